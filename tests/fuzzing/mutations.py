"""Small files of all old kinds, and random changes of them, for ``fuzzing.py``."""

import pickle
import random
import struct
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from transformer_xl.interop.convert.tf_files import crc32c

MARKER = "executed"

Mutation = Callable[[random.Random, bytes], bytes]


# Changes of any file.


def flip(draw: random.Random, content: bytes) -> bytes:
    """Flip one to eight bits."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def swap(draw: random.Random, content: bytes) -> bytes:
    """Exchange two bytes."""
    changed = bytearray(content)
    i, j = draw.randrange(len(changed)), draw.randrange(len(changed))
    changed[i], changed[j] = changed[j], changed[i]
    return bytes(changed)


def truncate(draw: random.Random, content: bytes) -> bytes:
    """Leave out the end."""
    return content[: draw.randrange(len(content))]


def insert(draw: random.Random, content: bytes) -> bytes:
    """Put random bytes in between."""
    i = draw.randrange(len(content))
    return content[:i] + draw.randbytes(draw.randint(1, 16)) + content[i:]


def repeat(draw: random.Random, content: bytes) -> bytes:
    """Write a part twice or many times, or leave it out."""
    i = draw.randrange(len(content))
    part = content[i : i + draw.randint(1, 64)]
    return content[:i] + part * draw.choice((0, 2, 1000)) + content[i + len(part) :]


def absurd(draw: random.Random, content: bytes) -> bytes:
    """Write a number of absurd size over something."""
    number = draw.choice((2**62, 2**63 - 1, -1, 2**31, 2**40, -(2**63), 0))
    width = draw.choice((4, 8))
    i = draw.randrange(len(content))
    return content[:i] + struct.pack("<q", number)[:width] + content[i + width :]


ANYWHERE: list[Mutation] = [flip, swap, truncate, insert, repeat, absurd]

# Changes of a pickle.

INSTRUCTIONS = b"(.012BCFGIJKLMNPQRSTUVX])}abcdeghijlopqrstu" + bytes(range(0x80, 0x99))
NAMES = ("os\nsystem", "builtins\neval", "torch\nload", "numpy\ndtype", "collections\nCounter")
NAMES += ("torch._utils\n_rebuild_tensor_v2", "mem_transformer\nX", "builtins\ntuple")
NAMES += ("numpy.core.multiarray\n_reconstruct", "_codecs\nencode", "copyreg\n__newobj__")
ATTACK = f"cposix\nsystem\n(S'touch {MARKER}'\ntR.".encode()


def instruction(draw: random.Random, content: bytes) -> bytes:
    """Write one to four instructions over others."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] = draw.choice(INSTRUCTIONS)
    return bytes(changed)


def name(draw: random.Random, content: bytes) -> bytes:
    """Call something, at random."""
    i = draw.randrange(len(content))
    call = draw.choice((b")R", b")\x81", b"NR", b"h\x00\x85R", b"h\x01h\x02\x86R", b""))
    return content[:i] + b"c" + draw.choice(NAMES).encode() + b"\n" + call + content[i:]


def attack(draw: random.Random, content: bytes) -> bytes:
    """Begin with something that runs a program, or end so."""
    i = draw.choice((0, 2, len(content) - 1, draw.randrange(len(content))))
    return content[:i] + ATTACK[: draw.choice((-1, len(ATTACK)))] + content[i:]


def number(draw: random.Random, content: bytes) -> bytes:
    """Replace a small number by one of absurd size."""
    places = [i for i, byte in enumerate(content[:-2]) if byte in b"KMJ"]
    if not places:
        return content
    i = draw.choice(places)
    value = draw.choice((2**62, 2**63 - 1, -1, 2**31, 10**6, 0))
    after = i + 1 + {75: 1, 77: 2, 74: 4}[content[i]]
    return content[:i] + b"\x8a\x08" + struct.pack("<q", value) + content[after:]


IN_PICKLES: list[Mutation] = [instruction, name, attack, number]

# Changes of an archive; the checksums are right.


def entries_of(content: bytes) -> dict[str, bytes]:
    """Return the entries of an archive."""
    with zipfile.ZipFile(BytesIO(content)) as archive:
        return {entry: archive.read(entry) for entry in archive.namelist()}


def archive_of(entries: list[tuple[str, bytes]], kind: int = zipfile.ZIP_STORED) -> bytes:
    """Make an archive."""
    buffer = BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", kind) as archive:
        # An entry that is there twice is meant.
        warnings.simplefilter("ignore")
        for entry, content in entries:
            archive.writestr(entry, content)
    return buffer.getvalue()


def in_archive(mutation: Mutation) -> Mutation:
    """Make a change of the pickle in an archive of one of a pickle."""

    def change(draw: random.Random, content: bytes) -> bytes:
        entries = entries_of(content)
        key = next(entry for entry in entries if entry.endswith("data.pkl"))
        return archive_of([*(entries | {key: mutation(draw, entries[key])}).items()])

    change.__name__ = f"{mutation.__name__} in data.pkl"
    return change


def directory(draw: random.Random, content: bytes) -> bytes:
    """Write something over a field of the directory, or of a header before an entry."""
    i, width = draw.choice([*_headers(content)])
    value = draw.choice((0, 1, 8, 0xFFFF, 0xFFFFFFFF, draw.randrange(len(content))))
    return content[:i] + struct.pack("<Q", value)[:width] + content[i + width :]


