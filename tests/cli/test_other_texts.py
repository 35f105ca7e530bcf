"""A text that has other characters than the model knows: what of it, where, and what to do."""

import pytest

from transformer_xl.config import ModelConfig
from transformer_xl.data import load_vocab, train_vocab
from transformer_xl.model import TransformerXL


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


def test_a_text_that_is_measured_tells_what_is_read_as_unknown(txl, tmp_path):
    train_vocab("chars", ["the cat\n"], held_out=["x"]).save(tmp_path)
    n = len(load_vocab(tmp_path))
    config = ModelConfig(vocab_size=n, n_layer=1, n_head=1, d_model=8, d_inner=8, mem_len=4)
    TransformerXL(config).save_pretrained(tmp_path)
    path = tmp_path / "text"
    path.write_text("the cat\nΩ\n", encoding="utf-8")
    ended = txl("eval", tmp_path, "--file", path, "--json")
    assert ended.code == 0
    assert (
        f"warning: {path}: not in the vocabulary: 'Ω' (1 in all, the first in line 2); "
        in ended.err
    )
