"""Runs examples/grpo.py several times, each in a fork of this process, which has done the imports.

python grpo_runs.py RUNS.json      [[{"WORLD_SIZE": ...} of each rank, [option, ...]], ...]; exit statuses as JSON
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import grpo  # noqa: E402
import grpo_task  # noqa: E402
import torch  # noqa: E402
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402, F401


def share_of_small_letters(text: str, finish_reason: str, question: grpo_task.Question) -> float:
    """A reward that a random model's bytes vary in."""
    return sum(letter.islower() for letter in text) / max(1, len(text))


def child(environment: dict[str, str], options: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= environment
    sys.argv = ["grpo.py", *options]
    status = 1
    try:
        torch.set_num_threads(1)
        status = grpo.main()
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    grpo_task.reward = share_of_small_letters
    few = grpo_task.questions("facts")[:10]
    grpo_task.questions = lambda task: few
    statuses = []
    for environments, options in json.loads(Path(sys.argv[1]).read_text()):
        children = [child(environment, options) for environment in environments]
        statuses.append([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
