"""Print a script of Megatron-LM with the lines that let its model generate while it trains.

    python examples/megatron_lm/add_lines.py ~/Megatron-LM/pretrain_gpt.py > ~/Megatron-LM/pretrain_and_generate.py

Nothing else of the script changes. Known are pretrain_gpt.py and examples/run_simple_mcore_train_loop.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

PRETRAIN = (
    (
        "from model_provider import model_provider\n",
        """\
from megatron_infer import InferenceConfig, RolloutSession, SamplingParams

sessions = []

def generate(model):
    sessions or sessions.append(RolloutSession(model, InferenceConfig(vocab_size=get_args().vocab_size)))
    sessions[0].update_weights()
    with sessions[0].generating() as rollout:
        print_rank_0(rollout.generate([[1, 2, 3]], SamplingParams(max_tokens=8))[0].samples[0].token_ids)
""",
    ),
    ("        forward_step,\n", "        non_loss_data_func=generate,\n"),
)
"""`pretrain` calls `non_loss_data_func` with the chunks of the model whenever it evaluates (--eval-interval)."""
LOOP = (
    (
        "from megatron.core.distributed import DistributedDataParallel\n",
        "from megatron_infer import InferenceConfig, RolloutSession, SamplingParams\n",
    ),
    (
        "    train_iterator: Iterator = get_train_data_iterator()\n",
        "    session = RolloutSession(gpt_model, InferenceConfig(max_sequence_length=_SEQUENCE_LENGTH))\n",
    ),
    (
        "        optim.step()\n",
        """\
        session.update_weights()
        with session.generating() as rollout:
            groups = rollout.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
        print(f"Iteration {iteration}: {groups[0].samples[0].token_ids}")
""",
    ),
)
ADDED = {
    "pretrain_gpt.py": PRETRAIN,
    "run_simple_mcore_train_loop.py": LOOP,
}
"""Script -> (a line of it, the lines that follow it now)."""


def with_lines(script: str, added: tuple[tuple[str, str], ...]) -> str:
    """The script with those lines; raises ValueError where it lacks a line that they follow, or has it twice."""
    for line, following in added:
        if script.count(line) != 1:
            raise ValueError(f"the script has {script.count(line)} lines {line.strip()!r}, and not one")
        script = script.replace(line, line + following)
    return script


def main() -> None:
    if len(sys.argv) != 2 or Path(sys.argv[1]).name not in ADDED:
        sys.exit(f"usage: add_lines.py SCRIPT; known are {', '.join(ADDED)}")
    path = Path(sys.argv[1])
    try:
        print(with_lines(path.read_text(), ADDED[path.name]), end="")
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}")


if __name__ == "__main__":
    main()
