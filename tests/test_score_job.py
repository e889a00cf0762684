"""Jobs that score: three shapes of rows, from table to table, with errors and figures."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chaos import hashes
from running import make_job, open_worker, prepared, read_rows, run_here, run_plan
from tiny_models import constant_model, save

from cluster.placement import Placement
from jobs.completion import Capture
from jobs.errors import InputError, SettingError
from jobs.folder import MANIFEST, list_parts, read_json
from jobs.job import Job
from jobs.lessons import Lessons
from jobs.metrics import measure
from jobs.model import ModelRef
from jobs.prompt import Prompt
from jobs.report import Counts, ShardReport
from jobs.scoring import (
    PREDICTIONS,
    Inquiry,
    Score,
    ScoreRequest,
    Scores,
    Scoring,
    Target,
)
from runner.diff import diff_outputs
from runner.plan import make_plan
from runner.run import Finished, run_job
from runner.show import show_output
from runner.verify import verify_output
from workers.complete import score_batch
from workers.generate import open_pipeline
from workers.pipeline import TokenScores
from workers.score import score

ECHO = ModelRef("echo", engine="echo")
FAULTY = ModelRef("faulty", engine="echo")
EOS = 256
"""What the echo engine puts before a text."""
SUMS = [0.5, 0.1, 0.4]


def write(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def score_job(source: Path, output: Path, model: ModelRef = ECHO, **settings: object) -> Job:
    names = Scoring.__dataclass_fields__
    scoring = Scoring(**{name: settings.pop(name) for name in names if name in settings})
    return make_job(source, output, model, scoring=scoring, **settings)


def codes(rows: pa.Table) -> list[str | None]:
    return [None if error is None else error["code"] for error in rows["error"].to_pylist()]


def problems(job: Job, rerun_sample: int = 0) -> list[str]:
    """What verify finds in a job whose shards are done."""
    *_, last = run_job(job, Placement(), start="resume")
    assert isinstance(last, Finished)
    return verify_output(job.output, rerun_sample).problems


def given_bytes(*pairs: tuple[str, str]) -> list[tuple[float, bool]]:
    """What the echo engine's pipeline says of contexts and continuations, byte by byte."""
    pipeline = open_pipeline("echo", engine="echo")
    contexts = [list(context.encode()) or [EOS] for context, _ in pairs]
    rows = [[*c, *text.encode()] for c, (_, text) in zip(contexts, pairs, strict=True)]
    scores = score(pipeline, rows, num_context=[len(context) for context in contexts])
    return [(row.loglikelihood, row.is_greedy) for row in scores]


def test_texts_are_scored_from_their_first_token_on(tmp_path: Path) -> None:
    texts = ["hello world", "é"]
    source = write(tmp_path / "in.parquet", id=[7, 8], text=texts)

    job = score_job(source, tmp_path / "out", token_logprobs=True)
    rows, counts = run_here(job)

    expected = given_bytes(*(("", text) for text in texts))
    assert rows["loglikelihood"].to_pylist() == [value for value, _ in expected]
    assert rows["is_greedy"].to_pylist() == [is_greedy for _, is_greedy in expected]
    assert rows["num_scored_tokens"].to_pylist() == [11, 2]
    assert rows["num_scored_bytes"].to_pylist() == [11, 2]
    assert rows["num_scored_words"].to_pylist() == [2, 1]
    assert rows["num_prompt_tokens"].to_pylist() == [1, 1]
    assert rows["token_ids"].to_pylist() == [list(text.encode()) for text in texts]
    assert rows["id"].to_pylist() == [7, 8]
    assert [row.size for row in rows["logprobs"].to_numpy()] == [11, 2]
    assert (counts.scored_tokens, counts.scored_bytes, counts.scored_words) == (13, 13, 3)
    assert counts.loglikelihood == pytest.approx(sum(value for value, _ in expected))
    assert problems(job, 2) == []


