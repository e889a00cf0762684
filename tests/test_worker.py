"""A worker without Ray: rows in, parts out, one row for every row, whatever is in them."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import (
    echo_job,
    make_job,
    open_worker,
    prepared,
    read_rows,
    run_here,
    write_prompts,
)
from tiny_models import byte_tokenizer, save, table_model

from jobs.completion import RowError
from jobs.folder import list_parts
from jobs.lessons import Lessons
from jobs.model import ModelRef
from jobs.prompt import Prompt
from jobs.sampling import row_seed
from runner.plan import make_plan
from workers.generate import generate, open_pipeline
from workers.prepare import prepare_prompts


def write_ids(path: Path, rows: list[object], type_: pa.DataType | None = None) -> Path:
    column = pa.array(rows, type_ or pa.list_(pa.int64()))
    pq.write_table(pa.table({"prompt_token_ids": column}), path)
    return path


def codes(table: pa.Table) -> list[str | None]:
    return [None if error is None else error["code"] for error in table["error"].to_pylist()]


def test_every_row_comes_back_once_in_order(tmp_path: Path) -> None:
    """Case O10: the first batch is the slowest, and nothing follows from it."""
    prompts = [f"{'x' * (200 - i)} {i}" for i in range(50)]
    source = write_prompts(tmp_path / "in.parquet", prompts)

    table, counts = run_here(echo_job(source, tmp_path / "out", rows_per_shard=9))

    assert table["row_id"].to_pylist() == list(range(50))
    assert table["id"].to_pylist() == list(range(50))
    assert table["prompt"].to_pylist() == prompts
    assert counts.rows == 50
    assert counts.failed_rows == 0
    assert len(list_parts(str(tmp_path / "out"))) == 6


@pytest.mark.parametrize("limits", [{}, {"max_batch_tokens": 200}])
def test_a_schedule_changes_when_rows_run_and_not_what_they_answer(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    """The echo engine's answers end where they like. Places of the batch stand empty less."""
    prompts = [f"{'x' * (i % 17)} {i}" for i in range(120)]
    source = write_prompts(tmp_path / "in.parquet", prompts)
    tables, idle = {}, {}
    for schedule in ("fixed", "refill"):
        job = echo_job(
            source, tmp_path / schedule, schedule=schedule, rows_per_batch=8, rows_per_shard=60,
            max_new_tokens=64, logprobs=2, **limits,
        )  # fmt: skip
        tables[schedule], counts = run_here(job)
        idle[schedule] = counts.idle_share

    assert tables["fixed"].equals(tables["refill"])
    assert len({len(ids) for ids in tables["fixed"]["token_ids"].to_pylist()}) > 10
    assert idle["refill"] < idle["fixed"]


def test_bad_rows_are_errors_and_their_neighbours_are_untouched(tmp_path: Path) -> None:
    """Cases G28, I01: an empty prompt once ended an engine and all other requests."""
    prompts = ["abc", "", "def", None, "x" * 9000, "ghi"]
    source = write_prompts(tmp_path / "in.parquet", prompts)
    clean = write_prompts(tmp_path / "clean.parquet", ["abc", "def", "ghi"])

    table, counts = run_here(echo_job(source, tmp_path / "out"))
    undisturbed, _ = run_here(echo_job(clean, tmp_path / "clean"))

    assert codes(table) == [
        None, "empty_prompt", None, "null_prompt", "context_length_exceeded", None,
    ]  # fmt: skip
    assert dict(counts.failed) == {
        "empty_prompt": 1, "null_prompt": 1, "context_length_exceeded": 1,
    }  # fmt: skip
    answers = [ids for ids in table["token_ids"].to_pylist() if ids is not None]
    assert answers == undisturbed["token_ids"].to_pylist()
    assert table["finish_reason"].to_pylist().count("error") == 3
    assert table["error"][4].as_py()["message"] == (
        "The prompt has 9000 tokens and needs room for 1 more; a row may hold 8192."
    )
    assert table["num_prompt_tokens"].to_pylist() == [3, None, 3, None, 9000, 3]


def test_bad_token_ids_are_errors_of_their_rows(tmp_path: Path, models: dict[str, str]) -> None:
    """Cases G30, G32."""
    rows = [[3, 4], [3, 12], [-1], [5279552648203111001], [None], [], [1, 2]]
    source = write_ids(tmp_path / "in.parquet", rows)

    table, _ = run_here(make_job(source, tmp_path / "out", ModelRef(models["succ12"])))

    assert codes(table) == [
        None, *["invalid_token_id"] * 4, "empty_prompt", None,
    ]  # fmt: skip
    assert table["token_ids"].to_pylist()[0] == [5, 6, 7, 8]
    assert table["token_ids"].to_pylist()[-1] == [3, 4, 5, 6]
    assert table["error"][1].as_py()["message"] == (
        "The token id at place 1 is 12; the model knows 0 to 11."
    )
    assert table["text"].null_count == 7


