"""Modes of an engine: exact mode, also in a GRPO step, batching, steps in flight."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cases.case import Case, Clock, Done, Measure, Variant
from megatron_infer.cli.bench import percentile
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.machine_defaults import machine_config
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.llm import LLM
from megatron_infer.memory.device import Device, HostRead
from megatron_infer.models.exact_forward import exact_logprobs
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.testing.tiny import tiny_gpt
from megatron_infer.utils.host import CpuClock


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)


# ---------------------------------------------------------------------- exact

PROMPT, CONTEXT, STEPS = 512, 128, 24


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(10, 2000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode(clock: Clock, engine: DynamicInferenceEngine, batch: int) -> Done:
    """STEPS steps of `batch` requests, from CONTEXT tokens on."""
    for number in range(batch):
        engine.add_request(random_ids(CONTEXT, number), greedy(STEPS + 2))
    engine.step()
    with clock:
        for _ in range(STEPS):
            engine.step()
    while engine.has_unfinished():
        engine.step()
    return Done(batch * STEPS)


def prefill(clock: Clock, engine: DynamicInferenceEngine, length: int) -> Done:
    with clock:
        engine.add_request(random_ids(length, 99), greedy(1))
        while engine.has_unfinished():
            engine.step()
    return Done(length)


def score_exactly(clock: Clock, model: torch.nn.Module) -> Done:
    """The trainer's scoring forward in exact mode."""
    with clock:
        exact_logprobs(model, [random_ids(PROMPT, 99)])
    return Done(PROMPT)


def score_stock(clock: Clock, model: torch.nn.Module) -> Done:
    """The same by the stock forward and log_softmax."""
    ids = torch.tensor([random_ids(PROMPT, 99)])
    with clock, torch.no_grad():
        logits = model(ids, torch.arange(PROMPT)[None], None)
        logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])
    return Done(PROMPT)


@contextlib.contextmanager
def exact(args: argparse.Namespace) -> Iterator[list[Measure]]:
    torch.set_num_threads(args.threads)
    model = build_model(open_source(args.model), dtype=getattr(torch, args.dtype))
    sizes: dict[str, Any] = {
        "buffer_size_gb": 0.5,
        "block_size_tokens": 64,
        "max_requests": 16,
        "max_tokens": 2048,
        "max_sequence_length": 2048,
    }
    engines = {
        name: DynamicInferenceEngine(model, InferenceConfig(**sizes, batch_invariant=name == "exact"))
        for name in ("normal", "exact")
    }

    def decodes(batch: int) -> dict[str, Variant]:
        return {name: partial(decode, engine=engine, batch=batch) for name, engine in engines.items()}

    def prefills(length: int) -> dict[str, Variant]:
        return {name: partial(prefill, engine=engine, length=length) for name, engine in engines.items()}

    scores: dict[str, Variant] = {
        "normal": partial(score_stock, model=model),
        "exact": partial(score_exactly, model=model),
    }
    yield [
        Measure("decode, batch 1", "token", decodes(1)),
        Measure("decode, batch 16", "token", decodes(16)),
        Measure("prefill 512", "token", prefills(PROMPT)),
        Measure("prefill 1536", "token", prefills(3 * PROMPT)),
        Measure("score 512 (trainer)", "token", scores),
    ]


# ---------------------------------------------------------------------- batching

POLICIES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "mixed, max_tokens=128": {"max_tokens": 128},
    "prefill_first": {"batching": "prefill_first"},
    "phased": {"batching": "phased"},
}


def long_prompt(
    clock: Clock,
    make_engine: Callable[[], DynamicInferenceEngine],
    streams: list[list[int]],
    prompt: list[int],
    tokens: int,
    drawn: list[Any],
) -> Done:
    """Stream, let the prompt arrive after a quarter of the tokens, and go on to the end."""
    engine = make_engine()
    times: dict[str, list[float]] = {}
    answers: dict[str, list[int]] = {}
    arrived, late = 0.0, ""
    before = CpuClock.now()
    with clock:
        ids = [engine.add_request(one, greedy(tokens)) for one in streams]
        while engine.has_unfinished():
            if not late and len(times) == len(ids) and min(map(len, times.values())) >= tokens // 4:
                arrived, late = time.perf_counter(), engine.add_request(prompt, greedy(8))
            for output in engine.step():
                fresh = output.outputs[0].token_ids
                moments = times.setdefault(output.request_id, [])
                moments += [time.perf_counter()] * (len(fresh) - len(moments))
                answers[output.request_id] = fresh
    drawn.append([answers[one] for one in (*ids, late)])
    first = times[late][0]
    gaps = [b - a for one in ids for a, b in zip(times[one], times[one][1:], strict=False) if b > arrived and a < first]
    figures = {
        "first token of the prompt, s": first - arrived,
        "between tokens of the streams, ms: p50": percentile(gaps, 50) * 1e3,
        "p99": percentile(gaps, 99) * 1e3,
        "longest": max(gaps) * 1e3,
        "cores of other processes": CpuClock.now().other_load(before) or 0.0,
    }
    return Done(1, figures)