def test_continuations_are_scored_behind_their_contexts(tmp_path: Path) -> None:
    """The white space at a context's end is the continuation's, as lm-eval has it."""
    source = write(
        tmp_path / "in.parquet",
        context=["Question: ", "", "  ", "a"],
        continuation=["yes", "b", "c", "bc"],
    )

    rows, counts = run_here(score_job(source, tmp_path / "out"))

    expected = given_bytes(("Question:", " yes"), ("", "b"), ("", "  c"), ("a", "bc"))
    assert rows["loglikelihood"].to_pylist() == [value for value, _ in expected]
    assert rows["num_scored_tokens"].to_pylist() == [4, 1, 3, 2]
    assert rows["num_scored_bytes"].to_pylist() == [3, 1, 1, 2]
    assert rows["num_prompt_tokens"].to_pylist() == [9, 1, 1, 1]
    assert "token_ids" not in rows.column_names
    assert counts.prompt_tokens == 12


def test_choices_are_scored_and_the_likeliest_is_predicted(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.parquet",
        context=["ab", "cd"],
        choices=[["x", "yz", "é"], ["q", "rs"]],
        answer=["yz", "q"],
    )

    job = score_job(source, tmp_path / "out", label_column="answer", pmi=True, token_logprobs=True)
    rows, counts = run_here(job)

    pairs = [("ab", "x"), ("ab", "yz"), ("ab", "é"), ("cd", "q"), ("cd", "rs")]
    values = [value for value, _ in given_bytes(*pairs)]
    bare = [value for value, _ in given_bytes(*(("", text) for _, text in pairs))]
    assert rows["choice_loglikelihoods"].to_pylist() == [values[:3], values[3:]]
    assert rows["choice_unconditional_loglikelihoods"].to_pylist() == [bare[:3], bare[3:]]
    assert rows["choice_num_tokens"].to_pylist() == [[1, 2, 2], [1, 2]]
    assert rows["choice_num_bytes"].to_pylist() == [[1, 2, 2], [1, 2]]
    assert rows["token_ids"].to_pylist()[1] == list(b"qrs")
    sizes = [1, 2, 2, 1, 2]
    by_size = [value / size for value, size in zip(values, sizes, strict=True)]
    gains = [value - other for value, other in zip(values, bare, strict=True)]
    right = {}
    for way, numbers in zip(PREDICTIONS, (values, by_size, by_size, gains), strict=True):
        best = [int(np.argmax(numbers[:3])), int(np.argmax(numbers[3:]))]
        assert rows[way].to_pylist() == best
        right[way] = (best[0] == 1) + (best[1] == 0)
    assert counts.labelled == dict.fromkeys(PREDICTIONS, 2)
    assert counts.right == {way: number for way, number in right.items() if number}
    assert problems(job, 2) == []


def test_token_ids_are_taken_wherever_text_is(tmp_path: Path) -> None:
    """The same numbers; what follows from text, bytes and words, is null."""
    pairs = {"context": ["ab", ""], "continuation": ["cd", "e"]}
    choices = {"context": ["ab", ""], "choices": [["c", "de"], ["f"]]}
    for name, columns in {"texts": {"text": ["abc", "d"]}, "pairs": pairs, "more": choices}.items():
        ids = json.loads(json.dumps(columns), object_hook=_as_bytes)
        source = write(tmp_path / f"{name}.parquet", **columns)
        as_ids = write(tmp_path / f"{name}_ids.parquet", **ids)
        texts, _ = run_here(score_job(source, tmp_path / name, keep=()))
        rows, _ = run_here(score_job(as_ids, tmp_path / f"{name}_ids", keep=()))
        if name == "texts":  # Nothing is put before ids: the first has nothing to follow.
            assert rows["num_scored_tokens"].to_pylist() == [2, None]
            assert codes(rows) == [None, "empty_prompt"]
            continue
        [column] = {"loglikelihood", "choice_loglikelihoods"} & set(rows.column_names)
        assert rows[column].equals(texts[column])
        assert set(rows["num_scored_bytes"].to_pylist() if name == "pairs" else [None]) == {None}
        if name == "more":
            assert rows["choice_num_bytes"].to_pylist() == [[None, None], [None]]
            assert rows["predicted_choice_per_byte"].null_count == 2


def _as_bytes(columns: dict[str, list[object]]) -> dict[str, pa.Array]:
    def ids(value: object) -> list[object]:
        return list(value.encode()) if isinstance(value, str) else [ids(v) for v in value]

    kinds = {"choices": pa.list_(pa.list_(pa.int32()))}
    return {
        name: pa.array([ids(value) for value in values], kinds.get(name, pa.list_(pa.int64())))
        for name, values in columns.items()
    }


