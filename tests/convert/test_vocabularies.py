import json
import pickle
import sys
import types
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from transformer_xl.data import load_vocab
from transformer_xl.interop.convert import vocabularies
from transformer_xl.interop.convert.cutting import moses_normalizer
from transformer_xl.interop.convert.torch_files import Instance
from transformer_xl.interop.convert.vocabularies import find_vocab, read_vocab, vocab_from_object

WORDS = ["<eos>", "the", "<unk>", "cat", "Ñandú"]


@pytest.fixture(scope="module")
def hf(shared):
    folder = shared / "goldens" / "hf_tokenizer"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


@pytest.fixture
def old_classes(monkeypatch):
    """Give the classes of the authors' code, which are gone when a file is read."""
    made = {}
    for module, name in (("data_utils", "Corpus"), ("vocabulary", "Vocab")):
        made[name] = type(name, (), {"__module__": module})
        home = types.ModuleType(module)
        setattr(home, name, made[name])
        monkeypatch.setitem(sys.modules, module, home)
    return made


def attributes(symbols, **others):
    numbers = OrderedDict((symbol, number) for number, symbol in enumerate(symbols))
    return {
        "counter": Counter(symbols),
        "special": ["<eos>"],
        "lower_case": False,
        "delimiter": None,
        "idx2sym": list(symbols),
        "sym2idx": numbers,
        **others,
    }


def instance(state):
    return Instance("vocabulary.Vocab", state)


def old_vocab(symbols, **others):
    return instance(attributes(symbols, **others))


def reloaded(vocab, folder):
    folder.mkdir()
    vocab.save(folder)
    again = load_vocab(folder)
    assert again.hash == vocab.hash
    assert again.symbols == vocab.symbols
    return again, Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", ["vocab.pkl", "vocab_plain.pkl"])
def test_the_old_tokenizer_is_reproduced(hf, name, tmp_path):
    vocab, tokenizer = reloaded(read_vocab(hf / name), tmp_path / "vocab")
    golden = json.loads((hf / "examples.json").read_text())
    assert vocab.symbols == [*golden["idx2sym"], "<formula>"]
    for example in golden["examples"]:
        assert vocab.encode(example["text"]) == example["ids"]
        assert tokenizer.encode(example["text"]).ids == example["ids"]
        assert vocab.decode(example["ids"]) == example["decoded"]
    lines = (hf / "corpus.txt").read_text().splitlines()
    ids = [token for line in lines for token in vocab.encode(line)]
    assert ids == json.loads((hf / "corpus_ids.json").read_text())


def test_lines_of_a_file_end_with_eos(hf):
    text = (hf / "corpus.txt").read_text()
    vocab = read_vocab(hf / "vocab.pkl")
    ids = vocab.encode_lines(text)
    assert [x for x in ids if x != vocab.eos_id] == json.loads((hf / "corpus_ids.json").read_text())
    assert sum(x == vocab.eos_id for x in ids) == text.count("\n")


MOSES = [
    ("rock'n'roll don't", "rock 'n'roll don 't"),
    ("Mr. X met Mr. y. No. 5 ended. no", "Mr. X met Mr. y . No. 5 ended. no"),
    ("the U.S. end.", "the U.S. end ."),
    ('He said, "so." (Or 50 %)', 'He said , " so . " ( Or 50 % )'),
    ("$1,000.50 -- well-known... yes", "$ 1 @,@ 000 @.@ 50 -- well @-@ known ... yes"),
    ("1\xa02 — \u2018x\u2019 …", "1 @.@ 2 - ' x ' ..."),
    ("a <UNK> b<x>", "a <UNK> b < x >"),
    ("漢字", "漢 字"),
]


def test_the_moses_rules():
    for text, tokens in MOSES:
        assert moses_normalizer(["<unk>"]).normalize_str(text).split() == tokens.split()


def test_the_moses_rules_take_linear_time():
    for text in ("a.", ".", "'", "(", ",.", " ", "\n", "a'", '".', "\xa0", "-"):
        moses_normalizer().normalize_str("x" + text * 20_000 + "y")


