"""GRPO on one live megatron-core model, which generates and trains without a second copy of the weights.

    python examples/grpo.py --out-dir run                                     minutes on a CPU; curve in run/curve.png
    torchrun --nproc-per-node 2 examples/grpo.py --model smollm2 --tp 2       the same on two processes
    python examples/grpo.py --rollout-lag 1 --partial-rollouts --kv-cache-management-mode offload
    python examples/grpo.py --out-dir run --resume --steps 40                 resume from the checkpoint in run
    python examples/grpo.py --lora-rank 16                                    train an adapter, written for PEFT

A step: the model answers each prompt several times; a rule rewards the answers (grpo_task.py); an answer's advantage is
its reward relative to its group's mean; PPO's clipped objective makes better answers more likely. The engine returns
the probability each token was sampled with, so that differences of the trainer's forward (rounding, newer weights) are
corrected by importance weights, truncated at --max-weight.
Sources: GRPO arXiv:2402.03300, PPO arXiv:1707.06347, truncated weights after IMPALA arXiv:1802.01561.
"""

from __future__ import annotations

from megatron_infer.utils.openmp import limit_spinning

limit_spinning()  # before torch is imported

# ruff: noqa: E402
import argparse
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import grpo_task as task
import torch
from generate import device_of_rank, tokenizer_of
from grpo_options import check, check_resumed, identity, options
from grpo_report import SETS, Log, Stopwatch, line, open_wandb, summary
from grpo_trainer import Reference, Trainer, load, make_trainer, on_cpu, restore, save
from torch import Tensor
from tqdm import tqdm

from megatron_infer import SamplingParams
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.distributed.groups import build_groups
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.kernels.threads import apply_cpu_settings
from megatron_infer.memory.device import Device, choose_dtype
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.lora.attach import AttachedLoRA, attach_lora
from megatron_infer.rl.mismatch_meter import MismatchMeter
from megatron_infer.rl.rollout import Rollout, RolloutProgress
from megatron_infer.rl.rollout_queue import RolloutQueue
from megatron_infer.rl.samples import RolloutGroup, RolloutSample
from megatron_infer.rl.session import RolloutSession

EVALUATION = 10**6
"""The step whose seeds evaluations use; no run reaches it."""
EVALUATION_SAMPLES = 4
"""Answers to each question, beside the greedy one."""
MICRO_BATCH_TOKENS = 1024
"""Tokens of a training forward: about a group's."""


def main() -> int:
    args = options(__doc__)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        check(args, world)
        learn(args, rank)
    except (InferenceError, NotImplementedError) as error:  # raised on every rank, printed by one
        if rank == 0 or "RankFailure" in type(error).__name__:
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


# ------------------------------------------------------------------------------------------------ the loop