def test_prompts_at_the_limit_of_the_model(tmp_path: Path, models: dict[str, str]) -> None:
    """Case G29: a context of 64 tokens."""
    rows = [[1] * 63, [1] * 64, [1] * 65, [1] * 5000, [3, 4]]
    source = write_ids(tmp_path / "in.parquet", rows)

    table, _ = run_here(make_job(source, tmp_path / "out", ModelRef(models["succ12"])))

    too_long = "context_length_exceeded"
    assert codes(table) == [None, too_long, too_long, too_long, None]
    assert table["token_ids"].to_pylist()[0] == [2]
    assert table["finish_reason"].to_pylist()[0] == "length"
    assert table["token_ids"].to_pylist()[-1] == [5, 6, 7, 8]


@pytest.mark.parametrize(("truncation", "first"), [("left", 7), ("right", 0)])
def test_truncation_is_flagged_and_leaves_room_for_the_whole_answer(
    tmp_path: Path, models: dict[str, str], truncation: str, first: int
) -> None:
    """Else a prompt of 63 tokens would get one new token, and one of 64 tokens would get four."""
    rows = [[i % 12 for i in range(67)], [1] * 61, [1] * 60, [3, 4]]
    source = write_ids(tmp_path / "in.parquet", rows)

    table, counts = run_here(
        make_job(source, tmp_path / "out", ModelRef(models["succ12"]), truncation=truncation)
    )

    assert table["truncated"].to_pylist() == [True, True, False, False]
    assert table["num_prompt_tokens"].to_pylist() == [60, 60, 60, 2]
    assert table["num_generated_tokens"].to_pylist() == [4] * 4
    assert table["token_ids"][0].as_py()[0] == (first + 60) % 12
    assert (counts.truncated, counts.out_of_room) == (2, 0)


def test_answers_that_end_for_want_of_room_are_counted(
    tmp_path: Path, models: dict[str, str]
) -> None:
    source = write_ids(tmp_path / "in.parquet", [[1] * 63, [1] * 62, [1] * 60, [3, 4]])

    table, counts = run_here(make_job(source, tmp_path / "out", ModelRef(models["succ12"])))

    assert table["num_generated_tokens"].to_pylist() == [1, 2, 4, 4]
    assert counts.out_of_room == 2


@pytest.mark.parametrize(
    ("truncation", "tokens"), [("left", [257, *b"4567"]), ("right", [257, *b"0123"])]
)
def test_what_the_tokenizer_adds_is_not_cut_off(
    tmp_path: Path, truncation: str, tokens: list[int]
) -> None:
    model = table_model([(i + 1) % 258 for i in range(258)])
    folder = save(model, tmp_path / "model", tokenizer=byte_tokenizer(bos=True))
    source = write_prompts(tmp_path / "in.parquet", ["01234567"])
    job = make_job(
        source, tmp_path / "out", ModelRef(folder), truncation=truncation, max_model_len=9
    )
    plan = make_plan(job)
    worker = open_worker(plan)

    [prompt] = prepare_prompts(plan, worker._engine, [Prompt(0, 0, text="01234567")])

    assert list(prompt.token_ids) == tokens
    assert prompt.truncated


def test_dictionaries_that_differ_by_file_go_into_one_arrow_part(tmp_path: Path) -> None:
    for number, words in enumerate((["x", "y"], ["z", "x"])):
        column = pa.array(words).dictionary_encode()
        write_prompts(tmp_path / "in" / f"{number}.parquet", ["a", "b"], word=column)

    table, _ = run_here(
        echo_job(tmp_path / "in", tmp_path / "out", output_format="arrow", output_logits=True,
                 rows_per_batch=1)
    )  # fmt: skip

    assert table["word"].to_pylist() == ["x", "y", "z", "x"]


def test_long_lists_of_alternatives_are_written_batch_by_batch_too(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(20)])
    row_bytes = 4 * 8 * 200

    table, counts = run_here(
        echo_job(source, tmp_path / "out", logprobs=200, rows_per_batch=9, rows_per_shard=20,
                 logits_budget_bytes=6 * row_bytes)
    )  # fmt: skip

    assert counts.batches == 7
    assert table["row_id"].to_pylist() == list(range(20))
    assert len(table["top_ids"][0].as_py()[0]) == 200


