"""Tokens, log probabilities and ranks drawn from vocabulary shards are, bit for bit, those of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gloo_ranks import run_on_ranks
from sampling_oracle import make_request
from sampling_rows import random_logits, random_request

from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.native_sampling import NativeSampling
from megatron_infer.runner.in_flight import arrays_of
from megatron_infer.runner.parallel.tensor_parallel_sampler import for_group
from megatron_infer.runner.sampling.logprobs import prompt_logprobs
from megatron_infer.runner.sampling.row_params import RowParams
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput

INF = float("inf")


class Pair:
    """One sampler on whole rows and one on this rank's shard, over the same requests."""

    def __init__(self, requests, vocab_size, rank, size, *, padding=7, mode="raw", kernels=None) -> None:
        self.requests, self.rank, self.size = requests, rank, size
        self.vocab_size = vocab_size
        self.padded = -(-(vocab_size + padding) // size) * size
        longest = max(len(r.tokens) for r in requests)
        self.pool = torch.zeros(len(requests), longest + 9, dtype=torch.int32)
        for row, request in enumerate(requests):
            self.pool[row, : len(request.tokens)] = torch.tensor(request.tokens, dtype=torch.int32)
        self.whole = self._sampler(mode, kernels)
        self.sharded = for_group(self._sampler(mode, kernels), torch.distributed.group.WORLD)

    def _sampler(self, mode, kernels):
        params = RowParams(len(self.requests), self.vocab_size)
        for row, request in enumerate(self.requests):
            params.set(row, request)
        return Sampler(params, padded_vocab_size=self.padded, logprobs_mode=mode, kernels=kernels)

    def shard(self, logits_SV):
        """(all logits with padding that is larger than any of them, this rank's part)."""
        padded = torch.nn.functional.pad(logits_SV, (0, self.padded - self.vocab_size), value=1e4)
        return padded, padded.chunk(self.size, dim=1)[self.rank].contiguous()

    def check(self, logits_RV, rows=None):
        """Draw for `rows` both ways from logits_RV[row]; the token ids, and how many rows were bad."""
        rows = np.arange(len(self.requests), dtype=np.int32) if rows is None else np.asarray(rows, dtype=np.int32)
        positions = np.array([len(self.requests[row].tokens) for row in rows])
        inputs = SamplerInput(rows=rows, positions=positions, token_pool=self.pool)
        padded, shard = self.shard(logits_RV[torch.from_numpy(rows).long()])
        before = shard.clone()
        got, want = self.sharded.sample(shard, inputs), self.whole.sample(padded, inputs)
        assert torch.equal(bits(shard), bits(before)), "the model's logits were changed"
        assert got.bad_S.tolist() == want.bad_S.tolist()
        assert got.tokens_S.tolist() == want.tokens_S.tolist()
        same_scores(got.logprobs, want.logprobs)
        same_carried(got.token_details, want.token_details)
        return got

    def check_prompt(self, logits_PV, targets_P, top):
        padded, shard = self.shard(logits_PV)
        arguments = {"top": top, "chunk": 5, "vocab_size": self.vocab_size}
        want = prompt_logprobs(padded, targets_P, lambda x: x, **arguments, score=self.whole.score)
        got = prompt_logprobs(shard, targets_P, lambda x: x, **arguments, score=self.sharded.score)
        for mine, whole in zip(got, want, strict=True):
            assert mine.dtype == whole.dtype and torch.equal(bits(mine), bits(whole))


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_scores(got, want):
    assert (got is None) == (want is None)
    if got is None:
        return
    assert got.index.tolist() == want.index.tolist() and got.counts.tolist() == want.counts.tolist()
    assert torch.equal(bits(got.token_logprob), bits(want.token_logprob))
    assert torch.equal(got.token_rank, want.token_rank)
    for entry, count in enumerate(want.counts):
        assert torch.equal(got.top_ids[entry, :count], want.top_ids[entry, :count])
        assert torch.equal(bits(got.top_logprobs[entry, :count]), bits(want.top_logprobs[entry, :count]))


def same_carried(got, want):
    assert (got is None) == (want is None)
    if got is None:
        return
    got, want = arrays_of(got), arrays_of(want)
    assert list(got) == list(want) and {"values.raw", "values.processed", "values.support"} < set(got)
    for name in ("index", "places.support"):
        assert got.pop(name).tolist() == want.pop(name).tolist()
    for mine, whole in zip(got.values(), want.values(), strict=True):
        assert mine.dtype == whole.dtype and mine.shape == whole.shape and torch.equal(bits(mine), bits(whole))


def same_on_all_ranks(*tensors):
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(gathered, tensor.contiguous())
        assert all(torch.equal(bits(other), bits(tensor)) for other in gathered)


def every_option(rank, size, kernels):
    """Random parameters beside random others: greedy rows, drawn ones, and any mix of the rest."""
    for vocab_size, step in ((30, None), (1000, 0.5), (1003, 0.5)):
        rng = np.random.default_rng(vocab_size)
        requests = [random_request(rng, vocab_size) for _ in range(64)]
        requests += [make_request([1], temperature=0) for _ in range(16)]
        logits = random_logits(rng, len(requests), vocab_size, step=step)
        for mode in ("raw", "processed"):
            pair = Pair(requests, vocab_size, rank, size, mode=mode, kernels=kernels)
            out = pair.check(logits)
            same_on_all_ranks(out.tokens_S, out.logprobs.token_logprob, out.logprobs.top_ids)
            same_on_all_ranks(out.token_details.values["processed"], out.token_details.values["support"])
            for _ in range(3):
                pair.check(logits, rng.permutation(len(requests))[: int(rng.integers(1, 40))])


def few_rows(rank, size, kernels):
    """Fewer rows than ranks, each kind of row alone."""
    rng = np.random.default_rng(5)
    kinds = [{"temperature": 0}, {}, {"top_k": 3, "logprobs": 4}, {"temperature": 0, "logprobs": 0}, {"min_p": 0.1}]
    kinds += [{"temperature": 0, "return_support": True}, {"top_k": 3, "return_support": True, "logprobs": 1}]
    kinds += [{"return_sampled_logprobs": True}]
    pair = Pair([make_request([1, 2], seed=i, **kind) for i, kind in enumerate(kinds)], 301, rank, size)
    logits = random_logits(rng, len(kinds), 301)
    for row in range(len(kinds)):
        pair.check(logits, [row])
    pair.check(logits, [0, 2])


def bad_rows(rank, size, kernels):
    """NaN, infinities and masked vocabularies, wherever in the vocabulary they are."""
    rng = np.random.default_rng(6)
    kinds = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {},
        {"top_p": 0.9},
        {"temperature": 0, "min_tokens": 3},
    ]
    requests = [make_request([1, 2], seed=i, stop_ids=[4], **kind) for i, kind in enumerate(kinds)]
    for poison in (float("nan"), -float("nan"), INF, -INF):
        for where in (slice(0, 1), slice(299, 300), slice(None), slice(150, 300)):
            logits = random_logits(rng, len(kinds), 300)
            logits[::2, where] = poison
            pair = Pair(requests, 300, rank, size, kernels=kernels)
            got = pair.check(logits)
            harmless = poison == -INF and where != slice(None)
            assert got.bad_S.tolist() == [not harmless, False] * 2 + [not harmless]
    nothing = make_request([1], temperature=0, allowed_token_ids=[7], bad_token_ids=[7])
    assert Pair([nothing], 300, rank, size).check(
        torch.randn(1, 300, generator=torch.manual_seed(1))
    ).bad_S.tolist() == [True]


