"""Proving an output: what is sound is said to be, and what was tampered with is named."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from running import batchwright as run_command
from running import echo_job, make_job, open_worker, prepared, write_prompts
from tiny_models import constant_model, save

from jobs.completion import RowError
from jobs.errors import OutputError
from jobs.folder import list_parts, mark_success
from jobs.job import Job
from jobs.lessons import Lessons
from jobs.model import ModelRef
from jobs.parts import read_part
from runner.cli import batchwright, exit_code
from runner.manifest import write_manifest
from runner.verify import Verdict, verify_output

PROMPTS = ["abc", "def", None, "ghij", "k"]
FIRST = "part-00000.parquet"
SECOND = "part-00001.parquet"
NOT_SOUND = "no row was answered again, since the parts are not sound."
WELL = "every row once and in order, as it was written: all is well"
NUMBER = r"-?\d+\.\d+"

Edit = Callable[[pa.Table], pa.Table]


def finish(job: Job, lessons: Lessons | None = None) -> Path:
    """Runs a job without Ray, and leaves its folder as a run that has ended well does."""
    plan = prepared(job)
    worker = open_worker(plan)
    reports = [worker.run_shard(shard, lessons or Lessons()) for shard in plan.shards]
    write_manifest(plan, None, reports, 0.0)
    mark_success(plan.job.output)
    return Path(plan.job.output)


def problems(folder: Path) -> list[str]:
    return verify_output(str(folder), 0).problems


def repeated(folder: Path, num_rows: int = 100) -> Verdict:
    return verify_output(str(folder), num_rows)


def verify(*arguments: object) -> Result:
    """The command in this process; what it returns is its exit code."""
    result = CliRunner().invoke(
        batchwright, ["verify", *map(str, arguments)], standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    return result


def rewrite(folder: Path, name: str, table: pa.Table, **counts: object) -> None:
    """Replaces a part, and has record and manifest say what the new file is. counts: as well."""
    pq.write_table(table, folder / name)
    content = (folder / name).read_bytes()
    part = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    amend(record_path(folder, name), part=part, counts=counts)
    manifest = json.loads((folder / "_manifest.json").read_text())
    next(said for said in manifest["parts"] if said["name"] == name).update(part)
    (folder / "_manifest.json").write_text(json.dumps(manifest))


def amend(path: Path, **changes: dict[str, object]) -> None:
    """Changes values in the sections of a JSON file."""
    content = json.loads(path.read_text())
    for section, values in changes.items():
        content[section].update(values)
    path.write_text(json.dumps(content))


def rewrite_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def record_path(folder: Path, name: str) -> Path:
    return folder / "_records" / f"{Path(name).stem}.json"


def edit(folder: Path, edits: Edit, name: str = FIRST, **counts: object) -> None:
    rewrite(folder, name, edits(pq.read_table(folder / name)), **counts)


def put(column: str, row: int, value: object) -> Edit:
    """One cell is another. A function as value is given the old one."""

    def edits(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        values[row] = value(values[row]) if callable(value) else value
        field = table.schema.field(column)
        place = table.schema.get_field_index(column)
        return table.set_column(place, field, pa.array(values, field.type))

    return edits


def put_all(*edits: Edit) -> Edit:
    def together(table: pa.Table) -> pa.Table:
        for each in edits:
            table = each(table)
        return table

    return together


def nudge(place: int, by: float) -> Callable[[list[float]], list[float]]:
    return lambda values: [v + by if i == place else v for i, v in enumerate(values)]


def nudge_logit_of_first_token(table: pa.Table) -> pa.Table:
    token_id = table["token_ids"][0].as_py()[0]
    return put("logits", 0, lambda rows: [nudge(token_id, 0.01)(rows[0]), *rows[1:]])(table)


def nudge_with_sum(table: pa.Table) -> pa.Table:
    nudged = put("logprobs", 0, nudge(1, 1e-3))(table)
    return put("cumulative_logprob", 0, sum(nudged["logprobs"][0].as_py()))(nudged)


def without_last(values: list[object]) -> list[object]:
    return values[:-1]


def one_token_less(table: pa.Table) -> pa.Table:
    """The last token of row 0 goes, and everything that was said of it."""
    logprobs = table["logprobs"][0].as_py()
    by_token = ("token_ids", "logprobs", "top_ids", "top_logprobs", "logits")
    return put_all(
        *(put(name, 0, without_last) for name in by_token),
        put("num_generated_tokens", 0, 2),
        put("cumulative_logprob", 0, sum(logprobs[:-1])),
    )(table)


def other_metadata(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata({"batchwright.job": "{}"})


def flip_byte(path: Path, place: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= mask
    path.write_bytes(content)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5 rows in 2 parts: 3 tokens each, the third row an error; with everything in columns."""
    folder = tmp_path_factory.mktemp("sound")
    source = write_prompts(folder / "in.parquet", PROMPTS)
    return finish(
        echo_job(source, folder / "out", logprobs=2, output_logits=True, max_new_tokens=3,
                 ignore_eos=True, rows_per_shard=3)
    )  # fmt: skip