def test_a_fixed_size_list_of_ids_is_read_too(tmp_path: Path, models: dict[str, str]) -> None:
    source = write_ids(tmp_path / "in.parquet", [[3, 4], [5, 6]], pa.list_(pa.int32(), 2))

    table, _ = run_here(make_job(source, tmp_path / "out", ModelRef(models["succ12"])))

    assert table["token_ids"].to_pylist() == [[5, 6, 7, 8], [7, 8, 9, 10]]


@pytest.mark.parametrize(("max_new_tokens", "text"), [(6, "\U0001f642"), (2, "�")])
def test_characters_of_several_tokens_are_decoded_together(
    tmp_path: Path, models: dict[str, str], max_new_tokens: int, text: str
) -> None:
    """Case G43: cut inside a character, the ids stay and the text shows one replacement."""
    source = write_prompts(tmp_path / "in.parquet", [">"])

    table, _ = run_here(
        make_job(source, tmp_path / "out", ModelRef(models["emoji"]), max_new_tokens=max_new_tokens)
    )

    assert table["token_ids"].to_pylist() == [[240, 159, 153, 130, 256][:max_new_tokens]]
    assert table["text"].to_pylist() == [text]


def test_a_stop_id_has_a_reason_and_eos_has_none(tmp_path: Path, models: dict[str, str]) -> None:
    source = write_prompts(tmp_path / "in.parquet", [">"])
    job = make_job(source, tmp_path / "out", ModelRef(models["emoji"]), max_new_tokens=9)
    stopped = make_job(
        source, tmp_path / "stopped", ModelRef(models["emoji"]), stop_token_ids=(153,)
    )

    eos, _ = run_here(job)
    stop, _ = run_here(stopped)

    assert (eos["finish_reason"].to_pylist(), eos["stop_reason"].to_pylist()) == (["stop"], [None])
    assert (stop["finish_reason"].to_pylist(), stop["stop_reason"].to_pylist()) == (
        ["stop"], ["153"],
    )  # fmt: skip


def test_text_gets_the_special_tokens_of_its_tokenizer_once(tmp_path: Path) -> None:
    """Part of case G48: a plain-text prompt has exactly one BOS, and none if none is wanted."""
    model = table_model([(i + 1) % 258 for i in range(258)])
    folder = save(model, tmp_path / "model", tokenizer=byte_tokenizer(bos=True))
    source = write_prompts(tmp_path / "in.parquet", ["ab"])

    lengths = {}
    for choice in ("auto", "yes", "no"):
        table, _ = run_here(
            make_job(source, tmp_path / choice, ModelRef(folder), add_special_tokens=choice)
        )
        lengths[choice] = table["num_prompt_tokens"].to_pylist()
    assert lengths == {"auto": [3], "yes": [3], "no": [2]}


def test_an_empty_prompt_is_an_error_even_where_bos_would_be_added(tmp_path: Path) -> None:
    model = table_model([(i + 1) % 258 for i in range(258)])
    folder = save(model, tmp_path / "model", tokenizer=byte_tokenizer(bos=True))
    source = write_prompts(tmp_path / "in.parquet", ["", "a"])

    table, _ = run_here(make_job(source, tmp_path / "out", ModelRef(folder)))

    assert codes(table) == ["empty_prompt", None]


def test_rows_draw_from_seeds_of_their_own_and_generate_repeats_them(
    tmp_path: Path, models: dict[str, str]
) -> None:
    """Cases G16, G17: 32 equal prompts differ, and their draws follow from job seed and row."""
    source = write_ids(tmp_path / "in.parquet", [[0]] * 32)
    sampling = {"temperature": 1.0, "seed": 7, "max_new_tokens": 16}

    table, _ = run_here(make_job(source, tmp_path / "a", ModelRef(models["const5"]), **sampling))
    resharded, _ = run_here(
        make_job(source, tmp_path / "b", ModelRef(models["const5"]), **sampling,
                 rows_per_batch=5, rows_per_shard=7)
    )  # fmt: skip

    answers = table["token_ids"].to_pylist()
    assert answers == resharded["token_ids"].to_pylist()
    # 16 draws of .636 .234 ...: two rows agree with a probability of 1e-5.
    assert len({tuple(answer) for answer in answers}) == 32
    assert table["seed"].to_pylist() == [row_seed(7, row) for row in range(32)]
    pipeline = open_pipeline(models["const5"])
    for row in (0, 9, 31):
        alone = generate(
            pipeline, [[0]], max_new_tokens=16, temperature=1.0, seed=table["seed"][row].as_py()
        )
        assert alone.sequences[0][1:] == answers[row]


