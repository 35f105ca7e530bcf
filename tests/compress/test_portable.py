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
from transformer_xl.apps.compress.contents import made_here
from transformer_xl.apps.compress.header import pack, unpack
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
assert found.streams == 20
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


def test_an_archive_that_depends_on_it_is_refused_there(model, vocab, surprising, elsewhere):
    # As format 1 was: it has no word of frequencies, which were rounded to single precision.
    data = surprising[:600]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("EXACT_FREQUENCIES", "EXACT_ROTARY"):
            patch.setattr(f"transformer_xl.apps.compress.planning.{name}", False)
        content = compress(data, model, vocab, Settings(streams=20)).content
    header, payload = unpack(content)
    assert not header.coding.exact_frequencies
    old = _as_format(1, header, payload)
    assert decompress(old, model, vocab) == data
    elsewhere()
    with pytest.raises(ArchiveError, match="cannot be decompressed here, and nothing was written"):
        decompress(old, model, vocab)


def test_an_archive_of_format_2_has_the_frequencies_of_rotary_positions_in_single_precision(
    gpt, vocab, elsewhere
):
    data = _SONG * 50
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_xl.apps.compress.planning.EXACT_ROTARY", False)
        content = compress(data, gpt, vocab, Settings(streams=20)).content
    header, payload = unpack(content)
    assert header.coding.exact_frequencies
    assert not header.coding.exact_rotary
    old = _as_format(2, header, payload)
    assert decompress(old, gpt, vocab) == data
    elsewhere()
    with pytest.raises(ArchiveError, match="cannot be decompressed here, and nothing was written"):
        decompress(old, gpt, vocab)


def _as_format(version, header, payload):
    """The same file in an older format, whose header ends before the newer words."""
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(header))
    for _ in range(3 - version):
        assert fields[-1].pop() is False
    packed = msgspec.msgpack.encode(fields)
    return (
        struct.pack("<4sBHI", b"TXLZ", version, len(packed), zlib.crc32(packed)) + packed + payload
    )


def test_what_differs_where_an_archive_was_made_is_named():
    settings = Settings(learn=True, streams=60, segment_len=8)
    header, payload = unpack(compress(b"a" * 600, settings=settings).content)
    assert header.made_by == made_here(header.coding.learning)
    package, _, _, processor = header.made_by.split(", ")

    def restore(made_by):
        # As one whose weights were others where it was made.
        coding = msgspec.structs.replace(header.coding, model=bytes(16))
        decompress(pack(msgspec.structs.replace(header, made_by=made_by, coding=coding), payload))

    made_by = f"{package}, torch 1.0, OLD, {processor}"
    with pytest.raises(ArchiveError) as found:
        restore(made_by)
    assert f"by {made_by}, and this is {header.made_by}: decompress it on" in str(found.value)
    assert "ATEN_CPU_CAPABILITY=old" in str(found.value)


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
