"""Write the artefacts that every later version must open, with the results they must give.

    PYTHONPATH=src python tests/artifacts/make.py tests/artifacts/0.1.0

writes a folder that does not exist yet; run it on the revision that the artefacts are to be of. A
folder that was written once is never written again: a new format gets a new folder beside it.
Everything in it is drawn from fixed seeds by this program, and nothing names a place on the
machine that wrote it::

    text.txt               the text that all of it is made from
    corpora/KIND           a prepared corpus for each kind of vocabulary
    run                    a training run, stopped in the middle
    run-end.safetensors    the weights at its end, where it was not stopped
    models/NAME            model folders
    session.safetensors    a session, and state.safetensors a text of `txl generate --state`
    archives               files of `txl compress`, with and without --learn, and what they hold
    authors/model.pt       a model as the authors' training program saves it
    converted              that model, converted
    expected.json          what must come out, and the machine that wrote it

Stored numbers are recorded as SHA-256 and must come back bit for bit. Computed numbers are
recorded in float64, where processors differ in the last digits alone; texts are drawn greedily,
and only where the likeliest token leads by far more than rounding.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from authors import authors_model
from describing import (
    N_GREEDY,
    SAMPLE,
    SEGMENT,
    describe_corpus,
    describe_model,
    finish_run,
    greedy,
    machine,
    prompt_of,
    raw_digests,
    replaced,
)
from safetensors.torch import save_file
from torch import nn

from transformer_xl import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    Session,
    TrainConfig,
    TransformerXL,
    convert,
    generate,
    load_vocab,
    prepare,
    train,
)
from transformer_xl.apps.compress import Settings, compress
from transformer_xl.inference.generate import Sampling
from transformer_xl.model import build_model, load_model
from transformer_xl.train import Interrupted, loop
from transformer_xl.train.checkpoint.checkpoints import read_about

KINDS = ("bytes", "chars", "words", "bpe")
PRECISIONS = {str(x).removeprefix("torch."): x for x in (torch.bfloat16, torch.half)}
LEAST_LEAD = 1e-3
"""By how many nats the likeliest token must lead: a thousand times the rounding of float32."""
STEPS, STOPPED_AT = 30, 17


def make(folder: Path) -> None:
    """Write all artefacts into a new folder."""
    folder.mkdir(parents=True)
    # Paths are recorded as they are given.
    os.chdir(folder)
    torch.set_num_threads(1)
    Path("text.txt").write_text("".join(_lines(400)), encoding="utf-8")
    expected = {
        "machine": machine(),
        "corpora": {kind: _make_corpus(kind) for kind in KINDS},
        "run": _make_run(),
        "models": _make_models(),
        "sessions": _make_sessions(),
        "archives": _make_archives(),
        "converted": _make_converted(),
    }
    for card in Path().rglob("README.md"):
        card.unlink()
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def _lines(n: int) -> Iterator[str]:
    """Yield lines of a text in which there is something to learn."""
    words = ("the", "cat", "saw", "a", "dog", "and", "ran", "to", "sea", "café", "naïve")
    draw = random.Random(0)
    for _ in range(n):
        yield " ".join(draw.choices(words, range(len(words), 0, -1), k=draw.randint(4, 7))) + "\n"


def _make_corpus(kind: Any) -> dict[str, Any]:
    settings = DataConfig(path="text.txt", vocab=kind, cache_dir="cache", verify="never")
    if kind == "bpe":
        settings = replace(settings, vocab_size=280)
    folder = prepare(settings).folder
    Path("corpora").mkdir(exist_ok=True)
    final = folder.rename(Path("corpora", kind).absolute())
    shutil.rmtree("cache")
    return describe_corpus(final)


def _recipe() -> Config:
    return Config(
        model=ModelConfig(n_layer=2, n_head=2, d_model=20, d_inner=24, mem_len=10, dropout=0.0),
        data=DataConfig(corpus="corpora/chars", vocab="chars", verify="never"),
        train=TrainConfig(
            steps=STEPS,
            batch_size=4,
            segment_len=SEGMENT,
            accumulate=2,
            lr=1e-2,
            warmup_steps=3,
            average="ema",
            average_decay=0.8,
            log_every=5,
            eval_every=10,
            save_every=8,
            keep_checkpoints=1,
            # The same numbers on every machine, up to rounding.
            precision="float32",
        ),
        eval=EvalConfig(segment_len=32, mem_lens=()),
        generate=GenerateConfig(length=20),
    )


def _make_run() -> dict[str, Any]:
    before = loop.train_step

    def train_step(config: Config, state: Any, network: Any) -> Any:
        found = before(config, state, network)
        if state.step == STOPPED_AT:
            signal.raise_signal(signal.SIGINT)
        return found

    with replaced("train_step", train_step), suppress(Interrupted):
        train(_recipe(), "run", quiet=True)
    Path("run/.lock").unlink(missing_ok=True)
    # Its file has the name of the machine.
    # Not those of who made it.
    about = json.loads(Path("run/environment.json").read_text())
    about |= {"command": "txl train recipe.toml --out run", "platform": "Linux"}
    Path("run/environment.json").write_text(json.dumps(about, indent=2) + "\n")
    with tempfile.TemporaryDirectory() as place:
        end = shutil.copytree("run", Path(place, "run"))
        found = finish_run(end, Path("corpora/chars"))
        save_file(found.pop("weights"), "run-end.safetensors")
        shutil.copytree(end / "model" / "last", "models/chars")
    (checkpoint,) = Path("run/checkpoints").iterdir()
    (shard,) = checkpoint.glob("*.safetensors")
    stopped = {"tensors": raw_digests(shard), "about": read_about(checkpoint)}
    return {"stopped": stopped, "end": found}


def _make_models() -> dict[str, Any]:
    small = ModelConfig(n_layer=2, n_head=2, d_model=16, d_inner=20, mem_len=9, dropout=0.0)
    words = load_vocab("corpora/words")
    made = {
        "adaptive": replace(
            small, vocab_size=len(words), cutoffs=(4, 8), div_val=2, attn_len=7, clamp_len=6
        ),
        "options": replace(
            small,
            vocab_size=31,
            norm_first=True,
            gate="gru",
            qk_norm=True,
            activation="swiglu",
            tie_biases=False,
            tie_embeddings=False,
            d_embed=12,
        ),
        "lstm": ModelConfig(
            kind="lstm", vocab_size=31, n_layer=2, d_model=12, mem_len=0, dropout=0.0
        ),
        "bfloat16": replace(small, vocab_size=31, norm="rms", enhanced_recurrence=True),
        "float16": replace(small, vocab_size=31, attn_type=1, n_positions=17),
    }
    for name, config in made.items():
        model = _drawn(config)
        model.to(PRECISIONS.get(name))
        model.save_pretrained(Path("models", name), words if name == "adaptive" else None)
    _save_with_transformers("models/chars", "models/transformers")
    found: dict[str, Any] = {}
    for path in sorted(Path("models").iterdir()):
        found[path.name] = describe_model(load_model(path))
        found[path.name]["file"] = raw_digests(path / "model.safetensors")
        model = load_model(path).double()
        _require_lead(model, prompt_of(model), found[path.name]["greedy"])
    return found


def _drawn(config: ModelConfig) -> TransformerXL:
    torch.manual_seed(3)
    model = build_model(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)
    return model


def _save_with_transformers(source: str, folder: str) -> None:
    import transformers

    import transformer_xl.hf  # noqa: F401

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _require_lead(model: TransformerXL, tokens: list[int], drawn: list[int]) -> None:
    """Check that rounding does not change what is drawn greedily."""
    mems = None
    for n, token in enumerate([*tokens, *drawn[:-1]], 1):
        with torch.no_grad():
            out = model(torch.tensor([[token]]), mems)
        mems = out.mems
        assert out.log_probs is not None
        best, second = out.log_probs.flatten().topk(2).values.tolist()
        assert n < len(tokens) or best - second > LEAST_LEAD, (n, best, second)


def _make_sessions() -> dict[str, Any]:
    session = Session.open("models/chars", seed=5)
    session.write(SAMPLE)
    session.save("session.safetensors")
    session_text = "".join(session.fork().generate(N_GREEDY, sampling=Sampling(temperature=0)))
    model, vocab = load_model("models/chars"), load_vocab("models/chars")
    drawn = generate(model, vocab.encode(SAMPLE), length=5, seed=6)
    written = list(drawn)
    state = drawn.state
    state.save(Path("state.safetensors"), Path("models/chars/model.safetensors"))
    last = written[-1]
    _require_lead(model, vocab.encode(SAMPLE), vocab.encode(session_text))
    drawn_on = greedy(model, [last], state.mems)
    _require_lead(model, [*vocab.encode(SAMPLE), *written], drawn_on)
    return {
        "session": {"tensors": raw_digests(Path("session.safetensors")), "greedy": session_text},
        "state": {
            "tensors": raw_digests(Path("state.safetensors")),
            "last_token": last,
            "greedy": drawn_on,
            "seeded": list(generate(model, state=state, length=5)),
        },
    }


def _make_archives() -> dict[str, Any]:
    Path("archives").mkdir()
    data = Path("text.txt").read_bytes()[:300]
    # Where a character ends.
    data = data[: data.rindex(b"\n") + 1]
    Path("archives/text.txt").write_bytes(data)
    model, vocab = load_model("models/chars"), load_vocab("models/chars")
    noise = random.Random(1).randbytes(64)
    made = {
        "model": compress(data, model, vocab),
        "model-learn": compress(data, model, vocab, Settings(learn=True)),
        "learn": compress(data, None, None, Settings(learn=True)),
        "stored": compress(noise, None, None, Settings(learn=True)),
    }
    Path("archives/noise.bin").write_bytes(noise)
    found = {}
    for name, archive in made.items():
        assert (archive.streams == 0) == (name == "stored")
        Path("archives", f"{name}.txl").write_bytes(archive.content)
        found[name] = {
            "holds": "noise.bin" if name == "stored" else "text.txt",
            "model": "chars" if name.startswith("model") else None,
            "learns": name.endswith("learn"),
            "model_bits": archive.model_bits,
        }
    return found


def _make_converted() -> dict[str, Any]:
    Path("authors").mkdir()
    torch.save(authors_model(), "authors/model.pt")
    Path("authors/vocab.txt").write_text("".join(f"word{n}\n" for n in range(29)) + "<unk>\n")
    convert("authors", "converted")
    return describe_model(load_model("converted"))


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit("give one folder that does not exist yet")
    make(Path(sys.argv[1]))
