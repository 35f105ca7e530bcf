"""Inventories of other projects' documentation, with the entries that are linked to from here.

The build has no network, so that Sphinx cannot fetch the inventories of torch and transformers,
which have tens of thousands of entries. ``python scripts/docs/inventories.py`` writes those in use
to ``docs/inventories``. To link to another object, add it to the table.
"""

import sys
import zlib
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "docs" / "inventories"
_HEADER = """\
# Sphinx inventory version 2
# Project: {name}
# Version: {version}
# The remainder of this file is compressed using zlib.
"""


class Project(NamedTuple):
    """A project, and which of its pages are linked to."""

    url: str
    version: str
    entries: dict[str, tuple[str, str]]
    """By name of an object, its role and its address below ``url``; ``$`` stands for the name."""


# Classes have the names of the modules that define them, as signatures and bases have.
_TORCH = {
    "torch.Tensor": ("py:class", "tensors.html#$"),
    "torch.dtype": ("py:class", "tensor_attributes.html#$"),
    "torch.device": ("py:class", "tensor_attributes.html#$"),
    "torch.nn.modules.module.Module": (
        "py:class",
        "generated/torch.nn.Module.html#torch.nn.Module",
    ),
    "torch.nn.modules.linear.Linear": (
        "py:class",
        "generated/torch.nn.Linear.html#torch.nn.Linear",
    ),
}
# Hugging Face's documentation is not made by Sphinx; anchors are full names all the same.
_TRANSFORMERS = {
    "transformers.configuration_utils.PreTrainedConfig": (
        "py:class",
        "main_classes/configuration#transformers.PreTrainedConfig",
    ),
    "transformers.generation.utils.GenerationMixin": (
        "py:class",
        "main_classes/text_generation#transformers.GenerationMixin",
    ),
}
PROJECTS = {
    "torch": Project("https://docs.pytorch.org/docs/stable/", "2", _TORCH),
    "transformers": Project("https://huggingface.co/docs/transformers/", "5", _TRANSFORMERS),
}


def inventory(name: str) -> bytes:
    """Return the inventory of a project, in the format of Sphinx."""
    project = PROJECTS[name]
    entries = (f"{key} {role} 1 {url} -\n" for key, (role, url) in project.entries.items())
    header = _HEADER.format(name=name, version=project.version).encode()
    return header + zlib.compress("".join(entries).encode(), 9)


def entries_of(content: bytes) -> str:
    """Return the entries of an inventory; compressed bytes depend on the version of zlib."""
    return zlib.decompress(content.split(b"\n", 4)[4]).decode()


def main() -> int:
    """Write the inventories."""
    FOLDER.mkdir(exist_ok=True)
    for name in PROJECTS:
        (FOLDER / f"{name}.inv").write_bytes(inventory(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
