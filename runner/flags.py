"""The table of flags: which field each fills, what it means, and which commands have it.

Flags, keys of a configuration file and fields of Job are one list, and a test holds them together.
Defaults stand in the dataclasses alone.
"""

from dataclasses import dataclass
from typing import Any

import click

from cluster.placement import Placement
from jobs.job import Job, Packing
from jobs.model import ModelRef
from jobs.sampling import Sampling
from jobs.scoring import Scoring
from jobs.tolerance import Tolerance


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of the command line, and where its value goes."""

    owner: type
    "The dataclass that has the field."
    field: str
    names: tuple[str, ...]
    value_type: "click.ParamType[Any] | type"
    help: str
    unset: str = ""
    "What happens if it is not given, where the default alone does not say it."
    multiple: bool = False
    required: bool = False

    @property
    def key(self) -> str:
        """Name in a configuration file: the flag's, with underscores."""
        return self.names[0].removeprefix("--").split("/")[0].replace("-", "_")


class Size(click.ParamType[int]):
    """Bytes: a number, or one with KiB, MiB or GiB."""

    name = "size"
    _units = {"kib": 2**10, "mib": 2**20, "gib": 2**30}  # noqa: RUF012 - never changed.

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        text = str(value).strip().lower()
        unit = next((unit for unit in self._units if text.endswith(unit)), "")
        try:
            return int(float(text.removesuffix(unit)) * self._units.get(unit, 1))
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no size. Give a number, or one with KiB, MiB or GiB.")


class Share(click.ParamType[str]):
    """A number of rows, or a share of them in percent."""

    name = "n|p%"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        return str(value)


def _choice(*names: str) -> click.Choice[str]:
    return click.Choice(names)


_FROM_MODEL = "the model's generation config, else {}"

