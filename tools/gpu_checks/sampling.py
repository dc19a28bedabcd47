"""The sampler on the device against the sampler on a CPU, on the same logits: the same tokens, and no wait for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from launches import captured
from sampling_rows import UNEDITED, Rows, random_logits, random_request, same_outputs

from gpu_checks.context import Context
from gpu_checks.registry import Comparison, check
from megatron_infer.kernels import backend_candidates
from megatron_infer.kernels.draw_columns import DrawRoom
from megatron_infer.runner.sampling.row_params import RowFlags
from megatron_infer.runner.sampling.sampler import SamplerInput, SamplerOutput
from megatron_infer.runner.sampling.token_masks import TokenMasks

VOCABULARIES = (1000, 32000, 50257, 128256, 151936, 262144)
"""Odd ones and powers of two: each has a cut of its own into chunks."""
CAPTURED: dict[str, Any] = UNEDITED | {"return_support": False}
"""Where details are returned of rows for their supports alone, what a graph's draw leaves undefined is among them."""
MASKED = (1, 5)
"""Rows of which a grammar allows one token each."""


def _rows(ctx: Context, requests: list[Any], vocabulary: int, *, mode: str = "raw", with_kernels: bool = True) -> Rows:
    """Rows on the device; with_kernels=False: torch's code draws."""
    forced = ctx.pick(None, "triton")
    found, _ = backend_candidates.available(backend_candidates.SAMPLING, ctx.device, torch.float32, forced=forced)
    own = {"kernels": found[0], "argmax": found[0].argmax, "device_kernels": found[0]} if found and with_kernels else {}
    return Rows(requests, vocabulary, mode=mode, device=ctx.device, **own)


def _step(rows: Rows, logits_RV: torch.Tensor, masks: TokenMasks) -> Callable[[], SamplerOutput]:
    """The draw of all rows, to be run any number of times."""
    rows.params.flags[list(MASKED)] |= RowFlags.GRAMMAR
    order = np.arange(len(rows.requests), dtype=np.int32)
    inputs = SamplerInput(rows=order, positions=rows.positions_of(order), token_pool=rows.pool, masks=masks)
    return partial(rows.sampler.sample, rows.padded(logits_RV), inputs)


@check(budget_s=100, what="difference in nats")
def draws(ctx: Context, compare: Comparison) -> None:
    """Any mix of parameters, penalties and a grammar's masks among them, draws and tells what it does on a CPU, by
    kernels and by torch's code; the host waits for none of it, and a row of NaN is called bad.
    """
    for number, vocabulary in enumerate(ctx.pick(VOCABULARIES, (120,))):
        rng, dtype = np.random.default_rng(vocabulary), ctx.dtypes()[number % len(ctx.dtypes())]
        requests = [random_request(rng, vocabulary, logprobs=1, return_support=True) for _ in range(ctx.pick(96, 6))]
        bits, allowed = np.zeros((len(MASKED), -(-vocabulary // 32)), dtype=np.uint32), [7, vocabulary - 1]
        for row, line, token in zip(MASKED, bits, allowed, strict=True):
            requests[row] = random_request(rng, vocabulary, **UNEDITED, logprobs=1, return_support=True)
            line[token // 32] = 1 << token % 32
        logits = random_logits(rng, len(requests), vocabulary, dtype=dtype)
        masks = TokenMasks(np.array(MASKED), bits.view(np.int32))
        wanted = _told(_step(Rows(requests, vocabulary, mode="processed"), logits, masks)())
        for with_kernels in (True, False):
            rows = _rows(ctx, requests, vocabulary, mode="processed", with_kernels=with_kernels)
            step = _step(rows, logits, masks)
            step()  # compiles
            rows.put(0, requests[0])  # what was uploaded for these rows is uploaded again
            with ctx.no_sync():
                out = step()
            label = f"vocabulary {vocabulary}, {dtype}, {'kernels' if with_kernels else 'torch'}"
            compare.require(f"{label}: masks were passed over", out.tokens_S[list(MASKED)].tolist() == allowed)
            for name, got in _told(out).items():
                if name == "log probabilities":
                    excess = (got - wanted[name]).abs() - 1e-5 * wanted[name].abs()
                    compare.add(f"{label}, {name}", float(excess.max()), 2e-5)
                else:
                    compare.require(f"{label}: other {name}", torch.equal(got, wanted[name]))
            spoilt = logits.index_fill(0, torch.tensor([2]), torch.nan)
            bad = _step(rows, spoilt, masks)().bad_S.cpu().nonzero().flatten().tolist()
            compare.require(f"{label}: rows called bad: {bad}", bad == [2])


def _told(out: SamplerOutput) -> dict[str, torch.Tensor]:
    """What is told of each row, on a CPU."""
    assert out.logprobs is not None and out.token_details is not None
    told = {"tokens": out.tokens_S, "bad rows": out.bad_S, "supports": out.token_details.values["support"]}
    told |= {"ranks": out.logprobs.token_rank, "log probabilities": out.logprobs.token_logprob}
    return {name: value.cpu() for name, value in told.items()}


@check(budget_s=60)
def captured_draws(ctx: Context, compare: Comparison) -> None:
    """A captured draw follows rows, positions, parameters and logits, waits for nothing, and gives the bits of one
    outside of a graph: tokens, log probabilities, ranks.
    """
    for vocabulary, mode in ctx.pick(((1000, "raw"), (50257, "processed"), (262144, "raw")), ((120, "processed"),)):
        rng, dtype = np.random.default_rng(vocabulary), ctx.pick(torch.bfloat16, torch.float32)
        count = ctx.pick(48, 6)
        rows = _rows(ctx, [random_request(rng, vocabulary, **CAPTURED) for _ in range(count)], vocabulary, mode=mode)
        logits = rows.padded(random_logits(rng, count, vocabulary, dtype=dtype))
        row_S, position_S = torch.zeros((2, count), dtype=torch.int32, device=ctx.device)
        room = DrawRoom.make(count, ctx.device)
        with torch.inference_mode():
            rows.captured.refresh()
            draw = partial(rows.captured.draw, logits, row_S, position_S, rows.pool, room)
            replay = captured(draw, ctx.device)
            for turn in range(ctx.pick(5, 2)):
                for row in rng.choice(count, size=1 + count // 8, replace=False).tolist():
                    rows.put(row, random_request(rng, vocabulary, **CAPTURED))
                inputs = rows.inputs(rng.permutation(count))
                logits.copy_(rows.padded(random_logits(rng, count, vocabulary, dtype=dtype)))
                row_S.copy_(torch.from_numpy(inputs.rows))
                position_S.copy_(torch.from_numpy(inputs.positions))
                rows.captured.refresh()
                label = f"vocabulary {vocabulary}, turn {turn}"
                compare.require(f"{label}: these rows are drawn outside", rows.captured.can_draw(inputs))
                with ctx.no_sync():
                    replay()
                    got = rows.captured.output(logits, inputs, room)
                same_outputs(got, rows.sampler.sample(logits, inputs))
                compare.require(f"{label}: rows called bad", not bool(got.bad_S.any()))
                drawn = rows.pool[row_S.long(), position_S.long()]
                compare.require(f"{label}: other tokens in the pool", bool(torch.equal(drawn.long(), got.tokens_S)))
