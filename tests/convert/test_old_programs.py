"""The options of older programs: each changes the recipe, is refused or is reported."""

import argparse
import re
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path

import pytest

from transformer_xl import cli
from transformer_xl.config import Config
from transformer_xl.config.recipes import differences, load_recipe
from transformer_xl.interop.old_programs import Program, options, title, translate

NONE = "\N{EN DASH}"
PROGRAMS = Program.__args__
PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
BASE = {program: "--data_dir=data/wt103" if "tensorflow" in program else "" for program in PROGRAMS}
CORPUS = {"tensorflow": "--data_dir=x/enwik8", "tensorflow-tpu": "--data_dir=x/enwik8"}
# Options that count beside others only, and those, of the PyTorch and the TensorFlow programs.
BESIDE = {
    "init_range": "--init uniform",
    "mom": "--optim sgd",
    "patience": "--scheduler dev_perf",
    "decay_rate": "--scheduler dev_perf",
    "lr_min": "--scheduler dev_perf",
    "eta_min": "--scheduler cosine",
    "same_length": "--mem_len 40",
    "clamp_len": "--mem_len 40",
    "static-loss-scale": "--cuda --fp16",
    "dynamic-loss-scale": "--cuda --fp16",
    "fp16": "--cuda",
    "amp": "--fp16 --apex_amp_opt_level O0",
    "apex_amp_opt_level": "--fp16",
    "proj_same_dim": "--div_val 4 --d_model 512 --d_embed 512",
    "weight_decay": "--optim lamb",
    "n_head": "--attn_type 0",
}
OTHER = {
    "dataset": "enwik8",
    "init": "uniform",
    "emb_init": "uniform",
    "optim": "adagrad",
    "scheduler": "inv_sqrt",
    "d_embed": "64",
    "tgt_len": "72",
    "eval_tgt_len": "60",
    "batch_size": "64",
    "train_batch_size": "64",
    "batch_chunk": "2",
    "d_model": "502",
    "lr": "0.02",
    "clamp_len": "30",
    "attn_type": "1",
    "max_eval_steps": "7",
    "eval_max_steps": "7",
    "max_eval_batch": "7",
    "sample_softmax": "9",
    "gpu0_bsz": "4",
    "decay_rate": "0.25",
    "eta_min": "0.0001",
    "lr_min": "0.0001",
    "min_lr_ratio": "0.5",
    "div_val": "2",
    "multi_gpu": {"nvidia": "ddp", "authors": None},
    "vocab": "bpe",
    "amp": "pytorch",
    "apex_amp_opt_level": "O0",
    "affinity": "single",
    "eval_split": "test",
    "percentiles": "50,60",
    "data_dir": "data/enwik8",
}


def other(program, name, about):
    """Another value of an option, as it stands on the command line."""
    value = OTHER.get(name, "")
    if isinstance(value, dict):
        value = value[program] or ""
    if about["type"] == "flag":
        return f"--{name}"
    if program == "nvidia-tensorflow" and name == "amp":
        value = ""
    if about["type"] == "bool":
        return f"--{name}={not about['default']}"
    if not value:
        default = about.get("default")
        changed = {"int": lambda: (default or 0) + 1, "float": lambda: (default or 0.0) + 0.01}
        value = str(changed.get(about["type"], lambda: "else")())
    return f"--{name}={value}"


def tried(text, program):
    """The translation of a command line, or why it is refused."""
    try:
        return translate(text, program), ""
    except ValueError as error:
        return None, str(error)


def outcome(program, name):
    """What comes of another value of an option: settings, ``no effect`` or ``refused``."""
    about = options(program)[name]
    beside = BESIDE.get(name, "")
    known = {_name(word) for word in beside.split() if word.startswith("--")}
    if not known <= {*options(program)} or name in known:
        beside = ""
    base = f"{BASE[program]} {beside}"
    if name == "data_dir":
        base = "--data_dir=data/wt103"
    before = translate(base, program)
    given = other(program, name, about)
    found, refused = tried(f"{base} {given}", program)
    if found is None:
        assert f"--{name}" in refused or f"{name}=" in refused, refused
        return "refused"
    said = [note for note in found.notes if note.startswith(f"--{name.replace('-', '_')} has no")]
    changed = {line.split(":")[0] for line in differences(before.config, found.config)}
    assert bool(changed) != bool(said), (given, changed, said)
    return changed or "no effect"


def _name(word):
    return word.split("=")[0].removeprefix("--")