@pytest.fixture
def output(sound: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it, to be tampered with."""
    shutil.copytree(sound, tmp_path / "out")
    yield tmp_path / "out"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"logprobs": 0},
        {"logprobs": 3, "output_logits": True},
        {"logprobs": 0, "output_logits": True, "logits_dtype": "float16"},
        {"logprobs": 257, "output_logits": True},
        {"logprobs": 0, "output_logits": True, "frequency_penalty": 2.0},
        {"logprobs": 0, "output_logits": True, "presence_penalty": -2.0},
        {"logprobs": 0, "output_logits": True, "repetition_penalty": 1.7},
        {"logprobs": 0, "output_logits": True, "min_new_tokens": 3, "max_new_tokens": 9},
        {"logprobs": 0, "output_logits": True, "min_new_tokens": 6, "max_new_tokens": 6},
        {"logprobs": 1, "output_logits": True, "temperature": 1.0, "top_k": 9, "seed": 3},
        {"logprobs": 1, "output_format": "arrow"},
        {"logprobs": 1, "output_format": "arrow", "output_logits": True, "rows_per_shard": 2},
        {"logprobs": 1, "output_logits": True, "output_prefix": "answer_"},
        {"rows_per_shard": 1},
        {"rows_per_shard": 2, "limit": 3},
        {"keep": ()},
        {"truncation": "left", "max_model_len": 6},
        {"stop_token_ids": tuple(range(128))},
    ],
    ids=str,
)
def test_a_sound_output_is_well(tmp_path: Path, settings: dict[str, object]) -> None:
    source = write_prompts(tmp_path / "in.parquet", [*PROMPTS, "", "x" * 9000])

    verdict = verify_output(str(finish(echo_job(source, tmp_path / "out", **settings))), 0)

    assert verdict.problems == []
    assert verdict.rows == settings.get("limit", 7)
    assert verdict.parts == len(list_parts(verdict.folder))
    assert (verdict.rows_repeated, verdict.rows_same) == (0, 0)


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_an_output_of_no_rows_is_well(tmp_path: Path, file_format: str) -> None:
    source = write_prompts(tmp_path / "in.parquet", [])
    job = echo_job(source, tmp_path / "out", output_format=file_format, logprobs=1)

    verdict = repeated(finish(job))

    assert (verdict.problems, verdict.rows, verdict.parts) == ([], 0, 1)
    assert verdict.rows_repeated == 0


@pytest.mark.parametrize("by", [{"frequency_penalty": 2.0}, {"min_new_tokens": 4}])
def test_penalties_and_masks_take_logprobs_away_from_their_logits(
    tmp_path: Path, by: dict[str, object]
) -> None:
    """Else the two cases above would show nothing: 5e-6 is what verify allows."""
    source = write_prompts(tmp_path / "in.parquet", ["abc"])
    settings = {"logprobs": 0, "output_logits": True, "max_new_tokens": 4, **by}

    out = finish(echo_job(source, tmp_path / "out", **settings))

    [row] = read_part(str(out / FIRST)).to_pylist()
    logits = np.array(row["logits"], np.float64)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    away = np.abs(exact[np.arange(4), row["token_ids"]] - row["logprobs"])
    assert away.max() > 1e-5
    assert problems(out) == []


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (lambda table: table.slice(0, 2), "has 2 rows; 3 were planned."),
        (lambda table: table.take([0, 1, 2, 2]), "has 4 rows; 3 were planned."),
        (
            lambda table: table.take([0, 0, 2]),
            "rows 0 to 2 should be here, in order; row_id says otherwise.",
        ),
        (
            lambda table: table.take([1, 0, 2]),
            "rows 0 to 2 should be here, in order; row_id says otherwise.",
        ),
        (put("row_id", 1, 7), "rows 0 to 2 should be here, in order; row_id says otherwise."),
        (put("token_ids", 0, without_last), "row 0: token_ids has 2 entries for 3 tokens."),
        (put("logprobs", 1, without_last), "row 1: logprobs has 2 entries for 3 tokens."),
        (put("top_ids", 1, without_last), "row 1: top_ids has 2 entries for 3 tokens."),
        (put("top_logprobs", 0, None), "row 0: top_logprobs has None entries for 3 tokens."),
        (put("logits", 0, without_last), "row 0: logits has 2 entries for 3 tokens."),
        (
            put_all(
                put("logprobs", 0, nudge(1, 1e-3)),
                put("cumulative_logprob", 0, lambda value: value + 1e-3),
            ),
            f"row 0: logprobs add up to {NUMBER}, cumulative_logprob is {NUMBER}.\n"
            f"row 0: the logprob of token 1 is {NUMBER}, and its logits say {NUMBER}.",
        ),
        (
            nudge_with_sum,
            f"row 0: the logprob of token 1 is {NUMBER}, and its logits say {NUMBER}.",
        ),
        (
            put("cumulative_logprob", 1, lambda value: value + 1e-6),
            f"row 1: logprobs add up to {NUMBER}, cumulative_logprob is {NUMBER}.",
        ),
        (
            nudge_logit_of_first_token,
            f"row 0: the logprob of token 0 is {NUMBER}, and its logits say {NUMBER}.",
        ),
        (put("finish_reason", 0, "tired"), "row 0: finish_reason is 'tired'."),
        (
            put("finish_reason", 0, "error"),
            "row 0: finish_reason is 'error', error is null, num_generated_tokens is 3.",
        ),
        (
            put("finish_reason", 2, "stop"),
            "row 2: finish_reason is 'stop', error is set, num_generated_tokens is None.",
        ),
        (put("token_ids", 2, [65]), "row 2: token_ids has 1 entries for None tokens."),
        (put("logprobs", 2, [-1.0]), "row 2: logprobs has 1 entries for None tokens."),
        (
            put_all(put("token_ids", 2, [65]), put("num_generated_tokens", 2, 1)),
            "row 2: finish_reason is 'error', error is set, num_generated_tokens is 1.\n"
            "row 2: logprobs has None entries for 1 tokens.\n"
            "new_tokens is 7, and 6 in its record.",
        ),
        (one_token_less, "new_tokens is 5, and 6 in its record."),
        (put("num_prompt_tokens", 0, 4), "prompt_tokens is 7, and 6 in its record."),
        (put("truncated", 0, True), "truncated is 1, and 0 in its record."),
        (
            put("error", 2, lambda error: error | {"code": "empty_prompt"}),
            r"failed is {'empty_prompt': 1}, and {'null_prompt': 1} in its "
            "record.",
        ),
    ],
    ids=[
        "a row dropped", "a row too many", "a row twice", "two rows swapped", "a row_id changed",
        "a token removed", "a logprob removed", "alternatives removed", "alternatives null",
        "logits removed", "a logprob nudged", "a logprob nudged with its sum", "a sum nudged",
        "a logit nudged",
        "a reason of its own", "an error without an error", "an error that stopped",
        "an error row with a token", "an error row with a logprob", "an error row with a length",
        "a token less everywhere", "a longer prompt", "a cut prompt", "another error",
    ],
)  # fmt: skip
def test_a_part_that_was_written_anew_is_found_by_what_it_holds(
    output: Path, edits: Edit, said: str
) -> None:
    """Its record is in on it: checksum and size are those of the new file."""
    edit(output, edits)

    found = problems(output)

    wanted = [f"{FIRST}: {sentence}" for sentence in said.split("\n")]
    assert len(found) == len(wanted), found
    for sentence, pattern in zip(found, wanted, strict=True):
        assert re.fullmatch(pattern, sentence), sentence


@pytest.mark.parametrize(
    "edits",
    [
        other_metadata,
        lambda table: table.drop_columns(["finish_reason"]),
        lambda table: table.rename_columns({"text": "txt"}),
        lambda table: table.set_column(1, "id", table["id"].cast("int32")),
        lambda table: table.select(table.column_names[::-1]),
    ],
    ids=["other metadata", "a column missing", "a column renamed", "another type", "another order"],
)
def test_another_schema_is_found_though_all_parts_have_it(output: Path, edits: Edit) -> None:
    """The parts are compared with the job, and not with each other."""
    for name in (FIRST, SECOND):
        edit(output, edits, name)

    assert problems(output) == [
        f"{name}: its schema is not that of the job." for name in (FIRST, SECOND)
    ]


def test_a_prefix_hides_nothing_and_rows_are_counted_from_the_start(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", PROMPTS, finish_reason=["x"] * 5)
    out = finish(echo_job(source, tmp_path / "out", output_prefix="b_", rows_per_shard=3))
    assert problems(out) == []

    edit(out, put("b_finish_reason", 1, "tired"), SECOND)

    assert problems(out) == [f"{SECOND}: row 4: finish_reason is 'tired'."]


def flip_in_footer(folder: Path) -> None:
    flip_byte(folder / FIRST, (folder / FIRST).read_bytes().rindex(b"parquet-cpp-arrow"))


def copy_second_part(folder: Path) -> None:
    shutil.copy(folder / SECOND, folder / "part-00002.parquet")


def copy_first_part(folder: Path) -> None:
    shutil.copy(folder / FIRST, folder / SECOND)


def swap_records(folder: Path) -> None:
    first, second = (record_path(folder, name) for name in (FIRST, SECOND))
    content = first.read_text()
    first.write_text(second.read_text())
    second.write_text(content)


def cut(length: int) -> Callable[[Path], object]:
    return lambda out: (out / SECOND).write_bytes((out / SECOND).read_bytes()[:length])


CHECKSUM = "its checksum is [0-9a-f]{64}, and [0-9a-f]{64} in its record. Delete it, .*--resume."
SIZE = r"has \d+ bytes, and \d+ in its record. Delete it, .*--resume."
MANIFEST = "_manifest.json: is missing, damaged, or another version's: "
PARTS = "_manifest.json: its list of parts is not what their records say."


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (
            lambda out: (out / SECOND).unlink(),
            ["1 of 2 parts are missing, the first is part-00001.parquet. Go on with --resume."],
        ),
        (copy_second_part, ["part-00002.parquet: is a part of no shard that was planned."]),
        (
            lambda out: shutil.copy(out / FIRST, out / "part-00000.arrow"),
            ["part-00000.arrow: is a part of no shard that was planned."],
        ),
        (flip_in_footer, [f"{FIRST}: {CHECKSUM}"]),
        *((cut(length), [f"{SECOND}: {SIZE}"]) for length in (0, 100, -500, -1)),
        (lambda out: [cut(0)(out), (out / FIRST).write_bytes(b"")],
         [f"{FIRST}: {SIZE}", f"{SECOND}: {SIZE}"]),
        (copy_first_part, [f"{SECOND}: {SIZE}"]),
        (
            lambda out: amend(record_path(out, FIRST), counts={"new_tokens": 7}),
            [
                f"{FIRST}: new_tokens is 6, and 7 in its record.",
                "_manifest.json: new_tokens is 12; the records add up to 13.",
            ],
        ),
        (
            lambda out: amend(record_path(out, FIRST), counts={"rows": 4}),
            [
                f"{FIRST}: rows is 3, and 4 in its record.",
                "_manifest.json: rows is 5; the records add up to 6.",
            ],
        ),
        (lambda out: amend(record_path(out, FIRST), part={"num_rows": 4}), [PARTS]),
        (lambda out: amend(record_path(out, FIRST), part={"name": SECOND}), [PARTS]),
        (
            lambda out: record_path(out, SECOND).unlink(),
            [f"{SECOND}: has no record that is its own."],
        ),
        (
            swap_records,
            [f"{name}: has no record that is its own." for name in (FIRST, SECOND)],
        ),
        (
            lambda out: amend(record_path(out, FIRST), counts={"rows": "three"}),
            [f"{FIRST}: has no record that is its own."],
        ),
        (
            lambda out: amend(out / "_manifest.json", counts={"prompt_tokens": 1}),
            ["_manifest.json: prompt_tokens is 1; the records add up to 11."],
        ),
        (
            lambda out: amend(out / "_manifest.json", counts={"failed": {}}),
            [r"_manifest.json: failed is \{\}; the records add up to \{'null_prompt': 1\}."],
        ),
        (lambda out: rewrite_json(out / "_manifest.json", parts=[]), [PARTS]),
        (
            lambda out: rewrite_json(out / "_manifest.json", parts=[{"name": FIRST}]),
            [f"{MANIFEST}.*"],
        ),
        *(
            (lambda out, text=text: (out / "_manifest.json").write_text(text), [f"{MANIFEST}.*"])
            for text in ("", "{}", '{"counts": {"rows": 5}}', "[]", "null", '{"counts": 7}')
        ),
        (
            lambda out: (out / "_manifest.json").unlink(),
            ["_SUCCESS or _manifest.json is missing: the job has not ended. Go on with --resume."],
        ),
        (
            lambda out: (out / "_SUCCESS").unlink(),
            ["_SUCCESS or _manifest.json is missing: the job has not ended. Go on with --resume."],
        ),
    ],
)  # fmt: skip
def test_what_was_done_to_the_folder_is_said(
    output: Path, tamper: Callable[[Path], object], said: list[str]
) -> None:
    tamper(output)

    found = problems(output)

    assert len(found) == len(said), found
    for sentence, pattern in zip(found, said, strict=True):
        assert re.fullmatch(pattern, sentence), sentence


def test_a_job_that_was_broken_off_is_told_how_to_go_on(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", PROMPTS)
    plan = prepared(echo_job(source, tmp_path / "out", rows_per_shard=2))
    nothing = problems(tmp_path / "out")
    open_worker(plan).run_shard(plan.shards[1])

    verdict = verify_output(str(tmp_path / "out"), 3)

    assert nothing == [
        "3 of 3 parts are missing, the first is part-00000.parquet. Go on with --resume."
    ]
    assert verdict.problems == [
        "2 of 3 parts are missing, the first is part-00000.parquet. Go on with --resume.",
        NOT_SOUND,
    ]
    assert (verdict.rows, verdict.parts, verdict.rows_repeated) == (2, 1, 0)


def test_what_is_no_output_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(OutputError, match=f"{folder}: not the output of a job") as caught:
            verify(folder)
        assert exit_code(caught.value) == 1


@pytest.mark.parametrize("lacking", [None, "output_format", "kept_columns", "min_new_tokens"])
def test_a_folder_of_another_version_is_an_error(output: Path, lacking: str | None) -> None:
    """What cannot be understood once ended in a traceback."""
    job = json.loads((output / "_job.json").read_text())
    job["identity"].pop(lacking, None)
    (output / "_job.json").write_text(json.dumps(job) if lacking else "{}")

    with pytest.raises(OutputError, match=r"_job\.json and _plan\.json are from another version"):
        verify_output(str(output), 0)


@pytest.mark.parametrize("token_id", [257, 999, -1])
def test_a_token_that_is_no_word_is_found_and_not_raised(output: Path, token_id: int) -> None:
    edit(output, put("token_ids", 0, [token_id, 1, 2]))

    assert problems(output) == [f"{FIRST}: row 0: a token id is none of 257 words."]


def test_any_flipped_byte_is_found_and_none_is_raised(tmp_path: Path) -> None:
    """A damaged file must not be trusted: its names may be no UTF-8, its columns may be gone."""
    source = write_prompts(tmp_path / "in.parquet", ["abc", None])
    out = finish(echo_job(source, tmp_path / "out", logprobs=1))
    content = (out / FIRST).read_bytes()

    for place in range(0, len(content), 97):
        for mask in (0x01, 0x80):
            flip_byte(out / FIRST, place, mask)
            assert problems(out), f"byte {place}, mask {mask}"
            (out / FIRST).write_bytes(content)


def test_a_damaged_arrow_part_does_not_end_the_process(tmp_path: Path) -> None:
    """Arrow trusts the offsets in its files: one that points far away ended the process.

    In a process of its own, since pytest would end too.
    """
    source = write_prompts(tmp_path / "in.parquet", ["abc", "def"])
    out = finish(echo_job(source, tmp_path / "out", output_format="arrow", ignore_eos=True))
    path = out / "part-00000.arrow"
    content = path.read_bytes()
    # Of finish_reason: length, length.
    offsets = np.array([0, 6, 12], np.int32).tobytes()
    assert content.count(offsets) == 1
    flip_byte(path, content.index(offsets) + 11, 0x7F)

    result = run_command("verify", out)

    assert result.returncode == 1, result.stderr
    assert "part-00000.arrow: its checksum is" in result.stdout


@pytest.mark.parametrize("keep", [("prompt", "logprobs"), ("prompt", "logits"), None])
def test_columns_of_an_earlier_job_are_not_taken_for_ours(
    output: Path, tmp_path: Path, keep: tuple[str, ...] | None
) -> None:
    """An output is the input of the next job: its logprobs are columns like any other there."""
    second = finish(
        echo_job(output / FIRST, tmp_path / "second", keep=keep,
                 output_prefix="" if keep else "b_", max_new_tokens=2)
    )  # fmt: skip

    assert problems(second) == []


def test_an_input_column_that_is_called_like_ours_may_hold_anything(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", "b"], logprobs=["x", "y"])

    assert problems(finish(echo_job(source, tmp_path / "out"))) == []


def constant_output(folder: Path, logits: list[float], **settings: object) -> Path:
    """8 rows of a model that has these logits at every step."""
    source = folder / "in.parquet"
    pq.write_table(pa.table({"prompt_token_ids": [[0]] * 8}), source)
    model = ModelRef(save(constant_model(logits), folder / "model"))
    settings = {"logprobs": 0, "output_logits": True, "temperature": 1.0, **settings}
    return finish(make_job(source, folder / "out", model, **settings))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_large_logits_are_stored_as_well_as_their_type_can(tmp_path: Path, dtype: str) -> None:
    """Near 100 two float16 numbers are 0.0625 apart, so a logprob may be that far away."""
    out = constant_output(tmp_path, [100.02, 100.41, 99.97, 99.13], logits_dtype=dtype)

    assert problems(out) == []


def test_logits_that_float16_cannot_hold_are_no_fault(tmp_path: Path) -> None:
    """docs/output.md: in float16 a logit beyond 65,504 becomes infinite."""
    with np.errstate(over="ignore"):
        out = constant_output(tmp_path, [70000.0, 69999.0, 1.0], logits_dtype="float16")

    assert problems(out) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"logprobs": 2, "temperature": 1.0, "seed": 9},
        {"logprobs": 2, "temperature": 1.0, "output_logits": True, "rows_per_batch": 2},
        {"output_format": "arrow", "output_prefix": "b_", "logprobs": 0},
        {"logprobs": 0, "frequency_penalty": 1.5, "min_new_tokens": 4, "truncation": "right"},
        {"limit": 4, "keep": ()},
    ],
    ids=str,
)
def test_rows_of_the_echo_engine_repeat_to_the_last_bit(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    """Error rows too: they repeat as error rows."""
    prompts = [*PROMPTS, "", "x" * 9000, "lm", "n" * 30]
    source = write_prompts(tmp_path / "in.parquet", prompts)
    settings = {"max_new_tokens": 12, "rows_per_shard": 4, **settings}
    out = finish(echo_job(source, tmp_path / "out", **settings))

    verdict = repeated(out)

    num_rows = settings.get("limit", len(prompts))
    assert verdict.problems == []
    assert (verdict.rows_repeated, verdict.rows_same) == (num_rows, num_rows)
    assert verdict.logprob_difference == 0.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_torch_model_repeat_to_the_last_bit(
    tmp_path: Path, models: dict[str, str], temperature: float
) -> None:
    """Rows of unlike length, in batches of three: with other neighbours the last bits change."""
    rows = [[(7 * i + j) % 64 for j in range(1 + 5 * i % 13)] for i in range(11)]
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt_token_ids": [*rows, [64], None]}), source)
    job = make_job(
        source, tmp_path / "out", ModelRef(models["positions"]), temperature=temperature,
        max_new_tokens=8, logprobs=3, output_logits=True, rows_per_batch=3, rows_per_shard=6,
    )  # fmt: skip

    verdict = repeated(finish(job))

    assert verdict.problems == []
    assert (verdict.rows_repeated, verdict.rows_same) == (13, 13)
    assert verdict.logprob_difference == 0.0


def test_rows_are_answered_again_among_their_old_neighbours(
    tmp_path: Path, models: dict[str, str]
) -> None:
    """Alone, some of these rows have other last bits: sums are grouped by batch."""
    rows = [[(7 * i + j) % 64 for j in range(1 + 5 * i % 13)] for i in range(24)]
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt_token_ids": rows}), source)
    job = make_job(
        source, tmp_path / "out", ModelRef(models["positions"]), temperature=1.0,
        max_new_tokens=20, logprobs=0, rows_per_batch=24, rows_per_shard=24,
    )  # fmt: skip
    out = finish(job)

    samples = [repeated(out, num_rows) for num_rows in (1, 2, 3, 8)]

    assert [verdict.problems for verdict in samples] == [[]] * 4
    assert [verdict.rows_same for verdict in samples] == [1, 2, 3, 8]


def test_text_of_a_torch_model_repeats(tmp_path: Path, models: dict[str, str]) -> None:
    source = write_prompts(tmp_path / "in.parquet", [">", None, "", "a>"])
    job = make_job(source, tmp_path / "out", ModelRef(models["emoji"]), max_new_tokens=6)

    verdict = repeated(finish(job))

    assert (verdict.problems, verdict.rows_same) == ([], 4)


@pytest.mark.parametrize(("sample", "num_rows"), [(1, 1), (2, 2), (5, 5), (6, 5), (1000, 5)])
def test_so_many_rows_are_answered_again_but_none_twice(
    tmp_path: Path, sample: int, num_rows: int
) -> None:
    source = write_prompts(tmp_path / "in.parquet", PROMPTS)
    out = finish(echo_job(source, tmp_path / "out", rows_per_shard=2))

    verdict = repeated(out, sample)

    assert (verdict.rows_repeated, verdict.rows_same) == (num_rows, num_rows)


def test_rows_that_end_their_worker_are_not_run_again(tmp_path: Path) -> None:
    """They were left out of their batches, and would end this process."""
    source = write_prompts(tmp_path / "in.parquet", ["a", "b <exit>", "c", "d <raise>"])
    job = make_job(source, tmp_path / "out", ModelRef("faulty", engine="echo"), logprobs=1)
    crash = RowError("generate", "worker_crash", "It ended.", attempts=2, retryable=True)
    fault = RowError("generate", "engine_error", "It raised.", attempts=2)

    verdict = repeated(finish(job, Lessons(((1, crash), (3, fault)))))

    # What may pass when it is tried again is not compared.
    assert (verdict.problems, verdict.rows_repeated, verdict.rows_same) == ([], 3, 3)


def test_rows_of_halved_batches_are_answered_in_halved_batches(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", "b <memory>", "c", "d"])
    job = make_job(source, tmp_path / "out", ModelRef("faulty", engine="echo"), logprobs=1)

    verdict = repeated(finish(job, Lessons(halvings=1)))

    assert (verdict.problems, verdict.rows_same) == ([], 4)


@pytest.mark.parametrize("is_short", [True, False])
def test_a_row_that_did_not_fit_alone_is_no_fault_whether_it_fits_now_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", "b <huge>", "c"])
    job = make_job(source, tmp_path / "out", ModelRef("faulty", engine="echo"), rows_per_batch=1)
    out = finish(job)
    if not is_short:
        monkeypatch.setattr("workers.engines.faults.play_faults", lambda *_: None)

    verdict = repeated(out)

    assert (verdict.problems, verdict.rows_repeated, verdict.rows_same) == ([], 2, 2)


def test_rows_that_were_mended_are_not_answered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were in other batches, so that their last bits may be others."""
    source = write_prompts(tmp_path / "in.parquet", ["a", "b <huge>", "c"])
    model = ModelRef("faulty", engine="echo")
    job = make_job(source, tmp_path / "out", model, rows_per_batch=1, rows_per_shard=3)
    plan = prepared(job)
    worker = open_worker(plan)
    worker.run_shard(plan.shards[0])
    monkeypatch.setattr("workers.engines.faults.play_faults", lambda *_: None)
    write_manifest(plan, None, [worker.retry_shard(plan.shards[0])], 0.0)
    mark_success(plan.job.output)

    verdict = repeated(Path(plan.job.output))

    assert (verdict.problems, verdict.rows_repeated, verdict.rows_same) == ([], 2, 2)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """3 rows of 3 tokens in one part, with nothing beside the tokens that could betray them."""
    source = write_prompts(tmp_path / "in.parquet", ["abc", "de", "f"])
    return finish(echo_job(source, tmp_path / "out", max_new_tokens=3, ignore_eos=True))


def test_altered_tokens_are_found_when_rows_are_answered_again(plain: Path) -> None:
    token_id = pq.read_table(plain / FIRST)["token_ids"][1].as_py()[2]
    edit(plain, put("token_ids", 1, lambda ids: [*ids[:2], (token_id + 1) % 257]))
    assert problems(plain) == []

    verdict = repeated(plain)

    assert verdict.problems == [
        f"row 1, answered again: new token 2 was {(token_id + 1) % 257}, is now {token_id}."
    ]
    assert (verdict.rows_repeated, verdict.rows_same) == (3, 2)


def test_a_sample_lies_evenly_over_the_output(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(9)])
    out = finish(echo_job(source, tmp_path / "out", ignore_eos=True, rows_per_shard=9))
    edit(out, put_all(*(put("token_ids", row, [1, 2, 3, 4]) for row in range(9))))

    found = [repeated(out, sample).problems for sample in (1, 3, 4)]

    assert [[sentence.split(",")[0] for sentence in sentences] for sentences in found] == [
        ["row 0"],
        ["row 0", "row 3", "row 6"],
        ["row 0", "row 2", "row 4", "row 6"],
    ]


