import dataclasses
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from transformer_xl.data.imported import ImportedVocab, Rules
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.text import split_point
from transformer_xl.data.vocab_files import load_vocab
from transformer_xl.errors import DataError

SYMBOLS = [
    *("<eos>", "<unk>", "<x>", "dog", "s", "'s", "'", '"', "(", ")", ".", ",", ":", "$", "n't"),
    *("@-@", "@,@", "@.@", "5", "漢", "&amp;"),
]
MOSES = Rules(join="moses", eos="<eos>", unk="<unk>", apart=("<x>",), clean_up=True)


def imported(rules):
    ids = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return ImportedVocab(tokenizer.to_str(), rules)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("dog 's dog .", "dog's dog."),
        ('dog " dog " dog', 'dog "dog" dog'),
        ("dog ( dog ) : $ 5", "dog (dog): $5"),
        ("5 @,@ 5 @.@ 5 @-@ dog", "5,5.5-dog"),
        ("5 @,@ @,@ 5", "5,@,@ 5"),
        ("5 @,@", "5 @,@"),
        ("@-@ dog @-@", "-dog-"),
        ("dogs ' dog", "<unk> 'dog"),
        ("dog ' s", "dog's"),
        ("dog n't &amp; 漢 漢", "dogn't & 漢漢"),
        ('" <x> " . <x> .', '" <x> ". <x>.'),
        ("dog <eos> dog", "dog <eos> dog"),
    ],
)
def test_moses_joins_words(words, text):
    vocab = imported(MOSES)
    assert vocab.decode(vocab.encode(words)) == text


@given(st.lists(st.integers(0, len(SYMBOLS) - 1)), st.integers(0, 40))
def test_lines_are_joined_by_themselves(ids, cut):
    vocab = imported(dataclasses.replace(MOSES, line_ends="after"))
    first, second = vocab.decode([*ids[:cut], 0]), vocab.decode(ids[cut:])
    assert vocab.decode([*ids[:cut], 0, *ids[cut:]]) == first + second
    assert first.endswith("\n")


IDS = st.lists(st.integers(0, len(SYMBOLS) - 1), max_size=12)


@given(IDS, IDS, IDS)
def test_a_fork_of_a_decoder_goes_its_own_way(begin, one, other):
    def decoded(ids):
        decoder = imported(MOSES).stream_decoder()
        return "".join(map(decoder.push, ids)) + decoder.flush()

    decoder = imported(MOSES).stream_decoder()
    text = "".join(map(decoder.push, begin))
    fork = decoder.fork()
    assert text + "".join(map(decoder.push, one)) + decoder.flush() == decoded(begin + one)
    assert text + "".join(map(fork.push, other)) + fork.flush() == decoded(begin + other)


def test_rules_are_part_of_the_vocabulary(tmp_path):
    vocab, others = imported(MOSES), imported(dataclasses.replace(MOSES, clean_up=False))
    assert vocab.hash != others.hash
    vocab.save(tmp_path)
    again = load_vocab(tmp_path)
    assert isinstance(again, ImportedVocab)
    assert again.rules == MOSES
    assert (again.hash, again.kind, again.eos_id, again.unk_id) == (vocab.hash, "imported", 0, 1)
    assert again.token_bytes is None
    assert split_point("imported", "a b\nc") == 0


@pytest.mark.parametrize("change", [{"clean_up": False}, {"join": "glue"}, {"eos": 5}, None])
def test_edited_rules_are_refused(change, tmp_path):
    imported(MOSES).save(tmp_path)
    about = json.loads((tmp_path / "vocab.json").read_text())
    about["rules"] = None if change is None else about["rules"] | change
    (tmp_path / "vocab.json").write_text(json.dumps(about))
    with pytest.raises(DataError, match="damaged or was edited"):
        load_vocab(tmp_path)


def test_rules_name_symbols_that_exist():
    with pytest.raises(ValueError, match=r"eos='</s>'.* names a symbol that the vocabulary lacks"):
        imported(dataclasses.replace(MOSES, eos="</s>"))


def test_an_imported_vocabulary_is_not_trained():
    with pytest.raises(ValueError, match="loaded, not learned"):
        train_vocab("imported", ["a"])


def test_a_definition_that_is_none_is_refused_whatever_its_hash(tmp_path):
    definition, rules = b'{"model": {"type": "WordLevel"}}', Rules(join="words").to_json()
    digest = hashlib.sha256(
        f"imported\n{json.dumps(rules, sort_keys=True)}\n".encode() + definition
    )
    about = {"format_version": 1, "kind": "imported", "rules": rules, "hash": digest.hexdigest()}
    (tmp_path / "vocab.json").write_text(json.dumps(about))
    (tmp_path / "tokenizer.json").write_bytes(definition)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_vocab(tmp_path)
