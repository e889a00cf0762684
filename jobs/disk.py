"""An output folder on a local disk, or on network storage that is mounted like one.

A file is written under a hidden name, brought to the disk, and renamed: renaming is the commit.
"""

import os
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from jobs.errors import OutputError, SettingError
from jobs.lock import locked

_TOKEN = secrets.token_hex(4)
"Tells this process from those of the same number on other machines."


class LocalDisk:
    """A folder of a file system. Names are those of its files, or of files one folder below."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def check(self) -> None:
        """Raises SettingError if it cannot be a folder; OutputError if it must not be written."""
        path = Path(self.folder)
        if not path.exists():
            parent = next(parent for parent in path.absolute().parents if parent.exists())
            if not parent.is_dir():
                raise SettingError(f"{path}: {parent} is a file. Choose another folder.")
            _check_writable(parent)
        elif not path.is_dir():
            raise SettingError(f"{path}: is a file. Choose a folder.")
        else:
            _check_writable(path)

    def make(self) -> list[str]:
        """Makes the folder and returns what had to be made, the deepest first."""
        missing, path = [], os.path.abspath(self.folder)
        while not os.path.lexists(path):
            missing.append(path)
            path = os.path.dirname(path)
        os.makedirs(self.folder, exist_ok=True)
        return missing

    def unmake(self, made: Sequence[str]) -> None:
        """Removes what make() has made, as far as it is empty."""
        with suppress(OSError):
            for folder in made:
                os.rmdir(folder)

    def names(self, inside: str = "") -> list[str]:
        """What lies in the folder, or in one inside it."""
        return os.listdir(self._path(inside))

    def exists(self, name: str = "") -> bool:
        """True if a file is there, or the folder itself."""
        return os.path.exists(self._path(name))

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return os.path.getsize(self._path(name))

    def read(self, name: str) -> bytes:
        """All of a small file."""
        return Path(self._path(name)).read_bytes()

    def open_stream(self, name: str) -> BufferedReader:
        """A file to be read from front to back."""
        return open(self._path(name), "rb")

    def open_file(self, name: str) -> pa.NativeFile:
        """A file to be read here and there. Arrow files are mapped, and so not copied."""
        path = self._path(name)
        return pa.memory_map(path) if name.endswith(".arrow") else pa.OSFile(path)

    def write(self, name: str, content: bytes, *, is_durable: bool) -> None:
        """Writes a small file, whole or not at all."""
        os.makedirs(os.path.dirname(self._path(name)), exist_ok=True)
        draft = self.draft(name)
        try:
            draft.file.write(content)
            if is_durable:
                draft.seal()
            draft.file.close()
            draft.publish()
        finally:
            draft.discard()

    def draft(self, name: str) -> "HiddenFile":
        """A file that is written bit by bit, and not seen before it is whole."""
        parent, name = os.path.split(name)
        bare = name.removesuffix(".parquet").removesuffix(".arrow")  # No reader takes it for one.
        hidden = os.path.join(parent, f".{bare}.{os.getpid()}_{_TOKEN}.draft")
        return HiddenFile(self.folder, self._path(hidden), self._path(os.path.join(parent, name)))

    def delete(self, name: str) -> None:
        """Deletes a file, if it is there."""
        Path(self._path(name)).unlink(missing_ok=True)

    def delete_folder(self, name: str) -> None:
        """Deletes an empty folder."""
        os.rmdir(self._path(name))

    def sync(self) -> None:
        """Returns when new names in the folder would survive a loss of power."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # Some network storage keeps names by itself.
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def locked(self, name: str) -> AbstractContextManager[None]:
        """Nobody else is in a block with this name at the same time."""
        return locked(self._path(name))

    def create(self, name: str, content: bytes) -> "HeldFile":
        """Writes a file that must not exist yet. Raises FileExistsError if it does."""
        path = self._path(name)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            os.write(descriptor, content)
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        return HeldFile(descriptor)

    def seconds_since(self, name: str) -> float:
        """Since a file was touched, by the storage's clock, which may not be this machine's.

        Raises FileNotFoundError if it is gone.
        """
        try:
            now, path = tempfile.mkstemp(dir=self.folder, prefix="._now.json.", suffix=".draft")
        except OSError:  # Nothing can be written here, so nothing can be taken either.
            return 0.0
        try:
            return os.fstat(now).st_mtime - os.stat(self._path(name)).st_mtime
        finally:
            os.close(now)
            with suppress(FileNotFoundError):  # The owner may have swept it up.
                os.unlink(path)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name) if name else self.folder


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: no permission to write here. Choose another folder.")


class HiddenFile:
    """A draft beside its place, under a name that readers pass over."""

    def __init__(self, folder: str, hidden: str, path: str) -> None:
        self.place = folder
        self._hidden, self._path = hidden, path
        self.file: BinaryIO = open(hidden, "wb")  # noqa: SIM115 - closed by seal() or discard().

    def seal(self) -> int:
        """Returns its size when its bytes would survive a loss of power."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return os.path.getsize(self._hidden)

    def publish(self) -> None:
        """Gives it its name."""
        os.replace(self._hidden, self._path)

    def discard(self) -> None:
        """Leaves nothing of a draft that was not published."""
        with suppress(OSError):
            self.file.close()
        with suppress(OSError):
            os.unlink(self._hidden)


class HeldFile:
    """A file that says by its time that its owner lives. Another's in its place is not touched."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def touch(self) -> None:
        """Gives it the present time."""
        os.utime(self._descriptor)

    def close(self) -> None:
        """Lets go of it; it stays."""
        os.close(self._descriptor)
