"""Models, prompts and a driven engine, the same in one process and on every rank of several."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from model_kinds import SOFTCAPPED

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import CheckpointSource, save_checkpoint
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

SETTINGS = {"vocab_size": 128, "max_sequence_length": 256, "init_method_std": 0.2}
MODELS = {
    "tied": lambda: tiny_gpt(num_layers=4, share_embeddings_and_output_weights=True, qk_layernorm=True, **SETTINGS),
    "softcapped": lambda: tiny_gpt(**SOFTCAPPED, num_layers=4, **SETTINGS),
    "untied, uneven": lambda: tiny_gpt(num_layers=5, **SETTINGS),
    "learned positions": lambda: tiny_gpt(
        num_layers=2,
        add_bias_linear=True,
        normalization="LayerNorm",
        gated_linear_unit=False,
        activation_func=F.gelu,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
        **SETTINGS,
    ),
    "first stage without attention": lambda: tiny_hybrid("MM-M*-*M", position_embedding_type="rope", **SETTINGS),
    "last stage without Mamba": lambda: tiny_hybrid(
        "M*M-*-", share_embeddings_and_output_weights=True, position_embedding_type="rope", **SETTINGS
    ),
    "last stage without either": lambda: tiny_hybrid("M*--", **SETTINGS),
    "Mamba alone": lambda: tiny_hybrid("MMM", **SETTINGS),
}
PLAIN = {"block_size_tokens": 4, "buffer_size_gb": 0.01, "max_tokens": 64, "max_requests": 8, "check_invariants": True}
FEATURES = {
    "plain": {},
    "chunks, prefix cache, overlap": {
        "enable_chunked_prefill": True,
        "max_tokens": 16,
        "enable_prefix_caching": True,
        "prefix_caching_mamba_gb": 0.002,
        "overlap": True,
    },
}


def save_model(folder: Path, name: str) -> None:
    save_checkpoint(MODELS[name](), folder / name)


def load_model(folder: Path, name: str, **parallel):
    return build_model(CheckpointSource(folder / name), **parallel)


def make_engine(model, features: str = "plain", **settings) -> DynamicInferenceEngine:
    fields = PLAIN | FEATURES[features] | settings
    if "M" not in "".join(getattr(model, "hybrid_override_pattern", None) or ""):
        fields.pop("prefix_caching_mamba_gb", None)
    return DynamicInferenceEngine(model, InferenceConfig(**fields), eos_ids=[3])


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts with a common beginning; greedy and drawn, with logprobs of both kinds, groups and penalties.

    Every second one asks for what tokens carry.
    """
    generator = torch.Generator().manual_seed(5)
    stem = torch.randint(4, 128, (21,), generator=generator).tolist()
    own = [torch.randint(4, 128, (n,), generator=generator).tolist() for n in (3, 30, 9, 1, 14, 6)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=3),
        SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=2),
        SamplingParams(temperature=0.9, seed=7, max_tokens=12, logprobs=1, top_p=0.9),
        SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=3, logprobs=0),
        SamplingParams(temperature=0.8, seed=4, max_tokens=14, repetition_penalty=1.3, presence_penalty=0.4),
        SamplingParams(temperature=0.0, max_tokens=10, logprobs=2, min_tokens=4),
    ]
    params[1::2] = [dataclasses.replace(one, return_sampled_logprobs=True, return_support=True) for one in params[1::2]]
    return [(stem + tail, one) for tail, one in zip(own, params, strict=True)]


def answers(outputs) -> list:
    """What a caller sees of finished requests, as plain values."""

    def plain(entries):
        return None if entries is None else [e and {str(k): v.logprob for k, v in e.items()} for e in entries]

    return [
        [out.error and str(out.error), plain(out.prompt_logprobs)]
        + [
            [sample.token_ids, sample.finish_reason, plain(sample.logprobs), *token_details(sample)]
            for sample in out.outputs
        ]
        for out in outputs
    ]


def token_details(sample) -> list:
    """What a sample carries beyond tokens and logprobs."""
    support = sample.support
    return [
        sample.raw_logprobs,
        sample.processed_logprobs,
        None if support is None else [support.ids_at(i).tolist() for i in range(len(support))],
    ]


def generate(engine: DynamicInferenceEngine) -> list:
    prompts, params = zip(*requests(), strict=True)
    return answers(engine.generate([{"prompt_token_ids": ids} for ids in prompts], list(params), on_error="return"))


def generate_over_suspends(engine: DynamicInferenceEngine) -> list:
    """As `generate`, with a suspend in each mode on the way, and a request that is aborted."""
    from megatron_infer.config.inference import KVCacheManagementMode

    done = {}
    leads = engine.rank_group.groups.is_leader
    if leads:
        for index, (ids, params) in enumerate(requests()):
            engine.add_request({"prompt_token_ids": ids}, params, request_id=str(index), stream="final")
        engine.add_request({"prompt_token_ids": [9, 8, 7]}, SamplingParams(max_tokens=50, seed=1), request_id="gone")
    modes = list(KVCacheManagementMode)
    steps = 0
    while len(done) < len(requests()):
        steps += 1
        if steps % 5 == 0 and modes:
            engine.suspend(mode=modes.pop())
            engine.resume()
        if steps == 7 and leads:
            engine.abort("gone")
        done.update({out.request_id: out for out in engine.step() if out.finished and out.request_id != "gone"})
    assert not modes
    return answers([done[str(index)] for index in range(len(requests()))])


def assert_same(got, want, where="", *, tolerance=1e-5) -> None:
    """Equal values; floats within `tolerance`, of most likely tokens also where a near tie changes their places."""
    if isinstance(want, float):
        assert abs(got - want) < tolerance, f"{where}: {got} != {want}"
    elif isinstance(want, dict) and got.keys() != want.keys() and all(isinstance(one, float) for one in want.values()):
        assert_same(list(got.values()), list(want.values()), f"{where}: {got} != {want}", tolerance=tolerance)
        for key in got.keys() & want.keys():
            assert_same(got[key], want[key], f"{where}.{key}", tolerance=tolerance)
    elif isinstance(want, dict):
        assert list(got) == list(want), f"{where}: {got} != {want}"
        for key in want:
            assert_same(got[key], want[key], f"{where}.{key}", tolerance=tolerance)
    elif isinstance(want, list):
        assert isinstance(got, list) and len(got) == len(want), f"{where}: {got} != {want}"
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_same(one, other, f"{where}[{index}]", tolerance=tolerance)
    else:
        assert got == want, f"{where}: {got!r} != {want!r}"


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value))
