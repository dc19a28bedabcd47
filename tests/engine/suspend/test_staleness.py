"""The staleness oracle: random submits, pauses, updates, aborts and suspends against a slow computation from scratch.

What the engine computed is logged piece by piece (request, positions, weights). From the log alone a reference says
which weights drew each token and which weights' keys, values and recurrent state it was drawn from, and computes every
token anew with a toy cache, one request at a time, under those weights. Both must be what the engine reported.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from model_kinds import KINDS, RECURRENT, buffers, bytes_of, make_model, poison
from paged_step import Cache

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.testing.inspect import inspect

VOCAB = 128
NUM_WEIGHTS = 4
BLOCK = 8
NUM_ROWS = 6
SEEDS = {
    "attention": 4,
    "hybrid": 3,
    "mamba": 4,
    "latent": 1,
    "delta": 6,
    "softcapped": 1,
    "sparse": 4,
    "parallel": 3,
}
"""For each kind, a schedule that alone comes to all that `check_schedules` asks for, and swaps."""


@dataclass
class Piece:
    """Positions start .. start + n - 1 computed in one step."""

    start: int
    n: int
    weights: int
    label: int
    begins: bool
    """The row was empty before, but for a cached prefix."""


@dataclass
class Harness:
    """An engine under random commands, and the log of what it computed."""

    model: torch.nn.Module
    kind: str
    snapshots: list[list[torch.Tensor]]
    """What the weights can be."""
    rng: random.Random
    overlap: bool
    weights: int = 0
    label: int = 0
    log: dict[str, list[Piece]] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)
    swaps: Counter = field(default_factory=Counter)
    visited: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.load(0)
        self.engine = DynamicInferenceEngine(self.model, InferenceConfig(**self.settings()))
        forward = inspect(self.engine).runner.forward

        def logged(plan: Any, *rest: Any) -> Any:
            pieces = [(r, start, 1, False) for r, start in zip(plan.decode, plan.decode_starts, strict=True)]
            pieces += [(p.request, p.start, p.n, p.first) for p in plan.prefill]
            for request, start, n, first in pieces:
                returns = request.history.num_swaps > self.swaps[request.id]  # with the keys and values it had
                self.swaps[request.id] = request.history.num_swaps
                begins = first and not returns
                self.log.setdefault(request.id, []).append(Piece(start, n, self.weights, self.label, begins))
            return forward(plan, *rest)

        inspect(self.engine).runner.forward = logged

    def settings(self) -> dict[str, Any]:
        """A tight pool or an ample one, with a host to swap to or none, and few states for prefixes or many."""
        rng, (block_bytes, slot_bytes) = self.rng, bytes_of(self.model, BLOCK)
        pool, swap, paused = rng.choice([12, 12, 12, 40]), rng.choice([0, 40, 40]), rng.choice([0, 3])
        settings: dict[str, Any] = {
            "block_size_tokens": BLOCK,
            "max_sequence_length": 96,
            "max_requests": NUM_ROWS,
            "max_tokens": rng.choice([20, 128]),
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "prefix_caching_eviction_policy": "lru",
            "overlap": self.overlap,
            "check_invariants": True,
            "preemption_mode": "swap" if swap else "auto",
            "swap_buffer_size_gb": swap * (block_bytes + slot_bytes / 4) / 2**30,
        }
        if self.kind in RECURRENT:
            settings["prefix_caching_mamba_gb"] = rng.choice([2, 5, 40]) * slot_bytes / 2**30 + 1e-9
        settings |= buffers(self.model, blocks=pool, paused_blocks=paused, block_size=BLOCK, max_requests=NUM_ROWS)
        return settings | ({} if paused else {"paused_buffer_size_gb": 0})

    def load(self, index: int) -> None:
        self.weights = index
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.snapshots[index], strict=True):
                parameter.copy_(value)

    # ------------------------------------------------------------------ commands

    def act(self) -> None:
        kind = self.rng.choices(
            ["step", "submit", "retract", "keep", "update", "silent", "abort", "suspend"], [60, 14, 2, 2, 5, 3, 4, 6]
        )[0]
        self.visited[kind] += 1
        getattr(self, kind)()

    def step(self) -> None:
        if self.engine.has_unfinished():
            poison(self.engine)
            self.take(self.engine.step())

    def take(self, outputs: list[Any]) -> None:
        self.done |= {output.request_id: output for output in outputs if output.finished}

    def submit(self) -> None:
        if len(self.prompts) >= 14:
            return
        stem = list(range(10, 40))[: self.rng.choice([0, 16, 30])]
        if self.done and self.rng.random() < 0.3:  # the next turn after an answer
            name = self.rng.choice(list(self.done))
            stem = (self.prompts[name] + self.done[name].outputs[0].token_ids)[:34]
        prompt = stem + [self.rng.randrange(4, VOCAB) for _ in range(self.rng.randint(1, 30))]
        params = SamplingParams(temperature=0.0, max_tokens=self.rng.choice([3, 16, 24, 32]), ignore_eos=True)
        self.prompts[self.engine.add_request(prompt, params, stream="final")] = prompt

    def retract(self) -> None:
        self.engine.pause("retract")
        self.engine.unpause()

    def keep(self) -> None:
        self.engine.pause("keep")
        if self.rng.random() < 0.5:
            self.update()
        self.engine.unpause()

    def update(self) -> None:
        """New weights under a label of the caller's, which need not be new."""
        self.engine.drain()
        self.load(self.rng.randrange(NUM_WEIGHTS))
        label = self.rng.choice([self.label + 1, self.label + 5, max(0, self.label - 1)])
        running = self.rng.choice(["keep", "recompute"])
        self.engine.set_weight_version(label, running=running)
        self.label = label
        self.visited[f"update {running}"] += 1

    def silent(self) -> None:
        """New weights, and nobody says so."""
        if not self.engine.has_unfinished():
            return
        self.engine.drain()
        if self.engine.has_unfinished() and len(self.engine.output_processor):
            self.load((self.weights + self.rng.randint(1, NUM_WEIGHTS - 1)) % NUM_WEIGHTS)
            self.label += 1
            self.take(self.engine.step())

    def abort(self) -> None:
        live = [group.id for group in self.engine.output_processor.requests]
        if live:
            self.take([self.engine.abort(self.rng.choice(live))])

    def suspend(self) -> None:
        mode = self.rng.choice(["persist", "offload", "offload", "recompute"])
        self.engine.suspend(mode)
        self.visited[mode] += 1
        for command in self.rng.choices(["update", "submit", "abort", "nothing"], k=2):
            if command != "nothing":
                getattr(self, command)()
        if self.rng.random() < 0.4:
            self.engine.resume({"weights"})
            if self.rng.random() < 0.5:
                self.update()
        self.engine.resume()

    # ------------------------------------------------------------------ the reference

    def check(self, name: str, output: Any) -> None:
        tokens, sample = list(self.prompts[name]), output.outputs[0]
        adopted = inspect(self.engine).adopted
        cache, labels = Cache(adopted, num_blocks=64), []
        spans: list[tuple[int, int, int, int]] = []
        num_output = len(sample.token_ids)
        for piece in self.log.get(name, []):
            if len(tokens) - len(self.prompts[name]) >= num_output:
                break  # drawn in flight after its end
            start, n = piece.start, piece.n
            if piece.begins:
                labels, start, n = [], 0, piece.start + piece.n
                cache = Cache(adopted, num_blocks=64)
            elif len(labels) < start and set(labels) == {piece.label}:  # found meanwhile, under the same weights
                start, n = len(labels), piece.start + piece.n - len(labels)
                self.visited["skipped ahead"] += 1
            assert len(labels) == start, f"{name}: position {start} is computed after {len(labels)} others"
            known = (tokens + sample.token_ids[len(tokens) - len(self.prompts[name]) :])[start : start + n]
            self.load(piece.weights)
            adopted.refresh_scan_weights()
            step = cache.step([(0, known)])
            with torch.inference_mode():
                hidden = adopted.hidden(step)
                logits = adopted.logits(hidden[-1:], step.ops)
            labels += [piece.label] * n
            if start + n == len(tokens):
                span = (piece.label, min(labels), max(labels))
                if not spans or spans[-1][1:] != span:
                    spans.append((len(tokens) - len(self.prompts[name]), *span))
                tokens.append(int(logits[0, :VOCAB].argmax()))
        assert tokens[len(self.prompts[name]) :] == sample.token_ids, name
        assert [tuple(span[:4]) for span in sample.spans] == spans, name
        self.visited["mixed"] += any(span[2] != span[3] for span in spans)
        self.visited["tokens"] += num_output
        self.visited["swapped back"] += self.swaps[name]


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind) -> torch.nn.Module:
    return make_model(kind, vocab_size=VOCAB, max_sequence_length=128)


