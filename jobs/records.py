"""A record beside each part: its counts and checksum. A part with its record is whole.

The record is written after the part has got its name, and removed before it gets another content:
where there is one, it is this part's.
"""

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from jobs.errors import OutputError
from jobs.folder import RECORDS, explained, part_name, read_json, write_json
from jobs.parts import part_num_rows, part_schema, part_size, same_schema
from jobs.plan import Plan, Shard
from jobs.report import ShardReport
from jobs.schema import output_schema
from jobs.storage import join, storage_of


def write_record(folder: str, report: ShardReport) -> None:
    """Writes the record of a part that has got its name.

    Should it be lost with the power, the shard is done again: nothing waits for the disk here.
    """
    write_json(folder, _record_name(report.shard), report.record(), is_durable=False)


def drop_record(folder: str, shard: Shard) -> None:
    """Removes the record of a part that is about to be written."""
    with explained(folder):
        storage_of(folder).delete(_record_name(shard))


def read_record(folder: str, shard: Shard) -> ShardReport | None:
    """The record of a shard's part; None if there is none that can be read."""
    try:
        return ShardReport.from_record(read_json(folder, _record_name(shard)))
    except (OutputError, AttributeError, KeyError, TypeError, ValueError):
        return None


def find_finished(plan: Plan) -> list[ShardReport]:
    """Records of the shards whose parts are there and whole, in row order. Reads footers only."""
    schema = output_schema(plan)
    with ThreadPoolExecutor(max_workers=16) as readers:
        records = readers.map(lambda shard: _finished(plan, shard, schema), plan.shards)
        return [record for record in records if record is not None]


def _finished(plan: Plan, shard: Shard, schema: pa.Schema) -> ShardReport | None:
    folder = plan.job.output
    record = read_record(folder, shard)
    path = join(folder, part_name(shard.index, plan.job.output_format))
    if record is None or record.shard != shard or record.counts.rows != shard.num_rows:
        return None
    try:
        is_whole = (
            part_size(path) == record.part.size_bytes
            and part_num_rows(path) == shard.num_rows
            and same_schema(part_schema(path), schema)
        )
    except (OSError, OutputError):
        return None
    return record if is_whole else None


def _record_name(shard: Shard) -> str:
    return join(RECORDS, f"part-{shard.index:05d}.json")