def test_empty_token_ids_before_text_are_an_empty_context(tmp_path: Path) -> None:
    contexts = pa.array([[97], []], pa.list_(pa.int32()))
    source = write(tmp_path / "in.parquet", context=contexts, continuation=["bc", "d"])

    rows, _ = run_here(score_job(source, tmp_path / "out"))

    expected = given_bytes(("a", "bc"), ("", "d"))
    assert rows["loglikelihood"].to_pylist() == [value for value, _ in expected]


def test_a_sum_of_minus_infinity_is_no_number_in_json() -> None:
    counts = Counts(rows=1, loglikelihood=-math.inf)

    text = json.dumps(counts.record(), allow_nan=False)

    assert Counts.from_record(json.loads(text)) == counts


def test_verify_finds_figures_that_the_records_do_not_make(tmp_path: Path) -> None:
    job = score_job(write(tmp_path / "in.parquet", text=["ab"]), tmp_path / "out")
    run_here(job)
    assert problems(job) == []
    path = tmp_path / "out" / MANIFEST
    path.write_text(path.read_text().replace('"perplexity": ', '"perplexity": 1'))

    [found] = verify_output(job.output, 0).problems

    assert "metrics are" in found


def test_rows_that_cannot_be_scored_are_errors_and_cost_no_other(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.parquet",
        context=["a", None, "b" * 9000, "c", "d"],
        continuation=["", "x", "y", "z", None],
    )

    job = score_job(source, tmp_path / "out")
    rows, counts = run_here(job)

    assert codes(rows) == [
        "empty_continuation", "null_prompt", "context_length_exceeded", None, "null_prompt",
    ]  # fmt: skip
    assert rows["num_prompt_tokens"].to_pylist() == [None, None, 9000, 1, None]
    assert rows["loglikelihood"].null_count == 4
    assert counts.failed_rows == 4
    assert problems(job, 5) == []


@pytest.mark.parametrize(("side", "kept"), [("left", b"bcdef"), ("right", b"abcde")])
def test_a_context_that_is_too_long_is_cut_if_that_is_asked(
    tmp_path: Path, side: str, kept: bytes
) -> None:
    """The continuation is never cut, and the last token needs no room."""
    source = write(tmp_path / "in.parquet", context=["abcdef"], continuation=["xyz"])

    rows, counts = run_here(score_job(source, tmp_path / "out", max_model_len=7, truncation=side))

    assert rows["loglikelihood"].to_pylist() == [given_bytes((kept.decode(), "xyz"))[0][0]]
    assert rows["truncated"].to_pylist() == [True]
    assert counts.truncated == 1


def test_a_long_text_is_scored_in_windows_each_token_once(tmp_path: Path) -> None:
    """Case G42: 20 tokens, passes of 8, on a model whose logits are always the same."""
    model = save(constant_model(SUMS, eos=2), tmp_path / "model")
    ids = [i % 3 for i in range(20)]
    source = write(tmp_path / "in.parquet", text=pa.array([ids], pa.list_(pa.int32())))

    rows, _ = run_here(
        score_job(source, tmp_path / "out", ModelRef(model), max_model_len=8, token_logprobs=True)
    )

    table = np.log(np.exp(SUMS) / np.exp(SUMS).sum())
    assert rows["num_scored_tokens"].to_pylist() == [19]
    assert rows["token_ids"].to_pylist() == [ids[1:]]
    assert rows["loglikelihood"][0].as_py() == pytest.approx(table[ids[1:]].sum(), abs=1e-5)


def test_logits_are_those_of_the_scored_tokens(tmp_path: Path) -> None:
    """Few rows fit into the budget, so that there are many batches; verify adds the numbers up."""
    rows_given = ["abc" * (i % 5 + 1) for i in range(30)]
    source = write(tmp_path / "in.parquet", text=rows_given)
    settings = {"output_logits": True, "token_logprobs": True}

    job = score_job(source, tmp_path / "out", logits_budget_bytes=40 * 257 * 4, **settings)
    rows, counts = run_here(job)
    plain, _ = run_here(score_job(source, tmp_path / "plain", token_logprobs=True))

    assert counts.batches > 5
    lengths = [len(row) for row in rows["logits"].to_pylist()]
    assert lengths == [len(text) for text in rows_given]
    assert rows["logprobs"].equals(plain["logprobs"])
    assert problems(job, 3) == []


