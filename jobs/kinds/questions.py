"""Rows that hold what is to be scored: a text, a context and its continuation, or its choices."""

from typing import Any

import pyarrow as pa

from jobs.completion import RowError
from jobs.kinds.given import (
    check_given,
    is_given,
    is_list,
    is_messages,
    is_null,
    is_text,
    read_cells,
    read_contexts,
    read_given,
    refuse,
)
from jobs.kinds.kind import Cells, Columns, Kind, PromptValue
from jobs.scoring import Chat, Given, Question


def _read_texts(columns: Columns) -> list[PromptValue]:
    return [
        value if isinstance(value, RowError) else Question((value,)) if value else _EMPTY
        for value in read_given(columns["text_column"], "text")
    ]


def _read_continuations(columns: Columns) -> list[PromptValue]:
    contexts = read_contexts(columns["context_column"])
    continuations = read_given(columns["continuation_column"], "continuation")
    questions: list[PromptValue] = []
    for context, continuation in zip(contexts, continuations, strict=True):
        if isinstance(context, RowError) or isinstance(continuation, RowError):
            questions.append(context if isinstance(context, RowError) else continuation)
        elif not continuation:
            questions.append(refuse("empty_continuation", "The continuation is empty."))
        else:
            questions.append(Question((continuation,), context))
    return questions


def _read_choices(columns: Columns) -> list[PromptValue]:
    contexts = read_contexts(columns["context_column"])
    lists = read_cells(columns["choices_column"], "list of choices")
    has_labels = "label_column" in columns
    labels = read_cells(columns["label_column"], "label") if has_labels else [None] * len(lists)
    return [_ask(*cells) for cells in zip(contexts, lists, labels, strict=True)]


def _ask(context: Given | Chat | RowError, choices: Any, label: Any) -> PromptValue:
    if isinstance(context, RowError):
        return context
    if isinstance(choices, RowError) or isinstance(label, RowError):
        return choices if isinstance(choices, RowError) else label
    if choices is None:
        return refuse("null_prompt", "The list of choices is null.")
    if not choices:
        return refuse("empty_choices", "The list of choices is empty.")
    targets: list[Given] = []
    for place, choice in enumerate(choices):
        target = check_given(choice, f"choice at place {place}")
        if isinstance(target, RowError):
            return target
        if not target:
            return refuse("empty_continuation", f"The choice at place {place} is empty.")
        targets.append(target)
    right = _find_label(targets, label)
    if isinstance(right, RowError):
        return right
    return Question(tuple(targets), context, right)


def _find_label(choices: list[Given], label: int | str | None) -> int | RowError | None:
    if isinstance(label, str):
        if label in choices:
            return choices.index(label)
        return refuse("invalid_label", f"The label {label!r} is none of the choices.")
    if label is not None and not 0 <= label < len(choices):
        return refuse(
            "invalid_label", f"The label is {label}, and there are {len(choices)} choices."
        )
    return label


def _is_choices(type_: pa.DataType) -> bool:
    return is_null(type_) or (is_list(type_) and is_given(type_.value_type))


def _is_label(type_: pa.DataType) -> bool:
    return is_null(type_) or is_text(type_) or bool(pa.types.is_integer(type_))


_EMPTY = refuse("empty_prompt", "The text is empty.")
_GIVEN = "text or lists of integers"
_CONTEXT = Cells(
    "context",
    f"{_GIVEN}, or lists of messages with role and content",
    lambda type_: is_given(type_) or is_messages(type_),
    lambda type_: is_text(type_) or is_messages(type_),
)

TEXT = Kind({"text_column": Cells("text", _GIVEN, is_given, is_text)}, _read_texts)
CONTINUATION = Kind(
    {
        "context_column": _CONTEXT,
        "continuation_column": Cells("continuation", _GIVEN, is_given, is_text),
    },
    _read_continuations,
)
CHOICES = Kind(
    {
        "context_column": _CONTEXT,
        "choices_column": Cells(
            "choices",
            "lists of texts, or of lists of integers",
            _is_choices,
            lambda type_: is_list(type_) and is_text(type_.value_type),
        ),
        "label_column": Cells(None, "integers or text", _is_label, lambda _: False),
    },
    _read_choices,
)
