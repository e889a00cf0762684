"""Who owns an output folder: a process, and where its number means anything."""

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Owner:
    """The run that has a folder to itself."""

    run_id: str
    host: str
    pid: int
    started: str
    "When the process began, in the machine's own count: process numbers are used again."
    place: str
    "Where process numbers mean the same: the machine since it was started, and its container."

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Owner:
    """Itself, under a new name."""
    pid = os.getpid()
    return Owner(secrets.token_hex(8), socket.gethostname(), pid, start_of(pid) or "", this_place())


def this_place() -> str:
    """Where process numbers mean the same as here."""
    boot = _read("/proc/sys/kernel/random/boot_id")
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:
        container = ""
    return f"{socket.gethostname()} {boot} {container}"


def start_of(pid: int) -> str | None:
    """When a process began; None if there is none of that number, "" if that cannot be known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # Somebody else's, but it runs.
    # The name stands in parentheses and may hold blanks; the start is the 20th word after.
    words = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if words[:1] == ["Z"]:
        return None
    return words[19] if len(words) > 19 else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return ""
