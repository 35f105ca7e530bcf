"""Every setting of model, data and training changes the result on each path, or is refused.

The tables below have a row for each setting: the settings beside which it counts, and another
value. A setting without a row fails the first test.
"""

import dataclasses
import json
import tomllib
from dataclasses import fields, replace
from functools import partial

import pytest
import tomli_w
import torch

from transformer_xl.checkpoint import RunFolder
from transformer_xl.classify import LongDocumentClassifier
from transformer_xl.cli import parse
from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.convert import convert
from transformer_xl.data import building, corpus, prepare
from transformer_xl.distributed import World
from transformer_xl.evaluate import evaluate
from transformer_xl.export.step import make_step
from transformer_xl.generate import generate
from transformer_xl.nn import build_model
from transformer_xl.nn.compact import compact
from transformer_xl.nn.decoding import Decoder
from transformer_xl.nn.layer import DecoderLayer
from transformer_xl.nn.pretrained import load_config, write_model
from transformer_xl.recipes import dump_recipe, load_recipe
from transformer_xl.train import Network, loop, step, train
from transformer_xl.train.beginning import fit_to_corpus, initial_weights, new_state

CPU = torch.device("cpu")
LSTM = {"kind": "lstm", "n_head": 8, "d_inner": 2048}

MODEL = {
    # setting: beside which others, another value
    "kind": ({"n_head": 8, "d_inner": 2048}, "lstm"),
    "vocab_size": ({}, 29),
    "reset_at": ({}, 3),
    "n_layer": ({}, 3),
    "n_head": ({}, 4),
    "d_model": ({}, 24),
    "d_head": ({}, 5),
    "d_inner": ({}, 20),
    "activation": ({}, "gelu"),
    "d_embed": ({}, 6),
    "attn_type": ({}, 2),
    "n_positions": ({"attn_type": 1, "n_positions": 30}, 3),
    "cutoffs": ({}, (5,)),
    "div_val": ({"cutoffs": (5,)}, 2),
    "mem_len": ({}, 3),
    "ext_len": ({}, 2),
    "attn_len": ({}, 3),
    "clamp_len": ({}, 2),
    "start_memory": ({"mem_len": 30}, "zeros"),
    "norm_first": ({}, True),
    "gate": ({"norm_first": True}, "gru"),
    "norm": ({}, "rms"),
    "qk_norm": ({}, True),
    "enhanced_recurrence": ({}, True),
    "final_norm": ({}, True),
    "tie_biases": ({}, False),
    "tie_embeddings": ({}, False),
    "tie_projections": ({"d_embed": 6, "proj_init_std": 0.4}, True),
    "proj_same_dim": ({"cutoffs": (5,), "div_val": 2}, False),
    "sample_softmax": ({}, 5),
    "dropout": ({}, 0.3),
    "attn_dropout": ({}, 0.3),
    "qkv_dropout": ({}, 0.3),
    "embed_dropout": ({}, 0.3),
    "input_dropout": ({}, 0.3),
    "ff_dropout": ({}, 0.3),
    "output_dropout": ({}, 0.3),
    "variational_dropout": ({"dropout": 0.3}, True),
    "init_std": ({}, 0.3),
    "proj_init_std": ({"d_embed": 6}, 0.3),
    "norm_eps": ({}, 2.0),
    "quirks": ({"attn_type": 2}, ("stored_positions",)),
}
QUIRKS = {
    "stored_positions": {"attn_type": 2},
    "swapped_ext_len": {"ext_len": 2, "mem_len": 3},
    "raw_queries": {"attn_type": 2, "norm_first": True},
    "exact_frequencies": {},
}
TRAIN = {
    # Beside which others, another value, and where it is seen.
    "steps": ({}, 5, "numbers"),
    "minutes": ({"schedule": "constant_cooldown"}, 1.0, "state"),
    "batch_size": ({}, 2, "numbers"),
    "segment_len": ({}, 6, "numbers"),
    "stages": ({"segment_len": 8}, ((0.0, 4, 4), (0.5, 8, 8)), "numbers"),
    "random_segment_len": ({}, True, "numbers"),
    "roll": ({}, True, "numbers"),
    "accumulate": ({}, 2, "calls"),
    "loss": ({}, "half", "numbers"),
    "activation_reg": ({}, 2.0, "numbers"),
    "temporal_activation_reg": ({}, 2.0, "numbers"),
    "optimizer": ({}, "lamb", "numbers"),
    "lr": ({}, 2e-2, "numbers"),
    "embedding_lr": ({}, 2.0, "numbers"),
    "muon_lr": ({"optimizer": "muon"}, 0.05, "numbers"),
    "weight_decay": ({}, 1.0, "numbers"),
    "beta1": ({}, 0.5, "numbers"),
    "beta2": ({}, 0.5, "numbers"),
    "eps": ({}, 1e-2, "numbers"),
    "schedule": ({}, "inverse_sqrt", "numbers"),
    "warmup_steps": ({}, 2, "numbers"),
    "cooldown_fraction": ({"schedule": "constant_cooldown"}, 0.9, "numbers"),
    "min_lr_ratio": ({}, 0.5, "numbers"),
    "clip_norm": ({}, 1e-3, "numbers"),
    "average": ({}, "ema", "numbers"),
    "average_decay": ({"average": "ema"}, 0.5, "numbers"),
    "average_start": ({"average": "ema"}, 0.7, "numbers"),
    "precision": ({}, "bfloat16", "numbers"),
    "parallel": ({}, "fsdp", "shared"),
    "recompute": ({}, True, "calls"),
    "init_from": ({}, "model", "numbers"),
    "compile": ({}, True, "compiled"),
    "seed": ({}, 2, "numbers"),
    "max_skips": ({}, 1, "skips"),
    "skip_norm": ({}, 1e-6, "skips"),
    "spike": ({"lr": 1.0, "spike": 0.0}, 100.0, "files"),
    "hang_minutes": ({}, 3.0, "waits"),
    "log_every": ({}, 1, "files"),
    "eval_every": ({}, 1, "files"),
    "save_every": ({}, 1, "files"),
    "keep_checkpoints": ({"save_every": 1}, 1, "files"),
}
DATA = {
    "name": ({}, "tiny-shakespeare", "manifest"),
    "path": ({}, "other.txt", "tokens"),
    "valid_path": ({}, "other.txt", "tokens"),
    "test_path": ({}, "other.txt", "tokens"),
    "json_field": ({"path": "rows.jsonl"}, "title", "tokens"),
    "split_by": (
        {"path": "several", "vocab": "bytes", "valid_fraction": 0.2, "test_fraction": 0.2},
        "file",
        "tokens",
    ),
    "valid_fraction": ({}, 0.2, "tokens"),
    "test_fraction": ({}, 0.2, "tokens"),
    "vocab": ({}, "words", "tokens"),
    "vocab_size": ({"vocab": "words"}, 6, "tokens"),
    "vocab_from": ({"vocab": "chars"}, "all", "vocab"),
    "tokenizer": ({}, "vocabulary", "vocab"),
    "reset_at": ({}, "\n", "training"),
    "workers": ({}, 2, "processes"),
    "cache_dir": ({}, "elsewhere", "place"),
    "corpus": ({}, "prepared", "place"),
    "verify": ({}, "always", "comparisons"),
}
TABLES = {ModelConfig: MODEL, TrainConfig: TRAIN, DataConfig: DATA}


