import json
from inspect import unwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from transformer_xl.config import files
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.vocab import VocabKind
from transformer_xl.data.vocab_files import load_vocab
from transformer_xl.errors import DataError, InputError

SAMPLE = (
    "def add(self, name):\n    return self.name + name\n\n\nclass Wörter:\n    def f(self):\n"
    "        if self.add(1):\n            return None\n"
) * 20
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
# Spaces, marks and letters as they follow each other in source code, and what breaks naive code.
CODE = st.text(
    alphabet=st.sampled_from("  \t\n\n\r\x1c\x85\xa0ab_1٣é漢.,()=\N{COMBINING ACUTE ACCENT}")
)
BYTES = train_vocab("bytes", [])
BPE = train_vocab("bpe", [SAMPLE], 400)
KINDS: tuple[VocabKind, ...] = ("bytes", "chars", "words", "bpe")


def tokenizer_of(vocab):
    return Tokenizer.from_str(vocab.definition)


@settings(max_examples=50)
@given(TEXTS | CODE)
def test_bytes_and_bpe_restore_any_text(text):
    for vocab in (BYTES, BPE):
        ids = vocab.encode(text)
        assert vocab.decode(ids) == text
        assert vocab.decode_bytes(ids) == text.encode()
        assert vocab.token_bytes[ids].sum() == len(text.encode())


@settings(max_examples=50)
@given(TEXTS | CODE)
def test_the_tokenizers_file_alone_gives_the_same_numbers(text):
    for kind in ("chars", "words"):
        vocab = train_vocab(kind, [text])
        assert tokenizer_of(vocab).encode(text).ids == vocab.encode(text)
    for vocab in (BYTES, BPE):
        assert tokenizer_of(vocab).encode(text).ids == vocab.encode(text)
        assert tokenizer_of(vocab).decode(vocab.encode(text)) == text


def test_a_byte_is_its_own_number():
    assert len(BYTES) == 256
    assert BYTES.encode("aé\n") == list("aé\n".encode())
    assert BYTES.decode_bytes(range(256)) == bytes(range(256))
    assert BYTES.encode(b"\xff\xfe".decode(errors="surrogateescape")) == [255, 254]


@settings(max_examples=50)
@given(TEXTS)
def test_a_stream_decoder_writes_whole_characters_and_nothing_else(text):
    for vocab in (BYTES, BPE, train_vocab("chars", [text])):
        decoder = vocab.stream_decoder()
        written = [decoder.push(token) for token in vocab.encode(text)]
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(written)
        assert "".join(written) + decoder.flush() == text


def test_a_fork_of_a_decoder_goes_its_own_way():
    decoder = BYTES.stream_decoder()
    assert decoder.push(0xC3) == ""
    fork = decoder.fork()
    assert (decoder.push(0xA4), fork.push(0xA9)) == ("ä", "é")


def test_texts_that_stand_apart_are_in_no_longer_unit():
    text = "Ein Hund.\tA dog.\nEine Katze!\tA cat!\n" * 20

    def units(vocab):
        found = (vocab.decode_bytes([token]) for token in range(len(vocab)))
        return {x for x in found if b"\n" in x or b"\t" in x}

    assert b".\n" in units(train_vocab("bpe", [text], 300))
    vocab = train_vocab("bpe", [text], 300, apart=["\n", "\t"])
    assert units(vocab) == {b"\t", b"\n"}
    assert vocab.decode(vocab.encode(text)) == text
    assert vocab.encode(text).count(vocab.number_of("\n")) == 40


def test_words_are_numbered_by_frequency_and_eos_is_counted():
    vocab = train_vocab("words", ["b a b\n", "a\tc  b\n", "x\n"])
    assert vocab.symbols == ["b", "<eos>", "a", "c", "x"]
    assert vocab.eos_id == 1
    assert vocab.unk_id is None
    assert vocab.token_bytes is None
    assert vocab.encode("a b\nc") == [2, 0, 1, 3]
    assert vocab.decode([2, 0, 1, 3, 0]) == "a b\nc b"
    with pytest.raises(ValueError, match="do not restore"):
        vocab.decode_bytes([0])


def test_a_smaller_vocabulary_keeps_the_most_frequent_words():
    vocab = train_vocab("words", ["a a a b b c d\n"], vocab_size=4)
    assert vocab.symbols == ["a", "b", "<eos>", "<unk>"]
    assert vocab.encode("a c z") == [0, 3, 3]
    with pytest.raises(ValueError, match="vocab_size=2 has no tokens for words"):
        train_vocab("words", ["a b c\n"], vocab_size=2)