@cache
def rows_of_the_page():
    """The rows of the table of options: the option, its defaults, and what it is here."""
    text = PAGE.read_text("utf-8").split("## Their options, our settings")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `--([\w-]+)` \|(.*)\|$", text, re.M)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def shown(about):
    """A default as the table shows it; a dash where the program has no such option."""
    if about is None:
        return NONE
    default = about.get("default", "")
    if isinstance(default, list):
        default = ",".join(default)
    if isinstance(default, bool):
        default = str(default).lower()
    return f"`{default}`" if default != "" else "none"


def test_the_page_has_each_option_with_its_defaults():
    expected = {}
    for program in PROGRAMS:
        for name in options(program):
            expected[name] = [shown(options(each).get(name)) for each in PROGRAMS]
    found = {name: cells[:-1] for name, cells in rows_of_the_page().items()}
    assert found == expected


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_option_changes_the_recipe_or_is_refused_or_reported_as_the_page_says(program):
    known = {f"{s.name}.{x.name}" for s in fields(Config) for x in fields(s.type)}
    for name in options(program):
        said = rows_of_the_page()[name][-1]
        settings = {*re.findall(r"`((?:model|data|train|eval|generate)\.\w+)`", said)}
        assert settings <= known, name
        found = outcome(program, name)
        if isinstance(found, set):
            assert found <= settings, (name, found)
        else:
            assert found in said, (name, found)


def test_labml_has_its_recipe_and_each_of_its_options_a_row():
    text = PAGE.read_text("utf-8").split("### labml")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*) \|$", text, re.M)
    assert {name: value for name, value, _ in rows} == {
        name: shown(about | {"default": str(about["default"]).lower()})
        if not isinstance(about["default"], str)
        else shown(about)
        for name, about in options("labml").items()
    }
    recipe = asdict(load_recipe("shakespeare-char-labml"))
    for name, _, ours in rows:
        for section, key, value in re.findall(r"`(\w+)\.(\w+)` = `([^`]+)`", ours):
            ours = recipe[section][key]
            assert (str(ours).lower() if isinstance(ours, bool) else str(ours)) == value, name


