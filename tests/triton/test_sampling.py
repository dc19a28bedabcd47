"""Triton's draws, scores and masks are those of the torch code: every token, cut, rank and bit of randomness."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sampling_oracle import make_request
from sampling_rows import UNEDITED, Rows, drawn_captured, random_logits, random_request, same_outputs

from megatron_infer.kernels.triton.launch import launch
from megatron_infer.runner.sampling.filters import DrawParams, draw_any, draw_sorted
from megatron_infer.runner.sampling.logprobs import score
from megatron_infer.runner.sampling.rng import mix, uniform
from megatron_infer.runner.sampling.token_masks import forbid

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def kernels(device):
    from megatron_infer.kernels.triton.sampling import TritonSampling

    return TritonSampling()


@pytest.fixture(scope="module")
def narrow(device):
    """Holds so few candidates that most filtered rows are searched in whole."""
    from megatron_infer.kernels.triton.sampling import TritonSampling

    return TritonSampling(held=4)


def columns_of(rng, num_rows, vocab_size):
    """1 / temperature, top_k, top_p, min_p, uniform: every combination, or as many of them, in no order."""
    grid = list(
        itertools.product(
            [0.1, 1.0, 4.0], [1, 5, 64, 300, 2000, 1 << 30], [1e-9, 0.5, 0.95, 1.0], [0.0, 1e-3, 0.5, 1.0]
        )
    )
    chosen = [grid[i] for i in rng.choice(len(grid), size=num_rows, replace=num_rows > len(grid))]
    columns = torch.tensor(chosen, dtype=torch.float64).T.contiguous()
    columns[0] = 1 / columns[0]
    columns[1].clamp_(max=vocab_size)
    columns = torch.cat([columns, torch.from_numpy(rng.random((1, num_rows)))])
    columns[4, 0], columns[4, -1] = 0.0, 1 - 2.0**-53
    return columns


def same(kernels, device, logits, columns):
    got = [part.cpu() for part in kernels.draw(logits.to(device), columns.to(device))]
    free = (columns[1] >= logits.shape[1]) & (columns[2] >= 1) & (columns[3] <= 0)
    for rows, draw in ((free, draw_any), (~free, draw_sorted)):
        if not rows.any():
            continue
        params = DrawParams(columns_5M=columns[:, rows], candidates=256, needs_mass=True)
        wanted = draw(logits[rows].float(), params)
        assert got[0][rows].tolist() == wanted.token_M.tolist()
        assert torch.equal(got[1][rows], wanted.top_M)
        if wanted.cut_id_M is None:
            assert bool((got[2][rows] == -torch.inf).all()) and bool((got[3][rows] == logits.shape[1]).all())
        else:
            assert torch.equal(got[2][rows], wanted.cut_logit_M)
            assert got[3][rows].tolist() == wanted.cut_id_M.tolist()


@pytest.mark.parametrize("step", [None, 0.5], ids=["distinct", "many_equal"])
@pytest.mark.parametrize("vocab_size", [1, 300, 9001])
@pytest.mark.parametrize("room", ["kernels", "narrow"])
def test_tokens_and_cuts_are_those_of_torch(request, device, dtype, room, vocab_size, step):
    rng = np.random.default_rng(vocab_size + (step is None))
    num_rows = 2000 if device.type == "cuda" else 5 if vocab_size < 9000 else 3
    logits = random_logits(rng, num_rows, vocab_size + 7, dtype=dtype, step=step)[:, :vocab_size]
    if vocab_size > 100:
        logits[::4, rng.random(vocab_size) < 0.7] = -torch.inf
        logits[1::7] = 0.0
        logits[1::7, ::2] = -0.0
    same(request.getfixturevalue(room), device, logits, columns_of(rng, num_rows, vocab_size))


@pytest.mark.parametrize("room", ["kernels", "narrow"])
def test_cuts_and_draws_that_fall_between_equal_logits_are_those_of_torch(request, device, room):
    """Every row has two levels, 2 at the upper and 4 at the lower; draws fall right before and on each boundary."""
    logit = torch.tensor([-1.0, 0.0, -1.0, -1.0, 0.0, -1.0])
    low = int(np.exp(-1.0) * 2.0**40)
    ways = [(k, 1.0, 0.0) for k in range(1, 6)]
    ways += [(6, p, 0.0) for p in (1e-9, 0.29, 0.5, 0.7, 0.99)] + [(4, 0.8, 0.0), (5, 0.5, 0.0), (6, 1.0, 0.5)]
    rows = []
    for top_k, top_p, min_p in ways:
        top = min(top_k, 2)
        for edge in (2**40 * top, 2**40 * top + low):
            total = 2**40 * top + low * (top_k - top)
            rows += [(1.0, top_k, top_p, min_p, min(max((edge - d) / total, 0.0), 1 - 2.0**-53)) for d in (0.5, 0.0)]
    rows = rows if device.type == "cuda" else rows[::5]  # the interpreter takes a third of a second for each
    columns = torch.tensor(rows, dtype=torch.float64).T.contiguous()
    same(request.getfixturevalue(room), device, logit.half().expand(len(rows), -1), columns)


def test_draws_from_flat_rows_are_those_of_torch(kernels, device):
    rng = np.random.default_rng(1)
    num_rows = 4000 if device.type == "cuda" else 16
    columns = torch.ones(5, num_rows, dtype=torch.float64)
    columns[1], columns[3] = 20_000, 0.0
    columns[4] = torch.from_numpy(rng.random(num_rows))
    same(kernels, device, random_logits(rng, 1, 20_000).expand(num_rows, -1), columns)


def test_rows_that_cannot_be_drawn_from_say_so_and_greedy_ones_take_the_lowest_of_equal_ids(kernels, device):
    logits = torch.zeros(6, 5000)
    logits[1, 4999], logits[2, 7], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, [4097, 700, 4999]] = 3.0
    columns = torch.ones(5, 6, dtype=torch.float64)
    columns[1], columns[3] = 5000, 0.0
    columns[0, 4:] = 0.0
    token, top, *_ = kernels.draw(logits.to(device), columns.to(device))
    assert top.isfinite().tolist() == [True, False, False, False, True, True]
    assert token[3:].tolist() == [0, 700, 0]
    assert kernels.argmax(logits[3:].to(device))[0].tolist() == [0, 700, 0]


def test_weights_and_uniforms_are_the_hosts(device):
    from probe_kernels import draw_kernel

    rng, count = np.random.default_rng(2), 4096
    x = torch.from_numpy(-rng.exponential(8.0, count)).float()
    x[0], x[1] = 0.0, -torch.inf
    seeds = rng.integers(0, 2**64, count, dtype=np.uint64)
    seeds[:3] = 0, 2**63, 2**64 - 1
    positions = rng.integers(0, 2**31 - 1, count).astype(np.int32)
    weight, drawn = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.float64)
    tensors = [x, weight, torch.from_numpy(mix(seeds).view(np.int64)), torch.from_numpy(positions), drawn]
    tensors = [tensor.to(device) for tensor in tensors]
    launch(draw_kernel, (1,), *tensors, N=count)
    wanted = (x.double() * 0.7).exp().mul(2.0**40).to(torch.int64)
    assert int((tensors[1].cpu() - wanted).abs().max()) <= 1 and tensors[1][:2].tolist() == [2**40, 0]
    assert np.array_equal(tensors[4].cpu().numpy(), uniform(seeds, positions))


@pytest.mark.parametrize("room", ["kernels", "narrow"])
def test_scores_are_those_of_torch(request, device, dtype, room):
    kernels, rng, vocab_size = request.getfixturevalue(room), np.random.default_rng(3), 5003
    num_rows = 500 if device.type == "cuda" else 5
    logits = random_logits(rng, num_rows, vocab_size + 3, dtype=dtype, step=0.25)[:, :vocab_size]
    logits[::3, rng.random(vocab_size) < 0.5] = -torch.inf
    logits[:, 0] = 0.0
    token = torch.from_numpy(rng.integers(0, vocab_size, num_rows))
    token[:2] = logits[:2].float().argmax(-1)
    token[2], token[3] = 0, vocab_size - 1
    exact = torch.log_softmax(logits.double(), -1)
    for top in (0, 6):
        got = [part.cpu() for part in kernels.score(logits.to(device), token.to(device), top)]
        wanted = score(logits, token, top)
        assert torch.equal(got[1], wanted[1]) and torch.equal(got[2], wanted[2])
        # float64 is the judge: torch's own sum over a large vocabulary in fp32 is off by up to 1e-5
        torch.testing.assert_close(got[0], exact.gather(1, token[:, None])[:, 0].float(), atol=5e-7, rtol=5e-7)
        torch.testing.assert_close(got[3], exact.gather(1, wanted[2]).float(), atol=5e-7, rtol=5e-7)


def test_a_score_takes_over_what_the_draw_summed_up_and_a_row_of_nan_has_none(kernels, device):
    rng = np.random.default_rng(4)
    logits = random_logits(rng, 4, 700)
    logits[3, 5] = torch.nan
    columns = torch.ones(5, 4, dtype=torch.float64)
    columns[1], columns[3], columns[4] = 700, 0.0, 0.4
    columns[0, 1] = 1 / 0.7  # the sum of another temperature does not serve
    logits, columns = logits.to(device), columns.to(device)
    token, largest, _, _, mass, own = kernels.draw(logits, columns)
    assert (mass > 0).tolist() == [True, False, True, False]
    alone, taken = kernels.score(logits, token, 2), kernels.score(logits, token, 2, known=(mass, largest))
    assert torch.equal(own[[0, 2]], alone[0][[0, 2]]) and own.isnan().tolist() == [False, False, False, True]
    for one, other in zip(alone, taken, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))
    assert alone[0].isnan().tolist() == [False, False, False, True] and alone[2][3].tolist() == [0, 1]
    mass[0] *= 2
    assert abs(kernels.score(logits, token, 0, known=(mass, largest))[0][0] - alone[0][0] + np.log(2)) < 1e-5


@pytest.mark.parametrize("some", [False, True], ids=["all_rows", "some_rows"])
def test_masks_forbid_what_torch_forbids(kernels, device, some):
    rng = np.random.default_rng(5)
    work = random_logits(rng, 3, 4200)
    bits = torch.from_numpy(rng.integers(-(2**31), 2**31, (2 if some else 3, 132)).astype(np.int32))
    rows = torch.tensor([2, 0]) if some else None
    wanted, got = work.clone(), work.to(device)
    forbid(wanted, bits, rows)
    kernels.forbid(got, bits.to(device), None if rows is None else rows.to(device))
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_the_captured_draw_gives_what_the_ordinary_one_does_bit_for_bit(kernels, device, mode):
    """Rows with and without every option, side by side; torch's code agrees but for the last bits of a logarithm."""
    if device.type == "cuda":
        pytest.skip("these rows live on a CPU; the check captured_draws draws on a GPU")
    rng, vocab_size = np.random.default_rng(6), 4200
    ways = [
        {},
        {"temperature": 0.0, "logprobs": 0, "return_sampled_logprobs": True},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.7, "top_p": 0.9, "logprobs": 0, "return_sampled_logprobs": True},
        {"top_k": 7, "return_sampled_logprobs": True},
        {"temperature": 1.4, "logprobs": 2, "return_sampled_logprobs": True},
        {"logprobs": 0, "return_sampled_logprobs": True},
        {"temperature": 0.0, "logprobs": 2, "return_sampled_logprobs": True},
    ]
    requests = [make_request(rng.integers(0, 90, 40), rng.integers(0, 9, 20), seed=i, **w) for i, w in enumerate(ways)]
    requests += [random_request(rng, vocab_size, **UNEDITED, min_p=0.3)]
    logits = random_logits(rng, len(requests), vocab_size, dtype=torch.float16, step=0.125)
    logits[6, 9], logits[7, 4100] = torch.inf, torch.nan
    order = rng.permutation(len(requests))
    fast = Rows(requests, vocab_size, mode=mode, kernels=kernels, argmax=kernels.argmax, device_kernels=kernels)
    got = drawn_captured(fast, logits, order)
    same_outputs(got, fast.sample(logits, order))
    plain = Rows(requests, vocab_size, mode=mode)
    wanted = drawn_captured(plain, logits, order)
    assert got.tokens_S.tolist() == wanted.tokens_S.tolist() and got.bad_S.tolist() == wanted.bad_S.tolist()
    assert int(got.bad_S.sum()) == 2
    good = ~wanted.bad_S[torch.from_numpy(wanted.logprobs.index)]
    assert torch.equal(got.logprobs.token_rank[good], wanted.logprobs.token_rank[good])
    torch.testing.assert_close(
        got.logprobs.token_logprob[good], wanted.logprobs.token_logprob[good], atol=2e-5, rtol=1e-6
    )
    for name in ("raw", "processed"):
        good = ~wanted.bad_S[torch.from_numpy(wanted.token_details.index)]
        mine, theirs = got.token_details.values[name][good], wanted.token_details.values[name][good]
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-6)