def test_an_answer_that_was_cut_is_found_when_rows_are_answered_again(plain: Path) -> None:
    edit(
        plain,
        put_all(put("token_ids", 2, without_last), put("num_generated_tokens", 2, 2)),
        new_tokens=8,
    )
    amend(plain / "_manifest.json", counts={"new_tokens": 8})
    assert problems(plain) == []

    assert repeated(plain).problems == ["row 2, answered again: had 2 new tokens, has 3 now."]


@pytest.mark.parametrize(
    ("column", "row", "value", "said"),
    [
        ("finish_reason", 0, "stop", "finish_reason was 'stop', is now 'length'"),
        ("stop_reason", 0, "7", "stop_reason was '7', is now None"),
        ("seed", 1, 1, r"seed was 1, is now \d+"),
        ("text", 2, "no", "text was 'no', is now '.*'"),
        ("text", 2, None, "text was None, is now '.*'"),
    ],
)
def test_another_value_is_found_when_rows_are_answered_again(
    plain: Path, column: str, row: int, value: object, said: str
) -> None:
    edit(plain, put(column, row, value))
    assert problems(plain) == []

    [sentence] = repeated(plain).problems

    assert re.fullmatch(rf"row {row}, answered again: {said}\.", sentence), sentence


def test_another_error_is_found_when_rows_are_answered_again(output: Path) -> None:
    code = {"empty_prompt": 1}
    edit(output, put("error", 2, lambda error: error | {"code": "empty_prompt"}), failed=code)
    amend(output / "_manifest.json", counts={"failed": code})
    assert problems(output) == []

    assert repeated(output).problems == [
        "row 2, answered again: error was 'empty_prompt', is now 'null_prompt'."
    ]


