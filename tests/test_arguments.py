"""What generate() refuses, in which order, and in which words."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from jobs.completion import Capture
from jobs.sampling import RowSampling, SamplingDefaults
from workers.generate import GenerateIterator, generate
from workers.pipeline import BatchPipeline, PipelineLimits, RowContext


class Closed:
    """A pipeline that must not be run: every check comes before."""

    is_text_generator = True
    applies_penalties = True
    is_speculative = False
    overlap_active = False
    graph_capture_ready = False
    data_parallel_degree = 1
    vocab_size = 12
    eos_token_ids = frozenset([11])
    sampling_defaults = SamplingDefaults()
    limits = PipelineLimits(max_batch_size=4, max_length=16, max_prefill_tokens=40)
    num_open_rows = 0

    def __init__(self, **settings: object) -> None:
        for name, value in settings.items():
            setattr(self, name, value)

    def claim(self, contexts: object, capture: object, turns: object) -> SimpleNamespace:
        return SimpleNamespace(
            contexts=contexts, capture=capture, release=lambda row: None, execute=None
        )


def refused(kind: type[Exception], *args: object, on: object = None, **settings: object) -> str:
    settings = {"max_new_tokens": 2} | settings
    with pytest.raises(kind) as caught:
        generate(on or Closed(), *args, **settings)
    assert type(caught.value) is kind
    return str(caught.value)


def settle(**settings: object) -> RowSampling:
    """The sampling that a row gets."""
    pipeline = settings.pop("on", None) or Closed()
    batch = GenerateIterator(pipeline, [[1]], **({"max_new_tokens": 2} | settings))
    return batch._contexts[0].sampling


@pytest.mark.parametrize(
    ("input_ids", "words"),
    [
        ([1, 2, 3], "row 0 is the number 1. Wrap one prompt as [ids]"),
        ("text", "must be rows of token ids, got str"),
        (["text"], "row 0 must hold integers, got 'text'"),
        ([[1.0]], "an entry of row 0 must be an integer, got 1.0"),
        ([[1], [None]], "an entry of row 1 must be an integer, got None"),
        ([["1"]], "got '1'"),
        ([None], "row 0 must hold integers, got None"),
        (None, "must be rows of token ids, got NoneType"),
        (7, "must be rows of token ids, got int"),
    ],
)
def test_what_are_no_rows_of_integers_is_a_type_error(input_ids: object, words: str) -> None:
    """Cases G30 and flat_list, string_rows, string, float_row, none of the golden file."""
    message = refused(TypeError, input_ids)

    assert message.startswith("generate(): input_ids")
    assert words in message


def test_booleans_are_integers_in_a_prompt() -> None:
    batch = GenerateIterator(Closed(), [[True, False]], max_new_tokens=1)

    assert batch.sequences == [[1, 0]]


@pytest.mark.parametrize(
    ("kind", "mask", "words"),
    [
        (ValueError, [[1, 1]], "attention_mask has rows of [2] entries, input_ids of [2, 1]"),
        (ValueError, [[1], [1]], "attention_mask has rows of [1, 1] entries, input_ids of [2, 1]"),
        (TypeError, [[1.0, 1.0], [1.0]], "attention_mask: an entry of row 0 must be an integer"),
        (ValueError, [[1, 1], [0]], "row 1 is empty"),
    ],
)
def test_a_mask_must_fit(kind: type[Exception], mask: object, words: str) -> None:
    assert words in refused(kind, [[1, 2], [3]], mask)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ValueError, 0),
        (ValueError, -1),
        (ValueError, True),
        (ValueError, False),
        (TypeError, None),
        (TypeError, "3"),
        (TypeError, 2.0),
        (TypeError, 2.5),
    ],
)
def test_max_new_tokens_is_a_count(kind: type[Exception], value: object) -> None:
    """Case G27. MAX lets 2.5 through as 3; here it is refused."""
    assert "max_new_tokens must be" in refused(kind, [[1]], max_new_tokens=value)


def test_max_new_tokens_must_be_given() -> None:
    with pytest.raises(TypeError, match="max_new_tokens"):
        generate(Closed(), [[1]])


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        generate(Closed(), [[1]], max_new_tokens=1, best_of=2)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("min_p", -0.1, "between 0 and 1, got -0.1"),
        ("min_p", 1.1, "between 0 and 1, got 1.1"),
        ("min_p", NAN, "between 0 and 1, got nan"),
        ("repetition_penalty", 0.0, "finite and above 0, got 0.0"),
        ("repetition_penalty", -1.0, "finite and above 0, got -1.0"),
        ("repetition_penalty", NAN, "finite and above 0, got nan"),
        ("repetition_penalty", INF, "finite and above 0, got inf"),
        ("top_k", -2, "at least 1, or -1 or 0 for off, got -2"),
        ("top_k", True, "must be an integer, got True"),
        ("top_p", -0.1, "between 0 and 1, got -0.1"),
        ("top_p", 1.01, "between 0 and 1, got 1.01"),
        ("top_p", NAN, "between 0 and 1, got nan"),
        ("temperature", -0.1, "between 0 and 2, got -0.1"),
        ("temperature", 2.1, "between 0 and 2, got 2.1"),
        ("temperature", NAN, "between 0 and 2, got nan"),
        ("temperature", INF, "between 0 and 2, got inf"),
        ("frequency_penalty", 2.1, "between -2 and 2, got 2.1"),
        ("frequency_penalty", NAN, "between -2 and 2, got nan"),
        ("presence_penalty", -2.1, "between -2 and 2, got -2.1"),
        ("min_new_tokens", -1, "at least 0, got -1"),
        ("min_new_tokens", True, "must be an integer, got True"),
        ("min_new_tokens", 3, "min_new_tokens is 3, more than max_new_tokens, which is 2"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: object, words: str) -> None:
    """Cases G12, G14, G51."""
    message = refused(ValueError, [[1]], **{name: value})

    assert message.startswith(f"generate(): {name}")
    assert words in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 2.5),
        ("top_k", "40"),
        ("top_p", "1"),
        ("temperature", "1"),
        ("temperature", True),
        ("min_new_tokens", 1.0),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", [5.0]),
        ("seed", 1.5),
        ("seed", "x"),
        ("output_logprobs", "x"),
        ("output_logprobs", 2.0),
        ("output_logprobs", None),
    ],
)
def test_values_of_the_wrong_kind_are_refused(name: str, value: object) -> None:
    assert name in refused(TypeError, [[1]], **{name: value})


@pytest.mark.parametrize("value", [12, -1, 10**9])
def test_stop_ids_must_be_words_of_the_model(value: int) -> None:
    assert "stop_token_ids holds the token id" in refused(ValueError, [[1]], stop_token_ids=[value])


@pytest.mark.parametrize("value", [13, -1])
def test_logprobs_go_up_to_the_vocabulary(value: int) -> None:
    assert "between 0 and 12" in refused(ValueError, [[1]], output_logprobs=value)


@pytest.mark.parametrize("token_id", [12, 60000, 2**31 - 1, 2**63, -1, -12])
def test_prompts_must_be_words_of_the_model(token_id: int) -> None:
    """Case G30: elsewhere, ids wrap around or end the process."""
    message = refused(ValueError, [[1], [2, token_id]])

    assert f"row 1 holds the token id {token_id}; the model knows 0 to 11" in message


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([[1], [1] * 16], {}, "row 1 has 16 tokens and needs room for 1 more"),
        ([[1] * 15], {"min_new_tokens": 2}, "row 0 has 15 tokens and needs room for 2 more"),
        ([[1] * 15], {"ignore_eos": True}, "ignore_eos asks for 2 more"),
        ([[1], []], {}, "row 1 is empty"),
        ([[1]] * 5, {}, "5 rows are more than the 4 the pipeline was opened for"),
        ([[1] * 14] * 3, {}, "42 tokens together, more than the 40"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_the_numbers(
    rows: list[list[int]], settings: dict[str, object], words: str
) -> None:
    assert words in refused(ValueError, rows, **settings)


def test_a_full_row_is_no_error() -> None:
    generate_of_15 = GenerateIterator(Closed(), [[1] * 15], max_new_tokens=1_000_000)

    assert not generate_of_15.done


# Each is wrong in its own way; with all of them wrong, the first is named, then the next.
FAULTS = (
    ("must be rows of token ids", {"input_ids": 3}, {}),
    ("does not generate text", {}, {"is_text_generator": False}),
    ("speculative", {"ignore_eos": True}, {"is_speculative": True}),
    ("max_new_tokens must be", {"max_new_tokens": 0}, {}),
    ("min_p", {"min_p": 2}, {}),
    ("repetition_penalty", {"repetition_penalty": 0}, {}),
    ("top_k", {"top_k": -2}, {}),
    ("top_p", {"top_p": 2}, {}),
    ("temperature", {"temperature": 3}, {}),
    ("frequency_penalty", {"frequency_penalty": 3}, {}),
    ("presence_penalty", {"presence_penalty": 3}, {}),
    ("min_new_tokens must be", {"min_new_tokens": -1}, {}),
    ("applies no penalties", {"presence_penalty": 1}, {"applies_penalties": False}),
    ("more than max_new_tokens", {"min_new_tokens": 3}, {}),
    ("row 0 has 16 tokens", {"input_ids": [[1] * 16] + [[1]] * 4}, {}),
    ("5 rows are more", {"input_ids": [[1] * 15] * 5}, {}),
    ("tokens together", {"input_ids": [[1] * 14] * 4}, {}),
    ("device graphs", {}, {"graph_capture_ready": True, "data_parallel_degree": 2}),
    ("another batch is open", {}, {"overlap_active": True, "num_open_rows": 1}),
    ("output_logprobs must be between", {"output_logprobs": 99}, {}),
)


@pytest.mark.parametrize("first", range(len(FAULTS)))
def test_the_first_fault_in_the_order_is_the_one_named(first: int) -> None:
    arguments: dict[str, object] = {"input_ids": [[1]], "max_new_tokens": 2}
    facts: dict[str, object] = {}
    for _, wrong_arguments, wrong_facts in reversed(FAULTS[first:]):
        arguments |= wrong_arguments
        facts |= wrong_facts
    # Faults before the first must be mended where two of them use one argument.
    words, wrong_arguments, wrong_facts = FAULTS[first]
    arguments |= wrong_arguments
    kind = {"must be rows of token ids": TypeError, "another batch is open": RuntimeError}

    message = refused(kind.get(words, ValueError), on=Closed(**facts), **arguments)

    assert words in message


def test_errors_name_the_caller() -> None:
    assert refused(ValueError, [[1]], max_new_tokens=0, caller="AutoModel()").startswith(
        "AutoModel()"
    )
    with pytest.raises(ValueError, match=r"^GenerateIterator\(\): "):
        GenerateIterator(Closed(), [[1]], max_new_tokens=0)
    with pytest.raises(ValueError, match=r"^GenerateIterator.from_contexts\(\): row 0 is empty"):
        GenerateIterator.from_contexts(Closed(), [RowContext((), RowSampling(2), 0)])


def test_an_overlapping_pipeline_returns_no_logits() -> None:
    assert "cannot return logits" in refused(
        ValueError, [[1]], on=Closed(overlap_active=True), output_logits=True
    )


def test_unset_values_change_nothing() -> None:
    """Case G13: the default is sampling at temperature 1 over the whole vocabulary, seed 0."""
    assert settle() == RowSampling(max_new_tokens=2)


def test_unset_values_come_from_the_generation_config() -> None:
    defaults = SamplingDefaults(1, 0.6, 20, 0.9, 2.5)

    assert settle(on=Closed(sampling_defaults=defaults)) == RowSampling(
        max_new_tokens=2,
        min_new_tokens=1,
        temperature=0.6,
        top_k=20,
        top_p=0.9,
        repetition_penalty=2.5,
    )


def test_a_greedy_generation_config_needs_both_values_overridden() -> None:
    """do_sample: false means temperature 0 and top_k 1: temperature alone still runs top_k 1."""
    greedy = Closed(sampling_defaults=SamplingDefaults(temperature=0.0, top_k=1))

    assert settle(on=greedy, temperature=0.8).is_greedy
    assert not settle(on=greedy, temperature=0.8, top_k=-1).is_greedy


def test_a_value_given_wins_even_if_it_is_zero() -> None:
    defaults = SamplingDefaults(1, 0.6, 20, 0.9, 2.5)

    settled = settle(
        on=Closed(sampling_defaults=defaults), temperature=0, top_k=0, top_p=0, min_new_tokens=0
    )

    assert settled == RowSampling(2, temperature=0, top_k=-1, top_p=0, repetition_penalty=2.5)


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (0, [0, 2**32]),
        (None, [0, 2**32]),
        (-1, [2**64 - 1, 2**32 - 1]),
        (2**64 - 1, [2**64 - 1, 2**32 - 1]),
        (2**64, [0, 2**32]),
        (2**70 + 5, [5, 5 + 2**32]),
        (np.int64(-1), [2**64 - 1, 2**32 - 1]),
        (np.uint64(2**64 - 1), [2**64 - 1, 2**32 - 1]),
        (-(2**63) - 1, [2**63 - 1, 2**63 - 1 + 2**32]),
    ],
)
def test_rows_have_seeds_of_their_own(seed: int, seeds: list[int]) -> None:
    """Case G18: any integer is taken modulo 2**64, and -1 is not random."""
    batch = GenerateIterator(Closed(), [[1], [1]], max_new_tokens=2, seed=seed)

    assert [context.seed for context in batch._contexts] == seeds


def test_the_capture_reaches_the_pipeline(const5: BatchPipeline) -> None:
    def capture(**settings: object) -> Capture:
        return GenerateIterator(Closed(), [[1]], max_new_tokens=2, **settings)._claim.capture

    assert capture() == Capture(None, False)
    assert capture(output_logprobs=3, output_logits=1) == Capture(3, True)
    assert capture(output_logprobs=True) == Capture(1, False)
    assert capture(output_logprobs="chosen") == Capture(0, False)


def test_capture_is_plain_data() -> None:
    assert dataclasses.asdict(Capture(5, True)) == {
        "logprobs": 5, "logits": True, "prompt_logprobs": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (RowSampling(0), "max_new_tokens must be at least 1"),
        (RowSampling(1, temperature=-1.0), "temperature must be between 0 and 2"),
        (RowSampling(1, temperature=NAN), "temperature must be between 0 and 2"),
        (RowSampling(1, top_p=-2.0), "top_p must be between 0 and 1"),
        (RowSampling(1, min_new_tokens=2), "more than max_new_tokens"),
    ],
)
def test_rows_of_contexts_are_checked_too(sampling: RowSampling, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GenerateIterator.from_contexts(Closed(), [RowContext((1,), sampling, 0)])


def test_contexts_may_have_any_seed_and_top_k_0_for_off(const5: BatchPipeline) -> None:
    def run(top_k: int, seed: int) -> list[list[int]]:
        context = RowContext((0,), RowSampling(8, top_k=top_k), seed)
        with GenerateIterator.from_contexts(const5, [context]) as batch:
            for _ in batch:
                pass
        return batch.sequences

    assert run(0, -1) == run(-1, 2**64 - 1)
    assert const5.num_open_rows == 0
