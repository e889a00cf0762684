"""torch.compile behind a flag: which layers, where it is refused, and that it makes another job."""

from pathlib import Path

import pytest
import torch
from running import make_job, write_prompts
from test_ragged import RUN, make_config
from tiny_models import random_model

from jobs.errors import ModelError
from jobs.model import ModelRef, check_compile
from runner.plan import make_plan
from workers.generate import open_pipeline
from workers.model.compiled import compile_layers

NOT_HERE = r"--compile is for a GPU, and this model runs on cpu, .* Leave it out\."


@pytest.mark.parametrize(
    ("name", "count"), [("Llama", 3 * 3 + 1), ("Gemma2 with a window and soft caps", 3 * 5 + 1)]
)
def test_norms_and_feed_forward_layers_are_compiled_and_nothing_changes(
    name: str, count: int
) -> None:
    """Two norms and a feed-forward layer in each of three layers (Gemma2: four norms), a last norm.

    The eager backend traces as the others do, and compiles nothing: what is here is that it can be
    traced, for any number of tokens.
    """
    model = random_model(make_config(name, RUN[name]))
    rows = [torch.tensor([[5, 9, 30, 4, 8]]), torch.tensor([[7]]), torch.tensor([[3, 4, 50]])]
    with torch.inference_mode():
        expected = [model(input_ids=row, use_cache=False).logits for row in rows]

        assert compile_layers(model, backend="eager") == count

        for row, logits in zip(rows, expected, strict=True):
            found = model(input_ids=row, use_cache=False).logits
            torch.testing.assert_close(found, logits, atol=1e-5, rtol=0)


def test_compiling_for_a_cpu_is_refused(models: dict[str, str]) -> None:
    check_compile(ModelRef("demo", compile=True), "cuda")
    check_compile(ModelRef("demo"), "cpu")

    with pytest.raises(ModelError, match=NOT_HERE):
        check_compile(ModelRef("demo", compile=True), "cpu")
    with pytest.raises(ModelError, match=NOT_HERE):
        open_pipeline(models["succ12"], device="cpu", compile=True)


def test_a_job_that_compiles_for_a_cpu_is_refused(tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.parquet", ["a"])
    job = make_job(source, tmp_path / "out", ModelRef("echo", engine="echo", compile=True))

    with pytest.raises(ModelError, match=NOT_HERE):
        make_plan(job)
