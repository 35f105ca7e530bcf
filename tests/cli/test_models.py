"""eval, score and generate, as a user types them."""

import json
import os
import re
import shutil

import pytest
import torch
from tests.cli.conftest import TEXT

from transformer_xl.cli import loading
from transformer_xl.config import ModelConfig
from transformer_xl.config.recipes import generation_of
from transformer_xl.data import load_vocab, train_vocab
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.inference.generate import Sampling, Session, from_pretrained
from transformer_xl.model import TransformerXL

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def alone(trained, tmp_path):
    """A model folder that was taken out of its run."""
    return shutil.copytree(trained / "model" / "best", tmp_path / "alone")


@pytest.fixture
def of_bytes(tmp_path):
    """A model of bytes."""
    folder = tmp_path / "bytes"
    folder.mkdir()
    vocab = train_vocab("bytes", [])
    vocab.save(folder)
    config = ModelConfig(vocab_size=256, n_layer=1, n_head=1, d_model=8, d_inner=8, mem_len=4)
    TransformerXL(config).save_pretrained(folder)
    return folder


def test_eval_repeats_the_result_of_the_run(txl, trained):
    results = json.loads((trained / "results.json").read_text())["test"]
    ended = txl("eval", trained, "--eval.split", "test", "--json")
    assert (ended.code, ended.err) == (0, "")
    speed = ("seconds", "tokens_per_second")
    assert {k: x for k, x in ended.json.items() if k not in speed} == {
        k: x for k, x in results.items() if k not in speed
    }


def test_eval_takes_other_lengths_and_other_text(txl, trained, text):
    lengths = {"mem_len": 3, "segment_len": 2, "attn_len": 4, "clamp_len": 2}
    words = [word for name, n in lengths.items() for word in (f"--eval.{name}", n)]
    found = txl("eval", trained, "--file", text, *words, "--json").json
    ids = load_vocab(trained / "model" / "best").encode(TEXT)
    expected = evaluate(TransformerXL.from_pretrained(trained), ids, WithMemory(**lengths))
    assert found["nll"] == pytest.approx(expected.nll)
    assert (found["split"], found["tokens"]) == (str(text), len(TEXT) - 1)
    assert {name: found[name] for name in lengths} == lengths


def test_a_text_that_the_model_cannot_read_is_explained(txl, trained, tmp_path):
    text = tmp_path / "text.txt"
    for content, message in [
        (b"", "is empty (0 tokens): at least 2 tokens are needed"),
        (b"t", "a text of 1 tokens"),
        ("Ω".encode(), "not in the vocabulary"),
        (
            b"the \xff",
            "is not UTF-8 text: character 4 is the byte 0xff, and the vocabulary has only chars",
        ),
    ]:
        text.write_bytes(content)
        code, out, err = txl("eval", trained, "--file", text)
        assert (code, out) == (2, ""), content
        assert message in err, content


def test_score_gives_each_token_what_evaluate_counts(txl, trained, text, stdin):
    # In the segments of the evaluation.
    words = ("--segment_len", 64)
    ended = txl("score", trained, text, *words)
    assert (ended.code, ended.err) == (0, "")
    records = [json.loads(line) for line in ended.out.splitlines()]
    assert "".join(record["text"] for record in records) == TEXT
    assert records[0]["log_prob"] is None
    nll = -sum(record["log_prob"] for record in records[1:]) / (len(TEXT) - 1)
    assert nll == pytest.approx(
        txl("eval", trained, "--file", text, "--json").json["nll"], rel=1e-5
    )
    found = txl("score", trained, text, *words, "--json").json
    assert found["log_probs"] == [record["log_prob"] for record in records]
    assert found["ids"] == [record["id"] for record in records]
    assert (found["tokens"], found["nll"]) == (len(TEXT) - 1, pytest.approx(nll))
    stdin(TEXT.encode())
    assert txl("score", trained, "-", *words) == ended


def test_generate_writes_the_prompt_and_goes_on(txl, trained):
    code, out, err = txl("generate", trained, "--prompt", "a dog ", "--length", 15)
    assert code == 0
    assert err == "sampling with seed 1\n"
    assert out.startswith("a dog ")
    assert len(out) == len("a dog ") + 15 + 1
    assert txl("generate", trained, "--prompt", "a dog ", "--length", 15).out == out
    assert txl("generate", trained, "--prompt", "a dog ", "--length", 15, "--seed", 2).out != out
    found = txl("generate", trained, "--prompt", "a dog ", "--length", 15, "--json").json
    assert found["prompt"] + found["text"] + "\n" == out


def test_generate_goes_on_without_the_prompt_of_the_recipe(txl, trained, tmp_path):
    state = tmp_path / "state.safetensors"
    words = ["generate", trained, "--length", 5, "--state", state]
    first = txl(*words)
    assert first.out.startswith("the ")
    assert f"saved the state to {state}; the same command resumes from it" in first.err
    saved = state.read_bytes()
    assert len(txl(*words).out) == 5 + 1
    # What was typed is read, also where it is what the recipe says.
    state.write_bytes(saved)
    assert txl(*words, "--prompt", "the ", "--json").json["prompt"] == "the "
    state.write_bytes(saved)
    assert txl(*words, "--prompt=a", "--json").json["prompt"] == "a"