@contextlib.contextmanager
def batching(args: argparse.Namespace) -> Iterator[list[Measure]]:
    base = {
        "enable_prefix_caching": False,
        "max_requests": args.streams + 1,
        "max_tokens": 512,
        "max_sequence_length": args.prompt + 256,
    }
    llm = LLM(args.model, config=base, dtype=args.dtype, threads=args.threads or None)

    def engine_of(policy: dict[str, Any]) -> DynamicInferenceEngine:
        config = machine_config({**base, **policy}, is_cuda=False, available_bytes=8 << 30)
        return DynamicInferenceEngine(llm.engine.model, config)

    drawn: list[Any] = []
    work: dict[str, Any] = {
        "streams": [[17 + number, *range(40, 72)] for number in range(args.streams)],
        "prompt": [10 + (7 * place) % 2000 for place in range(args.prompt)],
        "tokens": args.tokens,
        "drawn": drawn,
    }
    variants: dict[str, Variant] = {
        name: partial(long_prompt, make_engine=partial(engine_of, policy), **work) for name, policy in POLICIES.items()
    }
    yield [Measure(f"{args.streams} streams, and a prompt of {args.prompt} tokens", "run", variants)]
    assert all(one == drawn[0] for one in drawn), "a policy changes the tokens"


# ---------------------------------------------------------------------- steps in flight

IN_FLIGHT: dict[str, dict[str, Any]] = {
    "1 step": {"max_steps_in_flight": 1},
    "1 step, overlap": {"overlap": True},
    "2 steps": {"max_steps_in_flight": 2},
    "4 steps": {"max_steps_in_flight": 4},
}


class LateDevice(Device):
    """The CPU, with a clock that says when a step's tokens can be read."""

    def __init__(self, device_s: float, late_s: float) -> None:
        super().__init__("cpu")
        self._device_s = device_s
        self._late_s = late_s
        self._free_at = 0.0

    def begin_read(self, *tensors: Tensor) -> HostRead:
        self._free_at = max(time.perf_counter(), self._free_at) + self._device_s
        return LateRead(self, tensors, self._free_at + self._late_s)


class LateRead(HostRead):
    def __init__(self, device: Device, tensors: tuple[Tensor, ...], at: float) -> None:
        super().__init__(device, tensors)
        self._at = at

    def is_done(self) -> bool:
        return time.perf_counter() >= self._at

    def wait(self) -> tuple[Tensor, ...]:
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return super().wait()


def on_late_device(
    clock: Clock, options: dict[str, Any], late_ms: float, args: argparse.Namespace, drawn: list[Any]
) -> Done:
    torch.manual_seed(0)
    device, length = LateDevice(args.device_ms / 1e3, late_ms / 1e3), args.tokens + 64
    config = InferenceConfig(max_requests=args.requests, max_sequence_length=length, buffer_size_gb=0.1, **options)
    with mock.patch("megatron_infer.engine.build_engine.Device", lambda name: device):
        engine = DynamicInferenceEngine(tiny_gpt(max_sequence_length=length, init_method_std=0.2), config)
    prompts = [[5 + number, 7, 9, 11] for number in range(args.requests)]
    engine.generate(prompts, greedy(args.tokens))  # warms up
    steps = engine.num_steps
    with clock:
        outputs = engine.generate(prompts, greedy(args.tokens))
    answers = [one.outputs[0].token_ids for one in outputs]
    drawn.append(answers)
    count = sum(map(len, answers))
    figures = {
        "share of the device's rate": count / clock.seconds / (args.requests / args.device_ms * 1e3),
        "host ms of a step": clock.cpu_seconds / (engine.num_steps - steps) * 1e3,
    }
    return Done(count, figures)