def nudge_first_logprob(folder: Path, by: float) -> None:
    """The sum goes along, so that nothing is wrong with the part by itself."""
    table = put("logprobs", 0, nudge(0, by))(pq.read_table(folder / FIRST))
    total = sum(table["logprobs"][0].as_py())
    rewrite(folder, FIRST, put("cumulative_logprob", 0, total)(table))
    assert problems(folder) == []


@pytest.fixture
def with_logprobs(tmp_path: Path) -> Path:
    """2 rows with logprobs, and no logits that could betray them."""
    source = write_prompts(tmp_path / "in.parquet", ["abc", "de"])
    return finish(echo_job(source, tmp_path / "out", logprobs=0, ignore_eos=True))


def test_altered_logprobs_are_found_when_rows_are_answered_again(with_logprobs: Path) -> None:
    nudge_first_logprob(with_logprobs, 0.5)

    verdict = repeated(with_logprobs)

    assert verdict.problems == ["row 0, answered again: a logprob is 0.5 nats away."]
    # 1e-6: float32 near 4.
    assert verdict.logprob_difference == pytest.approx(0.5, abs=1e-6)


def test_other_last_bits_are_told_and_are_no_fault(with_logprobs: Path) -> None:
    """They are another processor's."""
    nudge_first_logprob(with_logprobs, 1e-4)

    verdict = repeated(with_logprobs)

    assert verdict.problems == []
    assert (verdict.rows_repeated, verdict.rows_same) == (2, 1)
    assert verdict.logprob_difference == pytest.approx(1e-4, abs=1e-6)


