"""An archive restores on another kind of processor, or is refused in words."""

import os
import struct
import subprocess
import sys
import zlib

import msgspec
import pytest
import torch

from transformer_xl.apps.compress import ArchiveError, Settings, compress, decompress
from transformer_xl.apps.compress.header import unpack
from transformer_xl.model import positions

# In a process of its own: which instructions are used is decided when torch is loaded.
_COMPRESS = """
import sys
from pathlib import Path
import torch
from transformer_xl.apps.compress import Settings, compress
from transformer_xl.data import load_vocab
from transformer_xl.model import load_model

folder = Path(sys.argv[1])
data = (folder / "text").read_bytes()
found = compress(data, load_model(folder), load_vocab(folder), Settings(streams=20))
(folder / "text.txl").write_bytes(found.content)
print(torch.backends.cpu.get_cpu_capability())
"""
_PLAIN = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "2"}

_SONG = b"so it goes, "


def _run_with_plain_instructions(program, folder):
    words = [sys.executable, "-c", program, str(folder)]
    env = os.environ | _PLAIN
    made = subprocess.run(words, env=env, capture_output=True, check=True, text=True)
    assert made.stdout == "DEFAULT\n"


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes this a processor whose powers in single precision differ in their last digits."""

    def go():
        computed = positions.frequencies

        def other(d_model, precision=torch.float32):
            found = computed(d_model, precision)
            return found * (1 - 2e-6) if precision == torch.float32 else found

        monkeypatch.setattr(positions, "frequencies", other)
        positions._sinusoids.cache_clear()

    yield go
    positions._sinusoids.cache_clear()


@pytest.fixture
def gpt(changed):
    """A model with rotary positions, which expects what `_SONG` is made of."""
    model = changed(kind="gpt")
    with torch.no_grad():
        model.softmax.bias[[*_SONG]] += 4.0
    return model


def test_an_archive_restores_where_powers_are_rounded_otherwise(
    model, gpt, vocab, surprising, elsewhere
):
    texts = {model: surprising[:600], gpt: _SONG * 50}
    contents = {by: compress(x, by, vocab, Settings(streams=20)).content for by, x in texts.items()}
    elsewhere()
    for by, data in texts.items():
        assert unpack(contents[by])[0].coding is not None
        assert decompress(contents[by], by, vocab) == data


@pytest.mark.parametrize("version", [1, 2])
def test_an_archive_of_before_is_restored_here_and_refused_there(
    model, gpt, vocab, surprising, elsewhere, version
):
    # Format 1 has frequencies in single precision, format 2 those of rotary positions alone.
    by, data = (model, surprising[:600]) if version == 1 else (gpt, _SONG * 50)
    rounded = ("EXACT_FREQUENCIES", "EXACT_ROTARY")[version - 1 :]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict.fromkeys(rounded, False).items() | {("MOST_COUNTED", 0)}:
            patch.setattr(f"transformer_xl.apps.compress.planning.{name}", value)
        header, payload = unpack(compress(data, by, vocab, Settings(streams=20)).content)
    # The header ends before the newer words.
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(header))
    for _ in ("transforms", "counted", *rounded):
        assert not fields[-1].pop()
    packed = msgspec.msgpack.encode(fields)
    prefix = struct.pack("<4sBHI", b"TXLZ", version, len(packed), zlib.crc32(packed))
    old = prefix + packed + payload
    assert decompress(old, by, vocab) == data
    elsewhere()
    message = "cannot be decompressed here, and nothing was written: it was made by .*, and this is"
    with pytest.raises(ArchiveError, match=message):
        decompress(old, by, vocab)


@pytest.mark.slow
def test_an_archive_of_other_instructions_and_threads_restores(changed, vocab, tmp_path):
    # Wide, as above; and it expects what the text is made of.
    model = changed(d_model=410, n_layer=1, mem_len=32)
    data = _SONG * 50
    with torch.no_grad():
        model.embedding.weight *= 0.1
        model.softmax.bias[[*data]] += 6.0
    model.save_pretrained(tmp_path, vocab)
    (tmp_path / "text").write_bytes(data)
    _run_with_plain_instructions(_COMPRESS, tmp_path)
    assert decompress((tmp_path / "text.txl").read_bytes(), model, vocab) == data
