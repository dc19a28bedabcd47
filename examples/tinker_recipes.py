"""Recipes of tinker-cookbook, its own code, on a server of the Tinker API.

Datasets and tokenizer come from here, as the recipes' own are on a hub.

megatron-infer tinker smollm2 --port 8000 --served-model-name Qwen/Qwen3-8B
python examples/tinker_recipes.py dpo --out-dir run/dpo --max-steps 14 --learning-rate 1e-4
python examples/tinker_recipes.py shorter --out-dir run/shorter --max-steps 12 --learning-rate 1e-3
python examples/tinker_recipes.py sl_loop --out-dir run/sl_loop --max-steps 20 --learning-rate 1e-3
python examples/tinker_recipes.py rl_loop --out-dir run/rl_loop --max-steps 30 --learning-rate 1e-3
python examples/tinker_recipes.py --curve curve.png run/*
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MODEL = "Qwen/Qwen3-8B"
"""The name whose chat format the cookbook knows; SmolLM2's is the same."""
NUM_PROBLEMS = 200
CHILDREN, THINGS = ("Tom", "Anna", "Ben", "Mia"), ("apples", "books", "coins", "pens", "cards")


class Recipe(NamedTuple):
    run: Callable[[Mapping[str, Any]], None]
    curves: tuple[str, ...]
    """Metrics that are plotted."""


def questions(*, held_out: bool) -> list[Any]:
    """Facts of examples/grpo.py."""
    from grpo_task import questions

    return [question for question in questions("facts") if question.held_out == held_out]


def pairs(*, held_out: bool) -> list[dict[str, Any]]:
    """Preferences in the format of hh-rlhf: the short answer of two right ones is chosen."""
    found = []
    for question in questions(held_out=held_out):
        asked, answer = f"Human: {question.text} Assistant: ", question.answers[0]
        wordy = f"That is a good question. Many people wonder about it. I think that the answer may be {answer}."
        found.append({"chosen": f"{asked}{answer}.", "rejected": asked + wordy})
    return found


def conversations(*, held_out: bool) -> list[dict[str, Any]]:
    """Questions with their answers, in the format of no_robots."""
    return [
        {
            "messages": [
                {"role": "user", "content": question.text},
                {"role": "assistant", "content": f"{question.answers[0]}."},
            ]
        }
        for question in questions(held_out=held_out)
    ]


def problems(*, held_out: bool) -> list[dict[str, Any]]:
    """Problems in the format of gsm8k, whose number has to be repeated."""
    generator, found = random.Random(int(held_out)), []
    for _ in range(NUM_PROBLEMS):
        child, thing, number = generator.choice(CHILDREN), generator.choice(THINGS), generator.randint(2, 20)
        question = f"{child} has {number} {thing}. How many {thing} does {child} have?"
        found.append({"question": question, "answer": f"{child} has {number} {thing}.\n#### {number}"})
    return found


DATASETS = {"Anthropic/hh-rlhf": pairs, "HuggingFaceH4/no_robots": conversations, "openai/gsm8k": problems}
"""What takes the place of a dataset of the hub."""


def load_dataset(name: str, *_: Any, **__: Any) -> Any:
    """In the place of the one of `datasets`."""
    import datasets

    parts = {part: DATASETS[name](held_out=held_out) for part, held_out in (("train", False), ("test", True))}
    return datasets.DatasetDict(
        {part: datasets.Dataset.from_list(rows).shuffle(seed=0) for part, rows in parts.items()}
    )


def dpo(options: Mapping[str, Any]) -> None:
    from tinker_cookbook.recipes.preference.dpo import train

    train.cli_main(train.CLIConfig(renderer_name="qwen3", batch_size=8, **PREFERENCE, **options))


def shorter(options: Mapping[str, Any]) -> None:
    from tinker_cookbook.recipes.preference.shorter import train

    small = {"batch_size": 2, "group_size": 8, "max_tokens": 48, "eval_every": 0}
    train.cli_main(train.CLIConfig(renderer_name="qwen3", **small, **PREFERENCE, **options))


def sl_loop(options: Mapping[str, Any]) -> None:
    from tinker_cookbook.recipes import sl_loop

    sl_loop.main(sl_loop.Config(batch_size=8, save_every=0, **options))


def rl_loop(options: Mapping[str, Any]) -> None:
    from tinker_cookbook.recipes import rl_loop

    small = {"batch_size": 4, "group_size": 8, "max_tokens": 40, "save_every": 0}
    rl_loop.main(rl_loop.Config(loss_fn="importance_sampling", **small, **options))


PREFERENCE = {"behavior_if_log_dir_exists": "delete"}
RECIPES = {
    "dpo": Recipe(dpo, ("dpo_loss", "accuracy")),
    "shorter": Recipe(shorter, ("env/all/ac_tokens_per_turn", "env/all/reward/total")),
    "sl_loop": Recipe(sl_loop, ("train_mean_nll",)),
    "rl_loop": Recipe(rl_loop, ("reward/total",)),
}


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
    options = {"model_name": MODEL, "log_path": str(args.out_dir)}
    RECIPES[args.recipe].run(options | {"max_steps": args.max_steps, "learning_rate": args.learning_rate})


def plot(curve: Path, folders: list[Path]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(folder, name) for folder in folders for name in RECIPES[folder.name].curves]
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
