"""What a session keeps with its state, so that a request that is sent twice appends once.

A client whose connection broke sends its request again with the same Idempotency-Key, and gets the
answer that was given: the last one is saved with the tokens that it appended. A request that comes
later still has the number of the turn for which it was meant.
"""

import hashlib
import json
from typing import Annotated

import msgspec

from transformer_xl.apps.serve.errors import ApiError, SessionError
from transformer_xl.apps.serve.schemas import CompletionRequest

LARGEST_ANSWER = 1 << 17
"""Characters of a response, in ASCII, that are stored with its Idempotency-Key."""


class Note(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """What a session keeps with its state."""

    turns: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0
    """How many answers it has given."""
    key: str = ""
    """The key of the last request that had one."""
    request: str = ""
    """A digest of that request."""
    answer: str = ""
    """The JSON of its answer; "": it was too large."""
    told: list[dict[str, object]] = []
    """Answers that a version before kept in another form."""

    def encoded(self) -> str:
        """Return it as text."""
        return msgspec.json.encode(self).decode()

    def after(self, body: CompletionRequest, key: str | None, answer: str) -> "Note":
        """Return the note after another answer; its JSON is kept if the request has a key."""
        note = msgspec.structs.replace(self, turns=self.turns + 1)
        if key is None:
            return note
        answer = answer if len(answer) <= LARGEST_ANSWER else ""
        return msgspec.structs.replace(note, key=key, request=digest(body), answer=answer)

    def answered(self, body: CompletionRequest, key: str | None) -> str:
        """Return the answer that was given to a request; "" if it is a new one.

        Raises:
            ApiError: The key was given with another request, its answer is not stored, or the
                request is for another turn.
        """
        is_repeated = key is not None and key == self.key and self.request == digest(body)
        if is_repeated and self.answer:
            return self.answer
        if is_repeated or (key and key in [each.get("key") for each in self.told]):
            message = (
                "this Idempotency-Key was answered, and the answer is not stored, as it was too "
                "long or of the version before: nothing is appended; GET /v1/sessions/NAME has "
                "the tokens"
            )
            raise ApiError(409, message, "answer_not_stored", "Idempotency-Key")
        if key and key == self.key:
            message = "this Idempotency-Key was used for another request: take a new one"
            raise ApiError(409, message, "idempotency_key_reused", "Idempotency-Key")
        if body.session_turn not in (None, self.turns):
            message = (
                f"session_turn={body.session_turn}, and the session has given {self.turns} "
                "answers: nothing was appended"
            )
            raise ApiError(409, message, "session_at_another_turn", "session_turn")
        return ""


def note_of(note: str) -> Note:
    """Return what a session keeps; raises a SessionError if it is damaged."""
    try:
        return msgspec.json.decode(note, type=Note) if note else Note()
    except msgspec.DecodeError as error:
        message = f"what the session keeps with its state is damaged: {error}"
        raise SessionError(409, "session_damaged", message) from error


def digest(body: CompletionRequest) -> str:
    """Return what tells two requests apart, however their answers are sent."""
    content = body.model_dump(mode="json", exclude={"stream", "stream_options", "user"})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
