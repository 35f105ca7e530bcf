"""The tokenizer is the vocabulary of the folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from transformer_xl.data.imported import ImportedVocab, Rules
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.vocab import Vocab
from transformer_xl.data.vocab_files import BroughtVocab, load_vocab

LINES = "the cat  saw a dog\nand ran, to sea\n"


def _imported() -> Vocab:
    words = ["<eos>", "<unk>", *dict.fromkeys(LINES.split()), "zebra"]
    tokenizer = Tokenizer(models.WordLevel({x: n for n, x in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return ImportedVocab(tokenizer.to_str(), Rules(join="words", eos="<eos>", unk="<unk>"))


def _brought() -> Vocab:
    bpe = json.loads(train_vocab("bpe", [LINES * 9], 270).definition)
    bpe["added_tokens"] = [
        {"id": 270 + n, "content": content, "special": True, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
        for n, content in enumerate(("<|endoftext|>", "<|pad|>"))
    ]
    bpe["model"]["vocab"] |= {"<|endoftext|>": 270, "<|pad|>": 271}
    return BroughtVocab(json.dumps(bpe))


MAKERS = {
    "bytes": lambda: train_vocab("bytes", []),
    "chars": lambda: train_vocab("chars", [LINES]),
    "words": lambda: train_vocab("words", [LINES], None, ["unknown"]),
    "bpe": lambda: train_vocab("bpe", [LINES * 9], 270),
    "integers": lambda: train_vocab("integers", ["1 2 3\n4 5\n"]),
    "imported": _imported,
    "brought": _brought,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_text_is_cut_and_joined_as_by_the_vocabulary(
    transformers: Any, tmp_path: Path, kind: str
) -> None:
    vocab = MAKERS[kind]()
    text = "3 1\n5 2\n" if kind == "integers" else LINES
    vocab.save(tmp_path)
    config = transformers.AutoConfig.for_model("transformer-xl", vocab_size=len(vocab))
    config.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = vocab.encode(text)
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == vocab.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == vocab.decode(ids)
    assert len(tokenizer) == tokenizer.vocab_size == len(vocab)
    assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids)) == ids
    for name, number in (("eos", vocab.eos_id), ("unk", vocab.unk_id)):
        assert getattr(tokenizer, f"{name}_token_id") == number
    # Padding is none of the symbols, which all mean something.
    has_own = "<|pad|>" in vocab.symbols
    expected = ("<|pad|>", vocab.number_of("<|pad|>")) if has_own else ("<pad>", len(vocab))
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == expected
    assert tokenizer.get_vocab().keys() == {*vocab.symbols}
    batch = tokenizer([text, text * 2], padding=True)
    assert batch["input_ids"][0][-len(ids) :] == ids
    assert sum(batch["attention_mask"][0]) == len(ids)
    assert tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True) == vocab.decode(ids)
    if not has_own:
        assert tokenizer.decode(batch["input_ids"][0]).endswith("<pad>" + vocab.decode(ids))
    # Written by either, the files are the same.
    tokenizer.save_pretrained(tmp_path / "again")
    assert load_vocab(tmp_path / "again").hash == vocab.hash
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again(text)["input_ids"] == ids
    assert again.special_tokens_map == tokenizer.special_tokens_map


def test_a_symbol_for_padding_that_was_brought_is_used(transformers: Any, tmp_path: Path) -> None:
    del transformers
    from transformer_xl.hf import TransformerXLTokenizer

    tokenizer = TransformerXLTokenizer(vocab=_brought())
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|endoftext|>")


def test_what_cannot_be_is_refused(transformers: Any, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not in the vocabulary of 15 chars: '7'"):
        tokenizer("the 7")
    with pytest.raises(ValueError, match="'a b': a symbol that is added has a name without blanks"):
        tokenizer.add_tokens(["a b"])
    with pytest.raises(ValueError, match="pad_token='<fill>' is not one of the 15 symbols"):
        type(tokenizer)(vocab=tokenizer.vocab, pad_token="<fill>")
    transformers.AutoConfig.for_model("transformer-xl", vocab_size=3).save_pretrained(tmp_path)
    with pytest.raises((ValueError, OSError), match=r"vocab|tokenizer"):
        transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_tokens_that_cannot_be_added_leave_the_tokenizer_as_it_was(
    transformers: Any, tmp_path: Path
) -> None:
    del transformers
    from transformer_xl.hf import TransformerXLTokenizer

    vocab = train_vocab("chars", [LINES])
    tokenizer = TransformerXLTokenizer(vocab=vocab)
    for names in (["New York"], ["<one>", "New York"]):
        with pytest.raises(ValueError, match="'New York': a symbol that is added has a name"):
            tokenizer.add_tokens(names)
    assert tokenizer(LINES)["input_ids"] == vocab.encode(LINES)
    assert tokenizer.add_tokens(["<one>"]) == 1
    assert tokenizer.decode([len(vocab)]) == "<one>"
    tokenizer.save_pretrained(tmp_path)
    assert len(TransformerXLTokenizer.from_pretrained(tmp_path)) == len(vocab) + 1


@pytest.mark.parametrize("kind", MAKERS)
def test_a_number_that_is_no_symbol_has_no_name(transformers: Any, kind: str) -> None:
    del transformers
    from transformer_xl.hf import TransformerXLTokenizer

    tokenizer = TransformerXLTokenizer(vocab=MAKERS[kind]())
    for number in (-100, -1, 10_000):
        with pytest.raises(ValueError, match=f"{number}"):
            tokenizer.decode([number])
        for given in (number, [number], [0, number]):
            with pytest.raises(ValueError, match=f"{number}"):
                tokenizer.convert_ids_to_tokens(given)
