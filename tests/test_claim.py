"""One owner of an output folder at a time: the living is refused, the dead is taken over."""

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from jobs import claim as module
from jobs import owner as facts
from jobs.claim import (
    OWNER,
    SECONDS_UNTIL_DEAD,
    Claim,
    claim_output,
    read_owner,
    refuse_owned,
)
from jobs.errors import OutputError, RefusedError
from jobs.folder import sweep_drafts
from jobs.lock import locked
from jobs.owner import Owner

LOCK = ".owner.lock"

FARAWAY = Owner("0123456789abcdef", "faraway", 7, "12345", "another machine")

HOLD = """
import sys
from jobs.claim import claim_output
with claim_output(sys.argv[1]):
    print("mine", flush=True)
    sys.stdin.readline()
"""
"A run that has the folder until its input ends."

HOLD_LOCK = HOLD.replace("claim_output", "locked").replace("jobs.claim", "jobs.lock")
"A process that looks at a claim until its input ends."

RACE = """
import sys, time
from contextlib import ExitStack
from jobs.claim import claim_output
from jobs.errors import RefusedError
print("ready", flush=True)
start = float(sys.stdin.readline())
with ExitStack() as held:
    for number, folder in enumerate(sys.argv[1:]):
        time.sleep(max(0.0, start + 0.03 * number - time.time()))
        try:
            held.enter_context(claim_output(folder))
            print("mine", flush=True)
        except RefusedError:
            print("refused", flush=True)
    sys.stdin.readline()
"""
"A run that tries for each folder at a certain moment, and keeps what it has until its input ends."


