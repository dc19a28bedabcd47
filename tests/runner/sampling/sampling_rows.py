"""A sampler with requests in its rows, and random requests to put there."""

from __future__ import annotations

import numpy as np
import torch
from sampling_oracle import make_request

from megatron_infer.kernels.draw_columns import DrawRoom
from megatron_infer.memory.device import Device
from megatron_infer.runner.cuda_graphs.captured_draw import CapturedDraw
from megatron_infer.runner.in_flight import arrays_of
from megatron_infer.runner.sampling.draw_groups import DeviceOps
from megatron_infer.runner.sampling.row_params import RowParams
from megatron_infer.runner.sampling.sampler import Sampler, SamplerInput, SamplerOutput

UNEDITED = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_token_ids": None,
    "min_tokens": 0,
}
"""Parameters of rows whose logits are drawn from as they are: those that a graph draws."""
PADDING = 24
"""Vocabulary entries after the real ones; the tests make them the largest of all."""


class Rows:
    """Requests by row, their token pool (junk beyond each context), a sampler over them, and its captured draw."""

    def __init__(
        self, requests, vocab_size, *, mode="raw", argmax=None, kernels=None, device_kernels=None, device="cpu"
    ) -> None:
        self.requests = requests
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        longest = max(len(r.tokens) for r in requests)
        pool = torch.randint(0, vocab_size, (len(requests) + 1, max(longest, 40) + 9), dtype=torch.int32)
        self.pool = pool.to(device)
        own = {} if device_kernels is None else {"forbid": device_kernels.forbid}
        ops = DeviceOps(to_device=Device(str(device)).to_device, **own)
        self.params = RowParams(len(requests) + 1, vocab_size)
        for row, request in enumerate(requests):
            self.put(row, request)
        self.sampler = Sampler(
            self.params,
            padded_vocab_size=vocab_size + PADDING,
            logprobs_mode=mode,
            argmax=argmax,
            kernels=kernels,
            ops=ops,
        )
        self.captured = CapturedDraw(self.sampler, device_kernels)

    def put(self, row: int, request) -> None:
        """The row is this request's from now on."""
        self.requests[row] = request
        self.params.set(row, request)
        self.pool[row, : len(request.tokens)] = torch.tensor(request.tokens, dtype=torch.int32)

    def positions_of(self, rows) -> np.ndarray:
        return np.array([len(self.requests[row].tokens) for row in rows], dtype=np.int64)

    def inputs(self, rows) -> SamplerInput:
        rows = np.asarray(rows, dtype=np.int32)
        return SamplerInput(rows=rows, positions=self.positions_of(rows), token_pool=self.pool)

    def can_draw(self, rows) -> bool:
        return self.captured.can_draw(self.inputs(rows))

    def padded(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """As a model gives them, on the device."""
        return torch.nn.functional.pad(logits_RV, (0, PADDING), value=1e4).to(self.device)

    def sample(self, logits_RV: torch.Tensor, rows=None) -> SamplerOutput:
        """Draw for `rows` (all of them) from logits_RV[row], real vocabulary only."""
        inputs = self.inputs(np.arange(len(self.requests)) if rows is None else rows)
        padded = self.padded(logits_RV[torch.from_numpy(inputs.rows).long()])
        before = padded.clone()
        out = self.sampler.sample(padded, inputs)
        assert torch.equal(padded.nan_to_num(), before.nan_to_num()), "the model's logits were changed"
        return out


def drawn_captured(rows: Rows, logits_RV: torch.Tensor, order) -> SamplerOutput:
    """Draw for rows in `order` as a padded step does, with two dummy rows behind them."""
    order = np.asarray(list(order), dtype=np.int32)
    count, dummy, positions = len(order), len(rows.requests), rows.positions_of(order)
    rows.captured.refresh()
    logits = torch.nn.functional.pad(logits_RV[torch.from_numpy(order).long()], (0, PADDING, 0, 2), value=1e4)
    before, room = logits.clone(), DrawRoom.make(count + 2, logits.device)
    row_S = torch.tensor([*order, dummy, dummy], dtype=torch.int32)
    rows.captured.draw(logits, row_S, torch.tensor([*positions, 0, 0], dtype=torch.int32), rows.pool, room)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "the model's logits were changed"
    out = rows.captured.output(logits[:count], rows.inputs(order), room.first(count))
    assert rows.pool[torch.from_numpy(order).long(), torch.from_numpy(positions)].tolist() == out.tokens_S.tolist()
    return out


def same_outputs(got: SamplerOutput, wanted: SamplerOutput) -> None:
    """Bit for bit, but for the details of bad rows."""
    assert got.tokens_S.tolist() == wanted.tokens_S.tolist() and got.bad_S.tolist() == wanted.bad_S.tolist()
    for name in ("logprobs", "token_details"):
        one, other = getattr(got, name), getattr(wanted, name)
        assert (one is None) == (other is None), name
        if one is None:
            continue
        good = ~wanted.bad_S.cpu()[torch.from_numpy(other.index)]
        found, expected = (
            {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in arrays_of(part).items()}
            for part in (one, other)
        )
        assert list(found) == list(expected)
        for field, theirs in expected.items():
            mine = found[field]
            if field == "values.support" or not isinstance(theirs, torch.Tensor):
                assert np.array_equal(mine, theirs), field
            else:
                mine, theirs = mine[good], theirs[good]
                same = (mine == theirs) | ((mine != mine) & (theirs != theirs))  # NaN where the model's own logits are
                assert bool(same.all()), (field, mine, theirs)


def random_request(rng: np.random.Generator, vocab_size: int, **fixed):
    """Any mix of parameters; each is absent about half of the time."""

    def maybe(value, otherwise):
        return value if rng.random() < 0.5 else otherwise

    def ids(count):
        return [int(i) for i in rng.choice(vocab_size, size=count, replace=False)]

    params = {
        "temperature": maybe(float(rng.uniform(0.2, 2.0)), float(rng.choice([0.0, 1.0]))),
        "top_k": maybe(int(rng.choice([1, 2, 7, 50, 64, 65, 200, vocab_size, 10 * vocab_size])), 0),
        "top_p": maybe(float(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999])), 1.0),
        "min_p": maybe(float(rng.choice([1e-4, 0.02, 0.3, 1.0])), 0.0),
        "repetition_penalty": maybe(1.3, 1.0),
        "presence_penalty": maybe(0.5, 0.0),
        "frequency_penalty": maybe(-0.25, 0.0),
        "logit_bias": maybe({i: float(rng.normal()) * 3 for i in ids(4)}, None),
        "allowed_token_ids": maybe(maybe(ids(vocab_size // 2), None), None),
        "bad_token_ids": maybe(ids(3), None),
        "min_tokens": maybe(int(rng.choice([1, 5, 6, 20])), 0),
        "logprobs": maybe(int(rng.choice([0, 1, 5])), None),
        "return_sampled_logprobs": maybe(True, False),
        "return_support": maybe(True, False),
        **fixed,
    }
    prompt = rng.integers(0, vocab_size, size=int(rng.integers(1, 30)))
    output = rng.integers(0, min(vocab_size, 12), size=int(rng.choice([0, 5, 6])))
    return make_request(prompt, output, seed=int(rng.integers(0, 2**63)), stop_ids=ids(2), **params)


def spoil(rng: np.random.Generator, logits: torch.Tensor) -> torch.Tensor:
    """Logits that a model may give too: -inf, -0.0, in some steps NaN and inf, or equal numbers only."""
    at = torch.from_numpy(rng.random(logits.shape))
    logits[at < 0.05], logits[(at > 0.05) & (at < 0.1)] = -torch.inf, -0.0
    if rng.random() < 0.3:
        logits[at > 0.99], logits[(at > 0.98) & (at < 0.985)] = torch.nan, torch.inf
    return logits.fill_(0.0) if rng.random() < 0.1 else logits


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int, *, dtype=torch.float32, step=None):
    """Rows from flat to peaked; `step` rounds to its multiples, which makes many equal logits."""
    spread = rng.uniform(0.2, 6.0, size=(num_rows, 1))
    logits = rng.normal(size=(num_rows, vocab_size)) * spread
    if step is not None:
        logits = np.round(logits / step) * step
    return torch.from_numpy(logits).to(dtype)