@pytest.mark.parametrize("section", TABLES)
def test_every_setting_has_a_row(section):
    assert [*TABLES[section]] == [field.name for field in fields(section)]
    for name, (base, value, *_) in TABLES[section].items():
        assert section(**base | {name: value}) != section(**base), name
    assert {*QUIRKS} == {*ModelConfig.__dataclass_fields__["quirks"].type.__args__[0].__args__}


# Training --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with texts of every kind, a model, a vocabulary and a prepared corpus."""
    folder = tmp_path_factory.mktemp("texts")
    line = "the cat saw a dog and ran to sea\n"
    (folder / "text.txt").write_text(line * 30 + "a quiz" + line)
    (folder / "other.txt").write_text("a dog and a cat ran\n" * 30)
    (folder / "several").mkdir()
    for n in range(10):
        (folder / "several" / f"{n}.txt").write_text((line * 5).replace("cat", f"c{n}t"))
    rows = [{"text": "the cat", "title": "a dog"}] * 30
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = DataConfig(vocab="chars", path=str(folder / "text.txt"), cache_dir=str(folder / "c"))
    prepared = prepare(config)
    (folder / "prepared").symlink_to(prepared.folder)
    (folder / "vocabulary").mkdir()
    prepare(replace(config, vocab="bytes")).vocab.save(folder / "vocabulary")
    torch.manual_seed(9)
    model = build_model(replace(BASE.model, vocab_size=len(prepared.vocab)))
    model.save_pretrained(folder / "model", prepared.vocab)
    return folder