def _headers(content: bytes) -> Iterator[tuple[int, int]]:
    fields = {b"PK\1\2": ((8, 2), (10, 2), (20, 4), (24, 4), (28, 2), (30, 2), (42, 4))}
    fields |= {b"PK\3\4": ((8, 2), (18, 4), (22, 4), (26, 2), (28, 2))}
    fields |= {b"PK\5\6": ((8, 2), (10, 2), (12, 4), (16, 4), (20, 2))}
    for i in range(len(content) - 3):
        for offset, width in fields.get(content[i : i + 4], ()):
            yield i + offset, width


def repack(draw: random.Random, content: bytes) -> bytes:
    """Compress it, write an entry twice, under another name, shorter, or not at all."""
    entries = list(entries_of(content).items())
    i = draw.randrange(len(entries))
    entry, inside = entries[i]
    how = draw.randrange(5)
    if how == 0:
        return archive_of(entries, zipfile.ZIP_DEFLATED)
    entries[i : i + 1] = [
        [(entry, inside), (entry, inside)],
        [(entries[draw.randrange(len(entries))][0], inside)],
        [(entry, inside[: len(inside) // 2])],
        [],
    ][how - 1]
    return archive_of(entries)


IN_ARCHIVES = [in_archive(mutation) for mutation in [*ANYWHERE, *IN_PICKLES]]
IN_ARCHIVES += [directory, repack]


def in_table(mutation: Mutation) -> Mutation:
    """Make a change of the first block of an index of one of any file; the checksum is right."""

    def change(draw: random.Random, content: bytes) -> bytes:
        block = content[: content.index(END_OF_BLOCK)]
        return index_of(mutation(draw, block) + END_OF_BLOCK)

    change.__name__ = f"{mutation.__name__} in the block"
    return change


# Small files of all kinds.

END_OF_BLOCK = struct.pack("<II", 0, 1)


def varint(n: int) -> bytes:
    """Return a number as Protocol Buffers write it."""
    return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])


def index_of(block: bytes) -> bytes:
    """Make an index of TensorFlow with one block."""
    handle = varint(0) + varint(len(block))
    index = b"\0\1" + varint(len(handle)) + b"z" + handle + END_OF_BLOCK
    footer = b"\0\0" + varint(len(block) + 5) + varint(len(index))
    footer = footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)
    return _sealed(block) + _sealed(index) + footer


def _sealed(block: bytes) -> bytes:
    crc = crc32c(block + b"\0")
    return block + b"\0" + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def tensorflow(tensors: dict[str, torch.Tensor]) -> tuple[bytes, bytes]:
    """Make a checkpoint of TensorFlow: its index and its numbers."""
    block, data = b"\0\0\2\x08\x01", b""
    for key in sorted(tensors):
        x = tensors[key].float().contiguous()
        sizes = b"".join(b"\x12" + varint(len(n) + 1) + b"\x08" + n for n in map(varint, x.shape))
        entry = b"\x08\1\x12" + varint(len(sizes)) + sizes + b"\x20" + varint(len(data))
        entry += b"\x28" + varint(4 * x.numel())
        block += b"\0" + varint(len(key)) + varint(len(entry)) + key.encode() + entry
        data += x.numpy().tobytes()
    return index_of(block + END_OF_BLOCK), data


def seeds(folder: Path) -> list[tuple[str, Path]]:
    """Make small files of all kinds; return the reader of each and where it lies."""
    draw = torch.Generator().manual_seed(0)
    weights = OrderedDict((f"layers.{i}.w", torch.randn(4, 3, generator=draw)) for i in range(3))
    weights |= {"half": torch.ones(5).half(), "view": weights["layers.0.w"].t()[1:]}
    words = [f"word{i}" for i in range(40)]
    made = {}
    module = ModuleType("mem_transformer")
    for kind in ("MemTransformerLM", "Vocab"):
        made[kind] = type(kind, (), {"__module__": "mem_transformer"})()
        setattr(module, kind, type(made[kind]))
    made["MemTransformerLM"].__dict__.update(
        {"n_layer": 3, "_parameters": weights, "_modules": OrderedDict(), "_buffers": {}}
    )
    made["Vocab"].__dict__.update(
        counter=Counter(words),
        idx2sym=words,
        sym2idx=OrderedDict((w, i) for i, w in enumerate(words)),
    )
    sys.modules["mem_transformer"] = module
    found = []
    for is_zip in (True, False):
        for key, value in {"state": weights, "model": made["MemTransformerLM"]}.items():
            path = folder / f"{key}_{'zip' if is_zip else 'legacy'}.pt"
            torch.save(value, path, _use_new_zipfile_serialization=is_zip)
            found.append(("torch", path))
    for protocol in (0, 2, 4):
        path = folder / f"vocab_{protocol}.pkl"
        path.write_bytes(pickle.dumps([made["Vocab"], np.arange(9.0).reshape(3, 3)], protocol))
        found.append(("pickle", path))
    del sys.modules["mem_transformer"]
    index, data = tensorflow(weights)
    (folder / "m.index").write_bytes(index)
    (folder / "m.data-00000-of-00001").write_bytes(data)
    return [*found, ("tensorflow", folder / "m.index")]


def mutations(reader: str, content: bytes) -> list[Mutation]:
    """Return the changes that fit a file."""
    if reader == "tensorflow":
        return ANYWHERE + [in_table(x) for x in ANYWHERE] * (END_OF_BLOCK in content)
    return ANYWHERE + (IN_ARCHIVES if content[:2] == b"PK" else IN_PICKLES)