def test_a_logprob_that_is_no_number_is_found_when_rows_are_answered_again(
    with_logprobs: Path,
) -> None:
    """NaN is not greater than what is allowed, and not less. Nor is it a number in JSON."""
    nudge_first_logprob(with_logprobs, float("nan"))

    said = json.loads(
        verify(with_logprobs, "--json", "--rerun-sample", 2).output, parse_constant=pytest.fail
    )

    assert said["problems"] == ["row 0, answered again: a logprob is inf nats away."]
    assert said["logprob_difference"] is None


def test_a_copy_is_compared_with_its_own_rows(plain: Path, tmp_path: Path) -> None:
    """The job names the folder that it was written to, and the rows lie here."""
    shutil.copytree(plain, tmp_path / "copy")
    edit(tmp_path / "copy", put("token_ids", 0, [1, 2, 3]))

    assert len(repeated(tmp_path / "copy").problems) == 1
    assert repeated(plain).problems == []


def test_an_output_that_was_moved_is_answered_again(plain: Path, tmp_path: Path) -> None:
    plain.rename(tmp_path / "moved")

    verdict = repeated(tmp_path / "moved")

    assert (verdict.problems, verdict.rows_same) == ([], 3)


def test_nothing_is_answered_again_where_something_is_wrong(plain: Path) -> None:
    edit(plain, put("finish_reason", 0, "tired"))

    verdict = repeated(plain)

    assert verdict.problems == [f"{FIRST}: row 0: finish_reason is 'tired'.", NOT_SOUND]
    assert verdict.rows_repeated == 0


