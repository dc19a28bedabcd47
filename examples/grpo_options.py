"""Options of examples/grpo.py, and checks of their combinations."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch

from megatron_infer.config.inference import KVCacheManagementMode
from megatron_infer.errors import ConfigError

CHANGEABLE = ("steps", "resume", "out_dir", "save_every", "wandb")
"""Options that may change when a run is resumed; all others must be the same."""

LR, LORA_LR = 6e-5, 5e-4
LEAST = {"steps": 1, "tp": 1, "prompts_per_step": 1, "group_size": 2, "max_tokens": 1, "epochs": 1}
LEAST |= {
    "mismatch_share": 0,
    "rollout_lag": 0,
    "save_every": 0,
    "evaluate_every": 0,
    "kl": 0,
    "lr": 0,
    "seed": 0,
    "lora_rank": 0,
}
ABOVE_ZERO = ("temperature", "clip", "max_weight")


def options(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", choices=("facts", "sums"), default="facts", help="what to ask (default: %(default)s)")
    add("--model", default="smollm2", help="an alias, a Hugging Face directory, a .gguf file (default: %(default)s)")
    add("--dtype", default="auto", help="float32, bfloat16 or auto: by the device (default: %(default)s)")
    add("--tp", type=int, default=1, help="tensor-parallel ranks, started by torchrun")
    add("--steps", type=int, default=12, help="total optimizer steps (default: %(default)s)")
    add("--prompts-per-step", type=int, default=8, help="groups per step (default: %(default)s)")
    add("--group-size", type=int, default=16, help="answers per prompt (default: %(default)s)")
    add("--max-tokens", type=int, default=16, help="most tokens of an answer (default: %(default)s)")
    add("--temperature", type=float, default=1.0)
    add("--lora-rank", type=int, default=0, help="train an adapter of this rank on frozen weights; 0: all weights")
    add("--lr", type=float, help=f"learning rate (default: {LR:g}, with --lora-rank {LORA_LR:g})")
    add("--optimizer", choices=("megatron", "torch"), default="megatron", help="whose Adam (default: %(default)s)")
    add("--epochs", type=int, default=1, help="updates from the same answers (default: %(default)s)")
    add("--clip", type=float, default=0.2, help="largest distance of a ratio from 1 (default: %(default)s)")
    add("--max-weight", type=float, default=2.0, help="limit of importance weights (default: %(default)s)")
    add("--kl", type=float, default=0.0, help="coefficient of the KL to the initial weights; 0 keeps no copy of them")
    exact = "importance ratios of exactly 1 where no weight changed, CPU only (default: on a CPU)"
    add("--exact", action=argparse.BooleanOptionalAction, default=not torch.cuda.is_available(), help=exact)
    evaluations = "steps between evaluations of the held-out questions; 0: none, neither before nor after the steps"
    add("--evaluate-every", type=int, default=4, help=evaluations)
    add("--mismatch-share", type=float, default=0.05, help="share of samples scored by the trainer; 0: none")
    add("--rollout-lag", type=int, default=0, help="batches generated ahead of the one trained on")
    add("--partial-rollouts", action="store_true", help="train on what finishes first; the rest outlives updates")
    modes = [mode.value for mode in KVCacheManagementMode]
    add("--kv-cache-management-mode", choices=modes, default="persist", help="the KV cache while training")
    add("--seed", type=int, default=0)
    add("--out-dir", type=Path, default=Path("grpo-run"), help="history, curve, checkpoint (default: %(default)s)")
    add("--save-every", type=int, default=10, help="steps between checkpoints; 0: none (default: %(default)s)")
    add("--resume", action="store_true", help="continue from the checkpoint in --out-dir")
    add("--wandb", choices=("off", "offline", "online"), default="off")
    args = parser.parse_args(arguments)
    if args.lr is None:
        args.lr = LORA_LR if args.lora_rank else LR
    return args


def check(args: argparse.Namespace, world: int) -> None:
    """Raise ConfigError for invalid options, before a model is loaded."""
    for name, least in LEAST.items():
        if not getattr(args, name) >= least:
            raise ConfigError(f"{flag(name)} is {getattr(args, name)}, it must be at least {least}")
    for name in ABOVE_ZERO:
        if not getattr(args, name) > 0:
            raise ConfigError(f"{flag(name)} is {getattr(args, name)}, it must be above 0")
    if world != args.tp:
        raise ConfigError(
            f"{world} process{'es' * (world > 1)}, but --tp is {args.tp}; there are no data-parallel replicas here: "
            f"start with torchrun --nproc-per-node {args.tp}"
        )
    if args.optimizer == "torch" and args.tp > 1:
        raise ConfigError("--optimizer torch clips by one process's gradient; take megatron with --tp above 1")
    if args.partial_rollouts and not args.rollout_lag:
        raise ConfigError("--partial-rollouts takes the first answers of several batches; give --rollout-lag 1 or more")
    if (args.out_dir / "history.jsonl").exists() and not args.resume:
        raise ConfigError(f"--out-dir {args.out_dir} holds a run; give --resume to go on with it, or another directory")
    if args.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"--wandb {args.wandb}, but wandb is not installed: pip install wandb, or leave it out")


def identity(args: argparse.Namespace) -> dict[str, Any]:
    """The options that must not change when a run is resumed."""
    return {name: value for name, value in vars(args).items() if name not in CHANGEABLE}


def check_resumed(args: argparse.Namespace, saved: dict[str, Any], step: int) -> None:
    """Raise ConfigError unless a checkpoint's run has the same options and steps left."""
    for name, value in identity(args).items():
        if saved[name] != value:
            raise ConfigError(
                f"--resume: the run in {args.out_dir} has {flag(name)} {saved[name]}, not {value}; give the same, "
                "or another --out-dir for another run"
            )
    if step >= args.steps:
        raise ConfigError(f"--resume: the run in {args.out_dir} has made {step} steps; give --steps above that")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
