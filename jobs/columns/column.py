"""The shape of a column: the fields it adds for a job, and their values for a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from jobs.completion import Completion
from jobs.plan import Plan

ColumnArray: TypeAlias = pa.Array | pa.ChunkedArray


@dataclass(frozen=True, slots=True)
class Column:
    """One or more fields of the output that are made together."""

    fields: Callable[[Plan], list[pa.Field]]
    "The fields, from the plan alone, so that all parts have one schema. None of them: empty."
    arrays: Callable[[Plan, Sequence[Completion]], list[ColumnArray]]
    "An array for each field, one value for each completion."


def output_field(
    name: str,
    type_: pa.DataType,
    meaning: str,
    *,
    unit: str = "",
    storage: str = "",
    nullable: bool = True,
) -> pa.Field:
    """A field whose metadata says what it means, and how it is stored if not as others are."""
    metadata = {"meaning": meaning, "unit": unit, "storage": storage}
    said = {key: value for key, value in metadata.items() if value}
    return pa.field(name, type_, nullable=nullable, metadata=said)


def alternatives(value_type: pa.DataType, number: int) -> pa.DataType:
    """So many values a token."""
    return pa.list_(pa.field("element", value_type, nullable=False), number)


def ragged(
    rows: Sequence[npt.NDArray[np.generic] | None], value_type: pa.DataType
) -> pa.LargeListArray:
    """A list for each row, null where there is none. Rows are [T] or, for fixed lists, [T, K]."""
    present = [row.reshape(-1) for row in rows if row is not None]
    # One row alone is handed over where it lies: logits are too big to be copied.
    flat = present[0] if len(present) == 1 else np.concatenate([np.empty(0, np.int8), *present])
    if pa.types.is_fixed_size_list(value_type):
        items = pa.array(flat, type=value_type.value_type)
        values: pa.Array = pa.FixedSizeListArray.from_arrays(items, type=value_type)
    else:
        values = pa.array(flat, type=value_type)
    lengths = np.array([0 if row is None else len(row) for row in rows], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets),
        values,
        type=pa.large_list(pa.field("element", value_type, nullable=False)),
        mask=pa.array([row is None for row in rows], pa.bool_()),
    )