@contextlib.contextmanager
def steps_in_flight(args: argparse.Namespace) -> Iterator[list[Measure]]:
    torch.set_num_threads(1)
    drawn: list[Any] = []

    def variants(late_ms: float) -> dict[str, Variant]:
        return {
            name: partial(on_late_device, options=options, late_ms=late_ms, args=args, drawn=drawn)
            for name, options in IN_FLIGHT.items()
        }

    yield [Measure(f"read {late} ms later", "token", variants(float(late))) for late in args.late_ms.split(",")]
    assert all(one == drawn[0] for one in drawn), "a case changes the tokens"


# ---------------------------------------------------------------------- GRPO


class GrpoStep:
    """The parts of a step of examples/grpo.py, with exact mode and without, on the same answers."""

    def __init__(self, task: str, prompts: int) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
        import grpo
        from grpo_options import options

        self.args = options(None, ["--lr", "0", "--task", task, "--prompts-per-step", str(prompts)])
        self._grpo = grpo
        self._sides: dict[str, Any] = {}
        for mode in ("normal", "exact"):
            self.args.exact = mode == "exact"
            self._sides[mode] = grpo.set_up(self.args, first_step=0)
        self._groups: list[Any] = []
        self._num_rounds = 0

    def generate(self, clock: Clock, mode: str) -> Done:
        import grpo_task

        round_, count = self._num_rounds // len(self._sides), self.args.prompts_per_step
        self._num_rounds += 1
        prompts = grpo_task.batch(self.args.task, round_, count, 0)
        with self._sides[mode][0].generating() as roll, clock:
            self._groups = roll.generate(prompts, self._grpo.sampling(self.args, round_, count))
        return Done(1)

    def train(self, clock: Clock, mode: str) -> Done:
        """On the groups that were drawn last; every group is trained on."""
        for group in self._groups:
            for number, sample in enumerate(group.samples):
                sample.reward = float(number % 2)
        session, trainer, reference, _ = self._sides[mode]
        with session.training(), clock:
            self._grpo.train_on(session, trainer, self._groups, self.args, reference)
        session.update_weights()
        return Done(1)


@contextlib.contextmanager
def grpo_exact(args: argparse.Namespace) -> Iterator[list[Measure]]:
    step = GrpoStep(args.task, args.prompts)

    def variants(part: Callable[[Clock, str], Done]) -> dict[str, Variant]:
        return {mode: partial(part, mode=mode) for mode in ("normal", "exact")}

    size = f"{step.args.prompts_per_step} x {step.args.group_size} answers"
    print(f"{torch.get_num_threads()} threads")
    yield [
        Measure(f"generate, {size}", "step", variants(step.generate)),
        Measure(f"train, {size}", "step", variants(step.train)),
    ]


CASES = {
    "exact": Case(
        about="Exact mode (batch_invariant) on and off: decode, prefill, the trainer's score.",
        prepare=exact,
        rounds=5,
        options={"model": "smollm2", "dtype": "float32", "threads": 1},
    ),
    "batching": Case(
        about="Batching policies: what a long prompt costs the streams, and how long it waits.\n\n"
        "The prompt arrives when every stream has a quarter of its tokens. Times between tokens are those from its\n"
        "arrival until its first token. Every policy gives the same tokens.",
        prepare=batching,
        options={"model": "smollm2", "dtype": "auto", "streams": 16, "prompt": 4096, "tokens": 96, "threads": 0},
    ),
    "steps-in-flight": Case(
        about="Steps in flight on a device whose tokens are read late: 1, 1 with overlap, 2 and 4.\n\n"
        "The device is simulated. The host computes a tiny model when its step is launched, which stands for the\n"
        "host's work; a clock stands for the device's work. A step takes --device-ms there, after the step before\n"
        "it, and the host can read its tokens --late-ms after the step has ended. Tokens are the same in every case.",
        prepare=steps_in_flight,
        options={"device_ms": 4.0, "late_ms": "0,2,8", "requests": 16, "tokens": 64},
    ),
    "grpo-exact": Case(
        about="A GRPO step of examples/grpo.py with exact mode and without: rollouts and update.\n\n"
        "Every group is trained on, at learning rate 0: both have the same weights and train on the same answers.",
        prepare=grpo_exact,
        options={"task": "facts", "prompts": 8},
    ),
}
