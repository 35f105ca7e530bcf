from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import DataConfig
from transformer_xl.data import text as text_module
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.text import Span, TextFiles, divide, read_blocks, read_text
from transformer_xl.data.vocab import VocabKind

TEXTS = st.text(
    alphabet=st.sampled_from("  \t\n\n\rab_1é漢\N{GRINNING FACE}.,()="), min_size=1, max_size=300
)
SAMPLE = "def add(self, name):\n    return self.name + name\n\n\nclass Wörter:\n    pass\n" * 9
BPE = train_vocab("bpe", [SAMPLE], 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    # Every block ends inside something: a character, a word, an indentation.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "BLOCK_BYTES", 7)
        patch.setattr(text_module, "_LONGEST_UNCUT", 1 << 20)
        yield


def write(folder: Path, text: str | bytes, name: str = "text.txt") -> Span:
    data = text if isinstance(text, bytes) else text.encode()
    (folder / name).write_bytes(data)
    return Span(folder / name, 0, len(data))


def encode_each(vocab, blocks) -> list[int]:
    return list(chain.from_iterable(map(vocab.encode, blocks)))


def content(spans) -> bytes:
    return b"".join(span.path.read_bytes()[span.start : span.stop] for span in spans)


@settings(max_examples=50, deadline=None)
@given(text=TEXTS)
def test_no_symbol_crosses_a_block(folder, text):
    span = write(folder, text)
    blocks = list(read_blocks("bpe", [span]))
    assert encode_each(BPE, blocks) == BPE.encode(text)
    blocks = list(read_blocks("words", [span]))
    vocab = train_vocab("words", blocks)
    # One <eos> for each line, also for a last one that does not end.
    lines = text.split("\n")
    whole = text if not lines[-1].strip() else text + "\n"
    assert encode_each(vocab, blocks) == vocab.encode(whole)


def test_a_line_without_end_is_cut_between_words(folder):
    span = write(folder, "word another " * 1000)
    for kind in ("words", "bpe"):
        assert max(map(len, read_blocks(kind, [span]))) < 40


@pytest.mark.parametrize("blank", ["\t", "\r", "\v", "\x1c", "\x85", "\xa0", "\u2003", "\u3000"])
def test_words_stay_whole_in_a_long_line_whatever_blanks_divide_them(folder, monkeypatch, blank):
    monkeypatch.setattr(text_module, "_LONGEST_UNCUT", 50)
    text = blank.join(map(str, range(500))) + "\n"
    blocks = list(read_blocks("words", [write(folder, text)]))
    vocab = train_vocab("words", [text])
    assert encode_each(vocab, blocks) == vocab.encode(text)
    assert max(map(len, blocks)) < 60


def test_a_text_without_any_place_to_cut_is_cut_anyway(folder, monkeypatch):
    monkeypatch.setattr(text_module, "_LONGEST_UNCUT", 50)
    blocks = list(read_blocks("bpe", [write(folder, "x" * 1000)]))
    assert "".join(blocks) == "x" * 1000
    assert max(map(len, blocks)) < 60


@pytest.mark.parametrize(
    ("data", "offset", "byte"),
    [
        (b"\xff", 0, "0xff"),
        (b"0123456789\xe9 abc", 10, "0xe9"),
        ("0123é漢".encode() + b"\xf0\x9f" + b"abcdefgh", 9, "0xf0"),
        (b"0123456789012345\xc3", 16, "0xc3"),
    ],
)
def test_bytes_that_are_no_text_are_located(folder, data, offset, byte):
    span = write(folder, data, "latin.txt")
    message = rf"latin\.txt is not UTF-8 text: byte {offset} is {byte}.*--data\.vocab bytes"
    with pytest.raises(ValueError, match=message):
        list(read_text(span))


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=4),
    shares=st.sampled_from([(0.1, 0.0), (0.0, 0.2), (0.05, 0.05), (0.4, 0.3), (0.0, 0.0)]),
    kind=st.sampled_from(["bytes", "chars", "bpe"]),
)
def test_the_shares_are_cut_off_the_end(folder, texts, shares, kind: VocabKind):
    paths = tuple(write(folder, text, f"{i}.txt").path for i, text in enumerate(texts))
    valid, test = shares
    config = DataConfig(path=str(folder), vocab=kind, valid_fraction=valid, test_fraction=test)
    splits = divide(config, TextFiles(root=folder, description="", train=paths))
    whole = "".join(texts).encode() if kind == "bytes" else "".join(texts)
    parts = [content(splits[name]) for name in ("train", "valid", "test")]
    if kind != "bytes":
        parts = [part.decode() for part in parts]
    first, second = int(round(1 - valid - test, 9) * len(whole)), int((1 - test) * len(whole))
    assert parts == [whole[:first], whole[first:second], whole[second:]]


@settings(max_examples=50, deadline=None)
@given(
    lines=st.lists(st.text(alphabet="  \tab漢", max_size=40), min_size=1, max_size=20),
    ends=st.booleans(),
)
def test_a_line_stays_whole_unless_it_is_too_long(folder, lines, ends):
    text = "\n".join(lines) + "\n" * ends
    span = write(folder, text)
    config = DataConfig(path="x", vocab="words", valid_fraction=0.3, test_fraction=0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_LONGEST_LINE", 30)
        splits = divide(config, TextFiles(root=folder, description="", train=(span.path,)))

    def expected(share):
        start = int(len(text) * round(1 - share, 12))
        line_end = text.find("\n", start, start + 30) + 1
        blank = next((i + 1 for i in range(start, len(text)) if text[i].isspace()), len(text))
        return (line_end or blank) if start else 0

    first, second = expected(0.6), expected(0.3)
    parts = [content(splits[name]).decode() for name in ("train", "valid", "test")]
    assert parts == [text[:first], text[first:second], text[second:]]


def test_whole_files_are_held_out_and_stay_where_they_are(folder):
    paths = [write(folder, f"{i:03}" * (1 + i % 5), f"file{i:03}").path for i in range(200)]
    config = DataConfig(path="x", split_by="file", valid_fraction=0.1, test_fraction=0.05)

    def hold_out(paths):
        splits = divide(config, TextFiles(root=folder, description="", train=tuple(paths)))
        return {name: [span.path for span in spans] for name, spans in splits.items()}

    splits = hold_out(paths)
    assert sorted(chain.from_iterable(splits.values())) == paths
    total = sum(path.stat().st_size for path in paths)
    for name, share in (("valid", 0.1), ("test", 0.05)):
        held_out = sum(path.stat().st_size for path in splits[name])
        assert share <= held_out / total < share + 0.01
        assert splits[name] == sorted(splits[name])
    # A new file hardly moves the others.
    moved = hold_out([*paths, write(folder, "new", "new").path])
    assert len(set(moved["test"]) ^ set(splits["test"])) <= 2


def test_too_few_files_to_hold_some_out_are_refused(folder):
    paths = tuple(write(folder, "text", name).path for name in "ab")
    config = DataConfig(path="x", split_by="file")
    with pytest.raises(ValueError, match="needs more than 2 files"):
        divide(config, TextFiles(root=folder, description="", train=paths))
