"""The tokenizer is the vocabulary of the folder."""

import json
import pickle
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from transformer_xl.data.imported import ImportedVocab, Rules
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.vocab_files import BroughtVocab, load_vocab

pytest.importorskip("transformers")

from transformer_xl.hf import TransformerXLTokenizer

LINES = "the cat  saw a dog\nand ran, to sea\n"


def _imported():
    words = ["<eos>", "<unk>", *dict.fromkeys(LINES.split()), "zebra"]
    tokenizer = Tokenizer(models.WordLevel({x: n for n, x in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return ImportedVocab(tokenizer.to_str(), Rules(join="words", eos="<eos>", unk="<unk>"))


def _brought():
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


def opened(transformers, vocab, folder):
    """The tokenizer of a folder with a vocabulary."""
    vocab.save(folder)
    config = transformers.AutoConfig.for_model("transformer-xl", vocab_size=len(vocab))
    config.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", MAKERS)
def test_text_is_cut_and_joined_as_by_the_vocabulary(transformers, tmp_path, kind):
    text = "3 1\n5 2\n" if kind == "integers" else LINES
    tokenizer = opened(transformers, vocab := MAKERS[kind](), tmp_path)
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


def test_what_cannot_be_is_refused(transformers, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"token_ids=None: .*has no symbol that ends a text"):
        tokenizer.decode(None)
    with pytest.raises(ValueError, match="'a b': a symbol that is added has a name without blanks"):
        tokenizer.add_tokens(["a b"])
    with pytest.raises(ValueError, match="pad_token='<fill>' is not one of the 15 symbols"):
        type(tokenizer)(vocab=tokenizer.vocab, pad_token="<fill>")
    transformers.AutoConfig.for_model("transformer-xl", vocab_size=3).save_pretrained(tmp_path)
    with pytest.raises((ValueError, OSError), match=r"vocab|tokenizer"):
        transformers.AutoTokenizer.from_pretrained(tmp_path)


PARTS = (
    *"the cat,.\u00e9\u20ac\u6f22\U0001f600\x1c\u2028\t\r",
    " ",
    "  ",
    "\n",
    " 1",
    "<eos>",
    "<unk>",
)


def _texts(n, parts=PARTS):
    draw = random.Random(0)
    return ["".join(draw.choices(parts, k=draw.randrange(30))) for _ in range(n)]


def _require_same(tokenizer, text):
    """Require IDs, texts and offsets of the vocabulary itself, or its error."""
    vocab = tokenizer.vocab
    if vocab.unk_id is None and vocab.unknown(text):
        with pytest.raises(ValueError, match="not in the") as expected:
            vocab.encode(text)
        with pytest.raises(ValueError, match="not in the") as caught:
            tokenizer(text)
        assert str(caught.value) == str(expected.value)
        return
    ids = vocab.encode(text)
    found = tokenizer(text, return_offsets_mapping=True)
    assert found["input_ids"] == ids
    assert tokenizer.decode(ids) == vocab.decode(ids)
    places = found["offset_mapping"]
    assert all(0 <= start <= end <= len(text) for start, end in places)
    assert places == sorted(places)
    if vocab.token_bytes is not None:
        # No character is left out, and several tokens of one have its place.
        assert {n for x in places for n in range(*x)} == {*range(len(text))}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_backend_cuts_and_joins_as_the_vocabulary(transformers, kind):
    tokenizer = TransformerXLTokenizer(vocab=MAKERS[kind]())
    own = {"bytes": PARTS, "integers": ("1 ", "2 ", "3\n")}.get(kind, (*"the cat\n ,",))
    for text in (*_texts(60), *_texts(60, own), LINES, ""):
        _require_same(tokenizer, text)
    tokenizer.add_tokens(["<|sep|>", "covid"])
    own = [*own, "<|sep|>", "covid"]
    again = pickle.loads(pickle.dumps(tokenizer))
    for text in _texts(20, own):
        assert tokenizer(text)["input_ids"] == again(text)["input_ids"]
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer("\ud800")


@pytest.mark.parametrize("kind", ["chars", "words", "imported", "bpe"])
def test_tokens_have_their_places_in_the_text(transformers, kind):
    tokenizer = TransformerXLTokenizer(vocab=MAKERS[kind]())
    text = "the cat\n\nran a" if kind != "bpe" else "the \u00e9\u6f22 cat"
    found = tokenizer(text, return_offsets_mapping=True)
    parts = [text[slice(*x)] for x in found["offset_mapping"]]
    if kind == "bpe":
        # Tokens that are parts of a character have its place.
        assert parts[0] == "the"
        assert [parts.count(x) for x in "\u00e9\u6f22"] == [2, 3]
    elif kind == "chars":
        assert "".join(parts) == text
    else:
        expected = ["the", "cat", "\n", "\n", "ran", "a"]
        assert parts == (expected if kind == "words" else [x for x in expected if x != "\n"])
    words = tokenizer(["the", "cat"], is_split_into_words=True)
    ids = [number for x in ("the", "cat") for number in tokenizer.vocab.encode(x)]
    assert words["input_ids"] == ids
    assert {*words.word_ids()} == {0, 1}
    pair = tokenizer("the", "cat")
    assert pair["input_ids"] == ids
    assert pair.sequence_ids() == words.word_ids()
    cut = tokenizer(text, truncation=True, max_length=2, return_overflowing_tokens=True)
    assert [x for row in cut["input_ids"] for x in row] == found["input_ids"]


def test_lines_that_are_texts_of_their_own_raise_an_error(transformers):
    vocab = MAKERS["brought"]()
    vocab.encodes_lines = True
    with pytest.raises(ValueError, match="encodes each line as a text of its own"):
        TransformerXLTokenizer(vocab=vocab)


def test_folders_of_the_tokenizer_without_a_backend_open(transformers, tmp_path):
    vocab = MAKERS["words"]().extended(["<|sep|>", "covid"])
    vocab.save(tmp_path)
    old = {
        "added_symbols": ["<|sep|>", "covid"],
        "added_tokens_decoder": {},
        "backend": "custom",
        "eos_token": "<eos>",
        "extra_special_tokens": ["<|sep|>"],
        "pad_token": "<pad>",
        "plain_symbols": ["covid"],
        "tokenizer_class": "TransformerXLTokenizer",
        "unk_token": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(old))
    transformers.AutoConfig.for_model("transformer-xl", vocab_size=99).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "the cat<|sep|>covid\n"
    n = len(vocab)
    ids = [*vocab.encode("the cat"), n - 2, n - 1, vocab.eos_id]
    assert len(tokenizer) == n
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids, skip_special_tokens=True).split() == ["the", "cat", "covid"]
    kept = tokenizer.convert_ids_to_tokens([n, *ids], skip_special_tokens=True)
    assert kept == ["the", "cat", "covid", "<eos>"]


def test_a_token_is_named_by_its_text_too(transformers):
    tokenizer = TransformerXLTokenizer(vocab=MAKERS["bpe"](), eos_token="\n")
    line_end, space = tokenizer.vocab.encode("\n")[0], tokenizer.vocab.encode(" ")[0]
    assert tokenizer.convert_tokens_to_ids(["\n", "\u010a", " "]) == [line_end, line_end, space]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("\u010a", line_end)
    assert tokenizer.convert_tokens_to_ids("\n\n\n\n\n") is None
    # What is no token is text.
    assert tokenizer.convert_tokens_to_string(["the cat ", "sat"]) == "the cat sat"
