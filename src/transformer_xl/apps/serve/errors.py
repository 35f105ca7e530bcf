"""Errors of the server, each with the status and the code that a client is told."""

from collections.abc import Mapping

from transformer_xl.config.files import NotRegularError


class ApiError(Exception):
    """An error response.

    The message has the value, the rule and the remedy; ``code`` is for programs, ``param`` is the
    invalid field.
    """

    status: int
    code: str | None

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


class QueueFullError(ApiError):
    """The queue is full."""

    def __init__(self) -> None:
        super().__init__(429, "too many requests wait: try again later", "queue_full")


class LateError(ApiError):
    """The request has not begun within its time limit."""

    def __init__(self) -> None:
        message = "the request waited longer than its time limit: try again later"
        super().__init__(503, message, "late")


class StoppingError(ApiError):
    """The server is stopping and begins nothing more."""

    def __init__(self) -> None:
        super().__init__(503, "the server is stopping: ask another one", "stopping")


NOT_BEGUN: Mapping[str, type[LateError | StoppingError]] = {
    "late": LateError,
    "stopping": StoppingError,
}
"""The error of a request of which no text has begun, by the reason for which its texts ended."""


class SessionError(ApiError):
    """A session is not available."""

    status, code, param_name = 409, "session_not_saved", "session"

    def __init__(self, message: str) -> None:
        super().__init__(self.status, message, self.code, self.param_name)


class SessionMissingError(SessionError):
    """There is no such session."""

    status, code = 404, "session_not_found"


class SessionBusyError(SessionError):
    """Another request uses the session."""

    status, code = 409, "session_busy"


class SessionExistsError(SessionError):
    """There is a session of the name of a new one."""

    status, code, param_name = 409, "session_exists", "name"


class TooManySessionsError(SessionError):
    """The largest number of sessions is reached."""

    status, code = 429, "too_many_sessions"


class SessionTakenError(SessionError):
    """Another server has acquired the session since; what was written here is not kept."""

    status, code = 409, "session_taken"


class StoreUnavailableError(SessionError):
    """The store does not answer."""

    status, code = 503, "store_unavailable"


class StorageFullError(SessionError):
    """The memory is full of sessions that cannot be saved."""

    status, code = 507, "no_room"


def file_error(error: Exception, name: str) -> ApiError:
    """Return the error response where the file of a session cannot be used."""
    if isinstance(error, NotRegularError):
        message = (
            f"in place of the file of session {name!r} is something else, which is not opened: "
            "take another name"
        )
        return ApiError(409, message, "session_not_a_file", "session")
    if isinstance(error, ValueError):
        message = f"session {name!r} was made with another model: delete it, or take another name"
        return ApiError(409, message, "session_of_another_model", "session")
    if isinstance(error, RuntimeError):
        message = f"the file of session {name!r} is damaged: delete it, or restore it from a copy"
        return ApiError(409, message, "session_damaged", "session")
    return ApiError(503, f"session {name!r} cannot be read or written: see the log", "disk")
