"""Recipes from the command lines of older programs: the authors' and NVIDIA's.

The options of each, with types and defaults, are in ``old_programs.toml``. An option changes the
recipe, or is refused, or is reported: nothing that is given is silently ignored.
"""

import argparse
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    Quirk,
    TrainConfig,
)
from transformer_xl.config.checks import near, require

Program = Literal["authors", "tensorflow", "tensorflow-tpu", "nvidia", "nvidia-tensorflow"]
"""The authors' ``pytorch/train.py``, ``tf/train_gpu.py`` and ``tf/train.py``; of NVIDIA's
DeepLearningExamples ``pytorch/train.py`` and ``tf/main.py``."""


class Translated(NamedTuple):
    """What became of a command line."""

    config: Config
    """The recipe."""
    notes: list[str]
    """What has no effect on it, and where the program differs."""


class _Corpus(NamedTuple):
    name: str
    vocab: str
    cutoffs: tuple[int, ...]
    """Of the authors; NVIDIA's are three less, for three symbols in front."""
    shares_tails: bool
    """Whether softmax and embedding share the projections of all clusters but the first."""
    prompt: str


_CORPORA = {
    "wt103": _Corpus("wikitext-103", "words", (20_000, 40_000, 200_000), True, " = Rome = \n"),
    "lm1b": _Corpus("lm1b", "words", (60_000, 100_000, 640_000), False, "The company said"),
    "enwik8": _Corpus("enwik8", "authors-bytes", (), False, "'''Rome''' is"),
    "text8": _Corpus("text8", "chars", (), False, " the "),
}
_IN_A_PATH = {"wt103|wikitext-103": "wt103", "lm1b|one-billion": "lm1b", "enwik8": "enwik8"}
_IN_A_PATH |= {"text8": "text8"}
_CUTOFFS_BEFORE = 3

_LOGS = "what is printed and logged is up to txl train"
_FOLDERS = "the folder of a run is --out of txl train"
_DEVICE = "the device is found; torchrun starts a process for each GPU"
_CORPUS_FOLDER = "the corpus is downloaded by its name; --data.path of txl train gives a local copy"
_ENDS = "a training ends with an evaluation, and txl eval makes others"
_SPEED = "it changes the speed and no result"

_ELSEWHERE = {
    **dict.fromkeys(("data", "data_dir", "record_info_dir", "corpus_info_path"), _CORPUS_FOLDER),
    **dict.fromkeys(("work_dir", "debug", "append_dataset", "append_time", "model_dir"), _FOLDERS),
    **dict.fromkeys(("log_all_ranks", "dllog_file", "txtlog_file", "no_env"), _LOGS),
    **dict.fromkeys(("raport_file", "percentiles", "track_mean"), _LOGS),
    **dict.fromkeys(("target_throughput", "target_perplexity"), _LOGS),
    **dict.fromkeys(("cuda", "multi_gpu", "local_rank", "use_tpu", "tpu", "tpu_zone"), _DEVICE),
    **dict.fromkeys(("gcp_project", "num_core_per_host", "num_hosts", "horovod"), _DEVICE),
    **dict.fromkeys(("affinity", "swap_mem", "jit_optimizer"), _SPEED),
    **dict.fromkeys(("no_test", "do_eval", "eval_ckpt_path"), _ENDS),
    "start_eval_steps": _ENDS,
}
"""Options that change no recipe, and why."""


class _Flags:
    """The options of a command line, with the program's defaults, and which of them were read."""

    def __init__(self, program: Program, given: Mapping[str, Any]) -> None:
        self.program: Program = program
        defaults = {_dest(name): x.get("default") for name, x in options(program).items()}
        self._values, self._given, self._read = {**defaults, **given}, given, set[str]()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def peek(self, name: str) -> Any:
        """Return a value without having read it."""
        return self._values[name]

    def has(self, name: str) -> bool:
        """Return whether the program has an option."""
        return name in self._values

    def asks(self, name: str) -> bool:
        """Return whether an option is given, with a value that is not its default."""
        self._read.add(name)
        default = options(self.program).get(name, {}).get("default")
        return name in self._given and self._given[name] != default

    def notes(self) -> list[str]:
        """Say of each given option that nothing has read why it has no effect."""
        unused, found = _table()[self.program]["unused"], []
        for name in self._given:
            if name in unused:
                found.append(f"--{name} has no effect: {title(self.program)} never uses it")
            elif name in self._read:
                continue
            elif name in _ELSEWHERE:
                found.append(f"--{name} has no effect on the recipe: {_ELSEWHERE[name]}")
            else:
                found.append(f"--{name} has no effect with the other options, there as here")
        return found


