"""Whatever happens to requests on the way, an engine on Triton's kernels gives the tokens of one that runs torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import make_engine
from replay_recorder import REPLAY

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.runner.cuda_graphs.graph_pool import GRAPHS_VARIABLE
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_hybrid

pytestmark = pytest.mark.triton

VOCAB = 64
STEM = [(7 * i) % 60 + 3 for i in range(33)]
PREFIXES = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru", "prefix_caching_mamba_gb": 0.002}
SUSPENDS = {3: "persist", 5: "offload", 7: "recompute"}
"""Step -> mode."""


@pytest.fixture(scope="module")
def model(device) -> torch.nn.Module:
    """Mamba, experts and attention, one layer each."""
    sizes = {"hidden_size": 32, "mamba_head_dim": 32, "num_attention_heads": 2, "num_query_groups": 1}
    settings = {"vocab_size": VOCAB, "max_sequence_length": 64, "init_method_std": 0.2, "mamba_num_groups": 1}
    return tiny_hybrid("ME*", **settings, **sizes).to(device)


def requests() -> list[tuple[str, list[int], SamplingParams]]:
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    return [
        ("first", STEM, SamplingParams(max_tokens=8, **greedy)),
        ("forks", [5, 9, 3], SamplingParams(n=2, seed=3, temperature=0.9, max_tokens=5, ignore_eos=True)),
        ("aborted", [4] * 9, SamplingParams(max_tokens=20, **greedy)),
        ("same stem", [*STEM, 8, 1], SamplingParams(max_tokens=3, seed=1, top_k=9, logprobs=1, ignore_eos=True)),
        ("late", STEM[:20], SamplingParams(max_tokens=3, **greedy)),
    ]


def lived_through(engine: DynamicInferenceEngine) -> tuple[dict[str, list[list[int]]], torch.Tensor]:
    """Two requests come late, one is aborted while its step is in flight, all see three suspends.

    -> (tokens, log probabilities of the request that goes on from a state that another one left: they show what a
    token does not).
    """
    todo, done = requests(), {}
    for name, prompt, params in todo[:3]:
        engine.add_request(prompt, params, request_id=name, stream="final")
    added, suspended = 3, set()
    while engine.has_unfinished():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        step = engine.num_steps
        if step >= 4 and added < len(todo):
            if added == 3:
                engine.abort("aborted")
            name, prompt, params = todo[added]
            engine.add_request(prompt, params, request_id=name, stream="final")
            added += 1
        if (mode := SUSPENDS.get(step)) is not None and step not in suspended:
            suspended.add(step)
            engine.suspend(mode)
            engine.resume()
    assert suspended == set(SUSPENDS)
    assert done["same stem"].num_cached_tokens == 32, "no prefix was found: nothing of captures is shown"
    assert engine.stats().num_free_blocks == engine.stats().num_blocks, "a block leaked"
    tokens = {name: [s.token_ids for s in output.outputs] for name, output in done.items() if name != "aborted"}
    sample = done["same stem"].outputs[0]
    return tokens, torch.tensor([sample.logprobs[i][token].logprob for i, token in enumerate(sample.token_ids)])


def engine_of(model, monkeypatch, backend: str, **settings: Any) -> DynamicInferenceEngine:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    sizes = {"buffer_size_gb": 0.005, "max_sequence_length": 64, "max_requests": 4, "max_tokens": 48}
    return make_engine(model, enable_chunked_prefill=True, **sizes, **PREFIXES, **settings)


def test_forks_prefixes_aborts_and_suspends_change_no_token(model, device, monkeypatch):
    want, logprobs = lived_through(engine_of(model, monkeypatch, "torch"))
    assert len({token for samples in want.values() for tokens in samples for token in tokens}) > 6
    if device.type == "cpu":
        monkeypatch.setenv(GRAPHS_VARIABLE, REPLAY)
    mixed = {"num_cuda_graphs": -1, "cuda_graph_max_tokens": 4, "use_cuda_graphs_for_non_decode_steps": True}
    for graphs in ({}, mixed):
        engine = engine_of(model, monkeypatch, "triton", overlap=True, **graphs)
        got, got_logprobs = lived_through(engine)
        assert got == want
        torch.testing.assert_close(got_logprobs, logprobs, rtol=0, atol=1e-4)
    pool = inspect(engine).runner.graphs.pool
    assert pool.counts.replays > 3 and not pool.counts.uncaptured
