"""A run that is told to stop: by a keyboard, by a scheduler, by the power switch."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from running import BATCHWRIGHT, batchwright, read_rows, worker_pids, write_prompts

pytestmark = pytest.mark.slow

ECHO = (
    "--model", "e", "--engine", "echo", "--max-new-tokens", "400", "--ignore-eos",
    "--rows-per-shard", "10", "--num-workers", "2",
)  # fmt: skip


def start(folder: Path, *flags: str) -> "subprocess.Popen[str]":
    """Starts a job of some seconds in a session of its own, as a terminal would."""
    if not (folder / "in.parquet").exists():
        write_prompts(folder / "in.parquet", [f"{i}" for i in range(200)])
    return subprocess.Popen(
        [BATCHWRIGHT, "run", "in.parquet", "out", *ECHO, *flags],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_part(folder: Path, driver: "subprocess.Popen[str]") -> None:
    while not list(folder.glob("out/part-*")):
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.05)


def family(pid: int) -> dict[int, str]:
    """All processes that a process has started, and those that they have: what each runs."""
    parents = {int(e.name): _parent(e) for e in Path("/proc").iterdir() if e.name.isdigit()}
    found, new = {}, {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= {child: _command(child) for child in new}
    return found


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return -1


def _command(pid: int) -> str:
    """What a process runs; empty if there is none, or nothing of it but its number."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def check_nobody_is_left(processes: dict[int, str], seconds: float) -> None:
    """Case J11: all processes of the run are gone. A number may be in use again by others."""
    # Two small helpers of Ray notice only after a minute that their driver was killed.
    processes = {pid: said for pid, said in processes.items() if "Agent" not in said}
    deadline = time.monotonic() + seconds
    while True:
        left = {pid: said for pid, said in processes.items() if said and _command(pid) == said}
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_one_signal_stops_in_order(tmp_path: Path, number: int, code: int) -> None:
    """Cases J11 and J12: soon, with a short message, and resumable."""
    driver = start(tmp_path)
    wait_for_part(tmp_path, driver)
    others = family(driver.pid)
    assert worker_pids(driver.pid)

    asked = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(driver.pid, number)  # As a terminal does: to the whole group.
    else:
        driver.send_signal(number)
    _, words = driver.communicate(timeout=30)

    assert driver.returncode == code, words
    assert time.monotonic() - asked < 20
    assert "Traceback" not in words
    assert "*** SIGTERM received" not in words, "Ray took it for a crash"
    assert "of 20 shards are finished. Go on with --resume." in words
    check_nobody_is_left(others, 10)
    left = sorted(name for name in os.listdir(tmp_path / "out") if not name.startswith("part"))
    assert left == ["_job.json", "_plan.json", "_records"]

    again = start(tmp_path, "--resume")
    _, words = again.communicate(timeout=120)
    assert again.returncode == 0, words
    assert "of the rows were finished already" in words
    assert read_rows(tmp_path / "out")["row_id"].to_pylist() == list(range(200))


def test_two_signals_stop_without_grace(tmp_path: Path) -> None:
    driver = start(tmp_path, "--grace", "100", "--rows-per-shard", "100")
    while not list(tmp_path.glob("out/.part-*")):  # Both shards are running.
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.05)
    others = family(driver.pid)

    driver.send_signal(signal.SIGINT)
    time.sleep(0.5)
    asked = time.monotonic()
    driver.send_signal(signal.SIGINT)
    _, words = driver.communicate(timeout=30)

    assert driver.returncode == 130, words
    assert time.monotonic() - asked < 20, "it waited for its grace"
    check_nobody_is_left(others, 10)


def test_a_signal_while_workers_start_is_noticed(tmp_path: Path) -> None:
    driver = start(tmp_path)
    while not worker_pids(driver.pid):
        assert driver.poll() is None
        time.sleep(0.02)
    others = family(driver.pid)

    driver.send_signal(signal.SIGTERM)
    _, words = driver.communicate(timeout=30)

    assert driver.returncode == 143, words
    assert "Traceback" not in words
    check_nobody_is_left(others, 10)
    assert not (tmp_path / "out").exists(), "a run that has written nothing leaves nothing"


def test_a_killed_driver_leaves_nobody_and_a_folder_that_can_be_resumed(tmp_path: Path) -> None:
    """Case J10, second half: the claim of a dead run is taken over with a word."""
    driver = start(tmp_path)
    wait_for_part(tmp_path, driver)
    others = family(driver.pid)

    driver.kill()
    driver.communicate()
    assert (tmp_path / "out" / "_owner.json").exists()
    again = start(tmp_path, "--resume")
    _, words = again.communicate(timeout=120)

    assert again.returncode == 0, words
    assert f"Taken over from process {driver.pid} on " in words
    check_nobody_is_left(others, 10)
    assert batchwright("verify", tmp_path / "out").returncode == 0


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """Case J10, first half: the second is refused and told who has it."""
    driver = start(tmp_path)
    wait_for_part(tmp_path, driver)

    for flag in ("--resume", "--overwrite"):
        second = start(tmp_path, flag)
        _, words = second.communicate(timeout=60)
        assert second.returncode == 4, words
        assert f"out: in use by process {driver.pid} on " in words

    _, words = driver.communicate(timeout=120)
    assert driver.returncode == 0, words
    assert batchwright("verify", tmp_path / "out").returncode == 0
