"""Errors that a user can act on. Each message states the fact, the value and the remedy.

    JobError
      SettingError      a flag, field or configuration key has a value that cannot be used
      InputError        the input cannot be read as asked
      ModelError        a model or tokenizer cannot be loaded, or cannot run as asked
      OutputError       the output folder cannot be read or written
      RefusedError      the output folder belongs to something else
      PlacementError    the machine or cluster lacks what the job asks for
      WorkerError       a worker failed while the job ran
      MemoryShortError  a worker ran out of memory; smaller batches may fit
      StoppedError      the run was told to stop

Each takes one message, so that it survives the way from a worker to the driver unchanged.
"""


class JobError(Exception):
    """Something about the job is wrong, and the user can mend it."""


class SettingError(JobError, ValueError):
    """A flag, field or configuration key has a value that cannot be used."""


class InputError(JobError):
    """The input files are missing, unreadable, or lack what the job needs."""


class ModelError(JobError):
    """The model or its tokenizer cannot be loaded, or cannot run as asked."""


class OutputError(JobError):
    """The output folder cannot be read or written."""


class RefusedError(OutputError):
    """The output folder holds something that this job must not touch."""


class PlacementError(JobError):
    """The machine or cluster cannot give what the job asks for."""


class WorkerError(JobError):
    """A worker failed while the job ran."""


class MemoryShortError(WorkerError):
    """A worker ran out of memory."""


class StoppedError(JobError):
    """The run was told to stop before it was finished."""