def learn(args: argparse.Namespace, rank: int) -> None:
    checkpoint, is_first = args.out_dir / "checkpoint", rank == 0
    begun = load(checkpoint, rank=rank) if args.resume else None
    run: dict[str, Any] = {"step": 0, "before": {}, "rows": []} if begun is None else begun["run"]
    if begun is not None:
        check_resumed(args, run["options"], run["step"])
    session, trainer, reference, adapter = set_up(args, first_step=run["step"])
    if begun is not None:
        restore(begun, model=session.model, trainer=trainer)
        session.update_weights()
    log = Log(args.out_dir, run["rows"], writer=open_wandb(args)) if is_first else None
    if begun is None:
        run["before"] = evaluate_all(session, args)
    if is_first and run["before"]:
        print(f"untrained: {summary(run['before'])}")
    supply = Supply(args, first_step=run["step"])
    meter = MismatchMeter(session, share=args.mismatch_share) if args.mismatch_share else None
    bar = tqdm(range(run["step"], args.steps), initial=run["step"], total=args.steps, unit="step", disable=None)
    for step in bar if is_first else range(run["step"], args.steps):
        watch = Stopwatch()
        with session.generating() as roll:
            watch.lap("switch")
            groups = supply.draw(roll, step, lambda progress: bar.set_postfix_str(f"{progress.num_tokens} tokens"))
            watch.lap("generate")
            seen = None if meter is None else meter.observe(groups)
        rewards = rewarded(groups)
        row = {"step": step, "reward": sum(rewards) / len(rewards)} | answer_stats(groups, session.weight_version)
        row |= {} if seen is None else seen.figures.as_metrics()
        watch.lap("other")
        with session.training():
            watch.lap("switch")
            row |= train_on(session, trainer, groups, args, reference)
            watch.lap("train")
        if args.evaluate_every and (step + 1) % args.evaluate_every == 0:
            row |= {f"held_out_{how}": found["reward"] for how, found in evaluate(session, args, "held_out").items()}
        watch.lap("other")
        run["rows"].append(row | watch.taken())
        if log is not None:
            log.add(run["rows"][-1])
            bar.set_description(f"reward {row['reward']:.2f}")
            tqdm.write(line(run["rows"][-1]), file=sys.stdout)
        if args.save_every and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            run |= {"step": step + 1, "options": identity(args)}
            save(checkpoint, rank=rank, model=session.model, trainer=trainer, run=run)
    if adapter is not None:
        adapter.save(args.out_dir / "adapter", base=args.model)
    after = evaluate_all(session, args)
    if log is not None:
        if after:
            print(f"trained: {summary(after)}")
        log.finish(before=run["before"], after=after, options=vars(args))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def set_up(
    args: argparse.Namespace, *, first_step: int
) -> tuple[RolloutSession, Trainer, Reference | None, AttachedLoRA | None]:
    """The model, with its optimizer and its engine, and the adapter that trains with --lora-rank."""
    device = Device(device_of_rank())
    if not device.is_cuda:
        apply_cpu_settings()
    torch.manual_seed(args.seed)
    source = open_source(args.model)
    plan, dtype, tokenizer = source.config(), choose_dtype(args.dtype, device, trains=True), tokenizer_of(source)
    if tokenizer is None:
        raise ConfigError(f"{args.model} has no tokenizer, and the task is made of text")
    groups = build_groups(tensor_parallel=args.tp)
    model = build_model(source, dtype=dtype, device=str(device.torch), pg_collection=groups)
    rank = args.lora_rank
    adapter = attach_lora(model, rank=rank, alpha=2 * rank, seed=args.seed) if rank else None
    reference = Reference(model) if args.kl and adapter is None else None
    trainer = make_trainer(args.optimizer, model, lr=args.lr)
    engine_options = {
        "pg_collection": groups,
        "buffer_size_gb": 0.25,
        "logprobs_mode": "processed",
        "seed": args.seed * EVALUATION + first_step,  # for prompts without a seed of their own
        "kv_cache_management_mode": args.kv_cache_management_mode,
        "batch_invariant": args.exact,
    }
    shape = shape_of(plan, dtype=str(dtype).removeprefix("torch."))
    config = machine_config(engine_options, shape, is_cuda=device.is_cuda, available_bytes=device.available_bytes())
    names = {"eos_ids": plan.eos_ids, "model_name": source.name}
    session = RolloutSession(trainer.model, config, tokenizer, meter=None, **names)  # `learn` has a meter
    return session, trainer, reference, adapter


# ------------------------------------------------------------------------------------------------ answers


