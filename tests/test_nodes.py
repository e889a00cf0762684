"""A cluster of several nodes, here on one machine: losing one loses nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import hashes
from running import echo_job, run_here, write_prompts

from runner.verify import verify_output

pytestmark = pytest.mark.slow

SETTINGS = {"rows_per_shard": 10, "logprobs": 2, "max_new_tokens": 300, "ignore_eos": True}

STORY = """
import logging, os, sys
from pathlib import Path

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
from ray.cluster_utils import Cluster
import ray
from running import echo_job
from cluster.placement import Placement
from jobs.report import ShardReport
from runner.run import run_job

logging.basicConfig(format="%(message)s", stream=sys.stdout)
logging.getLogger("cluster").setLevel(logging.INFO)
small = dict(object_store_memory=80 * 2**20, include_dashboard=False)
cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=0, **small))
nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1, **small) for _ in "ab")}
source, output = map(Path, sys.argv[1:3])
job = echo_job(source, output, **eval(sys.argv[3]))
done = 0
for report in run_job(job, Placement(address=cluster.address, num_workers=1)):
    done += isinstance(report, ShardReport)
    if done == 3 and len(nodes) == 2:
        # The worker's own node: another could be lost unseen, before its worker has begun.
        [actor] = ray._private.state.actors().values()
        cluster.remove_node(nodes.pop(actor["Address"]["NodeID"]), allow_graceful=False)
        print("a node was lost")
print("finished", report.counts.rows)
cluster.shutdown()
"""


MISMATCH = """
import os
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
from ray.cluster_utils import Cluster
import ray._private.utils
from cluster.placement import Placement
from cluster.session import connect

small = dict(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)
cluster = Cluster(initialize_head=True, head_node_args=small)
ray._private.utils.compute_version_info = lambda: ("2.60.0", "3.10.2")
try:
    with connect(Placement(address=cluster.address)):
        pass
except Exception as error:
    print(type(error).__name__, error)
cluster.shutdown()
"""


def test_a_cluster_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    """Case J18: with both versions, and no row to blame."""
    result = subprocess.run(
        [sys.executable, "-c", MISMATCH], capture_output=True, text=True, timeout=120, check=False
    )

    assert result.returncode == 0, result.stderr
    [line] = result.stdout.splitlines()
    assert line.startswith("PlacementError ")
    assert "Python: 3.10.2" in line
    assert f"Python: {'.'.join(map(str, sys.version_info[:3]))}" in line
    assert line.endswith("Use the same versions of Ray and Python as the cluster.")


def test_a_node_that_is_lost_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    """Case J08: what it was doing is done by the other, and the bytes are the same."""
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(120)])
    run_here(echo_job(source, tmp_path / "calm", **SETTINGS))

    result = subprocess.run(
        [sys.executable, "-c", STORY, source, tmp_path / "out", repr(SETTINGS)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "a node was lost" in result.stdout
    assert "worker lost on shard" in result.stdout
    assert "finished 120" in result.stdout
    assert hashes(tmp_path / "out") == hashes(tmp_path / "calm")
    assert verify_output(str(tmp_path / "out"), 0).problems == []
