"""Settings beside a vocabulary, whatever they say: it is read or refused."""

import json
from pathlib import Path

import pytest

from transformer_xl.interop.convert.vocabularies import read_vocab

ABSURD: list[object] = [None, True, -1, 2**63, 1e308, "", "x", [], {}, [None], ["<eos>"], "1" * 30]
SETTINGS: dict[str, dict[str, object]] = {
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
def test_whatever_settings_say_a_vocabulary_is_read_or_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("<eos>\n<unk>\n")
    n_read = n_refused = 0
    for key in SETTINGS[name]:
        for value in ABSURD:
            (tmp_path / name).write_text(json.dumps(SETTINGS[name] | {key: value}))
            try:
                read_vocab(tmp_path / "vocab.txt")
            except (RuntimeError, ValueError) as error:
                n_refused += str(tmp_path) in str(error)
            else:
                n_read += 1
    assert n_read + n_refused == len(SETTINGS[name]) * len(ABSURD)
    assert n_refused
