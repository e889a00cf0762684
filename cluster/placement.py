"""Where a job runs: how many workers, and what each may use. Nothing here changes a result."""

from dataclasses import dataclass

from jobs.errors import PlacementError, SettingError


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
        gpus = self.gpus_per_worker
        if gpus is not None and (gpus < 0 or (gpus > 1 and gpus != int(gpus))):
            raise SettingError(
                f"gpus_per_worker must be 0, a fraction of 1, or a whole number, got {gpus:g}."
            )
        if self.cpus_per_worker is not None and self.cpus_per_worker <= 0:
            raise SettingError(f"cpus_per_worker must be above 0, got {self.cpus_per_worker:g}.")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a cluster has."""

    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class Seats:
    """Workers to be started, and what each is given."""

    num_workers: int
    cpus: float
    gpus: float


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
            f"a worker needs {cpus:g} CPUs and {gpus:g} GPUs; the cluster has "
            f"{resources.num_cpus:g} CPUs and {resources.num_gpus:g} GPUs."
        )
    room = int(resources.num_cpus // cpus)
    if gpus:
        room = min(room, int(resources.num_gpus // gpus))
    return Seats(max(1, min(placement.num_workers or room, num_shards)), cpus, gpus)
