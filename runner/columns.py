"""Which columns of the input a job reads as what is asked, and which it carries into the output."""

from collections.abc import Mapping, Sequence

from jobs.errors import InputError
from jobs.files import RowSource
from jobs.job import Job
from jobs.kinds import KINDS, SCORED_KINDS
from jobs.kinds.kind import Cells, Kind


def find_prompt_columns(job: Job, source: RowSource) -> tuple[str, dict[str, str]]:
    """The kind's name and, by field, its columns: as asked, or as the one kind that fits has them.

    Raises InputError if no kind fits, or several do, or a column cannot be read so.
    """
    kinds = KINDS if job.scoring is None else SCORED_KINDS
    present = source.schema.names
    asked = _asked(job, kinds)
    fitting = {
        name: found
        for name, kind in kinds.items()
        if asked.keys() <= kind.columns.keys()
        and (found := _columns(kind, asked, present)).keys() >= _needed(kind).keys()
    }
    has = f"It has: {', '.join(present) or 'no columns'}."
    if not fitting:
        lacking, remedy = _lacking(kinds, asked)
        raise InputError(f"{job.input}: {lacking}. {has} {remedy}.")
    if len(fitting) > 1:
        either = " and ".join(" with ".join(map(repr, c.values())) for c in fitting.values())
        flags = " or ".join(dict.fromkeys(_flag(f) for kind in fitting for f in fitting[kind]))
        raise InputError(f"{job.input}: has both {either}. Choose with {flags}.")
    [(name, columns)] = fitting.items()
    for field, column in columns.items():
        _check(job, source, field, column, kinds[name].columns[field])
    return name, columns


def holds_text(source: RowSource, name: str, columns: Mapping[str, str]) -> bool:
    """True if one of these columns of a kind must be tokenized."""
    cells = (KINDS | SCORED_KINDS)[name].columns
    return any(
        cells[field].holds_text(source.schema.field(column).type)
        for field, column in columns.items()
    )


def find_kept_columns(job: Job, source: RowSource) -> Sequence[str]:
    """The input's columns that the output has, too. Raises InputError for one that is not there."""
    columns = source.schema.names
    missing = [name for name in job.keep or () if name not in columns]
    if missing:
        raise InputError(
            f"{job.input}: no column {missing[0]!r} to keep. It has: {', '.join(columns)}."
        )
    return columns if job.keep is None else list(dict.fromkeys(job.keep))


def _asked(job: Job, kinds: Mapping[str, Kind]) -> dict[str, str]:
    """Columns that the job names, by field."""
    owner = job if job.scoring is None else job.scoring
    fields = dict.fromkeys(field for kind in kinds.values() for field in kind.columns)
    return {field: name for field in fields if (name := getattr(owner, field)) is not None}


def _columns(kind: Kind, asked: Mapping[str, str], present: Sequence[str]) -> dict[str, str]:
    """What the kind would read: what is asked, wherever it is, and defaults that are there."""
    columns = {}
    for field, cells in kind.columns.items():
        if field in asked:
            columns[field] = asked[field]
        elif cells.default_column in present:
            columns[field] = str(cells.default_column)
    return columns


def _needed(kind: Kind) -> dict[str, Cells]:
    return {field: cells for field, cells in kind.columns.items() if cells.default_column}


def _lacking(kinds: Mapping[str, Kind], asked: Mapping[str, str]) -> tuple[str, str]:
    """What is not there, and what can be done about it, in words."""
    ways = [_needed(kind) for kind in kinds.values() if asked.keys() <= kind.columns.keys()]
    if not ways:
        flags = " and ".join(map(_flag, asked))
        return f"no kind of row has {flags}", "Leave one out"
    left = [{f: cells for f, cells in way.items() if f not in asked} for way in ways]
    defaults = " or ".join(
        " with ".join(repr(cells.default_column) for cells in way.values()) for way in left
    )
    flags = " or ".join(dict.fromkeys(_flag(field) for way in left for field in way))
    return f"no column {defaults}", f"Choose with {flags}"


def _check(job: Job, source: RowSource, field: str, column: str, cells: Cells) -> None:
    """Raises InputError if a column is not there, not in all files, or of another type."""
    if column not in source.schema.names:
        has = f"It has: {', '.join(source.schema.names) or 'no columns'}."
        raise InputError(f"{job.input}: no column {column!r}. {has} Use {_flag(field)}.")
    if column in source.lacking:
        raise InputError(
            f"{source.lacking[column]}: no column {column!r}, which other files have. Leave the "
            "file out, or rename its column."
        )
    type_ = source.schema.field(column).type
    if not cells.accepts(type_):
        raise InputError(
            f"{job.input}: column {column!r} holds {type_}; {_flag(field)} needs {cells.wanted}."
        )


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