WT103 = "--dataset wt103 --adaptive --n_layer 16 --d_model 410 --n_head 10 --d_head 41"
SCRIPTS = {
    # The training flags of the scripts that come with the programs.
    "paper-wt103-base": (
        "authors",
        f"{WT103} --d_inner 2100 --dropout 0.1 --lr 0.00025 --max_step 200000 --tgt_len 150 "
        "--mem_len 150 --eval_tgt_len 150 --batch_size 60",
    ),
    "paper-enwik8-base": (
        "authors",
        "--dataset enwik8 --n_layer 12 --d_model 512 --n_head 8 --d_head 64 --d_inner 2048 "
        "--dropout 0.1 --optim adam --max_step 400000 --tgt_len 512 --mem_len 512 "
        "--eval_tgt_len 128 --batch_size 22 --multi_gpu",
    ),
    "paper-lm1b-base": (
        "authors",
        "--dataset lm1b --adaptive --n_layer 18 --d_model 1024 --div_val 4 --n_head 8 "
        "--d_head 128 --d_inner 4096 --warmup_step 20000 --max_step 500000 --tgt_len 32 "
        "--mem_len 32 --eval_tgt_len 32 --batch_size 224",
    ),
    "paper-wt103-base-nvidia": (
        "nvidia",
        "--cuda --adaptive --roll --eta_min 0.001 --max_step 40000 --batch_size 256",
    ),
    "paper-enwik8-base-tensorflow": (
        "tensorflow",
        "--data_dir=../data/enwik8/tfrecords --n_layer=12 --d_model=512 --d_embed=512 "
        "--n_head=8 --d_head=64 --d_inner=2048 --dropout=0.1 --dropatt=0.0 "
        "--train_steps=400000 --tgt_len=512 --mem_len=512 --train_batch_size=24 "
        "--num_core_per_host=4 --iterations=200 --save_steps=4000 --do_train=True --do_eval=False",
    ),
    "paper-lm1b-base-tensorflow": (
        "tensorflow",
        "--corpus_info_path=one-billion-words/corpus-info.json --div_val=4 --untie_r "
        "--noproj_share_all_but_first --proj_same_dim=False --n_layer=18 --d_model=1024 "
        "--d_embed=1024 --n_head=8 --d_head=128 --d_inner=4096 --dropout=0.1 --dropatt=0.0 "
        "--train_steps=400000 --tgt_len=256 --mem_len=256 --train_batch_size=256 "
        "--iterations=200 --save_steps=4000",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_options_of_an_official_script_are_its_recipe(name):
    program, text = SCRIPTS[name]
    found, expected = translate(text, program).config, load_recipe(name)
    # A recipe is evaluated as the script's second half says, trains in the precision that is fast,
    # and has one constant of LayerNorm. Projections that do not exist are tied or not.
    model = replace(expected.model, norm_eps=found.model.norm_eps)
    has_proj = any(cluster.has_proj for cluster in replace(model, vocab_size=10**6).clusters)
    if not has_proj:
        model = replace(model, tie_projections=found.model.tie_projections)
    if found.model.tie_projections == (False,) * 4:
        model = replace(model, tie_projections=found.model.tie_projections)
    # The TensorFlow programs have no option for the seed.
    seed = found.train.seed if "tensorflow" in program else expected.train.seed
    same = replace(
        expected,
        model=model,
        train=replace(expected.train, precision="float32", seed=seed),
        eval=found.eval,
        generate=found.generate,
    )
    found_model = replace(found.model, d_head=expected.model.d_head)
    assert found.model.d_head == expected.model.head_width
    assert differences(replace(found, model=found_model), same) == []
    assert found.generate.prompt == expected.generate.prompt


@pytest.mark.parametrize(("program", "dash"), [("authors", "-"), ("nvidia", "_")])
def test_an_option_of_the_authors_is_parsed_as_their_parser_does(program, dash):
    parser = argparse.ArgumentParser()
    for name, about in options(program).items():
        if about["type"] == "flag":
            parser.add_argument(f"--{name}", action="store_true")
        else:
            kind = {"int": int, "float": float, "str": str}[about["type"]]
            how = {"default": about.get("default"), "choices": about.get("choices")}
            parser.add_argument(f"--{name}", type=kind, **how)
    # Abbreviated, as argparse allows.
    text = f"--n_lay 3 --lr=1e-2 --adap --log{dash}int 7"
    theirs, found = parser.parse_args(text.split()), translate(text, program).config
    assert found.model.n_layer == theirs.n_layer
    assert (found.train.lr, found.train.log_every) == (theirs.lr, 7)
    assert bool(found.model.cutoffs) == theirs.adaptive


REFUSED = [
    ("authors", "--gpu0_bsz 4", "--gpu0_bsz 4: here all GPUs have as many streams.* leave it"),
    ("authors", "run_wt103_base.sh train --work_dir X", "give the options of a training"),
    ("authors", "python eval.py --tgt_len 64", "txl eval --preset evaluates"),
    ("authors", "--n_layers 4", "has no option --n_layers; did you mean --n_layer"),
    ("authors", "--n_layer four", "--n_layer: invalid int value: 'four'"),
    ("authors", "--optim adamw", "--optim: invalid choice: 'adamw'"),
    ("authors", "--restart", r"--restart True: .* \(txl convert\)"),
    ("authors", "--fp16", "--fp16 without --cuda is ignored"),
    ("authors", "--same_length", "same_length with mem_len=0 hides every key"),
    ("authors", "--adaptive --dataset text8", "--adaptive with --dataset text8"),
    ("authors", "--clip 0", "--clip 0.0: .* every gradient by 0"),
    ("authors", "--eval_tgt_len 90", "--eval_tgt_len 90 must be at most --tgt_len 70 with"),
    ("authors", "--init xavier", "--init xavier: .* normal and uniform"),
    ("authors", "--eta_min 1", "--eta_min 1.0 must be between 0 and --lr 0.00025"),
    ("authors", "--lr 0", "--lr 0.0 must be above 0"),
    ("nvidia", "--save_all --eval_interval 0", "--eval_interval 0 must be above 0"),
    ("authors", "--batch_chunk 7", "accumulate=7 must divide batch_size=60"),
    ("nvidia", "--config_file base.yaml", "--config_file base.yaml: give the options"),
    ("nvidia", "--optim adam --weight_decay 0.1", "is added to the gradient"),
    ("nvidia", "--max_step_scheduler 9", "--max_step_scheduler 9: the cosine ends"),
    ("nvidia", "--fp16 --apex_amp_opt_level O3", "O3 keeps the weights in half precision"),
    ("tensorflow", "--n_layer=4", "names the corpus, and its folders name none: give one"),
    ("tensorflow", "--data_dir=wt103/enwik8", "its folders name enwik8, wt103: give"),
    ("tensorflow", "--data_dir=wt103 --untie_r=maybe", "'maybe' must be true or false"),
    ("tensorflow", "--data_dir=wt103 --n_lay=3", "has no option --n_lay=3"),
    ("nvidia-tensorflow", "--data_dir=wt103 --batch_chunk=2", "reads 2 segments after one"),
]


def test_what_has_no_equivalent_is_refused_with_the_reason():
    for program, text, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            translate(text, program)


def test_the_schedules_have_the_rates_of_the_program():
    def train(text):
        return translate(text).config.train

    found = train("--scheduler inv_sqrt --lr 1 --warmup_step 400")
    assert (found.schedule, found.lr, found.warmup_steps) == ("inverse_sqrt", 1 / 20, 400)
    found = train("--scheduler dev_perf --patience 3 --decay_rate 0.3 --lr 0.5 --lr_min 0.05")
    assert (found.schedule, found.patience, found.decay_rate) == ("plateau", 3, 0.3)
    assert found.min_lr_ratio == pytest.approx(0.1)
    found = train("--scheduler constant --optim sgd --mom 0.9 --lr 5")
    assert (found.schedule, found.cooldown_fraction) == ("constant_cooldown", 0)
    assert (found.optimizer, found.momentum) == ("sgd", 0.9)
    found = train("--cuda --fp16 --static-loss-scale 128")
    assert (found.precision, found.loss_scale) == ("float16", 128)
    found = train("--cuda --fp16 --dynamic-loss-scale --static-loss-scale 128")
    assert (found.precision, found.loss_scale) == ("float16", None)


def test_memory_and_segment_of_an_evaluation_have_the_sum_of_training():
    found = translate("--tgt_len 150 --mem_len 150 --eval_tgt_len 64 --same_length").config
    assert (found.model.attn_len, found.eval.attn_len) == (150, 236)
    assert (found.eval.segment_len, found.eval.mem_len, found.eval.ext_len) == (64, 236, None)
    found = translate("--tgt_len 150 --eval_tgt_len 64").config
    assert (found.eval.segment_len, found.eval.mem_len, found.eval.ext_len) == (64, None, 86)


def test_the_command_writes_the_recipe_and_says_what_has_no_effect(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    words = ["recipes", "--from-authors", "python train.py --cuda \\\n --n_layer 3 --clip_nonemb"]
    assert cli.main([*words, "--copy", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--clip_nonemb has no effect: {title('authors')} never uses it" in err
    assert f"wrote {file}; train it with: txl train {file}" in err
    text = file.read_text()
    assert text.startswith("# mine.toml\n# The recipe of these options of the authors'")
    assert "--clip_nonemb has no effect" in text
    assert load_recipe(file) == translate("--cuda --n_layer 3").config
    assert cli.main([*words, "--copy", str(file)]) == 1
    assert "exists and was not changed" in capsys.readouterr().err
    assert cli.main(words) == 0
    assert capsys.readouterr().out.splitlines()[1:] == text.splitlines()[2:]
    for wrong in (["--program", "nvidia"], ["demo", *words[1:]]):
        assert cli.main(["recipes", *wrong]) == 2


def test_no_options_are_those_of_a_program_that_has_none(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    for given in ("", "python train.py"):
        assert cli.main(["recipes", "--from_authors", given, "--copy", str(file)]) == 0
        assert load_recipe(file) == translate("").config
        file.unlink()
    for wrong in (["demo", "--from_authors="], ["--program", "nvidia"]):
        assert cli.main(["recipes", *wrong]) == 2


def test_a_value_that_names_a_program_does_not_end_the_options():
    launcher = "python torch/distributed/launch.py --nproc_per_node=8 train.py "
    for before in ("", "python train.py ", launcher):
        text = f"{before}--adaptive --dataset lm1b --data lm1b/one.py"
        assert translate(text, "authors").config.model.cutoffs


def test_the_options_of_a_launcher_are_not_those_of_the_program(capsys):
    launcher = "python -m torch.distributed.launch --nproc_per_node=8"
    for program in ("nvidia", "authors"):
        shown = []
        for before in ("", f"{launcher} train.py ", f"{launcher} pytorch/train.py wt103 "):
            words = ["recipes", "--from_authors", f"{before}--cuda --n_layer 3"]
            assert cli.main([*words, "--program", program]) == 0
            # The second line is the command itself.
            shown.append(capsys.readouterr().out.splitlines()[2:])
        assert shown[0] == shown[1] == shown[2]
    assert cli.main(["recipes", "--from_authors", f"{launcher} --cuda"]) == 2
    assert "has no option -m" in capsys.readouterr().err
