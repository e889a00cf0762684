"""Faults on purpose: what the echo engine does for a model called faulty. For tests of the rest.

A prompt that holds one of the words below makes the whole batch suffer, as a real fault would.
"""

import os
import time
from collections.abc import Sequence

from jobs.prompt import Prompt
from workers.turns import Turns

NAME = "faulty"
"The name of the model that has them."

_ROWS_THAT_FIT = 2


def spoil_texts(texts: Sequence[str]) -> None:
    """Raises, ends the process or hangs, if one of the texts asks that it cannot be tokenized."""
    said = "\n".join(texts)
    if "<encode>" in said:
        raise RuntimeError("the tokenizer failed")
    if "<exit in encode>" in said:
        os._exit(1)
    if "<hang in encode>" in said:
        time.sleep(86_400)
    if "<memory in encode>" in said and len(texts) > _ROWS_THAT_FIT:
        raise MemoryError(f"{len(texts)} texts do not fit")


def play_faults(prompts: Sequence[Prompt], turns: Turns | None) -> None:
    """Ends the process, hangs, grows or raises, if a prompt of the batch asks for it."""
    said = b"\n".join(bytes(token_id & 255 for token_id in _run_ids(p)) for p in prompts)
    num_live = len(prompts) if turns is None else min(turns.max_live, len(prompts))
    if b"<exit>" in said:
        os._exit(1)
    if b"<hang>" in said:
        time.sleep(86_400)
    if b"<memory>" in said and num_live > _ROWS_THAT_FIT:
        raise MemoryError(f"{num_live} rows do not fit")
    if b"<grow>" in said and num_live > _ROWS_THAT_FIT:
        held = []
        while True:
            held.append(bytearray(b"x") * 2**25)
            time.sleep(0.02)
    if b"<huge>" in said:
        raise MemoryError("the row does not fit")
    if b"<raise>" in said:
        raise RuntimeError("a kernel failed")


def _run_ids(prompt: Prompt) -> tuple[int, ...]:
    """All that is run for a prompt."""
    if prompt.inquiry is None:
        return prompt.token_ids or ()
    return tuple(i for request in prompt.inquiry.requests for i in request.token_ids)