def translate(text: str, program: Program = "authors") -> Translated:
    """Return the recipe of a command line of an older program.

    Args:
        text: Its options as in a shell; words before the first one, as ``python train.py``, are
            skipped.
        program: Which program it is for.

    Raises:
        ValueError: An option is unknown or has a wrong value, or its effect has no equivalent.
    """
    if program not in get_args(Program):
        raise ValueError(
            f"program={program!r} is unknown; there are {', '.join(get_args(Program))}"
        )
    flags = _Flags(program, _parsed(text, program))
    notes: list[str] = []
    make = _from_tensorflow if "tensorflow" in program else _from_pytorch
    config = make(flags, notes.append)
    return Translated(config, flags.notes() + notes)


def title(program: str) -> str:
    """Return what a program is called."""
    return _table()[program]["title"]


def options(program: str) -> dict[str, dict[str, Any]]:
    """Return the options of a program by name: ``type``, ``default`` and ``choices``."""
    return _table()[program]["options"]


@cache
def _table() -> dict[str, Any]:
    file = resources.files("transformer_xl.interop").joinpath("old_programs.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def _parsed(text: str, program: Program) -> dict[str, Any]:
    """Return the given options by name.

    Raises:
        ValueError: One is unknown or has a wrong value.
    """
    # absl takes no abbreviations, and --name=value, --name and --noname of booleans.
    is_absl = "tensorflow" in program
    parser = _Parser(
        title(program), add_help=False, argument_default=argparse.SUPPRESS, allow_abbrev=not is_absl
    )
    types: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _bool}
    types["list"] = lambda words: words.split(",")
    for name, about in options(program).items():
        if about["type"] == "flag":
            parser.add_argument(f"--{name}", action="store_true")
            continue
        how: dict[str, Any] = {"nargs": "?", "const": True} if about["type"] == "bool" else {}
        kind = types.get(about["type"], str)
        parser.add_argument(f"--{name}", type=kind, choices=about.get("choices"), **how)
        if about["type"] == "bool":
            parser.add_argument(f"--no{name}", action="store_false", dest=_dest(name))
    words = shlex.split(text.replace("\\\n", " "))
    for word in words:
        if word.endswith((".sh", "eval.py")):
            raise ValueError(
                f"{word}: give the options of a training, train.py and what follows it; what a "
                "script adds cannot be seen here, and txl eval --preset evaluates"
            )
    # A launcher, such as python -m torch.distributed.launch, has options of its own.
    # The first such program, as a later word may be a value of its options.
    is_program = bool(words) and not words[0].startswith("-")
    programs = [n for n, word in enumerate(words, 1) if is_program and word.endswith(".py")]
    trainings = [n for n in programs if Path(words[n - 1]).name.startswith("train")]
    start = next(iter(trainings or programs), 0)
    dashed = (n for n in range(start, len(words)) if words[n].startswith("-"))
    found, unknown = parser.parse_known_args(words[next(dashed, len(words)) :])
    if unknown:
        nearest = near(unknown[0].split("=")[0].lstrip("-"), options(program))
        hint = f"; did you mean --{nearest}?" if nearest else ""
        raise ValueError(f"{title(program)} has no option {unknown[0]}{hint}")
    return vars(found)


def _dest(name: str) -> str:
    return name.replace("-", "_")


def _bool(word: str) -> bool:
    known = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
    if word.lower() not in known:
        raise argparse.ArgumentTypeError(f"{word!r} must be true or false")
    return known[word.lower()]


def _refuse(flags: _Flags, *reasons: tuple[str, str]) -> None:
    """Refuse options whose effect has no equivalent, if they are given."""
    for name, reason in reasons:
        if flags.has(name):
            require(not flags.asks(name), f"--{name} {flags[name]}: {reason}")


