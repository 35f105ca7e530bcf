"""A text that has other characters than the model knows: what of it, where, and what to do."""

import codecs
from dataclasses import replace

import pytest

from transformer_xl.train import train


@pytest.mark.parametrize("words", [["generate", "--prompt"], ["eval", "--file"]], ids=str)
def test_characters_without_a_symbol_are_named_with_the_remedy(txl, trained, tmp_path, words):
    path = tmp_path / "text"
    path.write_text("the cat\nΩ ß Ω\n", encoding="utf-8")
    verb, flag = words
    ended = txl(verb, trained, flag, path.read_text() if verb == "generate" else path)
    assert (ended.code, ended.out) == (2, "")
    assert "'Ω', 'ß' (3 in all, the first in line 2)" in ended.err
    assert "--data.vocab bytes" in ended.err
    assert ("the prompt: " if verb == "generate" else f"{path}: ") in ended.err


def test_a_text_of_any_platform_is_measured_as_the_text(txl, trained, tmp_path):
    path = tmp_path / "text"
    path.write_text("the cat saw a dog\n" * 9)
    plain = txl("eval", trained, "--file", path, "--json").json["nll"]
    path.write_bytes(codecs.BOM_UTF8 + b"the cat saw a dog\r\n" * 9)
    ended = txl("eval", trained, "--file", path, "--json")
    assert ended.json["nll"] == plain
    assert f"normalized the text of {path}: 9 CR LF to LF, 1 BOM left out" in ended.err


def test_a_prompt_of_any_platform_is_the_prompt(txl, trained):
    plain = txl("generate", trained, "--prompt", "the cat\nsaw", "--seed", 1, "--json").json
    ended = txl("generate", trained, "--prompt", "\ufeffthe cat\r\nsaw", "--seed", 1, "--json")
    assert ended.json["text"] == plain["text"]
    assert "normalized the text of the prompt: 1 CR LF to LF, 1 BOM left out\n" in ended.err


@pytest.mark.parametrize("vocab", ["bytes", "chars"])
def test_a_run_of_an_earlier_version_goes_on_with_its_text(txl, toy_recipe, tmp_path, vocab):
    path, run = tmp_path / "text", tmp_path / "run"
    path.write_bytes(b"the cat saw a dog.\r\n" * 99)
    recipe = toy_recipe(
        data={"path": str(path), "vocab": vocab, "cache_dir": str(tmp_path), "raw": True},
        model={"n_layer": 1, "dropout": 0.0, "attn_dropout": 0.0},
        train={"steps": 2, "accumulate": 1, "warmup_steps": 0, "eval_every": 2},
    )
    train(recipe, run, quiet=True, reports=False)
    begun = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(begun.replace("raw = true", "raw = false"))
    earlier = replace(recipe, data=replace(recipe.data, raw=False))
    with pytest.raises(ValueError, match=r"which normalized no text, goes on with --data\.raw T"):
        train(earlier, run, quiet=True, reports=False)
    train(recipe, run, quiet=True, reports=False)
    ended = txl("eval", run, "--json")
    assert "normalized the text: 99 CR LF to LF; --data.raw True reads every byte" in ended.err
    ended = txl("eval", run, "--json", "--data.raw", True)
    assert (ended.code, ended.err) == (0, "")


def test_the_bytes_of_a_file_are_measured_as_they_are_if_asked(txl, trained, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"the cat\r\n")
    assert "--data.raw True reads every byte" in txl("eval", trained, "--file", path).err
    assert "'\\r' (1 in all" in txl("eval", trained, "--file", path, "--data.raw", True).err
