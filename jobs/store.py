"""An output folder on an object store, through pyarrow's file systems.

A key is written once, under its final name, and only when all of its bytes are there: nothing is
renamed or copied. Until then a part is staged in a local file without a name.
"""

import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import BinaryIO

import pyarrow as pa
from pyarrow import fs

from jobs.errors import OutputError, SettingError

SECONDS_TO_SETTLE = 2.0
"How long a new claim is left alone, to see whether another's takes its place."
_STREAM_BYTES = 8 * 2**20
"Read by one request when all of a file is read."
_REMEDIES = {
    "NO_SUCH_BUCKET": "Make the bucket, or name another",
    "ACCESS_DENIED": "Give credentials that may list, read, write and delete there",
    "INVALID_ACCESS_KEY_ID": "Give credentials that the store knows",
    "SIGNATURE_DOES_NOT_MATCH": "Give the secret that belongs to the access key",
    "NETWORK_CONNECTION": "See to it that the store can be reached from here",
}


def store_remedy(error: BaseException) -> str | None:
    """What may help against what a store has answered, without a full stop."""
    return next((remedy for word, remedy in _REMEDIES.items() if word in str(error)), None)


class ObjectStore:
    """What lies under one prefix of a bucket. Names are keys without it."""

    def __init__(self, folder: str, files: fs.FileSystem, prefix: str) -> None:
        """folder: the URI, as it is named in errors. prefix: the bucket and what follows."""
        self.folder = folder
        self._files, self._prefix = files, prefix.strip("/")

    def check(self) -> None:
        """Raises SettingError if there is no such bucket; OutputError if it cannot be reached."""
        bucket = self._prefix.split("/")[0]
        if not bucket:
            raise SettingError(f"{self.folder}: names no bucket. Name one.")
        try:
            found, place = self._files.get_file_info([bucket, self._prefix])
        except OSError as error:
            remedy = store_remedy(error) or "Choose another folder"
            raise OutputError(f"{self.folder}: cannot be reached: {error}. {remedy}.") from error
        if found.type == fs.FileType.NotFound:
            raise SettingError(
                f"{self.folder}: there is no bucket {bucket!r}. Make it, or name another."
            )
        if place.type == fs.FileType.File:
            raise SettingError(f"{self.folder}: is a file. Choose a folder.")

    def make(self) -> list[str]:
        """Makes nothing: a prefix is there when a key begins with it."""
        return []

    def unmake(self, made: Sequence[str]) -> None:
        """Has nothing to remove."""

    def names(self, inside: str = "") -> list[str]:
        """What lies under the prefix, or one step below. Raises FileNotFoundError if nothing."""
        found = self._files.get_file_info(fs.FileSelector(self._key(inside)))
        return [info.base_name for info in found]

    def exists(self, name: str = "") -> bool:
        """True if a key is there, or any below the prefix."""
        return bool(self._look(name).type != fs.FileType.NotFound)

    def size(self, name: str) -> int:
        """Bytes of an object. Raises FileNotFoundError if there is none."""
        size = self._look(name).size
        if size is None:
            raise FileNotFoundError(f"no key {self._key(name)!r}")
        return int(size)

    def read(self, name: str) -> bytes:
        """All of a small object."""
        with self._files.open_input_file(self._key(name)) as file:  # A stream would read bits.
            return bytes(file.read())

    def open_stream(self, name: str) -> pa.NativeFile:
        """An object to be read from front to back, some megabytes a request."""
        return self._files.open_input_stream(self._key(name), buffer_size=_STREAM_BYTES)

    def open_file(self, name: str) -> pa.NativeFile:
        """An object of which ranges are read."""
        return self._files.open_input_file(self._key(name))

    def write(self, name: str, content: bytes, *, is_durable: bool) -> None:
        """Writes a small object, whole or not at all. What the store has taken, it keeps."""
        _put(self._files, self._key(name), content)

    def draft(self, name: str) -> "StagedFile":
        """A file that is written bit by bit, and uploaded when it is whole."""
        return StagedFile(self.folder, self._files, self._key(name))

    def delete(self, name: str) -> None:
        """Deletes a key, if it is there."""
        with suppress(FileNotFoundError):
            self._files.delete_file(self._key(name))

    def delete_folder(self, name: str) -> None:
        """Deletes what pyarrow leaves in the place of a folder whose last key was deleted."""
        with suppress(FileNotFoundError):
            self._files.delete_dir(self._key(name))

    def sync(self) -> None:
        """Has nothing to wait for: what the store has taken, it keeps."""

    def locked(self, name: str) -> AbstractContextManager[None]:
        """Keeps nobody out: stores know no locks. create() settles who comes in."""
        return nullcontext()

    def create(self, name: str, content: bytes) -> "HeldKey":
        """Writes a key, and raises FileExistsError if another's stands there a moment later.

        pyarrow cannot ask a store to write only where nothing is. So the last of those that write
        in the same moment has it; one that is held up for longer is found out by its next look.
        """
        self.write(name, content, is_durable=True)
        time.sleep(SECONDS_TO_SETTLE)
        if self.read(name) != content:
            raise FileExistsError(f"{self._key(name)} was written by another")
        return HeldKey(self, name, content)

    def seconds_since(self, name: str) -> float:
        """Since a key was written, by the store's clock. Raises FileNotFoundError if it is gone."""
        now = f"._now.json.{secrets.token_hex(4)}.draft"
        try:
            self.write(now, b"", is_durable=False)
        except OSError:  # Nothing can be written here, so nothing can be taken either.
            return 0.0
        try:
            written, then = self._look(now).mtime, self._look(name).mtime
        finally:
            self.delete(now)
        if then is None or written is None:
            raise FileNotFoundError(f"no key {self._key(name)!r}")
        return float((written - then).total_seconds())

    def _look(self, name: str) -> fs.FileInfo:
        return self._files.get_file_info(self._key(name))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if name else self._prefix


class StagedFile:
    """A draft in a local file without a name: whatever ends this process, nothing is left of it."""

    def __init__(self, folder: str, files: fs.FileSystem, key: str) -> None:
        scratch = tempfile.gettempdir()
        self.place = f"{folder}, staged in {scratch}"
        self._files, self._key = files, key
        self.file: BinaryIO = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - as above.

    def seal(self) -> int:
        """Returns its size when all of it has found room on the local disk."""
        self.file.flush()
        return os.fstat(self.file.fileno()).st_size

    def publish(self) -> None:
        """Uploads it under its final key."""
        _put(self._files, self._key, mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_READ))
        self.file.close()

    def discard(self) -> None:
        """Lets the local file go."""
        with suppress(OSError):
            self.file.close()


class HeldKey:
    """A key that says by its time that its owner lives. Another's in its place is not touched."""

    def __init__(self, store: ObjectStore, name: str, content: bytes) -> None:
        self._store, self._name, self._content = store, name, content

    def touch(self) -> None:
        """Writes it again, if it still is what was written."""
        if self._store.read(self._name) == self._content:
            self._store.write(self._name, self._content, is_durable=False)

    def close(self) -> None:
        """Has nothing to let go of; the key stays."""


def _put(files: fs.FileSystem, key: str, content: "bytes | mmap.mmap") -> None:
    """Uploads all of an object, or nothing.

    A stream that an exception drops is published as far as it has come. So there is one write and
    no more, in a thread of its own, where no signal's handler can raise one between the steps.
    """

    whole = pa.py_buffer(content)

    def upload() -> None:
        stream = files.open_output_stream(key)
        try:
            stream.write(whole)
        finally:  # What has failed stays failed. Dropped, it could wait for ever for its pieces.
            stream.close()

    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(upload).result()