_RESTART = (
    "a recipe begins a training. Convert the checkpoint (txl convert), and train on with its "
    "folder in the place of a recipe (txl train FOLDER --out RUN)"
)
_GPU0 = (
    "here all GPUs have as many streams, as each has a process of its own and the first has no "
    "more to do than the others; leave it out"
)


def _from_pytorch(flags: _Flags, note: Callable[[str], None]) -> Config:
    is_nvidia = flags.program == "nvidia"
    off = "leave it out"
    if flags.asks("gpu0_bsz"):
        require(flags["gpu0_bsz"] < 0, f"--gpu0_bsz {flags['gpu0_bsz']}: {_GPU0}")
    _refuse(
        flags,
        ("restart", _RESTART),
        ("config_file", "give the options of the file on the command line, and leave it out"),
        ("local_batch_size", "give --batch_size, the streams of all GPUs together"),
    )
    if is_nvidia:
        require(
            flags["vocab"] == "word",
            f"--vocab {flags['vocab']}: their table of byte-pair units is not here; {off}, or set "
            "data.tokenizer to a tokenizer.json in the recipe",
        )
    corpus = _CORPORA[flags["dataset"]]
    require(
        not flags["adaptive"] or bool(corpus.cutoffs),
        f"--adaptive with --dataset {flags['dataset']}: their program has clusters for wt103 and "
        "lm1b only",
    )
    cutoffs = corpus.cutoffs if flags["adaptive"] else ()
    shift = _CUTOFFS_BEFORE if is_nvidia else 0
    mem_len, tgt_len, ext_len = flags["mem_len"], flags["tgt_len"], flags["ext_len"]
    attn_type, beyond = flags["attn_type"], int(is_nvidia)
    clamp_len = clamp_len_of(attn_type, flags["clamp_len"])
    if flags["clamp_len"] > 0 and attn_type == 3:
        note("--clamp_len has no effect with --attn_type 3: distances end with the table")
    if attn_type in (2, 3) and mem_len and not is_nvidia:
        note(f"with --attn_type {attn_type} and a memory their program stops at the first segment")
    norm_first, d_embed = flags["pre_lnorm"], flags["d_embed"]
    quirks = quirks_of(
        "nvidia" if is_nvidia else "authors",
        attn_type=attn_type,
        mem_len=mem_len,
        ext_len=ext_len,
        norm_first=norm_first,
    )
    samples = max(flags["sample_softmax"], 0)
    if samples:
        note("their program stops with --sample_softmax; here it trains")
    model: dict[str, Any] = {
        **{name: flags[name] for name in ("n_layer", "n_head", "d_head", "d_model", "d_inner")},
        "d_embed": None if d_embed < 0 or d_embed == flags["d_model"] else d_embed,
        "attn_type": attn_type,
        "n_positions": tgt_len + ext_len + mem_len if attn_type in (1, 3) else None,
        "cutoffs": tuple(cutoff - shift for cutoff in cutoffs),
        "div_val": flags["div_val"],
        "tie_projections": (False, *[corpus.shares_tails] * len(cutoffs)) if cutoffs else False,
        "mem_len": mem_len,
        "ext_len": ext_len,
        "attn_len": attn_len_of(flags["same_length"], mem_len, beyond),
        "clamp_len": clamp_len,
        "norm_first": norm_first,
        "tie_biases": attn_type != 1,
        "tie_embeddings": not flags["not_tied"],
        "dropout": flags["dropout"],
        "attn_dropout": flags["dropatt"],
        "sample_softmax": samples,
        "init_std": flags["init_std"],
        "proj_init_std": flags["proj_init_std"],
        "quirks": quirks,
        **_init(flags),
    }
    train = {
        **_optimizer(flags, note),
        **_schedule(flags, note),
        **_precision(flags),
        "steps": flags["max_step"],
        "batch_size": flags["batch_size"],
        "accumulate": flags["batch_chunk"],
        "segment_len": tgt_len,
        "random_segment_len": flags["varlen"],
        "warmup_steps": flags["warmup_step"],
        "clip_norm": flags["clip"],
        "seed": flags["seed"],
        "log_every": flags["log_interval"],
        "eval_every": flags["eval_interval"],
        "save_every": flags["eval_interval"],
    }
    interval = flags["eval_interval"]
    require(interval > 0, f"--eval_interval {interval} must be above 0")
    require(
        flags["clip"] > 0,
        f"--clip {flags['clip']}: with it their program multiplies every gradient by 0; for no "
        "clipping, set train.clip_norm = 0 in the recipe",
    )
    if flags["varlen"]:
        note("with --varlen, the learning rate is scaled with the length of a segment here")
    if is_nvidia:
        train["roll"] = flags["roll"]
        if flags["no_eval"]:
            train["eval_every"] = 0
        if flags["save_all"]:
            train["keep_checkpoints"] = -(-flags["max_step"] // flags["eval_interval"]) + 1
    return Config(
        model=ModelConfig(**model),
        data=DataConfig(name=corpus.name, vocab=corpus.vocab),  # pyright: ignore[reportArgumentType]
        train=TrainConfig(**train),
        eval=_evaluation(flags, beyond),
        generate=GenerateConfig(prompt=corpus.prompt),
    )


def _evaluation(flags: _Flags, beyond: int) -> EvalConfig:
    """Return the evaluation of a PyTorch program, in which memory and segment have one sum."""
    is_nvidia, found = flags.program == "nvidia", {}
    mem_len, tgt_len, ext_len = flags["mem_len"], flags["tgt_len"], flags["ext_len"]
    segment_len = flags["eval_tgt_len"]
    gained = tgt_len - segment_len
    context = mem_len or ext_len
    require(
        context + gained >= 0,
        f"--eval_tgt_len {segment_len} must be at most --tgt_len {tgt_len} with "
        f"{'--mem_len' if mem_len else '--ext_len'} {context} together",
    )
    if gained:
        found = {"segment_len": segment_len}
        found |= {"mem_len": mem_len + gained} if mem_len else {"ext_len": ext_len + gained}
        if mem_len and flags["same_length"]:
            found["attn_len"] = attn_len_of(True, mem_len + gained, beyond)
    most = flags["eval_max_steps" if is_nvidia else "max_eval_steps"]
    batch_size = flags["eval_batch_size"] if is_nvidia else 10
    return EvalConfig(batch_size=batch_size, max_steps=most if most > 0 else None, **found)


def _init(flags: _Flags) -> dict[str, Any]:
    init = flags["init"]
    require(
        init in ("normal", "uniform"),
        f"--init {init}: with it their program keeps PyTorch's own weights; here there are normal "
        "and uniform",
    )
    return {"init": init} | ({"init_range": flags["init_range"]} if init == "uniform" else {})


def _optimizer(flags: _Flags, note: Callable[[str], None]) -> dict[str, Any]:
    optim, found = flags["optim"], {"lr": flags["lr"]}
    if optim == "adam":
        found["optimizer"] = "adamw"
        if flags.has("weight_decay"):
            require(
                not flags["weight_decay"],
                f"--weight_decay {flags['weight_decay']} with --optim adam is added to the "
                "gradient, and that of train.optimizer = 'adamw' is decoupled: leave it out, and "
                "set train.weight_decay in the recipe",
            )
    elif optim in ("lamb", "jitlamb"):
        found |= {"optimizer": "lamb", "eps": 1e-6, "weight_decay": flags["weight_decay"]}
        if flags["weight_decay"]:
            note("--weight_decay reaches matrices only here, and all weights there")
    elif optim == "sgd":
        found |= {"optimizer": "sgd", "momentum": flags["mom"]}
    else:
        found |= {"optimizer": "adagrad", "eps": 1e-10}
    return found


def _schedule(flags: _Flags, note: Callable[[str], None]) -> dict[str, Any]:
    scheduler, lr, warmup = flags["scheduler"], flags["lr"], flags["warmup_step"]
    if scheduler == "cosine":
        if flags.has("max_step_scheduler") and flags.asks("max_step_scheduler"):
            steps = flags["max_step_scheduler"]
            require(
                steps == flags["max_step"],
                f"--max_step_scheduler {steps}: the cosine ends with the training, after "
                f"--max_step {flags['max_step']}; leave it out",
            )
        if warmup and flags.program == "authors":
            note("the cosine begins after the warm-up here, and at step 0 there")
        return {"schedule": "cosine", "min_lr_ratio": _ratio("eta_min", flags["eta_min"], lr)}
    if scheduler == "inv_sqrt":
        # Theirs is lr / sqrt(step); ours is a share of the peak, at the end of the warm-up.
        return {"schedule": "inverse_sqrt", "lr": lr / max(warmup, 1) ** 0.5}
    if scheduler == "dev_perf":
        require(
            0 < flags["decay_rate"] < 1,
            f"--decay_rate {flags['decay_rate']} must be above 0 and below 1",
        )
        if warmup:
            note("evaluations during the warm-up count for --patience there, and not here")
        return {
            "schedule": "plateau",
            "patience": flags["patience"],
            "decay_rate": flags["decay_rate"],
            "min_lr_ratio": _ratio("lr_min", flags["lr_min"], lr),
        }
    return {"schedule": "constant_cooldown", "cooldown_fraction": 0.0}


def _ratio(name: str, least: float, lr: float) -> float:
    require(lr > 0, f"--lr {lr} must be above 0")
    require(0 <= least <= lr, f"--{name} {least} must be between 0 and --lr {lr}")
    return least / lr


def _precision(flags: _Flags) -> dict[str, Any]:
    """Return precision and loss scale; without --fp16 theirs are those of float32."""
    if not flags["fp16"]:
        return {"precision": "float32"}
    if flags.program == "authors":
        require(
            flags["cuda"],
            "--fp16 without --cuda is ignored by their program; give both or leave it out",
        )
        if flags["dynamic_loss_scale"]:
            return {"precision": "float16"}
        return {"precision": "float16", "loss_scale": float(flags["static_loss_scale"])}
    if flags["amp"] == "apex":
        level = flags["apex_amp_opt_level"]
        require(
            level != "O3",
            "--apex_amp_opt_level O3 keeps the weights in half precision; here they stay in "
            "float32, as with O1 and O2",
        )
        if level == "O0":
            return {"precision": "float32"}
    return {"precision": "float16"}


def _from_tensorflow(flags: _Flags, note: Callable[[str], None]) -> Config:
    is_nvidia = flags.program == "nvidia-tensorflow"
    evaluates = "it evaluates a checkpoint: txl convert, and txl eval"
    _refuse(flags, ("warm_start_path", _RESTART), ("do_train", evaluates))
    if flags.program == "tensorflow-tpu":
        _refuse(flags, ("do_eval_only", evaluates))
    if is_nvidia:
        chunks = flags["batch_chunk"]
        require(
            chunks == 1,
            f"--batch_chunk {chunks}: in {title(flags.program)} it reads {chunks} segments after "
            "one another for an update, and train.accumulate divides the streams; leave it out",
        )
    dataset = _named_in(flags)
    corpus, mem_len = _CORPORA[dataset], flags["mem_len"]
    shift, n_tails = _CUTOFFS_BEFORE if is_nvidia else 0, len(corpus.cutoffs)
    d_embed = None if flags["d_embed"] == flags["d_model"] else flags["d_embed"]
    model: dict[str, Any] = {
        **{name: flags[name] for name in ("n_layer", "n_head", "d_head", "d_model", "d_inner")},
        "d_embed": d_embed,
        "cutoffs": tuple(cutoff - shift for cutoff in corpus.cutoffs),
        "div_val": flags["div_val"],
        "mem_len": mem_len,
        "attn_len": attn_len_of(flags["same_length"], mem_len, 1),
        "clamp_len": clamp_len_of(0, flags["clamp_len"]),
        "start_memory": "zeros",
        "tie_biases": not flags["untie_r"],
        # Without clusters the softmax has the projection of the embedding.
        "tie_projections": True,
        "dropout": flags["dropout"],
        "attn_dropout": flags["dropatt"],
        "init_std": flags["init_std"],
        "norm_eps": 1e-12,
        **_init(flags),
    }
    if n_tails:
        model["tie_projections"] = (False, *[flags["proj_share_all_but_first"]] * n_tails)
    if flags.program != "tensorflow-tpu":
        model["proj_init_std"] = flags["proj_init_std"]
    if flags["init"] == "uniform" and flags.program != "tensorflow-tpu":
        note("their program stops with --init uniform; here it trains")
    if flags["div_val"] > 1:
        model["proj_same_dim"] = flags["proj_same_dim"]
    train: dict[str, Any] = {
        "steps": flags["train_steps"],
        "batch_size": flags["train_batch_size"],
        "segment_len": flags["tgt_len"],
        "lr": flags["learning_rate"],
        "warmup_steps": flags["warmup_steps"],
        "min_lr_ratio": flags["min_lr_ratio"],
        "clip_norm": flags["clip"],
        "precision": "float32",
        "log_every": flags["log_interval" if is_nvidia else "iterations"],
        "eval_every": flags["save_steps"],
        "save_every": flags["save_steps"],
    }
    require(flags["clip"] > 0, f"--clip {flags['clip']}: it makes every gradient 0")
    if is_nvidia:
        # Their optimizer has a weight decay that no option changes.
        train |= {"optimizer": "lamb", "eps": 1e-6, "weight_decay": 0.01}
        note("the weight decay of LAMB, 0.01 there, reaches matrices only here, all weights there")
        if flags["amp"]:
            train["precision"] = "float16"
    most = flags["max_eval_batch"]
    return Config(
        model=ModelConfig(**model),
        data=DataConfig(name=corpus.name, vocab=corpus.vocab),  # pyright: ignore[reportArgumentType]
        train=TrainConfig(**train),
        eval=EvalConfig(
            split=flags["eval_split"],
            batch_size=flags["eval_batch_size"],
            max_steps=most if most > 0 else None,
        ),
        generate=GenerateConfig(prompt=corpus.prompt),
    )


def _named_in(flags: _Flags) -> str:
    """Return the corpus that the folders of a TensorFlow program name; no option does."""
    found: set[str] = set()
    for name in ("data_dir", "record_info_dir", "corpus_info_path", "model_dir"):
        path = str(flags.peek(name)).lower()
        named = {corpus for words, corpus in _IN_A_PATH.items() if re.search(words, path)}
        if named:
            found |= named
            flags[name]
    require(
        len(found) == 1,
        f"no option of {title(flags.program)} names the corpus, and its folders name "
        f"{', '.join(sorted(found)) or 'none'}: give one of wt103, lm1b, enwik8, text8 in "
        "--data_dir, as --data_dir=data/wt103",
    )
    return found.pop()


def attn_len_of(same_length: bool, mem_len: int, beyond: int) -> int | None:
    """Return how many keys ``same_length`` shows: ``beyond`` more than the memory has.

    The masks of the authors' PyTorch and of Hugging Face hide one more key than those of TensorFlow
    and NVIDIA.

    Raises:
        ValueError: It shows none.
    """
    if not same_length:
        return None
    if not mem_len + beyond:
        raise ValueError(
            "same_length with mem_len=0 hides every key in the authors' code: its losses are "
            "NaN. Give --same_length False, or leave it out"
        )
    return mem_len + beyond


def clamp_len_of(attn_type: int, clamp_len: int) -> int | None:
    """Return the largest distance, None if there is no limit."""
    if clamp_len <= 0 or attn_type == 3:
        return None
    # The table of the authors has clamp_len rows: the largest distance is one less.
    return clamp_len - 1 if attn_type == 1 else clamp_len


def quirks_of(
    origin: str, *, attn_type: int, mem_len: int, ext_len: int, norm_first: bool
) -> tuple[Quirk, ...]:
    """Return the deviations from the paper that settings bring about in a program."""
    quirks: dict[Quirk, bool] = {
        "stored_positions": attn_type in (2, 3) and mem_len != 0,
        # Unlike the authors' code, NVIDIA's passes the two lengths in the right order.
        "swapped_ext_len": ext_len != 0 and origin == "authors",
        "raw_queries": attn_type in (2, 3) and norm_first,
        "exact_frequencies": origin == "tensorflow",
    }
    return tuple(quirk for quirk, is_theirs in quirks.items() if is_theirs)