BASE = Config(
    model=ModelConfig(
        n_layer=2, n_head=2, d_model=16, d_inner=32, mem_len=8, dropout=0.0, init_std=0.2
    ),
    data=DataConfig(path="text.txt", vocab="chars"),
    train=TrainConfig(
        steps=4,
        batch_size=4,
        segment_len=8,
        lr=1e-2,
        log_every=2,
        eval_every=2,
        save_every=2,
        precision="float32",
        clip_norm=10.0,
    ),
)


@pytest.fixture
def recipe(texts):
    """Makes recipes on these texts: `recipe(train={"steps": 3})`."""

    def make(**sections):
        config = BASE
        sections = {"data": {}} | sections
        for name, values in sections.items():
            values = dict(values)
            if name == "data":
                values = {"path": "text.txt", "cache_dir": str(texts / "cache")} | values
                for key in ("path", "valid_path", "test_path", "tokenizer", "corpus"):
                    if values.get(key) is not None:
                        values[key] = str(texts / values[key])
            if "init_from" in values:
                values["init_from"] = str(texts / values["init_from"])
            config = replace(config, **{name: replace(getattr(config, name), **values)})
        return config

    return make


def begun(config):
    """Begin a training as `train` does, without a folder."""
    text = prepare(config.data)
    weights = initial_weights(config)
    config = fit_to_corpus(config, text)
    state = new_state(config, text, CPU, World(), weights)
    return config, state, Network(state.model, config.train, state.world)


def numbers(config):
    """Return losses, and the weights at the end: those that are kept."""
    config, state, network = begun(config)
    state.model.train()
    losses = [step.train_step(config, state, network).loss for _ in range(4)]
    weights = [weight.detach().flatten() for weight in state.shown.parameters()]
    return torch.cat([torch.stack(losses), *weights])


def tried(make):
    """Return what is made, or why it is refused."""
    try:
        return make(), None
    except ValueError as error:
        return None, str(error)


def differs(one, other):
    return one.shape != other.shape or not torch.equal(one, other)


def trained(_, config, **patched):
    return numbers(config).tolist()


def state_of(monkeypatch, config):
    return begun(config)[1].end_is_fixed


def calls(monkeypatch, config):
    """How often layers are called in a step, and on how many streams."""
    seen, forward = [], DecoderLayer.forward

    def counted(self, x, *rest):
        seen.append(len(x))
        return forward(self, x, *rest)

    monkeypatch.setattr(DecoderLayer, "forward", counted)
    config, state, network = begun(config)
    step.train_step(config, state, network)
    return seen


def compiled(monkeypatch, config):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: seen.append(options) or model)
    begun(config)
    return seen


def shared(monkeypatch, config):
    """Which parts of a model are divided over two processes."""
    from transformer_xl.train import network

    seen = []
    monkeypatch.setattr(network, "fully_shard", lambda part, **how: seen.append(type(part)))
    network.shard(build_model(replace(BASE.model, vocab_size=9)), config.train, World(size=2), CPU)
    return seen


def skips(monkeypatch, config):
    """How many updates are left out, and what ends the run, where gradients are no numbers."""
    monkeypatch.setattr(step, "KNOWN_AFTER", 1)
    config, state, network = begun(config)
    for _ in range(2):
        step.train_step(config, state, network)
    skipped = state.skipped
    monkeypatch.setattr(step, "get_total_norm", lambda gradients: torch.tensor(torch.nan))
    try:
        for _ in range(3):
            step.train_step(config, state, network)
    except RuntimeError as error:
        return skipped, "max_skips" in str(error)
    return skipped, None


def waits(monkeypatch, config):
    def joined(device, minutes):
        raise TimeoutError(minutes)

    monkeypatch.setattr(loop, "joined", joined)
    with pytest.raises(TimeoutError) as caught:
        train(config, "nowhere", quiet=True)
    return caught.value.args


