"""The connection to Ray: a cluster that runs already, or one of our own for the time of a job.

The only place that starts Ray or reads its environment.
"""

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager
from functools import partial
from pathlib import Path

from cluster.placement import Placement, Resources
from jobs.errors import PlacementError

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 2**20
"Ray's least: rows never travel through it."
_ATTEMPTS = 3
_PROBE_SECONDS = 10.0


@contextmanager
def connect(placement: Placement) -> Iterator[Resources]:
    """Connects to the cluster, or starts one, and leaves it at the end.

    Without an address the job runs on this machine, whatever RAY_ADDRESS says.
    Raises PlacementError if there is no such cluster.
    """
    _prepare_environment(is_local=placement.address is None)
    import ray  # Reads its environment when it is imported.

    # In the main thread Ray would take SIGTERM for itself, and end the process in the middle of
    # things. What a thread has started ends with it: it is kept until all is done.
    with ThreadPoolExecutor(max_workers=1) as thread:
        # Workers import from the folder where Ray is started, before all others. The user's may
        # hold modules that are called like ours; this one holds ours.
        with chdir(Path(__file__).parent.parent):
            local = placement.address is None
            start = _start_local if local else partial(_attach, str(placement.address))
            thread.submit(start).result()
        try:
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            yield Resources(resources.get("CPU", 0.0), resources.get("GPU", 0.0))
        finally:
            ray.shutdown()


def _prepare_environment(*, is_local: bool) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_COLOR_PREFIX"] = "0"
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"  # It takes SIGTERM for a crash.
    if not is_local:
        return
    if "ray" in sys.modules:  # It has read its environment, and would not take a token any more.
        if os.environ.get("RAY_AUTH_MODE") != "token":
            logger.warning("ray was imported before the job began: its ports have no token")
        return
    # Ray's ports listen on all interfaces; a token keeps others out.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _shows_worker_logs() -> bool:
    return logger.isEnabledFor(logging.DEBUG)


def _start_local() -> None:
    import ray

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=_shows_worker_logs(),
                logging_level=logging.ERROR,
            )
            return
        except Exception as error:
            ray.shutdown()
            if "timed out" not in str(error) or attempt == _ATTEMPTS:
                raise PlacementError(f"Ray cannot be started on this machine: {error}") from error


def _attach(address: str) -> None:
    import ray

    _probe(address)
    try:
        ray.init(address=address, log_to_driver=_shows_worker_logs(), logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        ray.shutdown()  # It may have joined half.
        said = " ".join(str(error).split()).rstrip(" .")
        remedy = "If it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH."
        if "ersion mismatch" in said:
            remedy = "Use the same versions of Ray and Python as the cluster."
        raise PlacementError(
            f"{address}: no Ray cluster can be joined there: {said}. {remedy}"
        ) from error


def _probe(address: str) -> None:
    """Finds out at once what Ray would find out in minutes: that nobody listens."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise PlacementError(f"{address}: must be HOST:PORT of a Ray cluster, or auto.")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        raise PlacementError(f"{address}: no Ray cluster listens there: {error}.") from error