def test_what_a_text_holds_beside_the_vocabulary_is_told_before_it_is_cut():
    chars = train_vocab("chars", ["ab"], held_out=["c"])
    assert chars.unknown("xayxb") == {"x": 2, "y": 1}
    assert train_vocab("words", ["a b\n"], held_out=["c\n"]).unknown("b z\na") == {"z": 1}
    for vocab in (BYTES, BPE):
        assert not vocab.unknown("日本")


def test_an_unknown_character_counts_no_bytes_and_restores_nothing():
    vocab = train_vocab("chars", ["ab"], held_out=["c"])
    assert vocab.token_bytes is not None
    assert vocab.token_bytes[vocab.unk_id] == 0
    assert vocab.decode(vocab.encode("axb")) == "a\ufffdb"
    assert vocab.decode_bytes(vocab.encode("ab")) == b"ab"
    with pytest.raises(ValueError, match="outside the vocabulary"):
        vocab.decode_bytes(vocab.encode("axb"))


def test_a_symbol_is_found_by_how_it_is_listed_or_by_its_text():
    words, chars = train_vocab("words", ["a b\nb\n"]), train_vocab("chars", ["a b\n"])
    assert words.number_of("<eos>") == words.eos_id
    assert words.number_of("b") == words.encode("b")[0]
    assert chars.number_of("\n") == chars.encode("\n")[0]
    assert BYTES.number_of("\n") == BYTES.number_of("Ċ") == 10
    assert BPE.number_of("\n") == BPE.encode("\n")[0]


def test_bpe_needs_room_for_every_byte():
    with pytest.raises(ValueError, match="vocab_size=100 must be at least 256"):
        train_vocab("bpe", ["abc"], 100)


@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_changes_nothing(kind, tmp_path):
    vocab = train_vocab(kind, [SAMPLE], 300, held_out=["\N{SNOWMAN}"])
    vocab.save(tmp_path)
    loaded = load_vocab(tmp_path)
    assert (loaded.kind, loaded.hash, loaded.symbols) == (kind, vocab.hash, vocab.symbols)
    assert (loaded.eos_id, loaded.unk_id) == (vocab.eos_id, vocab.unk_id)
    assert np.array_equal(loaded.token_bytes, vocab.token_bytes)
    assert loaded.encode(SAMPLE) == vocab.encode(SAMPLE)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == len(vocab)


def test_a_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"vocab\.json is missing.*--vocab FILE"):
        load_vocab(tmp_path)


@pytest.mark.parametrize("n_written", [0, 1])
def test_a_vocabulary_is_whole_where_its_second_file_is(tmp_path, monkeypatch, n_written):
    syncs = iter([None] * n_written)

    def stop(path):
        # The content is in the file by now, but not under its name.
        next(syncs)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", stop)
        with pytest.raises(StopIteration):
            BPE.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"][:n_written]
    BPE.save(tmp_path)
    assert load_vocab(tmp_path).hash == BPE.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about | {"format_version": 99}, "update transformer_xl"),
        (lambda about: about | {"kind": "tokens"}, "Invalid enum value .tokens."),
        (lambda about: about | {"hash": "0"}, "does not match the hash"),
        (lambda about: about | {"hash": "\ud800"}, "is damaged"),
        (lambda about: {}, "is damaged"),
        (lambda about: 3, "is damaged"),
    ],
)
def test_a_damaged_vocabulary_is_refused(change, message, tmp_path):
    BPE.save(tmp_path)
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=message):
        load_vocab(tmp_path)


@pytest.mark.parametrize("kind", ["chars", "words"])
def test_what_is_no_row_of_symbols_is_not_decoded(kind, refused):
    vocab = train_vocab(kind, ["to be or not to be"])
    for ids in ([-1], [10**9], [1.0], ["1"], 1, "1", None, [[1]]):
        with pytest.raises((InputError, TypeError), match=r"is not a symbol|int|iterable"):
            unwrap(type(vocab).decode)(vocab, ids)
        if kind != "words":
            with pytest.raises((InputError, TypeError), match=r"is not a symbol|int|iterable"):
                unwrap(type(vocab).decode_bytes)(vocab, ids)
    for number in (-1, len(vocab)):
        with refused(f"{number} is not a symbol: this vocabulary has 0 to"):
            vocab.stream_decoder().push(number)


def test_half_of_a_surrogate_pair_is_no_text_in_bytes_either():
    for encode in (train_vocab(kind, []).encode for kind in ("bytes", "bpe")):
        with pytest.raises(ValueError, match=r"character 1 is '\\ud800', half of a surrogate"):
            encode("a\ud800")