def files(monkeypatch, config, folder):
    """Which lines are logged, and which checkpoints are there."""
    monkeypatch.setattr(loop, "finish", lambda *about: {})
    train(config, folder, quiet=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return [(line["kind"], line["step"]) for line in lines], checkpoints


SEEN = {
    "numbers": trained,
    "state": state_of,
    "calls": calls,
    "compiled": compiled,
    "shared": shared,
    "skips": skips,
    "waits": waits,
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", TRAIN)
def test_a_setting_of_the_training_counts(monkeypatch, recipe, tmp_path, name):
    base, value, where = TRAIN[name]
    found = []
    for number, settings in enumerate((base, base | {name: value})):
        see = partial(files, folder=tmp_path / str(number)) if where == "files" else SEEN[where]
        with monkeypatch.context() as patch:
            found.append(see(patch, recipe(train=settings)))
    assert found[0] != found[1]


# Settings that count in training alone; what reads a text has all weights and drops nothing.
IN_TRAINING = {
    *("sample_softmax", "dropout", "attn_dropout", "qkv_dropout", "embed_dropout"),
    *("input_dropout", "ff_dropout", "output_dropout", "variational_dropout"),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", MODEL)
def test_a_setting_of_the_network_counts_in_training(recipe, name):
    base, value = MODEL[name]
    if name == "vocab_size":
        with pytest.raises(ValueError, match=r"model\.vocab_size=29 is not the size"):
            numbers(recipe(model={name: value}))
        return
    assert differs(*(numbers(recipe(model=x)) for x in (base, base | {name: value})))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [*MODEL, "data.reset_at"])
def test_a_setting_of_an_lstm_counts_or_is_refused(recipe, name):
    base, value = MODEL.get(name, ({}, None))
    if name in ("kind", "vocab_size"):
        return
    own = {"mem_len": 0, **LSTM}
    if name == "data.reset_at":
        found = (numbers(recipe(model=own, data=x)) for x in ({}, {"reset_at": "a"}))
        assert differs(*found)
        return
    changed = {**base, name: value} if name not in LSTM else {name: value}
    base = base if name not in LSTM else {}
    if name == "mem_len":
        # What it remembers is a state; the length says how much warms it up in an evaluation.
        return
    config, refused = tried(lambda: recipe(model=own | changed))
    if refused:
        assert "has no effect with kind='lstm'" in refused
        assert any(refused.startswith(f"{each}=") for each in changed)
        return
    assert differs(numbers(recipe(model=own | base)), numbers(config))


# Reading ---------------------------------------------------------------------------------------

WIDE = ModelConfig(
    vocab_size=23, n_layer=2, n_head=2, d_model=16, d_inner=32, mem_len=6, init_std=0.4
)
TOKENS = torch.randint(23, (2, 21), generator=torch.Generator().manual_seed(3))


def made(settings):
    """A model; those with weights of the same shapes have the same weights."""
    torch.manual_seed(5)
    config = replace(WIDE, **settings)
    return build_model(config).eval()


def in_segments(model, kept=False, **lengths):
    mems = model.start_memory(len(TOKENS))
    mems = model.keep(mems) if kept else mems
    found = []
    for segment in TOKENS.split(5, 1):
        out = model(segment, mems, **lengths)
        mems = out.mems
        found.append(out.log_probs)
    return torch.cat(found, 1)


def drawn(model):
    return torch.tensor([*generate(model, TOKENS[0], length=30, seed=1, temperature=3.0)])


def evaluated(model):
    result = evaluate(model, TOKENS[0].numpy(), segment_len=5)
    return torch.tensor(result.nll)


def decoded(model):
    decoder = Decoder(model, model.keep(model.start_memory(2)))
    hidden = [decoder.read(TOKENS[:, n]) for n in range(TOKENS.shape[1])]
    return model.softmax.log_probs(torch.stack(hidden, 1))


def exported(model):
    one = make_step(model)
    memory, found = one.start(2), []
    for n in range(TOKENS.shape[1]):
        log_probs, *memory = one(TOKENS[:, n, None], *memory)
        found.append(log_probs)
    return torch.cat(found, 1)


def classified(model):
    classifier = LongDocumentClassifier(model, 3, segment_len=5)
    torch.nn.init.normal_(classifier.head.weight, generator=torch.Generator().manual_seed(0))
    return classifier.to(model.dtype)(list(TOKENS))


PATHS = {
    "segments": in_segments,
    "keys and values": partial(in_segments, kept=True),
    "evaluation": evaluated,
    "generation": drawn,
    "decoder": decoded,
    "int8": lambda model: in_segments(compact(model, "int8"), kept=True),
    "export": exported,
    "classifier": classified,
}
# What only training, or only a call that reads the end of a segment again, takes.
BY_DESIGN = {("ext_len", path) for path in ("generation", "decoder", "export", "classifier")} | {
    # A classifier has a head of its own in the place of the softmax.
    *((name, "classifier") for name in ("cutoffs", "tie_embeddings", "tie_projections")),
}
QUIRK_ROWS = {f"quirks: {quirk}": ("quirks", base, (quirk,)) for quirk, base in QUIRKS.items()}
READ = {
    **{name: (name, base, value) for name, (base, value) in MODEL.items()},
    **QUIRK_ROWS,
    "quirks: raw_queries beside the authors'": ("quirks", {"norm_first": True}, ("raw_queries",)),
}


@torch.no_grad()
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", READ)
def test_a_setting_of_the_network_counts_wherever_a_text_is_read(row, path):
    name, base, value = READ[row]
    read = PATHS[path]
    models = [made(base), made(base | {name: value})]
    if row.endswith("exact_frequencies"):
        # It is in the last digits.
        if path in ("int8", "generation", "evaluation", "export", "classifier"):
            return
        models = [model.double() for model in models]
    found, refused = tried(lambda: [read(model) for model in models])
    if refused:
        reasons = ("kind=", "attn_type=2 has absolute positions", "a step begins with zeros")
        assert any(reason in refused for reason in reasons)
        return
    counts = name not in IN_TRAINING and (name, path) not in BY_DESIGN
    counts &= not (row.endswith("swapped_ext_len") and ("ext_len", path) in BY_DESIGN)
    assert differs(*found) == counts


# Conversion ------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["authors", "huggingface"])
@pytest.mark.parametrize("row", [row for row in READ if row not in ("kind", "vocab_size")])
def test_a_setting_of_the_network_is_converted_or_refused_or_said(tmp_path, row, to):
    name, base, value = READ[row]
    model, said = made(base | {name: value}), []
    model.save_pretrained(tmp_path / "ours")
    _, refused = tried(
        lambda: convert(tmp_path / "ours", tmp_path / "theirs", to=to, say=said.append)
    )
    if refused:
        assert any(each in refused for each in (f"{name}=", "attn_type=", "ext_len=", "quirk"))
        return
    settings = {"layer_norm_epsilon": model.config.norm_eps}
    folder = convert(tmp_path / "theirs", tmp_path / "again", settings=settings)
    again = load_config(folder / "config.json")
    theirs = getattr(again, name)
    if name == "tie_projections":
        theirs, value = [x.ties_proj for x in again.clusters], [True]
    # What initial weights are drawn with says nothing of those that are there.
    is_kept = theirs == value or (name == "quirks" and value[0] in theirs)
    is_drawn = name in ("init_std", "proj_init_std")
    line = "the memory began" if name == "start_memory" else f"{name}="
    assert is_kept or is_drawn or any(each.startswith(line) for each in said)


def test_transformers_keep_every_setting():
    pytest.importorskip("transformers", reason="needs pip install 'transformer-xl[hf]'")
    from transformer_xl.hf import TransformerXLConfig

    for name, base, value in READ.values():
        settings = dataclasses.asdict(WIDE) | base | {name: value}
        ours = TransformerXLConfig(**settings)
        again = TransformerXLConfig(**json.loads(ours.to_json_string()))
        assert ours.to_model_config() == again.to_model_config() == ModelConfig(**settings)


# Text ------------------------------------------------------------------------------------------


def tokens_of(monkeypatch, config):
    found = prepare(config.data)
    return [found.split(name).tolist() for name in ("train", "valid", "test")]


def vocab_of(monkeypatch, config):
    return prepare(config.data).vocab.symbols


def manifest_of(monkeypatch, config):
    return prepare(config.data).manifest["source"]["name"]


def training_of(monkeypatch, config):
    return begun(config)[0].model.reset_at


def place_of(monkeypatch, config):
    return prepare(config.data).folder.resolve()


def processes_of(monkeypatch, config):
    before, seen = building.perform_all, []

    def perform_all(tasks, n_workers):
        seen.append(n_workers)
        return before(tasks, 1)

    monkeypatch.setattr(building, "perform_all", perform_all)
    prepare(replace(config.data, cache_dir=f"{config.data.cache_dir}{config.data.workers}"))
    return seen


def comparisons_of(monkeypatch, config):
    """How often checksums are compared where they were compared before."""
    prepare(config.data)
    seen, verify = [], corpus.Corpus.verify
    monkeypatch.setattr(corpus.Corpus, "verify", lambda self: seen.append(1) or verify(self))
    prepare(config.data)
    return seen


OF_TEXT = {
    "tokens": tokens_of,
    "vocab": vocab_of,
    "manifest": manifest_of,
    "training": training_of,
    "place": place_of,
    "processes": processes_of,
    "comparisons": comparisons_of,
}


@pytest.mark.parametrize("name", DATA)
def test_a_setting_of_the_text_counts(monkeypatch, recipe, name):
    base, value, where = DATA[name]
    found = []
    for settings in (base, base | {name: value}):
        with monkeypatch.context() as patch:
            found.append(OF_TEXT[where](patch, recipe(data=settings)))
    assert found[0] != found[1]


def test_checksums_are_never_compared_where_that_is_asked_for(monkeypatch, recipe, tmp_path):
    for verify, n in (("never", 0), ("once", 1), ("once", 0), ("always", 1)):
        seen = []
        monkeypatch.setattr(corpus.Corpus, "verify", lambda self, seen=seen: seen.append(1))
        prepare(recipe(data={"verify": verify, "cache_dir": str(tmp_path)}).data)
        assert len(seen) == n, verify


# What changes nothing --------------------------------------------------------------------------

UNUSED = [
    (ModelConfig, {"attn_type": 3, "n_positions": 9}, {"clamp_len": 4}),
    (ModelConfig, {"attn_type": 2}, {"tie_biases": False}),
    (ModelConfig, {"attn_type": 3, "n_positions": 9}, {"tie_biases": False}),
    (ModelConfig, {}, {"quirks": ("stored_positions",)}),
    (ModelConfig, {"attn_type": 1, "n_positions": 9}, {"quirks": ("exact_frequencies",)}),
    (ModelConfig, {"attn_type": 2}, {"quirks": ("raw_queries",)}),
    (ModelConfig, {}, {"proj_same_dim": False}),
    (ModelConfig, {"kind": "lstm"}, {"n_head": 4}),
    (ModelConfig, {"kind": "lstm"}, {"clamp_len": 4}),
    (ModelConfig, {"kind": "lstm"}, {"ext_len": 2}),
    (TrainConfig, {}, {"muon_lr": 0.05}),
    (TrainConfig, {}, {"cooldown_fraction": 0.5}),
    (TrainConfig, {"average": "tail", "average_start": 0.5}, {"cooldown_fraction": 0.5}),
    (TrainConfig, {}, {"average_start": 0.5}),
    (TrainConfig, {"average": "tail"}, {"average_decay": 0.5}),
    (DataConfig, {"vocab": "chars"}, {"vocab_size": 50}),
    (DataConfig, {"vocab": "bpe"}, {"vocab_from": "all"}),
    (DataConfig, {"name": "hf:any/thing"}, {"path": "text.txt"}),
]


@pytest.mark.parametrize(("section", "base", "unused"), UNUSED)
def test_a_setting_that_changes_nothing_is_refused_and_left_out_of_what_is_stored(
    tmp_path, section, base, unused
):
    ((name, value),) = unused.items()
    kept = section(**base)
    with pytest.raises(ValueError, match=rf"^{name}=.* has no effect with .*; leave (it|out)"):
        section(**base | unused)
    # As an earlier version wrote it, into the folder of a run and of a model.
    where = {ModelConfig: "model", TrainConfig: "train", DataConfig: "data"}[section]
    config = replace(BASE, **{where: kept})
    values = tomllib.loads(dump_recipe(config))
    values[where][name] = value
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(values))
    assert load_recipe(tmp_path / "recipe.toml", is_stored=True) == config
    with pytest.raises(ValueError, match=f"{name}=.* has no effect"):
        load_recipe(tmp_path / "recipe.toml")
    if section is ModelConfig:
        write_model(kept, {}, tmp_path)
        content = json.loads((tmp_path / "config.json").read_text()) | unused
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert load_config(tmp_path / "config.json") == kept


@pytest.mark.parametrize("name", ["recompute", "compile"])
def test_what_an_lstm_has_no_use_for_is_refused_with_the_recipe(tmp_path, name):
    model = ModelConfig(**LSTM, mem_len=0)
    with pytest.raises(ValueError, match=rf"^{name}=True has no effect with model\.kind='lstm'"):
        Config(model=model, data=DataConfig(), train=TrainConfig(**{name: True}))
    config = Config(model=model, data=DataConfig())
    values = tomllib.loads(dump_recipe(config))
    values["train"][name] = True
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(values))
    assert load_recipe(tmp_path / "recipe.toml", is_stored=True) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"valid_path": "other.txt", "valid_fraction": 0.2}, r"data\.valid_fraction=0\.2 has no"),
        ({"test_path": "other.txt", "test_fraction": 0.0}, r"data\.test_fraction=0\.0 has no"),
        (
            {"valid_path": "other.txt", "test_path": "other.txt", "split_by": "file"},
            r"data\.split_by='file' has no effect",
        ),
        ({"json_field": "title"}, r"data\.json_field='title' has no effect: no file is JSON lines"),
    ],
)
def test_a_setting_of_no_use_to_a_text_is_refused_where_it_is_prepared(recipe, data, message):
    with pytest.raises(ValueError, match=message):
        prepare(recipe(data=data).data)


