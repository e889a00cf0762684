"""batchwright answers the prompts of a work file: workers of one thread each, as in a job.

python run_ours.py WORK
"""

import json
import sys
from pathlib import Path
from typing import Any

from team import Rows, Team, Work


def ours(work: dict[str, Any]) -> tuple[float, Rows]:
    """Seconds from the first prompt to the last answer, and the answers in the prompts' order."""
    longest = max(map(len, work["prompts"]))
    team = Team(work["num_threads"], max_length=longest + work["new_tokens"])
    asked = Work(work["new_tokens"], logprobs=work["logprobs"] or None)
    team.run(work["warm_up"], asked)
    found = team.run(work["prompts"], asked)
    team.close()
    return found


if __name__ == "__main__":
    seconds, answers = ours(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    print(json.dumps({"seconds": seconds, "answers": answers}))