def test_a_changed_input_is_said(plain: Path) -> None:
    write_prompts(plain.parent / "in.parquet", ["abc", "de", "fghijk"])

    [sentence] = repeated(plain).problems

    assert re.fullmatch(
        r"rows cannot be answered as they were: input file in\.parquet: size_bytes was \d+, is now "
        r"\d+; input file in\.parquet: mtime_ns was \d+, is now \d+\.",
        sentence,
    )


def test_an_input_that_is_gone_is_said(plain: Path) -> None:
    (plain.parent / "in.parquet").unlink()

    assert repeated(plain).problems == [
        f"rows cannot be answered again: {plain.parent}/in.parquet: no such file or folder."
    ]


def test_a_changed_model_is_said(tmp_path: Path) -> None:
    out = constant_output(tmp_path, [2.0, 1.0, 0.0])
    save(constant_model([2.0, 1.0, 0.5]), tmp_path / "model")

    [sentence] = repeated(out).problems

    hash_ = '"[0-9a-f]{59}…'
    assert re.fullmatch(
        f"rows cannot be answered as they were: model file model.safetensors was {hash_}, is now "
        rf"{hash_}\.",
        sentence,
    )
    assert problems(out) == []


def test_a_model_that_is_gone_is_said(tmp_path: Path) -> None:
    out = constant_output(tmp_path, [2.0, 1.0, 0.0])
    shutil.rmtree(tmp_path / "model")

    [sentence] = repeated(out).problems

    assert sentence.startswith(f"rows cannot be answered again: {tmp_path}/model: ")