def test_a_row_whose_logits_are_more_than_the_budget_is_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", text=["ab", "c" * 100])

    rows, _ = run_here(
        score_job(source, tmp_path / "out", output_logits=True, logits_budget_bytes=50 * 1028)
    )

    assert codes(rows) == [None, "out_of_memory"]
    assert "--logits-budget" in rows["error"][1]["message"].as_py()


def test_logits_that_are_no_numbers_are_an_error_of_their_row() -> None:
    def target(*token_ids: int) -> Target:
        return Target((ScoreRequest(token_ids, 1),))

    def inquiry(bad: bool, unconditional: bool) -> Inquiry:
        ids = (1, 2, 3) if bad else (1, 3)
        if unconditional:
            return Inquiry((target(1, 3),), (target(*ids),))
        return Inquiry((target(1, 3), target(*ids)))

    class Spoiled:
        def score(self, requests, num_top, *, keeps_logits):  # type: ignore[no-untyped-def]
            empty = np.empty((0, 0), np.float32)
            numbers = [[math.nan if i == 2 else -1.0 for i in r.scored_ids] for r in requests]
            return [
                TokenScores(np.float32(n), np.ones(len(n), bool), empty, empty, empty)
                for n in numbers
            ]

    cases = [(False, False), (True, False), (True, True), (False, True)]
    prompts = [Prompt(i, i, token_ids=(1,), inquiry=inquiry(*case)) for i, case in enumerate(cases)]

    completions = score_batch(Spoiled(), prompts, Capture(0))

    found = [c.error.code if c.error else c.logprobs.tolist() for c in completions]
    assert found == [[-1.0, -1.0], "nan_logits", "nan_logits", [-1.0]]


def test_a_shard_is_halved_for_want_of_memory(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", text=["<memory>", "a", "b", "c", "d"])
    plan = prepared(score_job(source, tmp_path / "out", FAULTY, rows_per_shard=5))
    calm, _ = run_here(score_job(source, tmp_path / "calm"))

    report = open_worker(plan).run_shard(plan.shards[0], Lessons(halvings=1))

    assert report.counts.batches == 3
    assert codes(read_rows(plan.job.output)) == [None] * 5
    assert calm.num_rows == 5


def test_the_order_of_shards_changes_no_byte(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", text=[f"{'abc' * (i % 7)}{i}" for i in range(40)])
    settings = {"rows_per_shard": 7, "token_logprobs": True}
    plan = prepared(score_job(source, tmp_path / "a", **settings))
    other = prepared(score_job(source, tmp_path / "b", **settings))

    run_plan(plan)
    for shard in reversed(other.shards):
        open_worker(other).run_shard(shard)

    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


@pytest.mark.usefixtures("shared_ray")
def test_a_job_that_scores_is_resumed_verified_and_accounted_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(
        tmp_path / "in.parquet",
        context=["a" * (i % 5) for i in range(30)],
        choices=[["x", "yy"]] * 30,
        label=[i % 2 for i in range(30)],
    )
    settings = {"rows_per_shard": 7, "label_column": "label"}
    run_here(score_job(source, tmp_path / "calm", **settings))
    job = score_job(source, tmp_path / "out", **settings)

    *_, finished = run_job(job, Placement(num_workers=2))
    Path(list_parts(job.output)[2]).unlink()
    (tmp_path / "out" / "_SUCCESS").unlink()
    *reports, again = run_job(job, Placement(num_workers=1), start="resume")

    assert [r.shard.index for r in reports if isinstance(r, ShardReport)] == [2]
    assert hashes(tmp_path / "out") == hashes(tmp_path / "calm")
    assert again.metrics == finished.metrics
    assert again.metrics == read_json(job.output, MANIFEST)["metrics"]
    predicted = read_rows(job.output)["predicted_choice"].to_pylist()
    share = sum(p == i % 2 for i, p in enumerate(predicted)) / 30
    assert again.metrics["accuracy"] == pytest.approx(share)
    assert verify_output(job.output, 10).problems == []
    comparison, is_same = diff_outputs(job.output, str(tmp_path / "calm"))
    assert comparison.is_same and is_same
    show_output(job.output, 3)
    assert "predicted_choice" in capsys.readouterr().out


def test_two_models_scores_are_compared(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", text=["abc", "d", ""])
    for name in ("a", "b"):
        run_here(score_job(source, tmp_path / name, ModelRef(name, engine="echo")))

    comparison, _ = diff_outputs(str(tmp_path / "a"), str(tmp_path / "b"))

    assert comparison.rows_differing == 2
    sums = [read_rows(tmp_path / name)["loglikelihood"].to_pylist() for name in ("a", "b")]
    away = [abs(x - y) for x, y in zip(*sums, strict=True) if x is not None]
    assert comparison.logprob_difference == pytest.approx(max(away))


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("loglikelihood", -1.0, "logprobs add up to"),
        ("num_scored_tokens", 9, "has 3 entries for 9 tokens"),
        ("num_scored_bytes", 9, "scored_bytes is 10, and 4 in its record"),
        ("is_greedy", True, "greedy is 1, and 0 in its record"),
    ],
)
def test_verify_finds_columns_that_do_not_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, value: object, said: str
) -> None:
    source = write(tmp_path / "in.parquet", text=["abc", "d"])
    run_here(score_job(source, tmp_path / "out", token_logprobs=True))
    from jobs import checks

    read = checks.read_pieces

    def spoiled(path: str):  # type: ignore[no-untyped-def]
        for table in read(path):
            place = table.column_names.index(column)
            values = [value, *table.column(column).to_pylist()[1:]]
            array = pa.array(values, table.schema.field(column).type)
            yield table.set_column(place, table.schema.field(column), array)

    monkeypatch.setattr(checks, "read_pieces", spoiled)

    assert any(said in problem for problem in verify_output(str(tmp_path / "out"), 0).problems)


