"""Looking at an output: counts and lengths of all rows, or one row token by token."""

from collections.abc import Iterable, Mapping
from typing import cast

import pandas as pd
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from jobs.errors import InputError, ModelError, OutputError
from jobs.folder import JOB, PLAN, list_parts, part_name, read_json
from jobs.model import ModelRef
from jobs.parts import is_bulky, part_schema, read_part
from jobs.storage import join
from runner.words import counted
from workers.engine import load_engine

_COLUMNS = ("row_id", "text", "finish_reason", "num_prompt_tokens", "num_generated_tokens", "error")
_SCORES = ("loglikelihood", "is_greedy", "num_scored_tokens")
_CHOICES = ("choice_loglikelihoods", "predicted_choice", "choice_num_tokens")
"What a list of rows that were scored has, beside row_id, num_prompt_tokens and error."
_BY_TOKEN = ("token_ids", "logprobs", "top_ids", "top_logprobs")
"Columns that are shown as a table with a line a token."
_WIDTH = 60
"Characters of text in a list of rows."
_ALTERNATIVES = 5


def show_output(folder: str, limit: int) -> None:
    """Prints how many rows there are, how they ended, how long they are, and the first few."""
    asked = _asked(folder)
    prefix, is_scored = str(asked["output_prefix"]), asked["scoring"] is not None
    parts = list_parts(folder)
    if not parts:
        raise OutputError(f"{folder}: no part is finished yet.")
    names = list(_COLUMNS)
    if is_scored:
        has_choices = prefix + _CHOICES[0] in part_schema(parts[0]).names
        own = _CHOICES if has_choices else _SCORES
        names = ["row_id", *own, "num_prompt_tokens", "error"]
    tables = [read_part(path, [prefix + name for name in names]) for path in parts]
    rows: pd.DataFrame = (
        pa.concat_tables(tables).rename_columns(names).to_pandas(types_mapper=pd.ArrowDtype)
    )
    console = _console()
    console.print(f"{counted(len(rows), 'row')} in {counted(len(parts), 'part')}\n")
    if not is_scored:
        console.print(_counts("finish_reason", rows["finish_reason"]))
    codes = rows["error"].dropna().map(lambda error: error["code"])
    if len(codes):
        console.print(_counts("error", codes))
    console.print(_lengths(rows))
    if limit > 0:
        console.print((_list_scores if is_scored else _list)(rows.head(limit)))


def show_row(folder: str, row_id: int) -> None:
    """Prints every column of one row, and its tokens with their log-probabilities."""
    prefix = str(_asked(folder)["output_prefix"])
    row, bulky = _find_row(folder, prefix + "row_id", row_id)
    console = _console()
    identity = cast("Mapping[str, object]", read_json(folder, JOB)["identity"])
    kept = cast("list[str]", identity["kept_columns"])
    own = {name.removeprefix(prefix): v for name, v in row.items() if name not in kept}
    in_table = {prefix + name for name in _BY_TOKEN if own.get("token_ids")} - set(kept)
    console.print(_fields({k: v for k, v in row.items() if k not in in_table}, bulky))
    if own.get("token_ids"):
        console.print(_tokens(own, _spell(folder, own, console)))


def _console() -> Console:
    # Brackets and colons in people's text are not rich's markup and emoji.
    return Console(highlight=False, markup=False, emoji=False)


def _asked(folder: str) -> Mapping[str, object]:
    return cast("Mapping[str, object]", read_json(folder, JOB)["asked"])


def _counts(name: str, values: "pd.Series[str]") -> Table:
    table = _table(name, "rows")
    for value, number in values.value_counts().items():
        table.add_row(str(value), f"{number:,}")
    return table


def _lengths(rows: pd.DataFrame) -> Table:
    table = _table("tokens", "total", "mean", "least", "median", "most")
    for name in ("num_prompt_tokens", "num_generated_tokens", "num_scored_tokens"):
        if name not in rows:
            continue
        lengths = rows[name].dropna().astype("int64")
        if len(lengths):
            numbers = (lengths.min(), lengths.median(), lengths.max())
            table.add_row(
                name.split("_")[1],
                f"{lengths.sum():,}",
                f"{lengths.mean():,.1f}",
                *(f"{number:,.0f}" for number in numbers),
            )
    return table


