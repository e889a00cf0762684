"""Where a job runs: how many workers, and what each may use. Nothing here changes a result."""

import logging
from dataclasses import dataclass
from math import isfinite

from jobs.errors import PlacementError, SettingError

logger = logging.getLogger(__name__)

_LEAST_SHARE = 0.0001
"Ray counts in ten-thousandths."


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job is to run, as asked for."""

    address: str | None = None
    "A running Ray cluster; None starts one on this machine for the time of the job."
    num_workers: int | None = None
    "None: one a GPU, or as many as the CPUs allow."
    gpus_per_worker: float | None = None
    "None: 1 if there are GPUs, else 0."
    cpus_per_worker: float | None = None
    "None: as many as a worker has threads."

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 1:
            raise SettingError(f"num_workers must be at least 1, got {self.num_workers}.")
        gpus, cpus = self.gpus_per_worker, self.cpus_per_worker
        if gpus is not None and not _is_gpu_share(gpus):
            raise SettingError(
                f"gpus_per_worker must be 0, a fraction of 1, or a whole number, got {gpus:g}."
            )
        if cpus is not None and not (isfinite(cpus) and cpus >= _LEAST_SHARE):
            raise SettingError(
                f"cpus_per_worker must be finite and at least {_LEAST_SHARE}, got {cpus:g}."
            )


def _is_gpu_share(gpus: float) -> bool:
    """True for none, a part of one, or some whole ones: Ray gives nothing else."""
    return gpus == 0 or _LEAST_SHARE <= gpus <= 1 or (isfinite(gpus) and gpus == int(gpus) > 0)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a cluster has."""

    num_cpus: float
    num_gpus: float

    def __str__(self) -> str:
        return f"{self.num_cpus:g} CPUs and {self.num_gpus:g} GPUs"


@dataclass(frozen=True, slots=True)
class Seats:
    """Workers to be started, and what each is given."""

    num_workers: int
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs and {self.gpus:g} GPUs"


def settle_seats(
    placement: Placement, resources: Resources, *, device: str, threads: int, num_shards: int
) -> Seats:
    """Decides how many workers to start: never more than there are shards.

    Raises PlacementError if the cluster cannot hold a single one.
    """
    gpus = placement.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if device == "cuda" else 0.0
    if device == "cuda" and not gpus:
        raise PlacementError(
            "the model is to run on a GPU, but gpus_per_worker is 0. Use --device cpu, or give "
            "each worker a GPU."
        )
    cpus = placement.cpus_per_worker or float(threads)
    if gpus > resources.num_gpus or cpus > resources.num_cpus:
        raise PlacementError(
            f"a worker needs {cpus:g} CPUs and {gpus:g} GPUs; the cluster has {resources}."
        )
    room = _how_often(cpus, resources.num_cpus)
    if gpus:
        room = min(room, _how_often(gpus, resources.num_gpus))
    asked = placement.num_workers or room
    if placement.address is None and asked > room:  # A cluster may grow; this machine will not.
        logger.warning("%d workers were asked for; %d fit on this machine", asked, room)
        asked = room
    return Seats(max(1, min(asked, num_shards)), cpus, gpus)


def _how_often(part: float, whole: float) -> int:
    """How many parts fit into the whole, where 0.1 fits ten times into 1."""
    return int(whole / part + 1e-9)