def test_verify_finds_a_prediction_that_its_numbers_do_not_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.parquet", context=["a"], choices=[["x", "y"]])
    run_here(score_job(source, tmp_path / "out"))
    monkeypatch.setattr(Scores, "predicted", lambda self, way: 5)

    found = [p for p in verify_output(str(tmp_path / "out"), 0).problems if "part-" in p]

    assert len(found) == 3
    assert all("and its numbers say 5" in problem for problem in found)


@pytest.mark.parametrize(
    ("columns", "settings", "error", "said"),
    [
        ({"a": ["x"]}, {}, InputError, "no column 'text' or 'context' with 'continuation' or "),
        ({"context": ["x"]}, {}, InputError, "Choose with --text-column or --context-column or"),
        (
            {"text": ["x"], "context": ["x"], "choices": [["x"]]}, {},
            InputError, "has both 'text' and 'context' with 'choices'",
        ),
        ({"text": [1]}, {}, InputError, "'text' holds int64; --text-column needs text or lists of"),
        (
            {"context": ["x"], "choices": ["x"]}, {},
            InputError, "'choices' holds string; --choices-column needs lists of texts",
        ),
        (
            {"text": ["x"]}, {"label_column": "text"},
            InputError, "no column 'context' with 'choices'",
        ),
        ({"text": ["x"]}, {"pmi": True}, SettingError, "pmi is for choices, and these rows are"),
        ({"text": ["x"], "loglikelihood": [0.0]}, {}, SettingError, "--output-prefix"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_at_all_is_refused_before_anything_starts(
    tmp_path: Path,
    columns: dict[str, object],
    settings: dict[str, object],
    error: type[Exception],
    said: str,
) -> None:
    source = write(tmp_path / "in.parquet", **columns)

    with pytest.raises(error, match=said):
        make_plan(score_job(source, tmp_path / "out", **settings))


def test_the_columns_that_are_scored_are_stated(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", q=["x"], choices=[["a"]])

    plan = make_plan(score_job(source, tmp_path / "out", context_column="q"))

    assert plan.notes[:2] == (
        "Rows are choices, in 'q', 'choices'.", "An empty context is token 256.",
    )  # fmt: skip


def test_an_empty_input_has_the_full_schema(tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", text=pa.array([], pa.string()))

    rows, counts = run_here(score_job(source, tmp_path / "out"))

    assert rows.num_rows == counts.rows == 0
    assert rows.schema.field("loglikelihood").metadata[b"unit"] == b"nats"


def test_figures_of_a_set() -> None:
    counts = Counts(
        rows=4, scored_tokens=10, scored_bytes=40, scored_words=5, loglikelihood=-20.0, greedy=1
    )

    figures = measure("continuations", counts)

    assert figures["perplexity"] == pytest.approx(math.exp(2))
    assert figures["word_perplexity"] == pytest.approx(math.exp(4))
    assert figures["byte_perplexity"] == pytest.approx(math.exp(0.5))
    assert figures["bits_per_byte"] == pytest.approx(0.5 / math.log(2))
    assert figures["greedy_share"] == 0.25
    assert measure("text prompts", counts) == {}
    assert measure("texts", Counts(rows=1)) == {}


def test_an_accuracy_has_the_standard_error_of_a_mean() -> None:
    marks = [1, 0, 1, 1, 0]
    counts = Counts(labelled=dict.fromkeys(PREDICTIONS, 5), right={"predicted_choice": 3})
    counts = Counts.from_record(json.loads(json.dumps(counts.record() | {"failed": {}})))

    figures = measure("choices", counts)

    assert figures["accuracy"] == pytest.approx(np.mean(marks))
    assert figures["accuracy_stderr"] == pytest.approx(np.std(marks, ddof=1) / math.sqrt(5))
    assert figures["accuracy_per_byte"] == 0


def test_of_equal_choices_the_first_is_predicted_and_what_is_impossible_last() -> None:
    def scores(*values: float, bare: tuple[float, ...] = ()) -> Scores:
        return Scores(tuple(Score(value, False, 1, 2, None) for value in values), bare)

    never = -math.inf
    assert scores(-1.0, -1.0).predicted("predicted_choice") == 0
    assert scores(never, -9.0).predicted("predicted_choice") == 1
    assert scores(never, -9.0, bare=(never, -1.0)).predicted("predicted_choice_pmi") == 1
    assert scores(-1.0).predicted("predicted_choice_pmi") is None


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def chats(*rows: list[tuple[str | None, str | None]] | None) -> pa.Array:
    values = [
        None if row is None else [{"role": role, "content": content} for role, content in row]
        for row in rows
    ]
    return pa.array(values, MESSAGES)


def test_what_follows_messages_is_the_assistants_turn(tmp_path: Path) -> None:
    """White space at the end of the template's text is its own, not the continuation's."""
    context = chats([("system", "s"), ("user", "hi")], [], None, [("user", None)])
    source = write(tmp_path / "in.parquet", context=context, continuation=["yes"] * 4)
    choices = write(tmp_path / "more.parquet", context=context, choices=[["yes", "n"]] * 4)

    rows, _ = run_here(score_job(source, tmp_path / "out"))
    more, _ = run_here(score_job(choices, tmp_path / "more", token_logprobs=True))

    pipeline = open_pipeline("echo", engine="echo")
    text = list(b"system: s\nuser: hi\nassistant: ")
    both = score(pipeline, [[*text, *b"yes"], [*text, *b"n"]], num_context=len(text))
    sums = [row.loglikelihood for row in both]
    assert rows["loglikelihood"][0].as_py() == sums[0]
    assert more["choice_loglikelihoods"][0].as_py() == sums
    assert rows["num_prompt_tokens"][0].as_py() == len(text)
    assert codes(rows) == codes(more)
    assert codes(rows) == [None, "invalid_messages", "null_prompt", "invalid_messages"]


def test_a_chat_template_that_refuses_costs_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(self: object, messages: list[tuple[str, str]]) -> str:
        if messages[0][0] == "robot":
            raise ValueError("there is no robot")
        return "x"

    monkeypatch.setattr("workers.engines.echo.EchoEngine.render", render)
    context = chats([("robot", "a")], [("user", "b")])
    source = write(tmp_path / "in.parquet", context=context, continuation=["y", "y"])

    rows, _ = run_here(score_job(source, tmp_path / "out"))

    assert codes(rows) == ["template_error", None]
    assert "there is no robot" in rows["error"][0]["message"].as_py()


def test_messages_without_a_chat_template_are_refused(
    tmp_path: Path, models: dict[str, str]
) -> None:
    context = chats([("user", "a")])
    source = write(tmp_path / "in.parquet", context=context, continuation=["y"])

    with pytest.raises(InputError, match="no chat template, so the messages of column 'context'"):
        make_plan(score_job(source, tmp_path / "out", ModelRef(models["emoji"])))
