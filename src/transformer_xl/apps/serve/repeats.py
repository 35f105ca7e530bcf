"""What a session keeps with its state, so that a request that is sent twice appends once.

A client whose connection broke asks again with the same Idempotency-Key, and gets the answer that
was given: the last few are kept, in the note of the state, and so are saved with the tokens that
they appended. A request that comes late, as it waited in a proxy while its client went on,
may have a key that is forgotten: the number of the turn for which it was meant tells it apart.
"""

import hashlib
import json
from typing import Annotated, Literal

import msgspec

from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.schemas import CompletionRequest
from transformer_xl.errors import CheckpointError

KEY = r"^[!-~]{1,255}$"
"""The pattern of an Idempotency-Key."""
_MOST = 8
"""Answers that are kept of a session."""
_MOST_BYTES = 1 << 18
"""Bytes of them, but for the last one."""
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Told(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An answer that a session has given."""

    key: str
    request: str
    """A digest of the request."""
    turn: _Count
    """How many answers the session had given with it."""
    tokens: list[int]
    text: str
    reason: Literal["stop", "repetition", "length", "cancelled"]
    seed: int | None = None
    n_behind: _Count = 0
    """How many of the last tokens are behind the text, as of a stop string; they are not told."""
    echo: str | None = None
    """The text of the prompt, where it was told."""


class Notes(msgspec.Struct, forbid_unknown_fields=True):
    """What a session keeps with its state."""

    turns: _Count = 0
    """How many answers it has given."""
    told: list[Told] = []
    """The last of them whose request had a key."""

    def encoded(self) -> str:
        """Return it as text."""
        return msgspec.json.encode(self).decode()

    def after(self, told: Told | None) -> "Notes":
        """Return the notes after another answer."""
        answers = [*self.told, told][-_MOST:] if told else self.told
        while len(answers) > 1 and len(msgspec.json.encode(answers)) > _MOST_BYTES:
            answers = answers[1:]
        return Notes(self.turns + 1, answers)


NOTE_BYTES = len(Notes(2**53 - 1).encoded())
"""Bytes of the notes of a session, at most, without answers that had a key."""
_DECODER = msgspec.json.Decoder(Notes)


def notes_of(note: str) -> Notes:
    """Return what a session keeps.

    Raises:
        CheckpointError: The note is damaged.
    """
    try:
        return _DECODER.decode(note) if note else Notes()
    except msgspec.DecodeError as error:
        message = f"what the session keeps with its state is damaged: {error}"
        raise CheckpointError(message) from error


def require_repeatable(body: CompletionRequest, key: str | None) -> None:
    """Require a request that can be recognized when it is sent again.

    Raises:
        ApiError: It has no session, or asks for more than text and tokens.
    """
    message = param = ""
    if body.session_turn is not None and not body.session:
        param, message = "session_turn", "session_turn is for sessions: name one, or leave it out"
    elif key is not None and not body.session:
        message = "Idempotency-Key is for sessions, to which nothing is appended twice: name one"
        param = "session"
    elif key is not None and (body.logprobs, body.attention) != (None, None):
        param = "attention" if body.logprobs is None else "logprobs"
        message = f"answers that are kept for an Idempotency-Key have no {param}: leave it out"
    if message:
        raise ApiError(400, message, "unsupported", param)


def digest(body: CompletionRequest) -> str:
    """Return what tells two requests apart, however their answers are sent."""
    content = body.model_dump(mode="json", exclude={"stream", "stream_options", "user"})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def find(notes: Notes, key: str | None, body: CompletionRequest) -> Told | None:
    """Return the answer that was given for a key; None: the request is a new one.

    Raises:
        ApiError: The key was given with another request, or the request is for another turn.
    """
    told = next((each for each in notes.told if each.key == key), None)
    if told is None and body.session_turn not in (None, notes.turns):
        message = (
            f"session_turn={body.session_turn}, and the session has given {notes.turns} answers: "
            "nothing was appended"
        )
        raise ApiError(409, message, "session_at_another_turn", "session_turn")
    if told is not None and told.request != digest(body):
        message = "this Idempotency-Key was used for another request: take a new one"
        raise ApiError(409, message, "idempotency_key_reused", "Idempotency-Key")
    return told
