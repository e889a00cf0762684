"""Joining a cluster: what is refused at once, and who decides where a job runs."""

import os
import socket
import subprocess
import sys

import pytest

from cluster.placement import Placement
from cluster.session import connect
from jobs.errors import PlacementError


def test_a_dead_address_fails_at_once_and_is_named() -> None:
    """Case J16: Ray itself was still waiting after 100 seconds."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"

    with (
        pytest.raises(PlacementError, match=f"{address}: no Ray cluster listens there"),
        connect(Placement(address=address)),
    ):
        pass


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://127.0.0.1:10001", "host"])
def test_addresses_of_another_kind_are_refused(address: str) -> None:
    with (
        pytest.raises(PlacementError, match="must be HOST:PORT of a Ray cluster, or auto"),
        connect(Placement(address=address)),
    ):
        pass


def test_auto_takes_ray_address_and_says_so_if_it_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")

    with (
        pytest.raises(PlacementError, match="8265: must be HOST:PORT"),
        connect(Placement(address="auto")),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import ray\n"], ids=["fresh", "ray-imported"])
def test_a_program_can_run_two_jobs_whether_or_not_it_has_imported_ray(first: str) -> None:
    """Ray reads its sign-in mode once, when it is imported."""
    code = (
        f"{first}"
        "from cluster.placement import Placement\n"
        "from cluster.session import connect\n"
        "for _ in range(2):\n"
        "    with connect(Placement()) as resources:\n"
        "        assert resources.num_cpus >= 1\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)

    assert result.returncode == 0, result.stderr
    assert ("its ports have no token" in result.stderr) == bool(first)


@pytest.mark.slow
def test_nobody_can_look_at_a_run_from_elsewhere() -> None:
    """Case J22: Ray's server for its page is not started, or hears this machine alone."""
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from test_stop import family\n"
        "from cluster.placement import Placement\n"
        "from cluster.session import connect\n"
        "with connect(Placement()):\n"
        "    for said in family(os.getpid()).values():\n"
        "        if 'dashboard.py' in said: print(said.replace('\\0', ' '))\n"
        "    print(os.environ['RAY_AUTH_MODE'], len(os.environ['RAY_AUTH_TOKEN']))\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env | {"PYTHONPATH": os.path.dirname(__file__)},
        check=True,
    )

    *servers, token = result.stdout.splitlines()
    assert token == "token 64"
    for server in servers:
        assert "--host=127.0.0.1" in server
        assert "--disable-frontend" in server
