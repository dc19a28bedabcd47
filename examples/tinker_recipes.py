"""Recipes of tinker-cookbook, its own code, on a server of the Tinker API.

Datasets and tokenizer come from here, as the recipes' own are on a hub.

megatron-infer tinker smollm2 --port 8000 --served-model-name Qwen/Qwen3-8B
python examples/tinker_recipes.py dpo --out-dir run/dpo --max-steps 14 --learning-rate 1e-4
python examples/tinker_recipes.py shorter --out-dir run/shorter --max-steps 12 --learning-rate 1e-3
python examples/tinker_recipes.py --curve curve.png run/*
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen3-8B"
"""The name whose chat format the cookbook knows; SmolLM2's is the same."""
CURVES = {
    "dpo": ("dpo_loss", "accuracy"),
    "shorter": ("env/all/ac_tokens_per_turn", "env/all/reward/total"),
}
"""Metrics of each recipe that are plotted."""


def pairs(*, held_out: bool) -> list[dict[str, str]]:
    """Preferences in the format of hh-rlhf: the short answer of two right ones is chosen."""
    from grpo_task import questions

    found = []
    for question in questions("facts"):
        if question.held_out == held_out:
            asked, answer = f"Human: {question.text} Assistant: ", question.answers[0]
            wordy = f"That is a good question. Many people wonder about it. I think that the answer may be {answer}."
            found.append({"chosen": f"{asked}{answer}.", "rejected": asked + wordy})
    return found


def load_dataset(name: str, *_: Any, **__: Any) -> Any:
    """In the place of the one of `datasets`."""
    import datasets

    rows = {
        "Anthropic/hh-rlhf": {"train": pairs(held_out=False), "test": pairs(held_out=True)},
    }[name]
    return datasets.DatasetDict(
        {part: datasets.Dataset.from_list(content).shuffle(seed=0) for part, content in rows.items()}
    )


def dpo(options: Mapping[str, Any]) -> None:
    from tinker_cookbook.recipes.preference.dpo import train

    train.cli_main(train.CLIConfig(renderer_name="qwen3", batch_size=8, **options))


def shorter(options: Mapping[str, Any]) -> None:
    from tinker_cookbook.recipes.preference.shorter import train

    small = {"batch_size": 2, "group_size": 8, "max_tokens": 48, "eval_every": 0}
    train.cli_main(train.CLIConfig(renderer_name="qwen3", **small, **options))


RECIPES: dict[str, Callable[[Mapping[str, Any]], None]] = {"dpo": dpo, "shorter": shorter}


def run(args: argparse.Namespace) -> None:
    os.environ.setdefault("TINKER_BASE_URL", "http://127.0.0.1:8000")
    os.environ.setdefault("TINKER_API_KEY", "tml-none")
    os.environ["TINKER_TELEMETRY"] = "0"
    import datasets
    from tinker_cookbook import tokenizer_utils
    from transformers import PreTrainedTokenizerFast

    from megatron_infer import open_source

    backend = open_source("smollm2").tokenizer().backend
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer_utils.register_tokenizer(MODEL, lambda: tokenizer)
    datasets.load_dataset = load_dataset
    options = {"model_name": MODEL, "log_path": str(args.out_dir), "behavior_if_log_dir_exists": "delete"}
    RECIPES[args.recipe](options | {"max_steps": args.max_steps, "learning_rate": args.learning_rate})


def plot(curve: Path, folders: list[Path]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(folder, name) for folder in folders for name in CURVES[folder.name]]
    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.2 * len(shown), 2.6), squeeze=False)
    for axis, (folder, name) in zip(axes[0], shown, strict=True):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        axis.plot([row[name] for row in rows if name in row])
        axis.set(title=f"{folder.name}: {name.removeprefix('env/all/')}", xlabel="step")
        axis.title.set_fontsize(9)
    figure.tight_layout()
    figure.savefig(curve, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", choices=RECIPES)
    parser.add_argument("--out-dir", type=Path)
    parser.add_argument("--max-steps", type=int, default=14)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument(
        "--curve",
        nargs="+",
        type=Path,
        metavar=("FILE", "DIR"),
        help="plot runs, in folders named as the recipes",
    )
    args = parser.parse_args()
    if args.curve is not None:
        plot(args.curve[0], args.curve[1:])
    elif args.recipe is None or args.out_dir is None:
        parser.error("a recipe and --out-dir, or --curve")
    else:
        run(args)


if __name__ == "__main__":
    main()
