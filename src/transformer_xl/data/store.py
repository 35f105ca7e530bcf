"""Local copies of files at URLs, downloaded with ``fsspec``: texts, and prepared corpora."""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from transformer_xl.config import Say, is_disk_full, require_space, write_atomically
from transformer_xl.data.locking import locked
from transformer_xl.data.unpacking import optional_package
from transformer_xl.errors import InputError

_CONNECTIONS = 8
_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+://", re.I)
# What stores call the version of an object; a time only where there is nothing better.
_VERSIONS = ("ETag", "etag", "md5Hash", "Content-MD5", "generation", "blob_id", "oid", "checksum")
_VERSIONS += ("Digest", "LastModified", "last_modified", "Last-Modified", "updated", "created")


def is_url(path: str) -> bool:
    """Whether a path is a URL of another place than this machine."""
    return _URL.match(path) is not None


def local_copy(url: str, downloads: Path, say: Say) -> Path:
    """Return a local copy of the object at a URL; of a folder or pattern, a folder with copies.

    What is there in the version that the store names is not downloaded again. On the web, a folder
    is a URL that ends with ``/`` and answers with a page of links.

    Raises:
        InputError: The URL chains file systems, or its protocol is unknown.
        OSError: It cannot be read; FileNotFoundError if there is nothing.
    """
    if "::" in url:
        raise InputError(f"{url} chains file systems with ::, which are not read here: give one")
    fsspec = optional_package("fsspec", f"{url}, read with fsspec,")
    # What a server compresses on the way has another size.
    web = {"headers": {"Accept-Encoding": "identity"}} if url.lower().startswith("http") else {}
    try:
        fs, path = fsspec.url_to_fs(url, **web)
    except (ValueError, ImportError) as error:
        raise InputError(f"{url}: {error}; there are s3, gs, az, https, hf ...") from error
    try:
        return _downloaded(fs, path, url, downloads / "objects", say)
    except Exception as error:  # Each package has classes of its own.
        cause = error.__cause__ or error
        if getattr(cause, "status", 404 if isinstance(cause, FileNotFoundError) else 0) == 404:
            raise FileNotFoundError(f"there is nothing at {url}") from error
        if is_disk_full(error) or isinstance(error, InputError):
            raise
        raise OSError(
            f"cannot read {url}: {cause or type(cause).__name__}. Credentials are taken from where "
            "the package of the store looks for them, such as AWS_PROFILE or ~/.aws for s3://"
        ) from error


def _downloaded(fs: Any, path: str, url: str, downloads: Path, say: Say) -> Path:
    is_web, is_pattern = url.lower().startswith("http"), "*" in path or "[" in path
    fs.invalidate_cache()
    is_folder = path.endswith("/") if is_web else fs.isdir(path)
    paths = fs.glob(path) if is_pattern else fs.find(path) if is_folder else [path]
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        listed = zip(paths, pool.map(fs.info, paths), strict=True)
        about = {x: info for x, info in sorted(listed) if info["type"] == "file"}
    if not about:
        raise FileNotFoundError(url)
    root = f"{path}/" if is_folder else re.split(r"[*\[]", path)[0].rpartition("/")[0]
    plain = {x: unquote(urlsplit(x).path) or "/" if is_web else x for x in [root, *about]}
    names = {x: os.path.relpath(plain[x], plain[root]) for x in about}
    if is_web and (is_folder or is_pattern):
        # A page of links has others, too: to pages in another order, and of other folders.
        pages = {
            x for x, name in names.items() if urlsplit(x).query or x[-1] == "/" or name[0] == "."
        }
        names = {x: name for x, name in names.items() if x not in pages}
    versions = {x: _version(about[x]) for x in names}
    folder = downloads / hashlib.sha256(json.dumps([url, versions]).encode()).hexdigest()[:16]
    if any(".." in Path(name).parts for name in names.values()):
        raise InputError(f"{url} has a name that leads out of the folder")
    copies = {x: folder / name for x, name in names.items()}

    def download(path: str) -> None:
        write_atomically(copies[path], lambda temporary: fs.get_file(path, str(temporary)))
        fs.invalidate_cache()
        if _version(fs.info(path)) != versions[path]:
            copies[path].unlink()
            raise OSError(f"{path} changed while it was read; try again")

    folder.mkdir(parents=True, exist_ok=True)
    with locked(downloads, say, "another process is downloading"):
        if missing := [x for x, copy in copies.items() if not copy.is_file()]:
            n_bytes = sum(about[x]["size"] or 0 for x in missing)
            require_space(folder, n_bytes, f"what is downloaded from {url}")
            say(f"downloading {len(missing):,} objects, {n_bytes:,} bytes, from {url}")
            with ThreadPoolExecutor(_CONNECTIONS) as pool:
                list(pool.map(download, missing))
    return folder if is_pattern or is_folder else copies[path]


def _version(info: dict[str, Any]) -> str:
    """Return the size of an object and the version that its store names, if any."""
    return f"{info['size']} {next((x for name in _VERSIONS if (x := info.get(name))), '')}"
