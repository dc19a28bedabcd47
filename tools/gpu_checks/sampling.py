"""The sampler on the device against the sampler on a CPU, on the same fp32 logits: the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpu_checks.context import Context
from gpu_checks.registry import Comparison, check
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.draw_columns import DrawRoom
from megatron_infer.runner.cuda_graphs.captured_draw import CapturedDraw
from megatron_infer.runner.sampling.draw_groups import DeviceOps
from megatron_infer.runner.sampling.row_params import RowParams
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput, SamplerOutput
from megatron_infer.runner.sampling.token_masks import forbid
from megatron_infer.scheduler.request import Request

CPU = torch.device("cpu")
VOCABULARIES = (1000, 32000, 50257, 128256, 151936, 262144)
"""Odd ones and powers of two: each has a cut of its own into chunks."""
PLAIN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 0.9, "top_k": 200, "top_p": 0.95, "min_p": 0.001},
    {"temperature": 1.0, "top_k": 1},
)
EDITED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {3: 5.0, 7: -2.0}},
    {"temperature": 1.0, "allowed_token_ids": [1, 5, 9, 30]},
    {"temperature": 1.0, "bad_token_ids": [0, 2]},
)


class Rows:
    """Requests by row with their token pool, on one device."""

    def __init__(
        self,
        wishes: list[dict[str, Any]],
        vocabulary: int,
        device: torch.device,
        *,
        with_kernels: bool,
    ) -> None:
        self.device, self.vocabulary = device, vocabulary
        generator = np.random.default_rng(3)
        self.params = RowParams(len(wishes) + 1, vocabulary)
        self.positions = generator.integers(2, 30, len(wishes))
        pool = generator.integers(0, vocabulary, (len(wishes) + 1, 40)).astype(np.int32)
        for row, wish in enumerate(wishes):
            length = int(self.positions[row])
            tokens = [int(token) for token in pool[row, :length]]
            request = Request(
                id=str(row),
                tokens=tokens,
                prompt_len=1 + length // 2,
                params=SamplingParams(max_tokens=100, **wish),
                max_total=length + 100,
                seed=row * 7919 + 1,
            )
            self.params.set(row, request)
        self.pool = torch.from_numpy(pool).to(device)
        kernels = self._kernels() if with_kernels else None
        self.sampler = Sampler(
            self.params,
            padded_vocab_size=vocabulary + 8,
            kernels=kernels,
            ops=DeviceOps(
                to_device=lambda array: torch.from_numpy(array).to(device),
                forbid=forbid if kernels is None else kernels.forbid,
            ),
        )
        self.captured_draw = CapturedDraw(self.sampler, kernels)

    def _kernels(self) -> Any:
        found, _ = backend_candidates.available(backend_candidates.SAMPLING, self.device, torch.float32, forced=None)
        return found[0] if found else None

    def sample(self, logits_RV: torch.Tensor) -> SamplerOutput:
        rows = np.arange(len(logits_RV), dtype=np.int32)
        padded = torch.nn.functional.pad(logits_RV, (0, 8), value=1e4).to(self.device)
        inputs = SamplerInput(rows=rows, positions=self.positions[rows], token_pool=self.pool)
        with torch.inference_mode():
            return self.sampler.sample(padded, inputs)

    def captured(self, logits_RV: torch.Tensor) -> Any:
        """A call that draws for rows in another order each time, from within a graph where there can be one -> (what
        it gave, what a draw outside gives)."""
        count = len(logits_RV)
        logits = torch.nn.functional.pad(logits_RV, (0, 8), value=1e4).to(self.device)
        own, room = logits.clone(), DrawRoom.make(count, self.device)
        row_S, position_S = torch.zeros((2, count), dtype=torch.int32, device=self.device)

        def run() -> None:
            self.captured_draw.draw(own, row_S, position_S, self.pool, room)

        self.captured_draw.refresh()
        run()
        replay = run
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            replay = graph.replay

        def draw(order: np.ndarray) -> tuple[SamplerOutput, SamplerOutput]:
            inputs = SamplerInput(rows=order, positions=self.positions[order], token_pool=self.pool)
            for target, source in ((own, logits[torch.from_numpy(order).to(self.device)]), (row_S, order)):
                target.copy_(torch.as_tensor(source))
            position_S.copy_(torch.from_numpy(inputs.positions))
            replay()
            return self.captured_draw.output(own, inputs, room), self.sampler.sample(own, inputs)

        return draw


def _compare(ctx: Context, compare: Comparison, *, ways: tuple[dict[str, Any], ...], real: tuple[int, int]) -> None:
    """real: how often each way is asked for at once, and rounds."""
    repeats, rounds = ctx.pick(real, (1, 1))
    for vocabulary in ctx.pick(VOCABULARIES, (120,)):
        wishes = [way for way in ways for _ in range(repeats)]
        there, here = (Rows(wishes, vocabulary, where, with_kernels=where != CPU) for where in (ctx.device, CPU))
        generator, wrong = torch.Generator().manual_seed(vocabulary), 0
        for _ in range(rounds):
            logits = torch.randn(len(wishes), vocabulary, generator=generator) * 3
            got, wanted = there.sample(logits), here.sample(logits)
            wrong += int((got.tokens_S.cpu() != wanted.tokens_S).sum())
            compare.require(f"vocabulary {vocabulary}: rows called bad", not bool(got.bad_S.any()))
        compare.add(f"vocabulary {vocabulary}", wrong / (rounds * len(wishes)), 0.0)


@check(budget_s=40, what="share of draws that differ")
def draws(ctx: Context, compare: Comparison) -> None:
    """The same logits and seed give the same token as on a CPU: greedy, temperature, top_k, top_p, min_p."""
    _compare(ctx, compare, ways=PLAIN, real=(8, 6))


@check(budget_s=30, what="share of draws that differ")
def edited_draws(ctx: Context, compare: Comparison) -> None:
    """Penalties, bias, allowed and bad tokens change a draw as on a CPU."""
    _compare(ctx, compare, ways=EDITED, real=(4, 3))


@check(budget_s=40, what="share of rows that differ")
def captured_draws(ctx: Context, compare: Comparison) -> None:
    """A captured draw gives what one outside of a graph does: tokens, log probabilities, ranks."""
    asked = ({}, {"logprobs": 0}, {"return_sampled_logprobs": True})
    for vocabulary in ctx.pick((1000, 50257, 262144), (120,)):
        wishes = [{**way, **more} for way in PLAIN for more in asked]
        rows = Rows(wishes, vocabulary, ctx.device, with_kernels=True)
        generator = torch.Generator().manual_seed(vocabulary)
        logits = (torch.randn(len(wishes), vocabulary, generator=generator) * 3).to(
            ctx.pick(torch.bfloat16, torch.float32)
        )
        with torch.inference_mode():
            draw = rows.captured(logits)
            for turn in range(ctx.pick(4, 1)):
                got, wanted = draw(np.random.default_rng(turn).permutation(len(wishes)).astype(np.int32))
                for name, one, other in _pairs(got, wanted):
                    differ = (one != other).float().mean().item()
                    compare.add(f"vocabulary {vocabulary}, {name}, turn {turn}", differ, 0.0)


def _pairs(got: SamplerOutput, wanted: SamplerOutput) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    assert got.logprobs is not None and wanted.logprobs is not None
    assert got.token_details is not None and wanted.token_details is not None
    return [
        ("tokens", got.tokens_S, wanted.tokens_S),
        ("log probabilities", got.logprobs.token_logprob, wanted.logprobs.token_logprob),
        ("ranks", got.logprobs.token_rank, wanted.logprobs.token_rank),
        ("raw", got.token_details.values["raw"], wanted.token_details.values["raw"]),
        ("processed", got.token_details.values["processed"], wanted.token_details.values["processed"]),
    ]


@check(budget_s=15, what="difference in nats")
def logprobs(ctx: Context, compare: Comparison) -> None:
    """Log probabilities of drawn and likeliest tokens equal float64; rows of NaN are called bad and no others."""
    for vocabulary in ctx.pick((1000, 128256), (120,)):
        wishes = [{"temperature": 1.0, "logprobs": 5}] * ctx.pick(16, 3)
        rows = Rows(wishes, vocabulary, ctx.device, with_kernels=True)
        logits = torch.randn(len(wishes), vocabulary, generator=torch.Generator().manual_seed(1)) * 3
        out = rows.sample(logits)
        assert out.logprobs is not None
        wanted = logits.double().log_softmax(-1).gather(1, out.tokens_S.cpu()[:, None])[:, 0]
        drawn = out.logprobs.token_logprob.cpu().double()
        compare.add(f"vocabulary {vocabulary}", float((drawn - wanted).abs().max()), 2e-5)
        logits[1, 7] = float("nan")
        bad = rows.sample(logits).bad_S.cpu().tolist()
        compare.require(f"vocabulary {vocabulary}: bad rows {bad}", bad == [i == 1 for i in range(len(wishes))])
