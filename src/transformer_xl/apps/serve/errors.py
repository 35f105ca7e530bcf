"""Errors of the server, each with the status and the code that a client receives."""

from transformer_xl.config import NotRegularError
from transformer_xl.errors import TxlError

_SESSION_STATUSES = {
    "session_not_found": 404,
    "too_many_sessions": 429,
    "disk": 503,
}
"""The status of an error of a session by its code; all others are conflicts, 409."""
_NOT_STARTED = {
    "queue_full": (429, "too many requests wait: try again later"),
    "late": (503, "the request waited longer than its time limit: try again later"),
    "stopping": (503, "the server is stopping: ask another one"),
}


class ApiError(TxlError):
    """An error response.

    The message has the value, the rule and the remedy; ``code`` is for programs, ``param`` is the
    invalid field.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class NotStartedError(ApiError):
    """No token of a request is generated: ``queue_full``, ``late`` or ``stopping``."""

    def __init__(self, code: str) -> None:
        super().__init__(*_NOT_STARTED[code], code)


class SessionError(ApiError):
    """A session is not available; the ``code`` says why."""

    def __init__(self, code: str, message: str, param: str = "session") -> None:
        super().__init__(_SESSION_STATUSES.get(code, 409), message, code, param)


def session_error(error: Exception, name: str) -> SessionError:
    """Return the error response where a stored session cannot be read or written."""
    if isinstance(error, SessionError):
        return error
    if isinstance(error, NotRegularError):
        message = (
            f"in place of the file of session {name!r} is something else, which is not opened: "
            "take another name"
        )
        return SessionError("session_not_a_file", message)
    if isinstance(error, ValueError):
        message = f"session {name!r} was made with another model: delete it, or take another name"
        return SessionError("session_of_another_model", message)
    if isinstance(error, RuntimeError):
        message = f"the file of session {name!r} is damaged: delete it, or restore it from a copy"
        return SessionError("session_damaged", message)
    return SessionError("disk", f"session {name!r} cannot be read or written: see the log")