@pytest.mark.parametrize(
    "other",
    [
        {"path": "other.txt"},
        {"valid_path": "other.txt"},
        {"test_path": "other.txt"},
        {"json_field": "title"},
        {"split_by": "file"},
        {"valid_fraction": 0.2},
        {"test_fraction": 0.2},
        {"vocab_from": "all"},
    ],
    ids=str,
)
def test_what_a_prepared_corpus_was_not_made_with_is_refused(recipe, other):
    ((name, _),) = other.items()
    given = {"corpus": "prepared"}
    prepare(recipe(data=given).data)
    with pytest.raises(ValueError, match=rf"data\.{name}=.*was made with .*: leave it"):
        prepare(recipe(data=given | other).data)


def test_a_run_on_a_prepared_corpus_goes_on_without_what_the_corpus_was_not_made_with(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "finish", lambda *about: {})
    config = recipe(data={"corpus": "prepared", "path": None})
    train(config, tmp_path, quiet=True)
    # As an earlier version would have let it begin.
    values = tomllib.loads((tmp_path / "recipe.toml").read_text())
    values["data"]["valid_fraction"] = 0.2
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(values))
    folder = RunFolder(tmp_path)
    folder.check(config)
    with pytest.raises(ValueError, match="another recipe"):
        folder.check(replace(config, data=replace(config.data, corpus=None)))


