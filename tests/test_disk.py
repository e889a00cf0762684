"""Disks that fill up, folders that vanish or lose permission: said, and nothing half done."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from running import BATCHWRIGHT, batchwright, write_prompts

pytestmark = pytest.mark.slow

ECHO = (
    "--model", "e", "--engine", "echo", "--max-new-tokens", "40", "--ignore-eos",
    "--output-logits", "--rows-per-shard", "10", "--num-workers", "2",
)  # fmt: skip
"A shard is 400 KB of logits."


def test_a_full_disk_is_said_and_the_job_goes_on_when_there_is_space(tmp_path: Path) -> None:
    """Case O14: a small tmpfs, in a mount namespace of its own, that is made larger later."""
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(200)])
    script = f"""
        set -u
        mkdir {tmp_path}/disk
        mount -t tmpfs -o size=3m none {tmp_path}/disk
        run="{BATCHWRIGHT} run {source} {tmp_path}/disk/out {" ".join(ECHO)} --quiet"
        $run; echo code $?
        ls -A {tmp_path}/disk/out
        {BATCHWRIGHT} verify {tmp_path}/disk/out; echo code $?
        mount -o remount,size=100m {tmp_path}/disk
        $run --resume; echo code $?
        {BATCHWRIGHT} verify {tmp_path}/disk/out; echo code $?
        echo at last; ls -A {tmp_path}/disk/out
    """
    result = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    assert "cannot be written: " in result.stderr
    assert "No space left on device" in result.stderr
    assert "Free some space, then run again with --resume" in result.stderr
    assert "Traceback" not in result.stderr
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("code")] == [
        "code 1", "code 1", "code 0", "code 0",
    ]  # fmt: skip
    # What a worker had begun is hidden, and swept up by the next run.
    at_last = lines[lines.index("at last") :]
    assert not [line for line in at_last if line.endswith(".draft")], "half a part was left"
    sound = "200 rows in 20 parts: every row once and in order, as it was written: all is well"
    assert sound in lines


def test_a_folder_that_vanishes_while_the_job_runs_is_said(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(400)])
    driver = subprocess.Popen(
        [BATCHWRIGHT, "run", source, tmp_path / "out", *ECHO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob("out/part-*")):
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.05)

    os.rename(tmp_path / "out", tmp_path / "elsewhere")
    _, words = driver.communicate(timeout=60)

    assert driver.returncode == 1, words
    assert f"{tmp_path}/out: cannot be written" in words
    assert "Put the folder back" in words
    assert "Traceback" not in words
    os.rename(tmp_path / "elsewhere", tmp_path / "out")
    again = batchwright("run", source, tmp_path / "out", *ECHO, "--resume", "-q")
    assert again.returncode == 0, again.stderr
    assert batchwright("verify", tmp_path / "out").returncode == 0


def test_a_folder_that_loses_its_permission_is_said(tmp_path: Path) -> None:
    """Root may write anywhere, so the job runs as a user without rights, where the test is root."""
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(400)])
    # A user namespace whose only user is not root: permissions are those of anybody.
    as_user = ["unshare", "--user", "--map-user=1000", "--"] if os.getuid() == 0 else []
    output = tmp_path / "out"
    driver = subprocess.Popen(
        [*as_user, BATCHWRIGHT, "run", source, output, *ECHO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    while not list(output.glob("part-*")):
        assert driver.poll() is None, driver.communicate()
        time.sleep(0.05)

    output.chmod(0o500)
    _, words = driver.communicate(timeout=60)
    output.chmod(0o700)

    assert driver.returncode == 1, words
    assert "Permission denied" in words
    assert "Give permission back, then run again with --resume" in words
    again = batchwright("run", source, output, *ECHO, "--resume", "-q")
    assert again.returncode == 0, again.stderr
