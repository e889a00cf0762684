"""lm-evaluation-harness on our engine: its tasks, and the numbers of its own HFLM.

    python -m workers.lm_eval --model batchwright --model_args model=demo --tasks hellaswag

The rest of the line is as lm_eval takes it. lm_eval finds no models but its own and those that were
imported before, so that from Python `import workers.lm_eval` comes before `simple_evaluate`.
"""

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from jobs.errors import ModelError
from jobs.model import Device, Dtype, ModelRef
from jobs.sampling import row_seed
from jobs.scoring import ScoreRequest
from workers.boundary import cut_windows
from workers.generate import open_pipeline
from workers.model.folder import find_model, find_tokenizer
from workers.model.loading import load_tokenizer
from workers.pipeline import RowContext, TokenScores
from workers.score import score
from workers.until import generate_until, settle_settings

logger = logging.getLogger(__name__)

_REQUESTS_AT_A_TIME = 1024
"Those of one call share what they begin with; after each, the bar moves and answers are kept."
Pair = tuple[tuple[str, str] | None, list[int], list[int]]
"A context and its continuation: as texts, for lm-eval's cache, and as token ids."


@register_model("batchwright")
class BatchwrightLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types.
    """A model of ours that lm-eval's tasks can ask."""

    def __init__(
        self,
        model: str,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int = 64,
        revision: str | None = None,
        dtype: Dtype = "auto",
        device: Device | Literal["cuda:0"] | None = None,
        prefix_token_id: int | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Opens a model: a folder, a hub id, a GGUF file, or demo.

        batch_size: changes nothing, since requests are packed by their tokens; lm_eval passes 1.
        max_batch_size: rows that generate at a time.
        device: cuda:0, which lm_eval passes, is a GPU if there is one.
        prefix_token_id: what stands before a text that nothing precedes; BOS, else EOS, if None.
        """
        super().__init__()
        self._pipeline = open_pipeline(
            model,
            max_batch_size=max_batch_size,
            max_length=max_length,
            revision=revision,
            dtype=dtype,
            device="auto" if device is None or device == "cuda:0" else device,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
        )
        reference = ModelRef(model, revision=revision, allow_pickle=allow_pickle)
        folder = find_tokenizer(reference, find_model(reference))
        self.tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        self.max_length = self._pipeline.limits.max_length
        self.max_gen_toks = max_gen_toks
        self._seed = seed
        firsts = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        self._first_id = next((token_id for token_id in firsts if token_id is not None), None)

    @property
    def eot_token_id(self) -> int | None:
        """EOS, if the tokenizer has one."""
        token_id: int | None = self.tokenizer.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that nothing precedes. Raises ModelError if there is none."""
        if self._first_id is None:
            raise ModelError("The model has neither BOS nor EOS. Name a prefix_token_id.")
        return self._first_id

    @property
    def tokenizer_name(self) -> str:
        """Under which lm-eval keeps what it has made of a task."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids of a text.

        add_special_tokens: None adds the tokenizer's own, unless the text begins with the first.
        """
        if add_special_tokens is None:
            first = "" if self._first_id is None else self.tok_decode([self._first_id], False)
            add_special_tokens = not (first and string.startswith(first))
        encoded = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)
        return list(encoded["input_ids"])

    def tok_decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat. Raises what the template raises for a role that it does not know."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        rows = [self._join(context, continuation) for _, context, continuation in requests]
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        if num_cut := sum(length > self.max_length + 1 for length in lengths):
            logger.warning("%d of %d contexts are cut from the left", num_cut, len(lengths))
        answers = [(0.0, False)] * len(rows)
        for place, scores in self._score(rows, disable_tqdm):
            answers[place] = (scores.loglikelihood, scores.is_greedy)
            if (pair := requests[place][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", pair, answers[place])
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each text, each of its tokens scored once, in nats."""
        first = (self.prefix_token_id,)
        windows, owners = list[ScoreRequest](), list[int]()
        for number, request in enumerate(requests):
            cut = cut_windows(self.tok_encode(request.args[0]), first, self.max_length)
            windows += cut
            owners += [number] * len(cut)
        sums = [0.0] * len(requests)
        for place, scores in self._score(windows, disable_tqdm):
            sums[owners[place]] += scores.loglikelihood
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _join(self, context: list[int], continuation: list[int]) -> ScoreRequest:
        """Both in one, cut from the left to what a pass holds: the last token is not run."""
        if not 0 < len(continuation) <= self.max_length:
            raise ValueError(
                f"a continuation must have 1 to {self.max_length} tokens of its own, and one has "
                f"{len(continuation)}: {self.tok_decode([*context, *continuation])!r}"
            )
        whole = (*(context or [self.prefix_token_id]), *continuation)[-(self.max_length + 1) :]
        return ScoreRequest(whole, len(whole) - len(continuation))

    def _score(
        self, requests: Sequence[ScoreRequest], is_quiet: bool
    ) -> Iterator[tuple[int, TokenScores]]:
        """Places of requests with their scores; those that begin alike stand together."""
        order = sorted(range(len(requests)), key=lambda place: requests[place].token_ids)
        with tqdm(total=len(order), disable=is_quiet, desc="Scoring requests") as bar:
            for start in range(0, len(order), _REQUESTS_AT_A_TIME):
                places = order[start : start + _REQUESTS_AT_A_TIME]
                rows = [requests[place].token_ids for place in places]
                contexts = [requests[place].num_context for place in places]
                found = score(self._pipeline, rows, num_context=contexts)
                yield from zip(places, found, strict=True)
                bar.update(len(places))

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows each text, up to the first of the strings that end it."""
        asked = [self._ask(place, *request.args) for place, request in enumerate(requests)]
        rows, stops = [row for row, _ in asked], [its for _, its in asked]
        texts = [""] * len(asked)
        spell = partial(self.tok_decode, skip_special_tokens=False)
        answers = generate_until(self._pipeline, rows, stops, spell)
        for place, token_ids in tqdm(
            answers, total=len(asked), disable=disable_tqdm, desc="Continuing requests"
        ):
            text = postprocess_generated_text(self.tok_decode(token_ids), stops[place], None)
            texts[place] = text
            self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return texts

    def _ask(
        self, place: int, context: str, settings: dict[str, object]
    ) -> tuple[RowContext, list[str]]:
        """A row, and the strings that end it."""
        rest = normalize_gen_kwargs(settings, self.max_gen_toks)
        num_new = rest.pop("max_gen_toks")
        eos = None if self.eot_token_id is None else self.tok_decode([self.eot_token_id], False)
        stops = handle_stop_sequences(rest.pop("until"), eos)
        room = self.max_length - num_new
        if room < 1:
            raise ValueError(
                f"max_gen_toks of {num_new} leaves no room in {self.max_length} tokens"
            )
        token_ids = (self.tok_encode(context) or [self.prefix_token_id])[-room:]
        sampling = settle_settings(rest, num_new, self._pipeline.sampling_defaults)
        return RowContext(tuple(token_ids), sampling, row_seed(self._seed, place)), stops


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