class Supply:
    """Generates the groups to train on, up to `--rollout-lag` batches ahead of the step that uses them."""

    def __init__(self, args: argparse.Namespace, *, first_step: int) -> None:
        self._args, self._next = args, first_step
        self._ready: deque[RolloutGroup] = deque()
        self._queue: RolloutQueue | None = None

    def draw(self, roll: Rollout, step: int, on_progress: Callable[[RolloutProgress], None]) -> list[RolloutGroup]:
        """The groups of `step`."""
        args, count = self._args, self._args.prompts_per_step
        if args.partial_rollouts:  # takes the first that finish; the others continue in the engine with changed weights
            if self._queue is None:
                batches = (task.batch(args.task, coming, count, args.seed) for coming in range(step, args.steps))
                params = replace(sampling(args, step, 1)[0], seed=None)
                self._queue = RolloutQueue(
                    roll, chain.from_iterable(batches), params, groups_per_step=count, lag=args.rollout_lag
                )
            return self._queue.next_batch()
        prompts, params = [], []
        while self._next <= min(step + args.rollout_lag, args.steps - 1):
            prompts += task.batch(args.task, self._next, count, args.seed)
            params += sampling(args, self._next, count)
            self._next += 1
        if prompts:
            self._ready += roll.generate(prompts, params, on_progress=on_progress)
        return [self._ready.popleft() for _ in range(count)]


def sampling(args: argparse.Namespace, step: int, count: int) -> list[SamplingParams]:
    """Every prompt of every step has its own seed, so that a resumed run samples what an uninterrupted one would."""
    common = {"n": args.group_size, "max_tokens": args.max_tokens, "temperature": args.temperature}
    first = (args.seed * (EVALUATION + 1) + step) * 1000
    return [SamplingParams(**common, logprobs=0, seed=first + number) for number in range(count)]


def rewarded(groups: list[RolloutGroup]) -> list[float]:
    """Set every sample's reward -> all rewards."""
    for group in groups:
        for sample in group.samples:
            sample.reward = task.reward(sample.text, sample.finish_reason, task.Question(**group.info["asked"]))
    return [sample.reward for group in groups for sample in group.samples if sample.reward is not None]


def answer_stats(groups: list[RolloutGroup], version: int) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    ages = [age for sample in samples for age in sample.staleness(version)]
    return {
        "right": sum(sample.reward > 0 for sample in samples) / len(samples),
        "form": sum(task.in_form(sample.text, sample.finish_reason) for sample in samples) / len(samples),
        "length": sum(sample.num_drawn for sample in samples) / len(samples),
        "staleness": sum(ages) / len(ages),
    }


