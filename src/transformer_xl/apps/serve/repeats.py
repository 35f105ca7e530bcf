"""Answers that can be told again: a client whose connection broke asks again with the same key.

The last few of a session are kept in the note of its state, so that they are saved with the tokens
that they appended.
"""

import hashlib
from typing import Literal

import msgspec

from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.schemas import CompletionRequest

KEY = r"^[!-~]{1,255}$"
"""The pattern of an Idempotency-Key."""
_MOST = 8
"""Answers that are kept of a session."""
_MOST_BYTES = 1 << 18
"""Bytes of them, but for the last one."""


class Told(msgspec.Struct, forbid_unknown_fields=True):
    """An answer that a session has given."""

    key: str
    request: str
    """A digest of the request."""
    tokens: list[int]
    text: str
    reason: Literal["stop", "repetition", "length", "cancelled"]
    seed: int | None = None


_DECODER = msgspec.json.Decoder(list[Told])


def require_repeatable(body: CompletionRequest) -> None:
    """Require a request whose answer can be kept.

    Raises:
        ApiError: It has no session, or asks for more than text and tokens.
    """
    if not body.session:
        message = "Idempotency-Key is for sessions, to which nothing is appended twice: name one"
        raise ApiError(400, message, "unsupported", "session")
    for name in ("logprobs", "attention"):
        if getattr(body, name) is not None:
            message = f"answers that are kept for an Idempotency-Key have no {name}: leave it out"
            raise ApiError(400, message, "unsupported", name)


def digest(body: CompletionRequest) -> str:
    """Return what tells two requests apart, however their answers are sent."""
    content = body.model_dump_json(exclude={"stream", "stream_options", "user"})
    return hashlib.sha256(content.encode()).hexdigest()


def find(note: str, key: str, body: CompletionRequest) -> Told | None:
    """Return the answer that was given for a key.

    Raises:
        ApiError: The key was given with another request.
        RuntimeError: The note is damaged.
    """
    for told in _read(note):
        if told.key == key:
            if told.request != digest(body):
                message = "this Idempotency-Key was used for another request: take a new one"
                raise ApiError(409, message, "idempotency_key_reused", "Idempotency-Key")
            return told
    return None


def added(note: str, told: Told) -> str:
    """Return the note with another answer."""
    kept = [*_read(note), told][-_MOST:]
    while len(kept) > 1 and len(msgspec.json.encode(kept)) > _MOST_BYTES:
        kept = kept[1:]
    return msgspec.json.encode(kept).decode()


def _read(note: str) -> list[Told]:
    try:
        return _DECODER.decode(note) if note else []
    except msgspec.DecodeError as error:
        raise RuntimeError(f"the answers that were kept are damaged: {error}") from error
