"""A finished part that is mended: rows whose error may pass are answered again, the others stay."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from jobs.completion import Completion
from jobs.folder import part_name
from jobs.parts import PartReader, hash_part, is_bulky, read_part
from jobs.plan import Plan, Shard
from jobs.records import read_record
from jobs.report import ShardReport
from jobs.rows import Rows
from jobs.schema import output_table
from jobs.storage import join


def completed_rows(
    plan: Plan,
    schema: pa.Schema,
    rows: Rows,
    stretch: Sequence[Completion | None],
    old: "OldPart | None",
) -> pa.Table:
    """A stretch of the part: a completion's row for each, or the old part's where there is none."""
    if old is not None:
        return old.splice(schema, rows, stretch)
    completions = [completion for completion in stretch if completion is not None]
    return output_table(plan, schema, rows, completions)


def open_old_part(plan: Plan, shard: Shard) -> "OldPart | None":
    """The shard's part; None if it is not what was written, so that all of it is to be done."""
    path = join(plan.job.output, part_name(shard.index, plan.job.output_format))
    record = read_record(plan.job.output, shard)
    try:
        is_sound = record is not None and hash_part(path) == record.part.sha256
    except OSError:
        is_sound = False
    return OldPart(plan, path, record) if is_sound and record is not None else None


class OldPart:
    """The part that a shard has already."""

    def __init__(self, plan: Plan, path: str, record: ShardReport) -> None:
        self._plan, self._path = plan, path
        self.record = record
        prefix = plan.job.output_prefix
        ends = read_part(self._path, [prefix + "error", prefix + "truncated"])
        self._errors = ends.column(0).combine_chunks()
        self._truncated = ends.column(1).combine_chunks()
        retryable = pc.fill_null(pc.struct_field(self._errors, "retryable"), False)
        self.retried = [place for place, yes in enumerate(retryable.to_pylist()) if yes]
        "Places of the rows that are to be answered again."
        self._reader = PartReader(self._path)

    def mended_report(self, report: ShardReport) -> ShardReport:
        """The whole part's report, from that of the rows that were answered again."""
        old = self.record
        codes = [self._errors[place].as_py()["code"] for place in self.retried]
        cut = sum(bool(self._truncated[place].as_py()) for place in self.retried)
        kept = dataclasses.replace(
            old.counts,
            rows=old.counts.rows - len(self.retried),
            failed=old.counts.failed - Counter(codes),
            truncated=old.counts.truncated - cut,
        )
        counts = dataclasses.replace(
            kept + report.counts, halved=max(old.counts.halved, report.counts.halved)
        )
        again = {old.shard.start + place for place in self.retried}
        # The rows that stay were answered as the old record says.
        return dataclasses.replace(
            report, counts=counts, lessons=old.lessons, mended=tuple(sorted({*old.mended, *again}))
        )

    def splice(
        self, schema: pa.Schema, rows: Rows, completions: Sequence[Completion | None]
    ) -> pa.Table:
        """The next rows of the part, with new ones where there are completions."""
        old = self._reader.read(len(completions))
        pieces = []
        for place, completion in enumerate(completions):
            if completion is None:
                pieces.append(old.slice(place, 1))
            else:
                pieces.append(output_table(self._plan, schema, rows.slice(place, 1), [completion]))
        table = pa.concat_tables(pieces or [schema.empty_table()]).unify_dictionaries()
        # Logits stay where they lie; for the rest, one piece is easier to read than many.
        return table if any(map(is_bulky, schema)) else table.combine_chunks()