# The command line ------------------------------------------------------------------------------


def packs():
    """Put the rows together to few recipes, each of settings that go together."""
    kinds = {"model": ModelConfig, "train": TrainConfig, "data": DataConfig}
    left = [
        (section, base | {name: value})
        for section, kind in kinds.items()
        for name, (base, value, *_) in TABLES[kind].items()
    ]
    while left:
        rows, left, taken = left, [], {section: {} for section in kinds}
        for section, settings in rows:
            together = taken | {section: taken[section] | settings}
            agrees = all(taken[section].get(name, x) == x for name, x in settings.items())
            config, _ = tried(
                lambda: Config(**{name: kinds[name](**x) for name, x in together.items()})  # noqa: B023
            )
            if agrees and config:
                taken = together
            else:
                left.append((section, settings))
        yield taken


def words_of(value):
    return [w for x in value for w in words_of(x)] if isinstance(value, tuple) else [str(value)]


def test_the_command_line_hands_every_setting_on(tmp_path):
    config = Config(model=ModelConfig(), data=DataConfig())
    (tmp_path / "recipe.toml").write_text(dump_recipe(config))
    n_settings = 0
    for pack in packs():
        words = []
        for section, settings in pack.items():
            for name, value in settings.items():
                words += [f"--{section}.{name}", *words_of(value)]
                n_settings += 1
        command = parse(["train", str(tmp_path / "recipe.toml"), "--out", "nowhere", *words])
        for section, settings in pack.items():
            assert getattr(command, section) == replace(getattr(config, section), **settings)
    assert n_settings >= sum(map(len, TABLES.values()))
