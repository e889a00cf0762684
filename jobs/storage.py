"""Where an output folder lies: on a local disk or in an object store. The only file that knows.

A folder is named by a path or a URI, and so is a part: what stands after a URI's "?" comes last.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from io import BufferedReader
from typing import BinaryIO, Protocol
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from jobs.disk import LocalDisk
from jobs.errors import OutputError, SettingError
from jobs.store import ObjectStore, store_remedy


class Draft(Protocol):
    """A file that is written bit by bit, and not seen before it is published."""

    file: BinaryIO
    place: str
    "What fills up while it is written."

    def seal(self) -> int: ...
    def publish(self) -> None: ...
    def discard(self) -> None: ...


class Held(Protocol):
    """A file that says by its time that its owner lives."""

    def touch(self) -> None: ...
    def close(self) -> None: ...


class Storage(Protocol):
    """One output folder. Names are those of its files, or of files one folder below."""

    def check(self) -> None: ...
    def make(self) -> list[str]: ...
    def unmake(self, made: Sequence[str]) -> None: ...
    def names(self, inside: str = "") -> list[str]: ...
    def exists(self, name: str = "") -> bool: ...
    def size(self, name: str) -> int: ...
    def read(self, name: str) -> bytes: ...
    def open_stream(self, name: str) -> BufferedReader: ...
    def open_file(self, name: str) -> pa.NativeFile: ...
    def write(self, name: str, content: bytes, *, is_durable: bool) -> None: ...
    def draft(self, name: str) -> Draft: ...
    def delete(self, name: str) -> None: ...
    def delete_folder(self, name: str) -> None: ...
    def sync(self) -> None: ...
    def locked(self, name: str) -> AbstractContextManager[None]: ...
    def create(self, name: str, content: bytes) -> Held: ...
    def seconds_since(self, name: str) -> float: ...


def storage_of(folder: str) -> Storage:
    """The storage of a folder that is named by a path or a URI.

    Raises SettingError if the URI cannot be used; OutputError if the store cannot be asked.
    """
    return _open(folder) if is_uri(folder) else LocalDisk(folder)


def storage_of_file(path: str) -> tuple[Storage, str]:
    """The storage of a file, and its name there."""
    place, mark, options = _cut(path)
    folder, slash, name = place.rpartition("/")
    return storage_of((folder or slash) + mark + options), name


def join(folder: str, *names: str) -> str:
    """The path or URI of a file in a folder."""
    place, mark, options = _cut(folder)
    return os.path.join(place, *names) + mark + options


def name_of(path: str) -> str:
    """The name of a file, without its folder."""
    return os.path.basename(_cut(path)[0])


def is_uri(folder: str) -> bool:
    """True for what is no path."""
    return "://" in folder


def absolute_folder(folder: str) -> str:
    """The folder as workers that run elsewhere can name it; a path if it is one, however given."""
    if not is_uri(folder):
        return os.path.abspath(folder)
    storage = storage_of(folder)
    return storage.folder if isinstance(storage, LocalDisk) else folder


def _cut(path: str) -> tuple[str, str, str]:
    """What stands before a URI's options, the question mark, and the options."""
    return path.partition("?") if is_uri(path) else (path, "", "")


@lru_cache(maxsize=64)  # A connection to a store is opened once.
def _open(uri: str) -> Storage:
    _refuse_secrets(uri)
    scheme = uri.partition("://")[0]
    try:
        files, place = fs.FileSystem.from_uri(uri)
    except (ValueError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        known = f"pyarrow has no file system for {scheme}://"
        fact = known if "Unrecognized filesystem type" in said else said
        raise SettingError(
            f"{uri}: {fact}. Give a path, or a URI of file, s3, gs or abfs."
        ) from error
    except OSError as error:
        said = str(error).splitlines()[0]
        remedy = store_remedy(error) or "Choose another folder"
        raise OutputError(f"{uri}: cannot be reached: {said}. {remedy}.") from error
    return LocalDisk(place) if scheme == "file" else ObjectStore(uri, files, place)


def _refuse_secrets(uri: str) -> None:
    """Raises SettingError if a URI may hold a key: it would stand in the output, and in errors."""
    scheme, _, rest = uri.partition("://")
    rest = unquote(rest)
    host, options = rest.partition("/")[0], rest.partition("?")[2]
    # A secret may itself hold slashes, and then ends far from where it began.
    is_secret = (
        (":" in host and "@" in rest)
        or (scheme == "s3" and ("@" in host or ":" in host))
        or "@" in options
        or any(word in options.lower() for word in ("secret", "password", "token", "sig="))
    )
    if is_secret:
        raise SettingError(
            f"{scheme}://...: keys and secrets in a URI would be written into the output. Leave "
            "them out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what the store reads."
        )