def test_the_command_says_what_is_wrong(output: Path) -> None:
    (output / "_SUCCESS").unlink()
    copy_second_part(output)

    result = verify(output)

    assert result.return_value == 1
    assert result.output == (
        "part-00002.parquet: is a part of no shard that was planned.\n"
        "_SUCCESS or _manifest.json is missing: the job has not ended. Go on with --resume.\n"
        "5 rows in 3 parts: 2 problems\n"
    )


def test_the_command_says_what_came_of_the_sample(plain: Path) -> None:
    result = verify(plain, "--rerun-sample", 2)

    assert result.return_value == 0
    assert result.output == (
        "2 rows answered again: 2 the same to the last bit, the greatest difference 0 nats\n"
        f"3 rows in 1 part: {WELL}\n"
    )


def test_the_command_lists_only_the_first_of_many_problems(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(25)])
    out = finish(echo_job(source, tmp_path / "out", rows_per_shard=25))
    edit(out, put_all(*(put("finish_reason", row, "tired") for row in range(25))))

    lines = verify(out).output.splitlines()

    assert lines[19] == f"{FIRST}: row 19: finish_reason is 'tired'."
    assert lines[20:] == ["and 5 more", "25 rows in 1 part: 25 problems"]


def test_json_is_one_object(plain: Path) -> None:
    result = verify(plain, "--json", "--rerun-sample", 3)

    assert json.loads(result.output) == {
        "folder": str(plain), "rows": 3, "parts": 1, "problems": [], "is_whole": True,
        "rows_repeated": 3, "rows_same": 3, "logprob_difference": 0.0,
    }  # fmt: skip

    (plain / "_SUCCESS").unlink()
    broken = verify(plain, "--json")
    assert broken.return_value == 1
    assert json.loads(broken.output)["is_whole"] is False
    assert len(json.loads(broken.output)["problems"]) == 1