def evaluate_all(session: RolloutSession, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of each set, before or after all steps; {} with `--evaluate-every 0`."""
    return {name: evaluate(session, args, name) for name in SETS} if args.evaluate_every else {}


def evaluate(session: RolloutSession, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Answer the questions of a set, "train" or "held_out", by greedy and by sampled decoding -> figures of both."""
    chosen = [question for question in task.questions(args.task) if question.held_out == (name == "held_out")]
    greedy = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    sampled = [replace(params, n=EVALUATION_SAMPLES) for params in sampling(args, EVALUATION, len(chosen))]
    prompts, found = [question.prompt() for question in chosen], {}
    with session.generating() as roll:
        groups = roll.generate(prompts + prompts, [greedy] * len(chosen) + sampled)
    for how, part in (("greedy", groups[: len(chosen)]), ("sampled", groups[len(chosen) :])):
        rewards = rewarded(part)
        found[how] = answer_stats(part, session.weight_version) | {"reward": sum(rewards) / len(rewards)}
        answers = [(asked.text, group.samples[0]) for asked, group in zip(chosen, part, strict=True)]
        found[how]["answers"] = [[asked, one.text, one.finish_reason, one.reward] for asked, one in answers]
    return found


# ------------------------------------------------------------------------------------------------ learning


def advantages(group: RolloutGroup) -> Tensor:
    """For each sample: its reward minus its group's mean, in standard deviations."""
    rewards = torch.tensor([sample.reward for sample in group.samples])
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def objective(
    scores: Tensor, old: Tensor, behaviour: Tensor, advantage: Tensor, *, clip: float, max_weight: float
) -> Tensor:
    """Loss of each token.

    Logprobs of the sampled tokens: `scores` with the weights now, `old` with those before this step's first update,
    `behaviour` of the distribution they were sampled from. old - behaviour is the correction, scores - old is what PPO
    clips.
    """
    weight = (old - behaviour).exp().clamp(max=max_weight)
    ratio = (scores - old).exp()
    return -weight * torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def train_on(
    session: RolloutSession,
    trainer: Trainer,
    groups: list[RolloutGroup],
    args: argparse.Namespace,
    reference: Reference | None,
) -> dict[str, float]:
    """`--epochs` updates from these groups -> metrics."""
    # A group whose rewards are all equal has zero advantages.
    useful = [group for group in groups if len({sample.reward for sample in group.samples}) > 1]
    samples = [sample for group in useful for sample in group.samples]
    advantage = [value for group in useful for value in advantages(group).tolist()]
    num_tokens = sum(sample.num_drawn for sample in samples)
    sequences, starts = [sample.ids for sample in samples], [len(sample.prompt_ids) for sample in samples]
    how = {"start": starts, "temperature": args.temperature, "micro_batch_tokens": MICRO_BATCH_TOKENS}
    anchors: list[Tensor] = []
    if args.kl and samples:
        with nullcontext() if reference is None else reference.in_place():
            anchors = session.score(sequences, adapter=None, **how)  # without the adapter, if there is one
    olds: dict[int, Tensor] = {}
    metrics = {"trained_groups": float(len(useful)), "loss": 0.0, "kl": 0.0, "grad_norm": 0.0}

    def loss_of(scores: list[Tensor], indices: list[int]) -> Tensor:
        """scores: of samples[indices], each [tokens after the prompt] -> their part of the loss of the whole batch."""
        for index, values in zip(indices, scores, strict=True):
            olds.setdefault(index, values.detach())  # before the first update
        now, old = torch.cat(scores), torch.cat([olds[index] for index in indices])
        behaviour = now.new_tensor([value for index in indices for value in samples[index].logprobs])
        drawn = now.new_tensor([value for index in indices for value in samples[index].loss_mask])
        benefit = now.new_tensor([advantage[index] for index in indices for _ in samples[index].token_ids])
        loss = objective(now, old, behaviour, benefit, clip=args.clip, max_weight=args.max_weight)
        if anchors:
            away = torch.cat([anchors[index] for index in indices]) - now
            kl = away.exp() - away - 1  # never negative: http://joschu.net/blog/kl-approx.html
            loss = loss + args.kl * kl
            metrics["kl"] += (kl.detach() * drawn).sum().item() / num_tokens / args.epochs
        loss = (loss * drawn).sum() / num_tokens
        metrics["loss"] += loss.item() / args.epochs
        return loss

    version = session.weight_version + 1  # of the weights that draw next; no epoch before the last draws
    for _ in range(args.epochs if samples else 0):
        session.score_and_backward(sequences, loss_of, **how)
        with on_cpu():
            metrics["grad_norm"] = session.step(trainer.optimizer, version=version).grad_norm
    return metrics | ratio_stats(samples, olds)


def ratio_stats(samples: list[RolloutSample], olds: dict[int, Tensor]) -> dict[str, float]:
    """Mean, extremes and quantiles of the tokens' importance ratios exp(old - behaviour), before truncation."""
    ratios = [torch.ones(1)]
    for index, old in olds.items():
        drawn = torch.tensor(samples[index].loss_mask) > 0
        ratios.append((old.cpu() - torch.tensor(samples[index].logprobs))[drawn].exp())
    ratio = torch.cat(ratios[1:] or ratios)
    low, high = torch.quantile(ratio, torch.tensor([0.01, 0.99])).tolist()
    return {
        "ratio_mean": ratio.mean().item(),
        "ratio_min": ratio.min().item(),
        "ratio_q01": low,
        "ratio_q99": high,
        "ratio_max": ratio.max().item(),
        "ratio_outside": ((ratio < 0.9) | (ratio > 1.1)).float().mean().item(),
        "num_tokens": float(len(ratio)) if olds else 0.0,
    }


if __name__ == "__main__":
    sys.exit(main())