def test_the_authors_words_end_lines_with_eos(tmp_path, old_classes):
    vocab, corpus = old_classes["Vocab"](), old_classes["Corpus"]()
    vocab.__dict__ = attributes(WORDS, lower_case=True, eos_idx=0)
    corpus.__dict__ = {"vocab": vocab, "dataset": "ptb", "train": torch.arange(5)}
    torch.save(corpus, tmp_path / "cache.pt")
    assert find_vocab(tmp_path) == tmp_path / "cache.pt"
    read, tokenizer = reloaded(read_vocab(find_vocab(tmp_path)), tmp_path / "vocab")
    text = " The  cat\n\ncat the\n"
    assert read.encode(text) == tokenizer.encode(text).ids == [1, 3, 0, 0, 3, 1, 0]
    assert read.decode([1, 3, 0, 0, 3, 1, 0]) == "the cat\n\ncat the\n"
    assert (read.eos_id, read.unk_id, read.token_bytes) == (0, None, None)
    with pytest.raises(ValueError, match=r"'dog', 'bird' .* it has no <unk>"):
        read.encode("the dog bird")
    with pytest.raises(ValueError, match="'dog'"):
        read.encode("dog")


@pytest.mark.parametrize("python", [2, 3])
def test_tensorflow_corpora_of_both_pythons_are_read(python, tmp_path, old_classes):
    vocab, corpus = old_classes["Vocab"](), old_classes["Corpus"]()
    symbols = WORDS if python == 3 else [x.encode().decode("latin-1") for x in WORDS]
    vocab.__dict__ = attributes(symbols)
    corpus.__dict__ = {"vocab": vocab}
    (tmp_path / "cache.pkl").write_bytes(pickle.dumps(corpus, protocol=2))
    (tmp_path / "corpus-info.json").write_text('{"vocab_size": 5, "dataset": "wt103"}')
    read = read_vocab(tmp_path / "cache.pkl")
    assert read.symbols == WORDS
    assert read.encode("Ñandú cat\n") == [4, 3, 0]


def test_sentences_of_lm1b_lie_between_marks(tmp_path):
    path = tmp_path / "1b_word_vocab.txt"
    path.write_text("<S> 7\nthe 5\n<UNK> 3\ncat 2\n")
    read, tokenizer = reloaded(read_vocab(path), tmp_path / "vocab")
    text = "the cat\n\na\n"
    ids = [0, 1, 3, 0, 0, 0, 0, 2, 0]
    assert read.encode(text) == tokenizer.encode(text).ids == ids
    assert read.decode(ids) == "the cat\n\n<UNK>\n"
    assert read.encode("the") == [0, 1]


def test_bytes_of_enwik8_are_read_from_raw_text():
    vocab = vocab_from_object(old_vocab(["32", "195", "97", "169", "13"]), path=Path("x"))
    assert vocab.encode("é a\na\r") == [1, 3, 0, 2, 2, 4]
    assert vocab.decode([1, 3, 0, 2]) == "é a"
    assert vocab.token_bytes is not None
    assert vocab.token_bytes.tolist() == [1] * 5
    with pytest.raises(ValueError, match="b'b'"):
        vocab.encode("ab")


def test_letters_of_text8_are_read_from_raw_text():
    vocab = vocab_from_object(old_vocab(["_", "a", "b"], lower_case=True), path=Path("x"))
    assert vocab.encode(" Ab a") == [0, 1, 2, 0, 1]
    assert vocab.decode([0, 1, 2, 0, 1]) == " ab a"


def test_the_vocabulary_inside_another_object_is_found():
    vocab = vocab_from_object({"epoch": 3, "vocab": old_vocab(WORDS, unk_idx=2)}, path=Path("x"))
    assert vocab.encode("the dog\n") == [1, 2, 0]


def refusal(function, *given, **named):
    """What a caller is told, or nothing."""
    try:
        function(*given, **named)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


HOSTILE = {
    "no list": {"idx2sym": "abc"},
    "no words": {"idx2sym": ["a", 1]},
    "a twin": {"idx2sym": ["a", "a"]},
    "no symbol": {"idx2sym": []},
    "a surrogate": {"idx2sym": ["\ud800"]},
    "two opinions": {"idx2sym": ["a", "b"], "sym2idx": {"a": 1, "b": 0}},
    "a gap": {"sym2idx": {"a": 0, "b": 2}},
    "a tensor": {"idx2sym": ["a"], "sym2idx": {"a": torch.zeros(2)}},
    "numbers of numbers": {"sym2idx": {1: 0}},
    "a list of numbers": {"idx2sym": ["a"], "sym2idx": [0]},
    "unk beyond": {"idx2sym": ["a"], "unk_idx": 1},
    "unk true": {"idx2sym": ["a", "b"], "unk_idx": True},
    "a case": {"idx2sym": ["a"], "lower_case": "yes"},
    "a delimiter": {"idx2sym": ["a"], "delimiter": ";"},
    "a list as delimiter": {"idx2sym": ["a"], "delimiter": [[]]},
    "nothing": {},
    "a vocabulary of nothing": {"vocab": {"vocab": {}}},
    "a number": {"vocab": 5},
}