def test_a_row_whose_logits_are_nan_is_an_error_of_its_own(tmp_path: Path) -> None:
    import torch
    from tiny_models import successor_model

    model = successor_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[10] = torch.nan
    folder = save(model, tmp_path / "model")
    source = write_ids(tmp_path / "in.parquet", [[8], [1]])

    table, _ = run_here(make_job(source, tmp_path / "out", ModelRef(folder)))

    assert codes(table) == ["nan_logits", None]
    assert table["token_ids"].to_pylist() == [None, [2, 3, 4, 5]]
    assert table["error"][0].as_py()["stage"] == "generate"


def test_logprobs_and_logits_agree_with_each_other(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["abc", None, "defgh", "i"])

    table, _ = run_here(
        echo_job(source, tmp_path / "out", logprobs=3, output_logits=True, max_new_tokens=5)
    )

    for row in table.to_pylist():
        if row["error"] is not None:
            assert row["logits"] is None
            continue
        logits = np.array(row["logits"], np.float64)
        exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        steps = np.arange(len(row["token_ids"]))
        np.testing.assert_allclose(row["logprobs"], exact[steps, row["token_ids"]], atol=5e-6)
        np.testing.assert_allclose(
            row["top_logprobs"], exact[steps[:, None], row["top_ids"]], atol=5e-6
        )
        assert row["cumulative_logprob"] == pytest.approx(sum(row["logprobs"]), abs=1e-12)
        assert logits.argmax(axis=1).tolist() == row["token_ids"]


def test_logits_change_no_token_and_batches_are_within_the_budget(tmp_path: Path) -> None:
    prompts = [str(i) * (i + 1) for i in range(20)]
    source = write_prompts(tmp_path / "in.parquet", prompts)
    row_bytes = 4 * 257 * 4

    plain, _ = run_here(echo_job(source, tmp_path / "a"))
    table, counts = run_here(
        echo_job(source, tmp_path / "b", output_logits=True, rows_per_batch=9, rows_per_shard=20,
                 logits_budget_bytes=6 * row_bytes)
    )  # fmt: skip

    assert counts.batches == 7
    assert table["token_ids"].to_pylist() == plain["token_ids"].to_pylist()
    assert [len(logits) for logits in table["logits"].to_pylist()] == [
        len(ids) for ids in table["token_ids"].to_pylist()
    ]


MEASURE = """
import sys
from pathlib import Path
from running import echo_job, prepared, run_plan

def mebibytes(name):
    [line] = [line for line in open("/proc/self/status") if line.startswith(name)]
    return int(line.split()[1]) / 1024

folder = Path(sys.argv[1])
source = folder / "in.parquet"
settings = dict(ignore_eos=True, rows_per_batch=64, rows_per_shard=384, output_logits=True,
                logits_budget_bytes=64 * 2**20, max_batch_tokens=10**6)
run_plan(prepared(echo_job(source, folder / "warm", limit=64, max_new_tokens=4, **settings)))
before = mebibytes("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # Forgets the peak so far.
run_plan(prepared(echo_job(source, folder / "out", max_new_tokens=1000, **settings)))
print(mebibytes("VmHWM") - before)
"""


def test_a_worker_never_holds_more_logits_than_the_budget(tmp_path: Path) -> None:
    """12 batches of 31 MiB, of which two are held; all of them would be 377 MiB."""
    write_prompts(tmp_path / "in.parquet", [f"{i:04}" for i in range(384)])

    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.path.dirname(__file__)},
        capture_output=True,
        text=True,
        check=True,
    )

    parts = list_parts(str(tmp_path / "out"))
    assert sum(os.path.getsize(path) for path in parts) > 370 * 2**20
    # Two batches, a row being joined and encoded, and slack of the allocators. Of batches that each
    # take the whole budget, two would be 160.
    assert float(result.stdout) < 140


def test_arrow_parts_hold_the_same_rows(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["abc", None, "def"])
    settings = {"logprobs": 2, "output_logits": True}

    parquet, _ = run_here(echo_job(source, tmp_path / "a", **settings))
    arrow, _ = run_here(echo_job(source, tmp_path / "b", output_format="arrow", **settings))

    assert os.path.basename(list_parts(str(tmp_path / "b"))[0]) == "part-00000.arrow"
    assert arrow.schema.equals(parquet.schema, check_metadata=True)
    assert arrow.equals(parquet)