@pytest.fixture(scope="module")
def snapshots(model) -> list[list[torch.Tensor]]:
    generators = [torch.Generator().manual_seed(seed) for seed in range(NUM_WEIGHTS)]
    return [[p.detach() + 0.1 * torch.randn(p.shape, generator=g) for p in model.parameters()] for g in generators]


def check_schedules(model, kind, snapshots, seeds, overlap) -> Counter:
    """Run a random schedule of each seed against the reference -> what they came to."""
    visited: Counter = Counter()
    for seed in seeds:
        harness = Harness(model, kind, snapshots, random.Random(seed), overlap)
        try:
            for _ in range(150):
                harness.act()
            while harness.engine.has_unfinished():
                harness.step()
            assert harness.done.keys() == harness.prompts.keys()
            for name, output in harness.done.items():
                harness.check(name, output)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        visited += harness.visited
        visited.update({k: v for k, v in harness.engine.stats().counters.items() if v})
    for what in ("update keep", "update recompute", "silent", "abort", "persist", "offload", "recompute", "mixed"):
        assert visited[what], f"{what}: {visited}"
    assert visited["prefix_hits"] and visited["tokens"] > 100
    assert visited["evicted"] or kind == "mamba", "its blocks take no memory"
    assert visited["states_loaded"] or kind not in RECURRENT
    return visited


def test_versions_and_tokens_equal_the_reference_in_a_random_schedule(model, kind, snapshots):
    overlap = [*KINDS].index(kind) % 2 == 1
    visited = check_schedules(model, kind, snapshots, [SEEDS[kind]], overlap)
    assert visited["swapped_in"] or kind == "mamba"


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("shard", range(4))
def test_versions_and_tokens_equal_the_reference_in_random_schedules(model, kind, snapshots, shard, overlap):
    each = 2 if kind == "mamba" else 3
    visited = check_schedules(model, kind, snapshots, range(shard * each, (shard + 1) * each), overlap)
    assert visited["swapped_in"] or kind == "mamba" or shard == 0, "shard 0 swaps for some kinds only"


def test_an_engine_made_under_inference_mode_takes_new_weights_outside_of_it(kind):
    model = make_model(kind, vocab_size=64, max_sequence_length=32)
    with torch.inference_mode():
        engine = DynamicInferenceEngine(model, InferenceConfig(max_sequence_length=32, buffer_size_gb=0.01))
        engine.refresh_weights()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    engine.refresh_weights()
    engine.suspend(tags=["weights"])
    engine.resume()
    engine.weights.verify()
