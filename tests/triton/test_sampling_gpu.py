"""What only a GPU shows: no wait for it in a sampler's step, and a captured draw that follows its rows' parameters."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from sampling_rows import UNEDITED, random_logits, random_request, same_outputs

from megatron_infer.kernels.draw_columns import DrawRoom
from megatron_infer.memory.device import Device
from megatron_infer.runner.cuda_graphs.captured_draw import CapturedDraw
from megatron_infer.runner.sampling.draw_groups import DeviceOps
from megatron_infer.runner.sampling.row_params import RowFlags, RowParams
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput
from megatron_infer.runner.sampling.token_masks import TokenMasks, forbid

pytestmark = pytest.mark.gpu

VOCAB, ROWS = 40_000, 48
PLAIN = {**UNEDITED, "logprobs": None, "return_sampled_logprobs": False, "return_support": False}


@pytest.fixture(autouse=True)
def gpu(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")


def make_sampler(requests, *, with_kernels=True):
    device = Device("cuda")
    params = RowParams(len(requests) + 1, VOCAB)
    for row, request in enumerate(requests):
        params.set(row, request)
    kernels = None
    if with_kernels:
        from megatron_infer.kernels.triton.sampling import TritonSampling

        kernels = TritonSampling()
    return Sampler(
        params,
        padded_vocab_size=VOCAB + 64,
        logprobs_mode="processed",
        argmax=None if kernels is None else kernels.argmax,
        kernels=kernels,
        ops=DeviceOps(to_device=device.to_device, forbid=forbid if kernels is None else kernels.forbid),
    )


def on_gpu(requests, rng):
    logits = torch.nn.functional.pad(random_logits(rng, len(requests), VOCAB, dtype=torch.bfloat16), (0, 64), value=1e4)
    pool = torch.zeros(len(requests) + 1, 80, dtype=torch.int32)
    for row, request in enumerate(requests):
        pool[row, : len(request.tokens)] = torch.tensor(request.tokens, dtype=torch.int32)
    return logits.cuda(), pool.cuda()


@pytest.mark.parametrize("with_kernels", [True, False], ids=["triton", "torch"])
def test_a_step_of_all_wishes_waits_for_nothing_and_draws_what_a_cpu_draws(with_kernels):
    rng = np.random.default_rng(0)
    requests = [random_request(rng, VOCAB) for _ in range(ROWS)]
    logits, pool = on_gpu(requests, rng)
    rows, positions = np.arange(ROWS, dtype=np.int32), np.array([len(r.tokens) for r in requests])
    sampler = make_sampler(requests, with_kernels=with_kernels)
    inputs = SamplerInput(rows=rows, positions=positions, token_pool=pool)
    sampler.sample(logits, inputs)  # compiles
    sampler.params.set(0, requests[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = sampler.sample(logits, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    of_cpu = Sampler(sampler.params, padded_vocab_size=VOCAB + 64, logprobs_mode="processed")
    wanted = of_cpu.sample(logits.cpu(), SamplerInput(rows=rows, positions=positions, token_pool=pool.cpu()))
    assert out.tokens_S.tolist() == wanted.tokens_S.tolist()
    assert out.logprobs.token_rank.tolist() == wanted.logprobs.token_rank.tolist()
    torch.testing.assert_close(out.logprobs.token_logprob.cpu(), wanted.logprobs.token_logprob, atol=2e-5, rtol=1e-5)
    assert torch.equal(out.token_details.values["support"].cpu(), wanted.token_details.values["support"])


def test_masks_reach_the_gpu_without_a_wait():
    rng = np.random.default_rng(1)
    requests = [random_request(rng, VOCAB, **PLAIN) for _ in range(8)]
    logits, pool = on_gpu(requests, rng)
    sampler = make_sampler(requests)
    sampler.params.flags[[1, 5]] |= RowFlags.GRAMMAR
    bits = np.zeros((2, VOCAB // 32), dtype=np.int32)
    bits[0, 7], bits[1, 1249] = 1 << 3, -(1 << 31)
    rows, positions = np.arange(8, dtype=np.int32), np.array([len(r.tokens) for r in requests])
    inputs = SamplerInput(
        rows=rows, positions=positions, token_pool=pool, masks=TokenMasks(np.array([1, 5], dtype=np.int64), bits)
    )
    sampler.sample(logits, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = sampler.sample(logits, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.tokens_S[[1, 5]].tolist() == [7 * 32 + 3, 1249 * 32 + 31]


def test_a_captured_draw_follows_rows_positions_parameters_and_logits():
    rng = np.random.default_rng(2)
    requests = [random_request(rng, VOCAB, **UNEDITED) for _ in range(ROWS)]
    logits, pool = on_gpu(requests, rng)
    sampler = make_sampler(requests)
    captured = CapturedDraw(sampler, sampler._kernels)
    captured.refresh()
    row_S, position_S = torch.zeros((2, ROWS), dtype=torch.int32, device="cuda")
    stream, room = torch.cuda.Stream(), DrawRoom.make(ROWS, logits.device)
    with torch.cuda.stream(stream):
        captured.draw(logits, row_S, position_S, pool, room)  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.draw(logits, row_S, position_S, pool, room)
    for _ in range(5):
        for row in rng.choice(ROWS, size=6, replace=False).tolist():
            requests[row] = random_request(rng, VOCAB, **UNEDITED)
            sampler.params.set(row, requests[row])
        order = rng.permutation(ROWS).astype(np.int32)
        positions = np.array([len(requests[row].tokens) for row in order], dtype=np.int64)
        for target, new in zip((logits, pool), on_gpu(requests, rng), strict=True):
            target.copy_(new)
        row_S.copy_(torch.from_numpy(order))
        position_S.copy_(torch.from_numpy(positions))
        captured.refresh()
        inputs = SamplerInput(rows=order, positions=positions, token_pool=pool)
        assert captured.can_draw(inputs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
            got = captured.output(logits, inputs, room)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        wanted = sampler.sample(logits, inputs)
        same_outputs(on_cpu(got), on_cpu(wanted))
        assert not got.bad_S.any()
        assert pool[row_S.long(), position_S.long()].tolist() == got.tokens_S.tolist()


def on_cpu(part):
    """A dataclass with its tensors, and those of what it holds, on the CPU."""
    moved = {}
    for one in fields(part):
        value = getattr(part, one.name)
        moved[one.name] = value.cpu() if isinstance(value, torch.Tensor) else value
        if one.name == "values":
            moved[one.name] = {key: tensor.cpu() for key, tensor in value.items()}
        if one.name in ("logprobs", "token_details") and value is not None:
            moved[one.name] = on_cpu(value)
    return replace(part, **moved)
