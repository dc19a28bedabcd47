"""The official SDK of the Tinker API and loops of tinker-cookbook, unmodified, train and sample SmolLM2."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_infer.server.tinker.losses import HOSTED, LOSSES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("tinker_cookbook") is None, reason="tinker-cookbook is not installed (make frameworks)"
    ),
]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tenants := tmp_path / "tenants").touch(0o600)
    tenants.write_text("one tml-test\nother tml-other\n")
    server = subprocess.Popen(
        [sys.executable, "-m", "megatron_infer", "tinker", "smollm2", "--port", "0", "--dtype", "float32",
         "--served-model-name", "Qwen/Qwen3-8B", "--state-dir", str(tmp_path / "state"), "--buffer-size-gb", "1",
         "--tenants", str(tenants)],
        env={**os.environ, "MEGATRON_INFER_API_KEY": "tml-server"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        yield next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.:]+", line)))
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0


def test_the_sdk_and_the_cookbooks_loops_train_and_sample(url: str, tmp_path: Path) -> None:
    case = Path(__file__).with_name("tinker_cookbook_case.py")
    subprocess.run([sys.executable, str(case), url, str(tmp_path)], check=True, timeout=600, env=dict(os.environ))
    found = json.loads((tmp_path / "found.json").read_text())
    losses = found["sdk"]["losses"]
    assert losses[-1] < losses[0] / 4 and "mine" in str(found["sdk"]["custom"])
    assert found["sdk"]["answer"] == " Lyon"
    resumed, own = found["sdk"]["resumed"]
    assert resumed == own
    hidden = found["sdk"]["hidden"]
    assert all("there is no checkpoint" in text for text in hidden), hidden
    refused = found["sdk"]["losses_refused"]
    for name, text in refused.items():
        if name in HOSTED:
            assert f"{name} is not supported" in text
        elif name in LOSSES:
            assert "unknown" not in text, "of what the loss needs, a tensor is missing"
        else:
            raise AssertionError(f"{name}: a loss of the SDK of which nothing is known")
    assert not refused["cross_entropy"]
    assert found["supervised"][-1] < found["supervised"][0] / 2
    assert [line["progress/batch"] for line in found["reinforced"] if "progress/batch" in line] == [0, 1]


def rows_of(recipe: str, url: str, folder: Path, **options: object) -> list[dict[str, float]]:
    """What a recipe of the example has written after each step."""
    script = Path(__file__).parents[2] / "examples" / "tinker_recipes.py"
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    env = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-test"}
    command = [sys.executable, str(script), recipe, "--out-dir", str(folder), *flags]
    subprocess.run(command, check=True, timeout=1800, env=env)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_preference_recipe_learns_what_is_chosen(url: str, tmp_path: Path) -> None:
    rows = rows_of("dpo", url, tmp_path, max_steps=3, learning_rate=1e-4)
    losses = [row["dpo_loss"] for row in rows]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3), "nothing is learned yet"
    assert losses[0] > losses[1] > losses[2] and rows[-1]["accuracy"] > 0.8


@pytest.mark.timeout(3600)
def test_the_loops_recipes_learn_answers_and_what_is_rewarded(url: str, tmp_path: Path) -> None:
    losses = [
        row["train_mean_nll"] for row in rows_of("sl_loop", url, tmp_path / "sl", max_steps=5, learning_rate=1e-3)
    ]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2
    rewards = [
        row["reward/total"] for row in rows_of("rl_loop", url, tmp_path / "rl", max_steps=12, learning_rate=1e-3)
    ]
    assert len(rewards) == 12 and rewards[0] < 0.2 and rewards[-1] > 0.5