@contextmanager
def other_process(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A living process that has what it was told to take."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mine\n"
        yield process


def other_run(folder: Path) -> AbstractContextManager[subprocess.Popen[str]]:
    return other_process(HOLD, folder)


def leave_dead_claim(folder: Path) -> Owner:
    """The claim of a process that has been killed."""
    with other_run(folder) as process:
        process.kill()
    owner = read_owner(str(folder))
    assert owner is not None
    return owner


def write_owner(folder: Path, owner: Owner, *, seconds_old: float = 0.0) -> None:
    write_claim(folder, json.dumps(dataclasses.asdict(owner)), seconds_old=seconds_old)


def write_claim(folder: Path, text: str, *, seconds_old: float = 0.0) -> None:
    (folder / OWNER).write_text(text)
    then = time.time() - seconds_old
    os.utime(folder / OWNER, (then, then))


def myself(folder: Path) -> Owner:
    """This process, as its claims name it."""
    with claim_output(str(folder)):
        owner = read_owner(str(folder))
    assert owner is not None
    return owner


def refused(folder: Path) -> str:
    with pytest.raises(RefusedError) as caught, claim_output(str(folder)):
        pass
    return str(caught.value)


def taken_over(folder: Path) -> str | None:
    with claim_output(str(folder)) as claim:
        return claim.dead_owner


def in_use_by_faraway(folder: Path) -> str:
    return (
        f"{folder}: in use by process 7 on faraway. Wait for it, or choose another folder. "
        "Should that run be dead, try again in 60 s."
    )


def test_a_claim_makes_the_folder_and_leaves_nothing_if_nothing_was_written(tmp_path: Path) -> None:
    """Its parents too, if they were made for it."""
    folder = tmp_path / "there" / "new" / "out"
    (tmp_path / "there").mkdir()

    with claim_output(str(folder)) as claim:
        assert os.listdir(folder) == [OWNER]
        assert (claim.folder, claim.dead_owner) == (str(folder), None)
        claim.check()

    assert os.listdir(tmp_path) == ["there"]
    assert os.listdir(tmp_path / "there") == []


def test_what_was_written_and_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()

    with claim_output(str(tmp_path / "new" / "out")):
        (tmp_path / "new" / "out" / "part").touch()
    with claim_output(str(tmp_path / "old")):
        pass

    assert os.listdir(tmp_path / "new" / "out") == ["part"]
    assert os.listdir(tmp_path / "old") == []


def test_a_run_that_fails_gives_the_folder_free(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claim_output(str(tmp_path)):
        raise ZeroDivisionError

    assert os.listdir(tmp_path) == []
    assert taken_over(tmp_path) is None


def test_a_second_claim_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with claim_output(str(tmp_path)) as claim:
        owner = read_owner(str(tmp_path))
        assert refused(tmp_path) == (
            f"{tmp_path}: in use by process {os.getpid()} on {owner.host}. Wait for it, or choose "
            "another folder."
        )
        claim.check()


def test_the_claim_of_a_living_process_is_refused_however_old(tmp_path: Path) -> None:
    """Case J10. On the same machine no clock is asked: a process that stands still is not dead."""
    with other_run(tmp_path) as process:
        owner = read_owner(str(tmp_path))
        os.utime(tmp_path / OWNER, (0, 0))

        said = refused(tmp_path)
        with pytest.raises(RefusedError) as caught:
            refuse_owned(str(tmp_path))

        assert said == str(caught.value)
        assert said.startswith(f"{tmp_path}: in use by process {process.pid} on {owner.host}. ")
        assert read_owner(str(tmp_path)) == owner
    assert not (tmp_path / OWNER).exists()


def test_the_claim_of_a_killed_process_is_taken_over_and_said(tmp_path: Path) -> None:
    """Case J10: a lock that is left behind is no block for ever."""
    owner = leave_dead_claim(tmp_path)

    refuse_owned(str(tmp_path))
    assert read_owner(str(tmp_path)) == owner
    with claim_output(str(tmp_path)) as claim:
        assert claim.dead_owner == f"process {owner.pid} on {owner.host}"
        assert os.listdir(tmp_path) == [OWNER]
        claim.check()

    assert os.listdir(tmp_path) == []


def test_a_killed_process_that_nobody_has_waited_for_is_dead_too(tmp_path: Path) -> None:
    with other_run(tmp_path) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        assert taken_over(tmp_path) is not None


def test_another_process_of_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    """Process numbers are used again, and after a restart of the machine soon."""
    me = myself(tmp_path)
    write_owner(tmp_path, me)
    assert "in use" in refused(tmp_path)

    write_owner(tmp_path, dataclasses.replace(me, started="1"))

    assert taken_over(tmp_path) == str(me)


def test_a_process_that_may_not_be_looked_at_is_taken_to_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where many share a machine, /proc often hides what others run (hidepid)."""
    read = facts._read

    with other_run(tmp_path):
        monkeypatch.setattr(
            facts, "_read", lambda path: "" if path.endswith("/stat") else read(path)
        )

        assert "in use" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 7}', "\x00" * 20])
def test_a_claim_that_cannot_be_read_is_judged_by_its_age(tmp_path: Path, text: str) -> None:
    """The file is made before it is written; a full disk or a lost machine can leave it empty."""
    write_claim(tmp_path, text, seconds_old=SECONDS_UNTIL_DEAD - 5)
    assert refused(tmp_path) == (
        f"{tmp_path}: in use by a run. Wait for it, or choose another folder. Should that run be "
        "dead, try again in 60 s."
    )

    write_claim(tmp_path, text, seconds_old=SECONDS_UNTIL_DEAD + 5)

    assert taken_over(tmp_path) == "an unknown run"


def test_an_owner_on_another_machine_lives_as_long_as_its_heart_beats(tmp_path: Path) -> None:
    write_owner(tmp_path, FARAWAY, seconds_old=SECONDS_UNTIL_DEAD - 5)
    assert refused(tmp_path) == in_use_by_faraway(tmp_path)
    with pytest.raises(RefusedError):
        refuse_owned(str(tmp_path))
    assert os.listdir(tmp_path) == [OWNER]

    write_owner(tmp_path, FARAWAY, seconds_old=SECONDS_UNTIL_DEAD + 5)

    refuse_owned(str(tmp_path))
    assert taken_over(tmp_path) == "process 7 on faraway"


def test_an_owner_elsewhere_with_the_number_of_one_here_is_not_taken_for_it(tmp_path: Path) -> None:
    """A number means nothing on another machine: neither life, nor death."""
    me = myself(tmp_path)
    write_owner(tmp_path, dataclasses.replace(me, place="elsewhere"), seconds_old=1000)
    assert taken_over(tmp_path) == str(me)

    dead = leave_dead_claim(tmp_path)
    write_owner(tmp_path, dataclasses.replace(dead, place="elsewhere"))

    assert "in use" in refused(tmp_path)


def test_a_claim_is_touched_while_it_is_held_and_another_runs_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_BEATS", 0.01)
    path = tmp_path / OWNER

    with claim_output(str(tmp_path)):
        for _ in range(3):
            os.utime(path, (0, 0))
            wait_until(lambda: time.time() - path.stat().st_mtime < 5)
        path.unlink()
        write_owner(tmp_path, FARAWAY, seconds_old=1000)
        time.sleep(0.1)

        assert time.time() - path.stat().st_mtime > 900, "it touches what is another's"


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "this has not come about in 10 s"
        time.sleep(0.01)


def test_a_run_whose_folder_was_taken_over_may_write_no_more(tmp_path: Path) -> None:
    with claim_output(str(tmp_path)) as claim:
        write_owner(tmp_path, FARAWAY)
        with pytest.raises(RefusedError) as caught:
            claim.check()

    assert str(caught.value) == (
        f"{tmp_path}: the folder is taken over by process 7 on faraway. This run ends; what it has "
        "finished is kept."
    )
    assert read_owner(str(tmp_path)) == FARAWAY, "another's claim was deleted at the end"


def test_a_run_whose_claim_is_gone_may_write_no_more(tmp_path: Path) -> None:
    with claim_output(str(tmp_path)) as claim:
        (tmp_path / OWNER).unlink()
        with pytest.raises(RefusedError) as caught:
            claim.check()

    assert str(caught.value) == (
        f"{tmp_path}: the folder is nobody's any more. This run ends; what it has finished is kept."
    )


def test_a_claim_in_a_folder_that_vanishes_ends_quietly(tmp_path: Path) -> None:
    folder = tmp_path / "out"

    with claim_output(str(folder)):
        (folder / OWNER).unlink()
        folder.rmdir()

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "fault"),
    [("file/out", "Not a directory"), ("file", "File exists"), ("link", "File exists")],
)
def test_what_cannot_be_a_folder_is_said_and_not_taken_for_another_runs(
    tmp_path: Path, name: str, fault: str
) -> None:
    """A file that has come since the first look, or a link to a folder that is not there."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    path = str(tmp_path / name)

    with pytest.raises(OutputError) as caught, claim_output(path):
        pass

    said = str(caught.value)
    assert said.startswith(f"{path}: cannot be made: ")
    assert said.endswith(f"{fault}: '{path}'. Choose another folder.")
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_full_disk_is_said_and_leaves_no_claim(tmp_path: Path) -> None:
    """Else the empty file that is left would keep the next run out for a minute.

    A process that may write no byte sees what one on a full disk sees.
    """
    folder = tmp_path / "new" / "out"
    code = (
        "import resource, sys\n"
        "from jobs.claim import claim_output\n"
        "from jobs.errors import OutputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try:\n"
        "    with claim_output(sys.argv[1]): pass\n"
        "except OutputError as error: print(error)\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )

    assert os.listdir(tmp_path) == []
    assert result.stdout.startswith(f"{folder}: cannot be made ready: "), result.stderr
    assert "File too large" in result.stdout


def test_who_looks_at_a_claim_waits_for_another_that_looks(tmp_path: Path) -> None:
    """Between the look and the new claim nobody else may look, or two would find the same dead."""
    dead = leave_dead_claim(tmp_path)

    with ThreadPoolExecutor(1) as pool:
        with locked(str(tmp_path / LOCK)):
            waiting = pool.submit(taken_over, tmp_path)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
            assert read_owner(str(tmp_path)) == dead

        assert waiting.result(timeout=10) == str(dead)
    assert os.listdir(tmp_path) == []


def test_a_claim_is_given_back_only_when_nobody_looks(tmp_path: Path) -> None:
    """Else it could vanish between the look and the refusal, or be another's by then."""
    with ThreadPoolExecutor(1) as pool:
        go = threading.Event()
        ending = pool.submit(hold_until, tmp_path, go)
        wait_until(lambda: (tmp_path / OWNER).exists() and not (tmp_path / LOCK).exists())
        with locked(str(tmp_path / LOCK)):
            go.set()
            with pytest.raises(TimeoutError):
                ending.result(timeout=0.3)
            assert (tmp_path / OWNER).exists()

        ending.result(timeout=10)
    assert os.listdir(tmp_path) == []


def hold_until(folder: Path, go: threading.Event) -> None:
    with claim_output(str(folder)):
        assert go.wait(10)


def test_the_lock_of_a_killed_process_is_in_nobodys_way(tmp_path: Path) -> None:
    with other_process(HOLD_LOCK, tmp_path / LOCK) as process:
        process.kill()
    assert os.listdir(tmp_path) == [LOCK]

    assert taken_over(tmp_path) is None

    assert os.listdir(tmp_path) == []


def test_a_refusal_leaves_no_lock(tmp_path: Path) -> None:
    write_owner(tmp_path, FARAWAY)

    refused(tmp_path)

    assert os.listdir(tmp_path) == [OWNER]


def test_a_lock_that_was_removed_while_another_waited_for_it_lets_nobody_in(tmp_path: Path) -> None:
    """The file goes with its holder. Who waited has the old file then, and a third has the new."""
    path = tmp_path / LOCK

    def enter() -> None:
        with locked(str(path)):
            pass

    first = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(first, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(enter)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.2)
        path.unlink()
        with locked(str(path)):
            os.close(first)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.2)

        second.result(timeout=10)


def test_the_owner_that_sweeps_drafts_does_not_disturb_who_looks_at_its_claim(
    tmp_path: Path,
) -> None:
    """A look makes a file for its time. One that is gone is no sign that the owner is dead.

    One look in five failed, so that 1,000 looks tell for certain.
    """
    write_owner(tmp_path, FARAWAY)
    has_begun, is_over = threading.Event(), threading.Event()

    def sweep() -> None:
        while not is_over.is_set():
            sweep_drafts(str(tmp_path))
            has_begun.set()

    with ThreadPoolExecutor(1) as pool:
        sweeping = pool.submit(sweep)
        assert has_begun.wait(10)
        try:
            for _ in range(1000):
                with pytest.raises(RefusedError):
                    refuse_owned(str(tmp_path))
        finally:
            is_over.set()
    sweeping.result()


def test_the_owner_that_sweeps_drafts_leaves_the_lock_to_who_has_it(tmp_path: Path) -> None:
    """Else a third would come in beside the one who looks."""
    with locked(str(tmp_path / LOCK)):
        sweep_drafts(str(tmp_path))

        assert os.listdir(tmp_path) == [LOCK]


@pytest.mark.parametrize("num_runs", [2, 3, 16])
def test_of_all_that_wait_to_look_at_a_dead_claim_one_gets_it(
    tmp_path: Path, num_runs: int
) -> None:
    """A third run once got in while the first two settled it. Here all stand at the door."""
    dead = leave_dead_claim(tmp_path)

    def come() -> Claim | None:
        try:
            return held.enter_context(claim_output(str(tmp_path)))
        except RefusedError:
            return None

    with ExitStack() as held, ThreadPoolExecutor(num_runs) as pool:
        with locked(str(tmp_path / LOCK)):
            coming = [pool.submit(come) for _ in range(num_runs)]
            time.sleep(0.2)
            assert not any(run.done() for run in coming)
        claims = [claim for run in coming if (claim := run.result(timeout=10)) is not None]

        assert [claim.dead_owner for claim in claims] == [str(dead)]
        claims[0].check()
        assert os.listdir(tmp_path) == [OWNER]


def race(folders: list[Path], num_runs: int) -> list[Counter[str]]:
    """Lets runs try for each folder at the same moment. What they were told, by folder."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(num_runs)
    ]
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(run)
        assert [run.stdout.readline() for run in runs] == ["ready\n"] * num_runs
        start = time.time() + 0.2
        for run in runs:
            run.stdin.write(f"{start}\n")
            run.stdin.flush()
        answers = [[run.stdout.readline().strip() for _ in folders] for run in runs]
        owners = [read_owner(str(folder)) for folder in folders]
        for run in runs:
            run.stdin.close()
    for place, owner in enumerate(owners):
        winners = [r.pid for r, told in zip(runs, answers, strict=True) if told[place] == "mine"]
        assert owner is not None
        assert winners == [owner.pid], "the folder has another owner than the one who was told so"
    return [Counter(told) for told in zip(*answers, strict=True)]


def test_of_many_runs_that_want_a_folder_at_once_one_gets_it(tmp_path: Path) -> None:
    folders = [tmp_path / f"{number}" for number in range(20)]

    outcomes = race(folders, 8)

    assert outcomes == [Counter(mine=1, refused=7)] * 20


def test_of_many_runs_that_find_a_dead_claim_at_once_one_gets_it(tmp_path: Path) -> None:
    folders = [tmp_path / f"{number}" for number in range(20)]
    dead = leave_dead_claim(tmp_path)
    for folder in folders:
        folder.mkdir()
        write_owner(folder, dead)

    outcomes = race(folders, 8)

    assert outcomes == [Counter(mine=1, refused=7)] * 20
