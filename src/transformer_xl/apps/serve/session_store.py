"""Where a server keeps its sessions: in a folder, or in memory."""

import hashlib
import logging
import re
from pathlib import Path

from transformer_xl.config import NotRegularError, kind_other_than_file
from transformer_xl.inference.generate import State, load_state, write_state
from transformer_xl.model import LanguageModel

log = logging.getLogger("transformer_xl.serve")

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""The pattern of a name."""
_SUFFIX = ".safetensors"


def is_name(name: str) -> bool:
    """Whether a session can have this name."""
    return bool(re.fullmatch(NAME, name))


class SessionFolder:
    """A folder with a file for each session.

    Files are those of :func:`~transformer_xl.inference.generate.write_state`, replaced atomically.
    Only regular files are opened, and no link is followed.

    Args:
        folder: The folder, which is created if there is none.
        weights: The checksum of the weights to which the memories belong.
        model: The model that reads them. None: files are not checked against one.

    Raises:
        OSError: The folder cannot be created or read.
    """

    def __init__(self, folder: Path, weights: str, model: LanguageModel | None = None) -> None:
        self._folder, self._weights, self._model = folder, weights, model
        folder.mkdir(parents=True, exist_ok=True)

    def used(self) -> dict[str, float]:
        """Return when each session was last used, in seconds since 1970, the oldest first."""
        sessions: dict[str, float] = {}
        for path in self._folder.glob(f"[0-9a-f][0-9a-f]/*{_SUFFIX}"):
            name = path.name.removesuffix(_SUFFIX).rpartition(".")[0]
            if not is_name(name) or path != path_of(self._folder, name):
                continue
            if path.parent.is_symlink() or kind_other_than_file(path, follow=False):
                log.warning("ignored in the folder of the sessions: %r is no file", str(path))
            else:
                sessions[name] = path.lstat().st_mtime
        return dict(sorted(sessions.items(), key=lambda each: each[1]))

    def require_free(self, name: str) -> None:
        """Require that nothing but a file is in the place of the file of a new session.

        Raises:
            NotRegularError: Something else is there.
        """
        path = path_of(self._folder, name)
        if kind := kind_other_than_file(path, follow=False):
            raise NotRegularError(f"{path} is {kind}, and not the file of a session")

    def read(self, name: str) -> State:
        """Load the state of a session; for what it raises see :func:`load_state`."""
        path = path_of(self._folder, name)
        return load_state(path, self._weights, self._model, follow=False)

    def write(self, name: str, state: State) -> None:
        """Save the state of a session.

        Raises:
            OSError: It cannot be written; the file is as it was.
        """
        path = path_of(self._folder, name)
        if path.parent.is_symlink():
            raise NotRegularError(f"{path.parent} is a symbolic link, and not a folder")
        write_state(path, state, self._weights)

    def delete(self, name: str) -> None:
        """Delete the file of a session."""
        path_of(self._folder, name).unlink(missing_ok=True)


class MemoryStore:
    """Sessions in memory, with the methods of a :class:`SessionFolder`."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    def used(self) -> dict[str, float]:
        """Return an empty dictionary: there are none at the start."""
        return {}

    def require_free(self, name: str) -> None:
        """Return: there are only sessions here."""

    def read(self, name: str) -> State:
        """Return the state of a session."""
        return self._states[name]

    def write(self, name: str, state: State) -> None:
        """Keep the state of a session."""
        self._states[name] = state

    def delete(self, name: str) -> None:
        """Delete a session."""
        del self._states[name]


def path_of(folder: Path, name: str) -> Path:
    """Return the file of a session."""
    # Some file systems ignore case; subfolders keep each folder small.
    digest = hashlib.sha256(name.encode()).hexdigest()
    return folder / digest[:2] / f"{name}.{digest[:12]}{_SUFFIX}"