def test_a_character_is_whole_though_a_state_was_saved_within_it(txl, of_bytes, tmp_path):
    model = TransformerXL.from_pretrained(of_bytes)
    with torch.no_grad():
        # The second and the third byte of the character.
        model.softmax.bias[0x94] = 100.0
    model.save_pretrained(of_bytes)
    words = ["generate", of_bytes, "--state", tmp_path / "state", "--length", 1, "--json"]
    begun = "└".encode()[:1].decode("utf-8", "surrogateescape")
    assert txl(*words, "--prompt", begun).json["text"] == ""
    assert txl(*words).json["text"] == "└"


@pytest.mark.parametrize("verb", ["score", "generate"])
def test_a_state_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    txl, trained, text, tmp_path, monkeypatch, verb
):
    words = [verb, trained, *([text] if verb == "score" else ["--length", 2]), "--state"]
    monkeypatch.setattr(loading, "load", None)
    code, out, err = txl(*words, tmp_path)
    assert (code, out) == (1, "")
    assert "is a folder: give a file in it" in err


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_weights_in_fewer_bits_say_what_they_cost(txl, trained, text, weights):
    exact = txl("eval", trained, "--file", text, "--json").json["nll"]
    ended = txl("eval", trained, "--file", text, "--json", "--weights", weights)
    assert ended.code == 0
    assert ended.json["nll"] == pytest.approx(exact, rel=0.01)
    assert ended.json["nll"] != exact
    scored = txl("score", trained, text, "--json", "--weights", weights).json["nll"]
    assert scored == pytest.approx(ended.json["nll"], rel=1e-3)
    written = txl("generate", trained, "--weights", weights, "--length", 9)
    assert (written.code, len(written.out)) == (0, 4 + 9 + 1)
    assert re.fullmatch(rf"sampling with .*weights {weights}\n", written.err)


def test_generate_in_parts_draws_what_it_draws_in_one(txl, trained, tmp_path):
    def text(state, length, *words):
        words = ["--json", "--state", tmp_path / state, "--length", length, *words]
        return txl("generate", trained, *words).json["text"]

    parts = [text("parts", 12, "--seed", 5), text("parts", 18)]
    assert "".join(parts) == text("whole", 30, "--seed", 5)


def test_samples_are_the_texts_of_their_seeds(txl, trained):
    words = ["generate", trained, "--prompt", "a dog ", "--length", 12]
    alone = [txl(*words, "--seed", seed, "--json").json["text"] for seed in (4, 5)]
    found = txl(*words, "--seed", 4, "--samples", 2, "--json").json["texts"]
    assert found == [
        {"prompt": "a dog ", "text": text, "seed": seed}
        for seed, text in zip((4, 5), alone, strict=True)
    ]
    lines = txl(*words, "--seed", 4, "--samples", 2).out
    assert lines == "".join(
        f"--- {n} of 2, seed {n + 3}\na dog {text}\n" for n, text in enumerate(alone, 1)
    )


def test_generate_explains_what_it_cannot_do(txl, trained):
    for words, message in [
        (["--prompt", "Ωmega"], "not in the vocabulary of 15 chars: 'Ω', 'm'"),
        (["--prompt", os.fsdecode(b"a\xff")], "the prompt is not UTF-8 text: character 1 is the"),
        (["--length", 0, "--json"], "length=0 generates without end, and --json needs"),
        (["--length", 0, "--samples", 2], "without end, and several texts needs"),
        (["--samples", 0], "samples=0 must be at least 1"),
        (["--samples", 2, "--state", "x"], "--state and --samples exclude each other"),
        (["--prompt", "a", "--prompts", "b", "c"], "--prompt and --prompts exclude each other"),
        (["--dry_base", 2], "txl generate --dry_base is gone: the factor of DRY is 1.75"),
        (["--beam_size", 2], "txl generate --beam_size is gone: model.generate(..., num_beams=4)"),
    ]:
        ended = txl("generate", trained, *words)
        assert (ended.code, ended.out) == (2, ""), words
        assert message in ended.err, words


def test_the_command_names_the_preface_and_goes_without_it(txl):
    words = ["generate", "english", "--prompt", "The river", "--length", 8]
    found = txl(*words, "--json")
    assert "preface 190 tokens (--no_preface: without)" in found.err
    model, vocab = from_pretrained("english")
    sampling = Sampling(**generation_of("english").sampling)
    session = Session(model, vocab)
    session.write("The river")
    assert found.json["text"] == "".join(session.generate(8, sampling, seed=1))
    without = txl(*words, "--json", "--no_preface")
    assert "preface" not in without.err
    assert without.json["text"] != found.json["text"]