def _list(rows: pd.DataFrame) -> Table:
    table = _table("row_id", "finish", "tokens", "text or error")
    for row in rows.to_dict("records"):
        error, text, tokens = row["error"], row["text"], row["num_generated_tokens"]
        said = repr(text) if isinstance(text, str) else "(no tokenizer)"
        if isinstance(error, dict):
            said = f"{error['code']}: {error['message']}"
        table.add_row(
            str(row["row_id"]),
            str(row["finish_reason"]),
            "" if pd.isna(tokens) else str(tokens),
            said if len(said) <= _WIDTH else said[:_WIDTH] + "…",
        )
    return table


def _list_scores(rows: pd.DataFrame) -> Table:
    values = [name for name in (*_SCORES, *_CHOICES) if name in rows]
    table = _table("row_id", *values, "error")
    for row in rows.to_dict("records"):
        error = row["error"]
        said = f"{error['code']}: {error['message']}" if isinstance(error, dict) else ""
        cells = ["" if said else _short(row[name]) for name in values]
        table.add_row(str(row["row_id"]), *cells, said[:_WIDTH] + "…" * (len(said) > _WIDTH))
    return table


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "  ".join(map(_short, value)) if isinstance(value, list) else str(value)


def _find_row(folder: str, column: str, row_id: int) -> tuple[dict[str, object], dict[str, str]]:
    """A row's values, and the types of those that are too big to be shown."""
    shards = cast("list[list[int]]", read_json(folder, PLAN)["shards"])
    file_format = str(_asked(folder)["output_format"])
    index = next((i for i, (start, stop) in enumerate(shards) if start <= row_id < stop), None)
    if index is None:
        there_are = f"Rows are 0 to {shards[-1][1] - 1}" if shards[-1][1] else "There are no rows"
        raise InputError(f"{folder}: no row {row_id}. {there_are}.")
    path = join(folder, part_name(index, file_format))
    schema = part_schema(path)
    bulky = {field.name: str(field.type) for field in schema if is_bulky(field)}
    names = [name for name in schema.names if name not in bulky]
    part = read_part(path, names)
    place = part.column(column).to_pylist().index(row_id)
    return {name: _value(part.column(name)[place]) for name in names}, bulky


def _value(cell: pa.Scalar) -> object:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        return f"no valid UTF-8: {error}"


def _fields(row: Mapping[str, object], bulky: Mapping[str, str]) -> Table:
    table = _table("column", "value", has_header=False)
    for name, value in row.items():
        table.add_row(name, repr(value) if isinstance(value, str) else str(value))
    for name, type_ in bulky.items():
        table.add_row(name, f"not shown: {type_}")
    return table


def _tokens(row: Mapping[str, object], words: Mapping[int, str]) -> Table:
    """A line a token: what was chosen, how likely it was, and what else could have been."""
    token_ids = cast("list[int]", row["token_ids"])
    logprobs = cast("list[float] | None", row.get("logprobs"))
    top_ids = cast("list[list[int]] | None", row.get("top_ids"))
    top_logprobs = cast("list[list[float]] | None", row.get("top_logprobs"))
    table = _table("step", "id", "token", "logprob", "alternatives")
    for step, token_id in enumerate(token_ids):
        others: list[str] = []
        if top_ids and top_logprobs:
            pairs = list(zip(top_ids[step], top_logprobs[step], strict=True))[:_ALTERNATIVES]
            others = [f"{words.get(i, str(i))} {logprob:.2f}" for i, logprob in pairs]
        table.add_row(
            str(step),
            str(token_id),
            words.get(token_id, ""),
            f"{logprobs[step]:.4f}" if logprobs else "",
            "  ".join(others),
        )
    return table


def _spell(folder: str, row: Mapping[str, object], console: Console) -> dict[int, str]:
    """The text of every token that will be shown, in quotes; empty if there is no tokenizer."""
    model = ModelRef(**cast("dict[str, str]", _asked(folder)["model"]))  # type: ignore[arg-type]
    token_ids = set(cast("list[int]", row["token_ids"]))
    for alternatives in cast("Iterable[list[int]]", row.get("top_ids") or ()):
        token_ids.update(alternatives[:_ALTERNATIVES])
    ordered = sorted(token_ids)
    try:
        words = load_engine(model.engine).spell(model, ordered)
    except ModelError as error:
        console.print(f"tokens are shown by id alone: {error}", soft_wrap=True)
        return {}
    return {token_id: repr(word) for token_id, word in zip(ordered, words, strict=True)}


def _table(*columns: str, has_header: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, show_header=has_header, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
