"""The schema of every part of a job, and the table that a stretch of completions becomes."""

import dataclasses
import json
from collections.abc import Sequence

import pyarrow as pa

from jobs.columns import COLUMNS, SCORE_COLUMNS
from jobs.columns.column import Column
from jobs.completion import Completion
from jobs.errors import SettingError
from jobs.plan import Plan


def output_schema(plan: Plan) -> pa.Schema:
    """The schema of all parts, known before any row has run.

    Raises SettingError if one of our columns has the name of a column of the input.
    """
    row_fields, answer_fields = _own_fields(plan)
    kept = [plan.source.schema.field(name) for name in plan.kept_columns]
    clashes = sorted({field.name for field in row_fields + answer_fields} & set(plan.kept_columns))
    if clashes:
        raise SettingError(
            f"the input has columns that the output would have too: {', '.join(clashes)}. "
            "Give our columns other names with --output-prefix, or choose with --keep."
        )
    # What is said here is the same wherever the job runs and wherever its files lie.
    metadata = {"batchwright.job": json.dumps(_description(plan), sort_keys=True)}
    return pa.schema(row_fields + kept + answer_fields, metadata=metadata)


def output_table(
    plan: Plan, schema: pa.Schema, rows: pa.Table, completions: Sequence[Completion]
) -> pa.Table:
    """The output's rows: the input's kept columns beside what became of each row."""
    row_column, *answer_columns = _columns(plan)
    arrays = [
        *row_column.arrays(plan, completions),
        *(rows.column(name) for name in plan.kept_columns),
        *(array for column in answer_columns for array in column.arrays(plan, completions)),
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _columns(plan: Plan) -> list[Column]:
    return list((COLUMNS if plan.job.scoring is None else SCORE_COLUMNS).values())


def _own_fields(plan: Plan) -> tuple[list[pa.Field], list[pa.Field]]:
    row_column, *answer_columns = _columns(plan)
    prefix = plan.job.output_prefix

    def named(fields: list[pa.Field]) -> list[pa.Field]:
        return [field.with_name(prefix + field.name) for field in fields]

    return named(row_column.fields(plan)), named(
        [field for column in answer_columns for field in column.fields(plan)]
    )


def _description(plan: Plan) -> dict[str, object]:
    job = plan.job
    return {
        "engine": job.model.engine,
        "architecture": plan.facts.architecture,
        "vocab_size": plan.facts.vocab_size,
        "max_length": plan.max_length,
        "dtype": plan.dtype,
        "threads_per_worker": job.model.threads,
        **_asked(plan),
        "packing": dataclasses.asdict(job.packing) | {"rows_per_shard": plan.rows_per_shard},
    }


def _asked(plan: Plan) -> dict[str, object]:
    """What was drawn or scored, and how."""
    scoring = plan.job.scoring
    if scoring is None:
        return {"sampling": plan.sampling.record(), "seed": plan.job.sampling.seed}
    return {"scoring": {"kind": plan.kind, "pmi": scoring.pmi, **plan.prompt_columns}}