FLAGS = (
    Flag(ModelRef, "path", ("--model",), str,
         "A model's folder, a GGUF file, a hub id, or demo.", required=True),
    Flag(ModelRef, "engine", ("--engine",), str,
         "What runs the model: torch, or echo, which needs none."),
    Flag(ModelRef, "revision", ("--revision",), str, "Branch, tag or commit of a hub model.",
         unset="the newest"),
    Flag(ModelRef, "tokenizer", ("--tokenizer",), str,
         "Folder or hub id of another tokenizer.", unset="the model's own"),
    Flag(ModelRef, "dtype", ("--dtype",), _choice("auto", "float32", "bfloat16", "float16"),
         "Type to compute with; auto is float32 on a CPU and the checkpoint's own on a GPU."),
    Flag(ModelRef, "device", ("--device",), _choice("auto", "cpu", "cuda"),
         "Where the model runs; auto is a GPU if there is one."),
    Flag(ModelRef, "kernels", ("--kernels",), _choice("auto", "compiled", "torch"),
         "What computes attention on a CPU; auto is compiled where there is a C compiler."),
    Flag(ModelRef, "compile", ("--compile/--no-compile",), bool,
         "Compile norms and feed-forward layers on a GPU: minutes at the start, faster steps."),
    Flag(ModelRef, "threads", ("--threads-per-worker",), int,
         "CPU threads of a worker. They can change last bits, so they are part of the job."),
    Flag(ModelRef, "trust_remote_code", ("--trust-remote-code/--no-trust-remote-code",), bool,
         "Run Python code that a model brings with it."),
    Flag(ModelRef, "allow_pickle", ("--allow-pickle/--no-allow-pickle",), bool,
         "Load pickled weights, which can run any code."),
    Flag(Job, "prompt_column", ("--prompt-column",), str, "Column of prompts as text.",
         unset="prompt, if there is one"),
    Flag(Job, "token_ids_column", ("--token-ids-column",), str, "Column of prompts as token ids.",
         unset="prompt_token_ids, if there is one"),
    Flag(Scoring, "text_column", ("--text-column",), str,
         "Column of texts to be scored from their beginning, as text or token ids.",
         unset="text, if there is one"),
    Flag(Scoring, "context_column", ("--context-column",), str,
         "Column of what precedes a continuation or choices, as text or token ids.",
         unset="context, if there is one"),
    Flag(Scoring, "continuation_column", ("--continuation-column",), str,
         "Column of what is scored behind its context, as text or token ids.",
         unset="continuation, if there is one"),
    Flag(Scoring, "choices_column", ("--choices-column",), str,
         "Column of lists, of which each entry is scored behind the same context.",
         unset="choices, if there is one"),
    Flag(Scoring, "label_column", ("--label-column",), str,
         "Column of the right choices: numbers from 0, or the choices themselves.",
         unset="none, and no accuracy"),
    Flag(Scoring, "pmi", ("--pmi/--no-pmi",), bool,
         "Score choices without their context, too, and predict by the difference."),
    Flag(Scoring, "token_logprobs", ("--token-logprobs/--no-token-logprobs",), bool,
         "Keep each scored token with its log-probability."),
    Flag(Job, "add_special_tokens", ("--add-special-tokens",), _choice("auto", "yes", "no"),
         "Whether the tokenizer adds BOS and the like; auto leaves it to the tokenizer."),
    Flag(Job, "max_model_len", ("--max-model-len",), int,
         "Most tokens of a row, with what follows its prompt or context.",
         unset="as many as the model holds"),
    Flag(Job, "truncation", ("--truncation",), _choice("error", "left", "right"),
         "error: a prompt or context that leaves no room is an error row. Else it is cut on that "
         "side to make room for what follows, and flagged."),
    Flag(Sampling, "max_new_tokens", ("--max-new-tokens", "--max-tokens"), int,
         "Most new tokens of a row.", required=True),
    Flag(Sampling, "min_new_tokens", ("--min-new-tokens",), int,
         "Fewest new tokens before EOS or a stop id may end a row.",
         unset=_FROM_MODEL.format(0)),
    Flag(Sampling, "temperature", ("--temperature",), float,
         "0 to 2; 0 takes the most likely token.", unset=_FROM_MODEL.format(1)),
    Flag(Sampling, "top_k", ("--top-k",), int,
         "Sample from the K most likely tokens; -1 or 0 for all.", unset=_FROM_MODEL.format("all")),
    Flag(Sampling, "top_p", ("--top-p",), float,
         "Sample from the fewest tokens that together reach this probability, 0 to 1.",
         unset=_FROM_MODEL.format(1)),
    Flag(Sampling, "min_p", ("--min-p",), float,
         "Leave out tokens less likely than this share of the best, 0 to 1.", unset="0"),
    Flag(Sampling, "frequency_penalty", ("--frequency-penalty",), float,
         "Taken off a token's logit for each time it was generated, -2 to 2.", unset="0"),
    Flag(Sampling, "presence_penalty", ("--presence-penalty",), float,
         "Taken off a token's logit if it was generated at all, -2 to 2.", unset="0"),
    Flag(Sampling, "repetition_penalty", ("--repetition-penalty",), float,
         "Makes tokens of prompt and answer less likely, above 0; 1 is off.",
         unset=_FROM_MODEL.format(1)),
    Flag(Sampling, "seed", ("--seed",), int,
         "Any integer, modulo 2**64; -1 is not random. Each row has a seed of its own."),
    Flag(Sampling, "stop_token_ids", ("--stop-token-id",), int,
         "A token that ends a row, besides EOS. May be given several times.", multiple=True),
    Flag(Sampling, "ignore_eos", ("--ignore-eos/--no-ignore-eos",), bool,
         "Run every row to --max-new-tokens, whatever it yields."),
    Flag(Job, "logprobs", ("--logprobs",), int,
         "Log-probabilities of the chosen tokens and of the K most likely; 0 for the chosen alone.",
         unset="none"),
    Flag(Job, "prompt_logprobs", ("--prompt-logprobs",), int,
         "The same for the prompt's own tokens, of which the first has none; K is at most 64.",
         unset="none"),
    Flag(Job, "output_logits", ("--output-logits/--no-output-logits",), bool,
         "Raw logits of each token that is new or scored, as wide as the vocabulary."),
    Flag(Job, "logits_dtype", ("--logits-dtype",), _choice("float32", "float16"),
         "Type of the logits column."),
    Flag(Job, "keep", ("--keep",), str,
         "An input column to carry into the output. May be given several times.",
         unset="all columns", multiple=True),
    Flag(Job, "output_prefix", ("--output-prefix",), str,
         "Put before the names of the columns that are added.", unset="nothing"),
    Flag(Job, "output_format", ("--output-format",), _choice("parquet", "arrow"),
         "Format of the parts; arrow is the IPC file format."),
    Flag(Job, "limit", ("--limit",), int, "Only the first N rows.", unset="all rows"),
    Flag(Packing, "rows_per_batch", ("--rows-per-batch",), int, "Rows that run together."),
    Flag(Packing, "max_batch_tokens", ("--max-batch-tokens",), int,
         "Most tokens of prompt and answer that a batch may come to hold."),
    Flag(Packing, "schedule", ("--schedule",), _choice("fixed", "refill"),
         "Whether a batch ends with its longest row, or a row that ends makes room for the next."),
    Flag(Packing, "rows_per_shard", ("--rows-per-shard",), int, "Rows of one part.",
         unset="from the number of rows"),
    Flag(Packing, "logits_budget_bytes", ("--logits-budget",), Size(),
         "Most bytes of logits and long lists of alternatives a worker holds, such as 512MiB."),
    Flag(Placement, "num_workers", ("--num-workers",), int, "Workers to start.",
         unset="one a GPU, or as many as the CPUs allow"),
    Flag(Placement, "gpus_per_worker", ("--gpus-per-worker",), float, "GPUs of a worker.",
         unset="1 on a GPU, else 0"),
    Flag(Placement, "cpus_per_worker", ("--cpus-per-worker",), float,
         "CPUs that Ray sets aside for a worker.", unset="one a thread"),
    Flag(Placement, "address", ("--address",), str,
         "HOST:PORT of a running Ray cluster, or auto to find it.",
         unset="this machine, whatever RAY_ADDRESS says"),
    Flag(Tolerance, "max_errors", ("--max-errors",), Share(),
         "Most rows with an error, such as 100 or 5%; beyond, the job ends early.",
         unset="all but one"),
    Flag(Tolerance, "shard_timeout", ("--shard-timeout",), float,
         "Seconds until the worker of a shard is taken for hung; 0 for never.",
         unset="once a shard has finished: ten times the slowest, at least 900"),
    Flag(Tolerance, "grace", ("--grace",), float,
         "Seconds that running shards are given when the job is told to stop."),
)  # fmt: skip

_OF_ANSWERS = {
    "prompt_column", "token_ids_column", "logprobs", "prompt_logprobs",
    "rows_per_batch", "max_batch_tokens", "schedule",
}  # fmt: skip
"Fields beside those of Sampling that mean nothing where no row is answered."

COMMANDS = {
    "run": tuple(flag for flag in FLAGS if flag.owner is not Scoring),
    "score": tuple(
        flag for flag in FLAGS if flag.owner is not Sampling and flag.field not in _OF_ANSWERS
    ),
}
"The flags of each command that runs a job."