def ties_and_padding(rank, size, kernels):
    """Equal logits on several ranks: the lowest id; ranks whose whole part is padding."""
    logits = torch.zeros(3, 12)
    logits[0, [5, 11]] = 2.0
    logits[1, [3, 4, 8]] = -0.0
    requests = [make_request([1], temperature=0) for _ in range(3)]
    assert Pair(requests, 12, rank, size, padding=0).check(logits).tokens_S.tolist() == [5, 0, 0]
    drawn = [make_request([1], temperature=0), make_request([1], seed=3, logprobs=12), make_request([1], top_k=2)]
    for padding in (12, 40):
        pair = Pair(drawn, 12, rank, size, padding=padding)
        pair.check(logits)
        pair.check_prompt(logits, torch.tensor([5, 3, 11]), 12)


def prompts(rank, size, kernels):
    rng = np.random.default_rng(8)
    for vocab_size in (97, 2000):
        pair = Pair([make_request([1])], vocab_size, rank, size, kernels=kernels)
        for count, top in ((1, 0), (2, 3), (17, 5), (11, vocab_size)):
            logits = random_logits(rng, count, vocab_size, step=0.25)
            pair.check_prompt(logits, torch.from_numpy(rng.integers(0, vocab_size, size=count)), top)


def many_steps(rank, size, kernels):
    """Penalties and min_tokens move on with the sequence, rows change hands."""
    rng = np.random.default_rng(9)
    ways = [
        {"temperature": 0, "frequency_penalty": 1.5},
        {"temperature": 0, "min_tokens": 4},
        {"temperature": 0.5, "top_p": 0.9, "min_tokens": 4, "repetition_penalty": 1.2},
        {"temperature": 0},
    ]
    requests = [make_request([1, 2, 3], seed=i, stop_ids=[0, 11], **way) for i, way in enumerate(ways)]
    pair = Pair(requests, 12, rank, size, kernels=kernels)
    pair.pool = torch.zeros(len(ways), 64, dtype=torch.int32)
    for step in range(24):
        for row, request in enumerate(requests):
            pair.pool[row, : len(request.tokens)] = torch.tensor(request.tokens, dtype=torch.int32)
        if step == 12:
            for sampler in (pair.whole, pair.sharded):
                sampler.params.set(3, make_request([1], seed=5, top_k=4))
        for request, token in zip(requests, pair.check(random_logits(rng, 4, 12)).tokens_S.tolist(), strict=True):
            request.tokens.append(token)


def on_rank(rank, size, folder):
    for kernels in (None, native_or_none()):
        for check in (every_option, few_rows, bad_rows, ties_and_padding, prompts, many_steps):
            check(rank, size, kernels)
    group = torch.distributed.new_group([rank], use_local_synchronization=True)
    pair = Pair([make_request([1])], 10, rank, size)
    assert for_group(pair.whole, None) is pair.whole and for_group(pair.whole, group) is pair.whole


def native_or_none():
    try:
        return NativeSampling(native_build.load())
    except native_build.NativeUnavailable:
        return None


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3])
def test_shards_draw_what_one_process_draws(tmp_path, size):
    native_or_none()  # built once, not by every rank
    run_on_ranks(on_rank, size, tmp_path)