def test_an_empty_input_makes_an_empty_part_with_the_whole_schema(tmp_path: Path) -> None:
    """Case I06."""
    source = write_prompts(tmp_path / "in.parquet", [])
    full = write_prompts(tmp_path / "full.parquet", ["a"])

    table, counts = run_here(echo_job(source, tmp_path / "out", logprobs=2, output_logits=True))
    other, _ = run_here(echo_job(full, tmp_path / "other", logprobs=2, output_logits=True))

    assert (table.num_rows, counts.rows) == (0, 0)
    assert table.schema.equals(other.schema, check_metadata=False)


def test_all_rows_failing_is_still_one_row_each(tmp_path: Path) -> None:
    """Cases I01, O17."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": pa.nulls(3)}), path)

    table, counts = run_here(echo_job(path, tmp_path / "out"))

    assert codes(table) == ["null_prompt"] * 3
    assert (counts.rows, counts.failed_rows) == (3, 3)


def test_one_failing_row_in_the_last_part_changes_no_schema(tmp_path: Path) -> None:
    """Case O01: 100 rows in 10 parts, and only row 95 fails."""
    prompts = [None if i == 95 else f"row {i}" for i in range(100)]
    source = write_prompts(tmp_path / "in.parquet", prompts)

    run_here(echo_job(source, tmp_path / "out", rows_per_shard=10, logprobs=2))

    schemas = [pq.read_schema(path) for path in list_parts(str(tmp_path / "out"))]
    assert len(schemas) == 10
    assert all(schema.equals(schemas[0], check_metadata=True) for schema in schemas)
    assert codes(read_rows(tmp_path / "out")).index("null_prompt") == 95


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a", "b", "c"])

    table, _ = run_here(echo_job(source, tmp_path / "out", limit=2))

    assert table["prompt"].to_pylist() == ["a", "b"]


def test_reports_add_up_and_name_their_part(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["abc", None, "defg"])
    plan = prepared(echo_job(source, tmp_path / "out", rows_per_shard=2))
    worker = open_worker(plan)

    first, second = (worker.run_shard(shard) for shard in plan.shards)

    total = first.counts + second.counts
    assert (total.rows, total.failed_rows, total.prompt_tokens) == (3, 1, 7)
    assert total.new_tokens == 8
    assert total.idle_share == 0
    assert (first.part.name, first.part.num_rows) == ("part-00000.parquet", 2)
    assert 0 < total.generate_seconds <= first.seconds + second.seconds


def test_what_a_worker_sends_back_is_small_whatever_it_has_written(tmp_path: Path) -> None:
    """Case O16: logits never travel through Ray."""
    source = write_prompts(tmp_path / "in.parquet", ["a"] * 64)
    settings = {"max_new_tokens": 100, "ignore_eos": True, "output_logits": True}
    plan = prepared(echo_job(source, tmp_path / "out", rows_per_shard=64, **settings))
    [shard] = plan.shards

    report = open_worker(plan).run_shard(shard)

    assert report.part.size_bytes > 6_000_000
    assert len(pickle.dumps(report)) < 2_000


def test_a_plan_reads_footers_and_no_row(tmp_path: Path) -> None:
    """Case J28: many short prompts cost nothing before workers read them."""
    source = write_prompts(tmp_path / "in.parquet", [f"{i}" for i in range(54_584)])
    content = bytearray(source.read_bytes())
    content[100:-4000] = bytes(len(content) - 4100)  # Not one row could be read.
    source.write_bytes(content)

    plan = make_plan(echo_job(source, tmp_path / "out", rows_per_batch=64))

    assert plan.num_rows == 54_584
    assert len(plan.shards) > 50


def test_a_row_that_cannot_even_be_tokenized_can_be_found_and_left_out(tmp_path: Path) -> None:
    """Trying the others does not touch it, and once it is known the shard is done without it."""
    source = write_prompts(tmp_path / "in.parquet", ["a", "b", "<encode>", "d"])
    plan = prepared(make_job(source, tmp_path / "out", ModelRef("faulty", engine="echo")))
    [shard], worker = plan.shards, open_worker(plan)

    with pytest.raises(RuntimeError, match="the tokenizer failed"):
        worker.run_shard(shard)
    worker.try_rows(shard, 0, 0)
    worker.try_rows(shard, 0, 2)
    with pytest.raises(RuntimeError, match="the tokenizer failed"):
        worker.try_rows(shard, 2, 3)
    error = RowError("generate", "engine_error", "It failed.")
    report = worker.run_shard(shard, Lessons(((2, error),)))

    assert report.counts.failed == {"engine_error": 1}
    assert read_rows(tmp_path / "out")["finish_reason"].to_pylist().count("error") == 1
