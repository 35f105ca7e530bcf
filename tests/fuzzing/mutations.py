"""Small files of all old kinds, and random changes of them, for ``fuzzing.py``."""

import pickle
import random
import re
import struct
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from transformer_xl.interop.convert.tf_files import crc32c

MARKER = "executed"

Mutation = Callable[[random.Random, bytes], bytes]


def at(draw: random.Random, content: bytes, n: int, new: bytes) -> bytes:
    """Write bytes in the place of ``n`` others, at random."""
    i = draw.randrange(len(content))
    return content[:i] + new + content[i + n :]


def flip(draw: random.Random, content: bytes) -> bytes:
    """Flip one to eight bits."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(draw: random.Random, content: bytes) -> bytes:
    """Leave out the end."""
    return content[: draw.randrange(len(content))]


def insert(draw: random.Random, content: bytes) -> bytes:
    """Put random bytes in between."""
    return at(draw, content, 0, draw.randbytes(draw.randint(1, 16)))


def repeat(draw: random.Random, content: bytes) -> bytes:
    """Write a part many times, or leave it out."""
    i = draw.randrange(len(content))
    part = content[i : i + draw.randint(1, 64)]
    return content[:i] + part * draw.choice((0, 2, 1000)) + content[i + len(part) :]


def absurd(draw: random.Random, content: bytes) -> bytes:
    """Write a number of absurd size over something."""
    number = draw.choice((2**62, 2**63 - 1, -1, 2**31, 2**40, -(2**63), 0))
    width = draw.choice((4, 8))
    return at(draw, content, width, struct.pack("<q", number)[:width])


ANYWHERE: list[Mutation] = [flip, truncate, insert, repeat, absurd]

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


IN_PICKLES: list[Mutation] = [instruction, name, attack]

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
    place = draw.choice([m.start() for m in re.finditer(rb"PK[\1\3\5][\2\4\6]", content)])
    i, width = place + draw.randrange(4, 46, 2), draw.choice((2, 4))
    value = draw.choice((0, 1, 8, 0xFFFF, 0xFFFFFFFF, draw.randrange(len(content))))
    return content[:i] + struct.pack("<Q", value)[:width] + content[i + width :]


def repack(draw: random.Random, content: bytes) -> bytes:
    """Compress it, or write an entry twice, under another name, shorter, or not at all."""
    entries = list(entries_of(content).items())
    i = draw.randrange(len(entries))
    entry, inside = entries[i]
    others = [[(entry, inside)] * 2, [(draw.choice(entries)[0], inside)], [(entry, inside[:9])], []]
    if draw.randrange(5) == 0:
        return archive_of(entries, zipfile.ZIP_DEFLATED)
    entries[i : i + 1] = draw.choice(others)
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


def object_of(name: str, **attributes: object) -> object:
    """Return an object of a class of the authors, of which pickles have the name alone."""
    module = sys.modules.setdefault("mem_transformer", ModuleType("mem_transformer"))
    kind = type(name, (), {"__module__": "mem_transformer"})
    setattr(module, name, kind)
    made = kind()
    vars(made).update(attributes)
    return made


def seeds(root: Path) -> list[tuple[str, Path]]:
    """Make small files of all kinds; return the reader of each and where it lies."""
    draw = torch.Generator().manual_seed(0)
    weights = OrderedDict((f"layers.{i}.w", torch.randn(4, 3, generator=draw)) for i in range(3))
    weights |= {"half": torch.ones(5).half(), "view": weights["layers.0.w"].t()[1:]}
    words = [f"word{i}" for i in range(40)]
    parts = {"_parameters": weights, "_modules": OrderedDict(), "_buffers": {}}
    model = object_of("MemTransformerLM", n_layer=3, **parts)
    numbers = OrderedDict((word, i) for i, word in enumerate(words))
    vocab = object_of("Vocab", counter=Counter(words), idx2sym=words, sym2idx=numbers)
    found = []
    for key, value, is_zip in (
        ("state", weights, True),
        ("model", model, True),
        ("old", model, False),
    ):
        path = root / key / "model.pt"
        path.parent.mkdir()
        torch.save(value, path, _use_new_zipfile_serialization=bool(is_zip))
        found.append(("torch", path))
    for protocol in (0, 2, 4):
        path = root / f"protocol{protocol}" / "vocab.pkl"
        path.parent.mkdir()
        path.write_bytes(pickle.dumps([vocab, np.arange(9.0).reshape(3, 3)], protocol))
        found.append(("pickle", path))
    del sys.modules["mem_transformer"]
    return [*found, ("tensorflow", write_tensorflow(root / "variables", weights))]


def write_tensorflow(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint of TensorFlow; return its index."""
    folder.mkdir()
    index, data = tensorflow(tensors)
    (folder / "m.data-00000-of-00001").write_bytes(data)
    (folder / "m.index").write_bytes(index)
    return folder / "m.index"


def mutations(reader: str, content: bytes) -> list[Mutation]:
    """Return the changes that fit a file."""
    if reader == "tensorflow":
        return ANYWHERE + [in_table(x) for x in ANYWHERE] * (END_OF_BLOCK in content)
    return ANYWHERE + (IN_ARCHIVES if content[:2] == b"PK" else IN_PICKLES)
