"""Comparing two outputs and saying what differs."""

import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table

from jobs.compare import Comparison, Side, compare_outputs, same_parts
from jobs.errors import OutputError
from jobs.folder import list_parts, part_name, readable
from jobs.storage import name_of
from runner.manifest import read_intent
from runner.words import counted, finite


def diff_outputs(a: str, b: str) -> tuple[Comparison, bool]:
    """What differs between the rows of two outputs, and whether their parts are the same bytes.

    Raises OutputError if one of them is no output or has no part yet.
    """
    first, second = _side(a), _side(b)
    with readable(f"{a} or {b}"):
        return compare_outputs(first, second), same_parts(first, second)


def _side(folder: str) -> Side:
    intent, paths = read_intent(folder), list_parts(folder)
    identity = intent.job["identity"]
    present = {name_of(path) for path in paths}
    for index in range(len(intent.plan["shards"])):
        name = part_name(index, identity["output_format"])
        if name not in present:
            raise OutputError(
                f"{folder}: {name} is missing, so that rows would be compared with others. Go on "
                "with --resume."
            )
    return Side(paths, identity["output_prefix"], set(identity["kept_columns"]))


def show_comparison(comparison: Comparison, *, same_parts: bool, limit: int, as_json: bool) -> None:
    """Prints what differs: tables, or one JSON object."""
    if as_json:
        record = dataclasses.asdict(
            dataclasses.replace(comparison, columns_differing=None)  # type: ignore[arg-type]
        )
        record["columns_differing"] = dict(comparison.columns_differing)
        record["rows_with_other_tokens"] = len(comparison.tokens_differing)
        record["tokens_differing"] = record["tokens_differing"][:limit]
        record["logprob_difference"] = finite(comparison.logprob_difference)
        record |= {"is_same": comparison.is_same, "same_bytes": same_parts}
        sys.stdout.write(json.dumps(record) + "\n")
        return
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if same_parts:
        console.print(f"the same: {comparison.rows_a:,} rows, every part the same bytes")
        return
    if comparison.tokens_differing and limit > 0:
        console.print(_tokens(comparison, limit))
    console.print(_summary(comparison))


def _summary(comparison: Comparison) -> str:
    compared, differ = comparison.rows_compared, comparison.rows_differing
    lines = [
        f"{counted(compared, 'row')} compared: {differ:,} differ, "
        f"{len(comparison.tokens_differing):,} of them in their tokens"
    ]
    lines += [
        f"  {name} differs in {counted(rows, 'row')}"
        for name, rows in comparison.columns_differing.items()
    ]
    if comparison.rows_a != comparison.rows_b:
        counts = f"{comparison.rows_a:,} rows in the first, {comparison.rows_b:,} in the second"
        lines.append(counts)
    if comparison.columns_of_one:
        names = ", ".join(comparison.columns_of_one)
        lines.append(f"columns that only one has, or with another type: {names}")
    if comparison.logprob_row is not None:
        lines.append(
            f"greatest difference of a logprob: {comparison.logprob_difference:.3g} nats, in row "
            f"{comparison.logprob_row}"
        )
    same = "the same rows, in files that are not the same bytes"
    lines.append(same if comparison.is_same else "different")
    return "\n".join(lines)


def _tokens(comparison: Comparison, limit: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("row_id", "first differing token", "id in the first", "id in the second"):
        table.add_column(column)
    for row in comparison.tokens_differing[:limit]:
        ids = ("(ended)" if token is None else str(token) for token in (row.a, row.b))
        table.add_row(str(row.row_id), str(row.place), *ids)
    if len(comparison.tokens_differing) > limit:
        table.add_row(f"and {len(comparison.tokens_differing) - limit:,} more")
    return table
