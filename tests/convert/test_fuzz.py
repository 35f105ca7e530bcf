"""Random damage: every file is read or refused, whatever is changed in it."""

import collections
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_xl.interop.convert.pickles import UnreadableFile
from transformer_xl.interop.convert.torch_files import read_pickle, read_torch
from transformer_xl.interop.convert.vocabularies import read_vocab


@pytest.fixture
def n_mutants(is_nightly: bool) -> int:
    return 200 if is_nightly else 50


NAMES = (b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch._utils\n_rebuild_tensor_v2\n")
NAMES += (
    b"cnumpy.core.multiarray\n_reconstruct\n",
    b"cmem_transformer\nX\n",
    b"c_codecs\nencode\n",
)


def damaged(draw: random.Random, content: bytes) -> bytes:
    i = draw.randrange(len(content))
    kind = draw.randrange(6)
    if kind == 0:
        return content[:i] + bytes([content[i] ^ 1 << draw.randrange(8)]) + content[i + 1 :]
    if kind == 1:
        return content[:i]
    if kind == 2:
        return content[:i] + content[i : i + 20] * draw.choice((0, 2, 100)) + content[i + 20 :]
    if kind == 3:
        number = struct.pack("<q", draw.choice((2**62, -1, 2**31)))
        return content[:i] + number + content[i + 8 :]
    if kind == 4:
        return content[:i] + draw.choice(NAMES) + draw.choice((b")R", b")\x81", b"")) + content[i:]
    return content[:i] + draw.randbytes(4) + content[i + 4 :]


def in_archive(draw: random.Random, content: bytes, path: Path) -> bytes:
    """Damage the pickle of an archive, whose checksums are right afterwards."""
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    key = next(name for name in entries if name.endswith("data.pkl"))
    entries[key] = damaged(draw, entries[key])
    with zipfile.ZipFile(path, "w") as archive:
        for name, inside in entries.items():
            archive.writestr(name, inside)
    return path.read_bytes()


@pytest.mark.parametrize("kind", ["zip", "in zip", "legacy", "pickle 0", "pickle 2", "pickle 4"])
def test_whatever_is_damaged_is_read_or_refused(
    kind: str, n_mutants: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x"
    weights = collections.OrderedDict(w=torch.ones(3, 2), half=torch.ones(2).half())
    words = [f"word{i}" for i in range(20)]
    vocab = [collections.Counter(words), words, np.arange(6.0).reshape(2, 3), {"n": 2**40}]
    read: Callable[[Path], object] = read_torch
    if kind.startswith("pickle"):
        path.write_bytes(pickle.dumps(vocab, int(kind[-1])))
        read = read_pickle
    else:
        torch.save({"weights": weights}, path, _use_new_zipfile_serialization=kind != "legacy")
    content = path.read_bytes()
    read(path)
    n_read = n_refused = 0
    for i in range(n_mutants):
        draw = random.Random(i)
        is_inside = kind == "in zip"
        mutant = in_archive(draw, content, path) if is_inside else damaged(draw, content)
        path.write_bytes(mutant)
        try:
            read(path)
        except UnreadableFile as error:
            n_refused += str(path) in str(error)
        else:
            n_read += 1
    assert n_read + n_refused == n_mutants
    assert n_refused > n_read
    assert list(tmp_path.iterdir()) == [path]


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
                read_vocab(tmp_path)
            except (UnreadableFile, ValueError) as error:
                n_refused += str(tmp_path) in str(error)
            else:
                n_read += 1
    assert n_read + n_refused == len(SETTINGS[name]) * len(ABSURD)
    assert n_refused


@pytest.mark.parametrize("name", ["vocab.txt", "vocab.pkl"])
def test_a_damaged_vocabulary_is_read_or_refused(name: str, n_mutants: int, tmp_path: Path) -> None:
    words = ["<eos>", "<unk>", *(f"word{i}" for i in range(20))]
    state = {"idx2sym": words, "sym2idx": {word: i for i, word in enumerate(words)}, "unk_idx": 1}
    content = pickle.dumps(state, 2) if name == "vocab.pkl" else "\n".join(words).encode()
    n_read = n_refused = 0
    for i in range(n_mutants):
        (tmp_path / name).write_bytes(damaged(random.Random(i), content))
        try:
            read_vocab(tmp_path / name)
        except (UnreadableFile, ValueError) as error:
            n_refused += str(tmp_path) in str(error)
        else:
            n_read += 1
    # A changed word of a text is a word.
    assert n_read + n_refused == n_mutants
    assert n_refused
