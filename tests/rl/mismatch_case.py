"""Sessions, rollouts and planted faults that the tests of the mismatch meter share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from session_case import VOCAB, make_session

from megatron_infer.config.inference import PrefixCachingEvictionPolicy
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.models.fused_mixer import ScanWeights
from megatron_infer.models.weights.manager import WeightManager
from megatron_infer.runner.sampling.row_params import RowParams
from megatron_infer.testing.inspect import inspect, run_one_by_one
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

BIG = {"init_method_std": 0.2}
MAKERS: dict[str, Callable[..., Any]] = {
    "attention": lambda **how: tiny_gpt(window_size=(15, 0), window_attn_skip_freq=[0, 1], **BIG | how),
    "experts": lambda **how: tiny_gpt(**EXPERTS, **BIG | how),
    "hybrid": lambda **how: tiny_hybrid("M*-ME", **BIG | how),
}
DRAWN = SamplingParams(n=2, max_tokens=24, temperature=0.7, ignore_eos=True, seed=3)


def session_of(kind: str, *, batch_invariant: bool = False, overlap: bool = False, **how: Any) -> Any:
    settings = {
        "check_invariants": False,
        "batch_invariant": batch_invariant,
        "overlap": overlap,
        "enable_prefix_caching": True,
        "prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.LRU,
        "prefix_caching_mamba_gb": 0.002 if kind == "hybrid" else None,
    }
    return make_session(MAKERS[kind](**how), settings=settings, meter=None)


def prompts() -> list[list[int]]:
    """One prompt shorter than a block, two longer."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in (9, 35, 52)]


def rollout(session: Any, meter: Any, params: SamplingParams = DRAWN) -> Any:
    """One rollout, measured -> the meter's report."""
    with session.generating() as roll:
        report = meter.observe(roll.generate(prompts(), params), params)
    inspect(session.engine).context.check()
    return report


def retrain(session: Any, seed: int = 0) -> None:
    """Change every weight a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.05)


# ---------------------------------------------------------------------- faults: (monkeypatch, session) -> None


def stale_decay(monkeypatch: Any, session: Any) -> None:
    """-exp(A_log) stays that of the weights before an update."""
    with monkeypatch.context() as patch:
        patch.setattr(ScanWeights, "refresh", lambda self: None)
        with torch.no_grad():
            session.model.decoder.layers[3].mixer.A_log.add_(3.0)
        session.update_weights()


def wrong_scale(monkeypatch: Any, session: Any) -> None:
    attend = session.model.decoder.layers[1].self_attention.fused.attend
    attend.spec = dataclasses.replace(attend.spec, scale=2 * attend.spec.scale)
    run_one_by_one(session.engine)


def dropped_window(monkeypatch: Any, session: Any) -> None:
    attend = session.model.decoder.layers[1].self_attention.fused.attend
    assert attend.spec.window == 16
    attend.spec = dataclasses.replace(attend.spec, window=None)
    run_one_by_one(session.engine)


def dropped_causal_mask(monkeypatch: Any, session: Any) -> None:
    """Queries of prompts attend to later keys too; this model's layer has no rotary embedding."""
    backend = session.engine.kernels.attention
    run, plan, steps = backend.run, backend.plan, []

    def planned(meta: Any) -> None:
        steps[:] = [meta]
        plan(meta)

    def acausal(q_TKGH: Any, k_TKH: Any, v_TKH: Any, kv_cache: Any, *, layer: int, spec: Any) -> Any:
        q, k, v = q_TKGH.clone(), k_TKH.clone(), v_TKH.clone()
        out = run(q_TKGH, k_TKH, v_TKH, kv_cache, layer=layer, spec=spec)
        for begin, end in pairwise(steps[0].cu_q.tolist()):
            if end - begin > 1:  # none of these tests' prompts is chunked
                weights = torch.einsum("tkgh,skh->kgts", q[begin:end], k[begin:end]).mul(spec.scale).softmax(-1)
                out[begin:end] = torch.einsum("kgts,skh->tkgh", weights, v[begin:end]).reshape(end - begin, -1)
        return out

    session.engine.reset_prefix_cache()
    monkeypatch.setattr(backend, "plan", planned)
    monkeypatch.setattr(backend, "run", acausal)
    run_one_by_one(session.engine)


def wrong_table_entry(monkeypatch: Any, session: Any) -> None:
    """The second entry of every block table is its first block."""
    rows = inspect(session.engine).runner.builder.rows
    first: dict[int, int] = {}
    put = rows.put_writes

    def crossed(writes: Any, buffer: Any) -> Any:
        first.update({row: block for row, column, block in writes if column == 0})
        return put([(row, c, first[row] if c == 1 else block) for row, c, block in writes], buffer)

    monkeypatch.setattr(rows, "put_writes", crossed)


def stale_prefix(monkeypatch: Any, session: Any) -> None:
    """New prompts match cached blocks of earlier weights."""
    root = session.engine.weights.root
    monkeypatch.setattr(WeightManager, "root", root)
    retrain(session)
    session.update_weights()


def stale_copy(monkeypatch: Any, session: Any, weight: str) -> None:
    """The packed copy of one linear has other weights."""
    packed = session.engine.kernels.packed
    live = session.model.get_parameter(weight)
    assert id(live) in packed._packed, "nothing is packed here"
    packed._packed[id(live)] = packed.layout.pack(live.detach() * 1.25, None)[0]


def router_order(monkeypatch: Any, session: Any) -> None:
    """Expert e is taken for the e-th expert from the end."""
    _, experts = session.model.decoder.layers[1].fused.blocks[1]
    route, experts.rules = experts.route, None  # no kernel chooses
    run_one_by_one(session.engine)
    experts.route = lambda *a, **k: tuple(part.flip(-1) for part in route(*a, **k))


def broken_residual(monkeypatch: Any, session: Any) -> None:
    """A layer adds 0.9 of its output to the residual stream."""
    ops = session.engine.kernels.ops
    add = ops.add_rms_norm
    monkeypatch.setattr(ops, "add_rms_norm", lambda x, *rest, **how: add(0.9 * x, *rest, **how))
    run_one_by_one(session.engine)


def no_temperature(monkeypatch: Any, session: Any) -> None:
    """The sampler draws at temperature 1 for every request."""
    take = RowParams.set

    def forgetful(self: RowParams, row: int, request: Any) -> None:
        take(self, row, request)
        self.table[0, row] = 1.0

    monkeypatch.setattr(RowParams, "set", forgetful)