def test_a_dictionary_that_is_no_vocabulary_is_refused():
    for name, content in HOSTILE.items():
        for given in (content, instance(content)):
            said = refusal(vocab_from_object, given, path=Path("evil.pkl"))
            assert "evil.pkl" in said, (name, said)


def test_a_data_set_that_is_unknown_is_refused():
    corpus = {"vocab": old_vocab(WORDS), "dataset": "wt3"}
    said = refusal(vocab_from_object, corpus, path=Path("cache.pt"))
    assert said.startswith("cache.pt: dataset='wt3' is unknown; choose one of ptb, wt2, wt103")


DAMAGED = [
    ("tokenizer_config.json", "{"),
    ("tokenizer_config.json", "[]"),
    ("tokenizer_config.json", '{"language": "fi"}'),
    ("tokenizer_config.json", '{"never_split": ["a.*b"]}'),
    ("tokenizer_config.json", '{"never_split": "<eos>"}'),
    ("tokenizer_config.json", '{"lower_case": 1}'),
    ("tokenizer_config.json", '{"eos_token": 3}'),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "y"}}}'),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"7": 5}}'),
    ("special_tokens_map.json", '{"additional_special_tokens": 5}'),
    ("added_tokens.json", '{"<x>": 9}'),
    ("added_tokens.json", '{"<x>": true}'),
    ("added_tokens.json", '{"<x>": [3]}'),
    ("added_tokens.json", '{"": 3}'),
    ("vocab.txt", ""),
    ("vocab.txt", "a\n\n<unk>\n"),
    ("vocab.txt", "a\nb\n"),
]


def test_damaged_settings_are_refused(tmp_path):
    vocab = "<eos>\n<unk>\na\n"
    for name, content in DAMAGED:
        (tmp_path / "vocab.txt").write_text(vocab)
        assert len(read_vocab(find_vocab(tmp_path))) == 3
        (tmp_path / name).write_text(content)
        said = refusal(read_vocab, find_vocab(tmp_path))
        assert name in said or "vocab.txt" in said, (name, content, said)
        (tmp_path / name).unlink()


ABSURD = [None, True, -1, 2**63, 1e308, "", "x", [], {}, [None], ["<eos>"], "1" * 30]
SETTINGS = {
    "tokenizer_config.json": {
        "eos_token": "<eos>",
        "unk_token": {"content": "<unk>"},
        "additional_special_tokens": ["<x>"],
        "added_tokens_decoder": {"2": {"content": "<x>", "special": True}},
        "never_split": ["<x>"],
        "delimiter": None,
        "lower_case": False,
        "language": "en",
        "clean_up_tokenization_spaces": True,
    },
    "special_tokens_map.json": {"eos_token": "<eos>", "additional_special_tokens": ["<x>"]},
    "added_tokens.json": {"<x>": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_whatever_settings_say_a_vocabulary_is_read_or_refused(name, tmp_path):
    (tmp_path / "vocab.txt").write_text("<eos>\n<unk>\n")
    n_refused = 0
    for key in SETTINGS[name]:
        for value in ABSURD:
            (tmp_path / name).write_text(json.dumps(SETTINGS[name] | {key: value}))
            said = refusal(read_vocab, tmp_path / "vocab.txt")
            assert not said or str(tmp_path) in said
            n_refused += bool(said)
    assert n_refused


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_lines_of_a_list_end_as_on_any_system(end, tmp_path):
    (tmp_path / "vocab.txt").write_text(f"<eos>{end}<unk>{end}a b{end}", newline="")
    assert read_vocab(tmp_path / "vocab.txt").symbols == ["<eos>", "<unk>", "a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a" * (33 << 20), "has 34,603,008 bytes, and a list of words up to 33,554,432"),
        (b"a\n\xff", "is not UTF-8 .*position 2"),
        (b"a\n\n<unk>\n", "a line is empty"),
        (b"".join(b"%x\n" % i for i in range((1 << 10) + 1)), "1,025 symbols"),
    ],
    ids=["file", "bytes", "empty line", "symbols"],
)
def test_what_is_no_list_of_words_is_refused(content, message, tmp_path, monkeypatch):
    assert vocabularies._MAX_SYMBOLS == 1 << 20
    monkeypatch.setattr(vocabularies, "_MAX_SYMBOLS", 1 << 10)
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_vocab(path)
