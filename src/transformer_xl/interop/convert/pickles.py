"""Read pickles without executing anything, and without taking much memory.

What is made of a pickle takes no more than some 64 MB and 20 times the bytes read so far, besides
the contents of its texts; a vocabulary of the authors takes half of that. What would take more is
refused.
"""

import mmap
from collections.abc import Callable

from transformer_xl.interop.convert.inert import Global, Instance, UnreadableFile
from transformer_xl.interop.convert.machine import Machine

__all__ = ["Global", "Instance", "UnreadableFile", "load_pickle"]


def load_pickle(
    data: bytes | bytearray | memoryview | mmap.mmap,
    persistent_load: Callable[[object], object] | None = None,
    start: int = 0,
    end: int | None = None,
) -> tuple[object, int]:
    """Read a pickle without executing anything.

    Args:
        data: Where it lies.
        persistent_load: Returns what stands for an object that lies elsewhere.
        start: Where it begins.
        end: Where it must have ended.

    Returns:
        The value, and the position behind the pickle.

    Raises:
        UnreadableFile: It is damaged, would take too much memory, or names something that no
            checkpoint needs.
    """
    if isinstance(data, bytearray | memoryview):
        data = bytes(data)
    end = len(data) if end is None else min(end, len(data))
    machine = Machine(data, persistent_load, start, end)
    try:
        value = machine.run()
    except (UnreadableFile, MemoryError):
        raise
    except Exception as error:
        raise UnreadableFile(
            f"the pickle is damaged at byte {machine.position:,} ({type(error).__name__}): get a "
            "fresh copy of the file"
        ) from error
    return value, machine.position