def test_the_command_ends_with_its_code(output: Path, tmp_path: Path) -> None:
    well = run_command("verify", output)
    (output / "_SUCCESS").unlink()
    broken = run_command("verify", output)
    nothing = run_command("verify", tmp_path / "nothing")
    usage = run_command("verify", output, "--rerun-sample", "-1")

    codes = [result.returncode for result in (well, broken, nothing, usage)]
    assert codes == [0, 1, 1, 2]
    assert well.stdout == f"5 rows in 2 parts: {WELL}\n"
    assert nothing.stdout == ""
    assert nothing.stderr.startswith(f"Error: {tmp_path}/nothing: not the output of a job: ")


def test_an_input_that_stands_beside_another_answer_is_found(tmp_path: Path) -> None:
    """Rows of the input shifted against the answers: only who answers them again can know."""
    source = write_prompts(tmp_path / "in.parquet", ["a", "b", "c", "d"])
    folder = finish(echo_job(source, tmp_path / "out"))
    edit(folder, lambda table: table.set_column(
        table.schema.get_field_index("prompt"),
        table.schema.field("prompt"),
        table["prompt"].combine_chunks()[::-1],
    ))  # fmt: skip

    verdict = repeated(folder)

    assert verdict.problems[0] == (
        "row 0, answered again: the input's prompt is not what stands beside the answer."
    )
    assert verdict.rows_same == 0
