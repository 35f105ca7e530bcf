"""How much memory a pickle may take, and what its instructions take of it."""

from transformer_xl.interop.convert.inert import UnreadableFile

# Besides the contents of texts. The vocabulary of the largest corpus, lm1b, takes half of it.
_ALWAYS = 64 << 20
_PER_BYTE = 20

ENTRY = 80
"""Bytes that an entry of a dictionary or of a set takes, roughly."""


def allowed_memory(taken: int, n_read: int) -> int:
    """Return how many bytes what was read may take.

    Raises:
        UnreadableFile: It takes more.
    """
    allowed = _ALWAYS + _PER_BYTE * n_read
    if taken > allowed:
        raise UnreadableFile(
            f"refused: the first {n_read:,} bytes of the pickle would take more than "
            f"{allowed >> 20:,} MB of memory, which no checkpoint needs"
        )
    return allowed


def _sizes() -> list[int]:
    # A place on the stack, and one where the value goes.
    sizes = [16] * 256
    for codes, size in (
        (b"ILFJM\x8a\x8bG", 48),
        (b"STUVX\x8c\x8dCB\x8e\x96", 80),
        # With what the check of the depth takes for each.
        (b"(t\x85\x86\x87]l}d", 200),
        (b"\x8f\x91", 260),
        (b"pqr\x94", 100),
        (b"s", ENTRY),
        (b"c\x93", 500),
        (b"ioR\x81\x92Q", 700),
        (b"\x80\x95ae01ub\x90.", 0),
    ):
        for code in codes:
            sizes[code] = size
    return sizes


SIZES = _sizes()
"""Bytes that each instruction takes, roughly, for what it makes and remembers."""
