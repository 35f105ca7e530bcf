from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from transformer_xl.config import DataConfig
from transformer_xl.data import text
from transformer_xl.data.catalogue import KNOWN_CORPORA
from transformer_xl.data.imported import Rules
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.preparing import prepare
from transformer_xl.data.text import Span, read_blocks, split_point
from transformer_xl.data.vocab_files import BroughtVocab, bring, load_vocab
from transformer_xl.interop.convert.cutting import imported_vocab
from transformer_xl.interop.convert.vocabularies import read_vocab

SAMPLE = "The cat sat on the mat, it's 42 years old!\n\n  Größe und Länge; 漢字.\nthe end\n" * 30
PIECES = ["<unk>", "<s>", "</s>", "\u2581the", "\u2581", "t", "h", "e", "c", "a", "at", "\u2581c"]


# That of GPT-4, in which a line end belongs to the marks before it.
MARKS_AND_LINE_ENDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A tokenizer as GPT-2's."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(whole, tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def gpt4(tmp_path_factory):
    """A tokenizer as GPT-4's."""
    split = pre_tokenizers.Split(Regex(MARKS_AND_LINE_ENDS), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return trained(pre_tokenizers.Sequence([split, as_bytes]), tmp_path_factory.mktemp("gpt4"))


def trained(pre_tokenizer, folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([SAMPLE], trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def save_metaspace(path):
    """Save a tokenizer that treats beginnings and blanks specially, as SentencePiece does."""
    pieces = [(name, -float(n)) for n, name in enumerate(PIECES)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path))


def symbols(vocab, text):
    return [vocab.symbols[token] for token in vocab.encode(text)]


def config(path, tokenizer, cache, **settings):
    return DataConfig(path=str(path), tokenizer=str(tokenizer), cache_dir=str(cache), **settings)


def test_a_tokenizer_of_bytes_restores_every_text(gpt2, tmp_path, monkeypatch):
    (tmp_path / "text").write_text(SAMPLE)
    whole = prepare(config(tmp_path / "text", gpt2, tmp_path / "whole"))
    assert b"".join(whole.raw(x) for x in ("train", "valid", "test")) == SAMPLE.encode()
    assert whole.vocab.token_bytes[whole.split("train")].sum() == whole.n_bytes("train")
    assert whole.vocab.eos_id == whole.vocab.symbols.index("<|endoftext|>")
    assert load_vocab(whole.folder).hash == whole.vocab.hash
    reference = Tokenizer.from_file(str(gpt2))
    train = whole.raw("train").decode()
    assert whole.split("train").tolist() == reference.encode(train).ids
    monkeypatch.setattr(text, "BLOCK_BYTES", 200)
    parts = prepare(config(tmp_path / "text", gpt2, tmp_path / "parts"))
    assert parts.split("train").tolist() == whole.split("train").tolist()


@settings(max_examples=80, deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from("  \n\n\n\t\u3000\u0301\u093f.。'a1_жश漢"), max_size=40),
    near=st.integers(0, 60),
)
def test_a_text_of_any_script_is_cut_between_their_symbols(
    gpt2, gpt4, tmp_path_factory, text, near
):
    split = split_point("brought", text[:near])
    for vocab in (bring(gpt2), bring(gpt4)):
        whole = vocab.encode(text)
        assert vocab.encode(text[:split]) + vocab.encode(text[split:]) == whole


def test_a_tokenizer_that_reads_by_line_may_be_cut_at_every_line(tmp_path, monkeypatch):
    save_metaspace(tmp_path / "tokenizer.json")
    vocab = bring(tmp_path)
    lines = "the cat.\n\n  the 。\nhat;\n" * 40
    (tmp_path / "text").write_text(lines, encoding="utf-8")
    share = {"valid_fraction": 0.0, "test_fraction": 0.0}
    settings = config(tmp_path / "text", tmp_path / "tokenizer.json", tmp_path / "c", **share)
    monkeypatch.setattr(text, "BLOCK_BYTES", 7)
    monkeypatch.setattr(text, "_LONGEST_UNCUT", 50)
    span = Span(tmp_path / "text", 0, (tmp_path / "text").stat().st_size)
    assert max(map(len, read_blocks("brought", [span]))) < 70
    assert prepare(settings).split("train").tolist() == vocab.encode(lines)


def test_sentencepiece_cuts_each_line_and_ends_it(tmp_path):
    save_metaspace(tmp_path / "tokenizer.json")
    vocab = bring(tmp_path)
    assert isinstance(vocab, BroughtVocab)
    assert vocab.symbols == PIECES
    assert symbols(vocab, "the\n")[-1] == "</s>"
    assert symbols(vocab, "the cat\nthe\n") == [
        *symbols(vocab, "the cat\n"),
        *symbols(vocab, "the\n"),
    ]
    assert vocab.decode(vocab.encode("the cat\nthe c\n")) == "the cat\nthe c\n"
    assert symbols(vocab, "z") == ["\u2581", "<unk>"]
    assert symbols(vocab, "the cat") == ["\u2581the", "\u2581c", "at"]


def test_a_fork_of_a_decoder_goes_its_own_way(tmp_path):
    save_metaspace(tmp_path / "tokenizer.json")
    vocab = bring(tmp_path)
    the, cat = vocab.encode("the"), vocab.encode("cat")
    decoder = vocab.stream_decoder()
    begin = "".join(map(decoder.push, the))
    fork = decoder.fork()
    assert begin + "".join(map(fork.push, cat)) == vocab.decode(the + cat)
    assert begin + "".join(map(decoder.push, the)) == vocab.decode(the + the)


HAN = "<0xE4> <0xB8> <0xAD>"


@pytest.mark.parametrize(
    ("names", "pieces"),
    [
        (f"{HAN} a \u2581the", ["", "", "中", "a", " the", ""]),
        (f"{HAN} <0x80> a", ["", "", "中", "", "\ufffda", ""]),
        (f"{HAN} <0x80> \u2581the a", ["", "", "中", "", "\ufffd the", "a", ""]),
        (f"{HAN} <0x80> <s> a {HAN}", ["", "", "中", "", "", "\ufffda", "", "", "中", ""]),
        ("\u2581the <0xE4> </s> \u2581the <0xE4>", ["the", "", "\ufffd\n", "the", "", "\ufffd"]),
    ],
)
def test_bytes_that_are_no_character_are_written_as_u_fffd(tmp_path, names, pieces):
    save_byte_fallback(tmp_path / "tokenizer.json")
    vocab = bring(tmp_path)
    ids = [vocab.symbols.index(name) for name in names.split()]
    decoder = vocab.stream_decoder()
    assert [*map(decoder.push, ids), decoder.flush()] == pieces
    assert vocab.decode(ids) == "".join(pieces)


def save_byte_fallback(path):
    """Save a tokenizer that writes unknown characters as bytes, as Llama's does."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    ids = {name: n for n, name in enumerate([*names, "\u2581the", "a"])}
    tokenizer = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path))


@pytest.mark.parametrize("kind", ["bytes", "chars", "words", "bpe", "authors-bytes"])
def test_a_vocabulary_of_ours_cuts_another_text_as_it_cut_its_own(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(text, "BLOCK_BYTES", 100)
    (tmp_path / "text").write_text(SAMPLE)
    first = prepare(DataConfig(path=str(tmp_path / "text"), vocab=kind, cache_dir=str(tmp_path)))
    again = prepare(config(tmp_path / "text", first.folder, tmp_path))
    assert again.folder != first.folder
    assert again.vocab.hash == first.vocab.hash
    for name in ("train", "valid", "test"):
        assert np.array_equal(again.split(name), first.split(name)), name


def test_a_vocabulary_of_old_cuts_a_long_text_as_its_lines(tmp_path, monkeypatch, shared):
    folder = shared / "goldens" / "hf_tokenizer"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    monkeypatch.setattr("transformer_xl.data.text.BLOCK_BYTES", 100)
    vocab = read_vocab(folder / "vocab.pkl")
    (tmp_path / "model").mkdir()
    vocab.save(tmp_path / "model")
    text = "".join((folder / "corpus.txt").read_text().splitlines(keepends=True)[:100])
    (tmp_path / "text").write_text(text)
    corpus = prepare(config(tmp_path / "text", tmp_path / "model", tmp_path))
    found = [x for name in ("train", "valid", "test") for x in corpus.split(name)]
    assert found == vocab.encode_lines(text)


def old_vocab(symbols, **rules):
    rules = {"line_ends": "none", "eos": None, "unk": None} | rules
    return imported_vocab(symbols, Rules(**rules), lower_case=False)


def cut_by(vocab, tmp_path, **settings):
    (tmp_path / "model").mkdir()
    vocab.save(tmp_path / "model")
    share = {"valid_fraction": 0.0, "test_fraction": 0.0}
    where = settings.pop("path", tmp_path / "text")
    corpus = prepare(config(where, tmp_path / "model", tmp_path / "cache", **share, **settings))
    return corpus.split("train").tolist()


@pytest.mark.parametrize("is_ours", [True, False])
def test_symbols_that_are_added_to_bytes_are_in_no_text(tmp_path, is_ours):
    vocab = train_vocab("bytes", []) if is_ours else old_vocab([*"\u0120abc"], join="bytes")
    vocab = vocab.extended(["<pad>"])
    (tmp_path / "text").write_bytes(b"ab c")
    assert cut_by(vocab, tmp_path) == vocab.encode("ab c")
    # Nor do they write one.
    added = vocab.number_of("<pad>")
    assert vocab.decode([*vocab.encode("ab"), added, *vocab.encode(" c")]) == "ab c"
    assert vocab.token_bytes[added] == 0


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_a_long_line_of_characters_is_cut_within_words(tmp_path, monkeypatch, block):
    monkeypatch.setattr(text, "BLOCK_BYTES", block)
    vocab = old_vocab([*" abc"], join="chars")
    line = "  abc  a bb   cab c " * 20
    (tmp_path / "text").write_text(line)
    assert cut_by(vocab, tmp_path) == vocab.encode_lines(line)


@pytest.mark.parametrize("is_published", [True, False])
def test_the_words_of_a_published_corpus_are_not_cut_again(tmp_path, monkeypatch, is_published):
    common = DataConfig(vocab="words" if is_published else "bytes")
    monkeypatch.setitem(KNOWN_CORPORA, "", replace(KNOWN_CORPORA["ptb-word"], settings=common))
    symbols = ["<eos>", "2", "@,@", "000", ",", "@"]
    vocab = old_vocab(symbols, join="moses", eos="<eos>", unk="<eos>")
    (tmp_path / "text").write_text("2 @,@ 000\n")
    assert (cut_by(vocab, tmp_path) == [1, 2, 3, 0]) == is_published


def test_a_word_without_a_token_is_an_error_of_ours(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"the tokenizer failed on this text: .*\[UNK\]"):
        bring(tmp_path).encode("a b")
    (tmp_path / "text").write_text("a b\n" * 9)
    with pytest.raises(ValueError, match=r"the tokenizer failed on this text: .*\[UNK\]"):
        prepare(config(tmp_path / "text", tmp_path / "tokenizer.json", tmp_path, workers=2))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b"{}"),
        ("a.json", b'{"model": {"type": "Evil"}}'),
        ("a.model", b"\x0a\x0e\x0a\x05<unk>"),
    ],
)
def test_what_is_no_tokenizer_is_named(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(
        ValueError, match=r"data\.tokenizer=.* is not a tokenizer\.json .*transformers writes"
    ):
        bring(tmp_path / name)
