"""weight_dtype int8 and int4: every feature gives the same answers, updates arrive, what cannot have it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import gguf
import pytest
import torch
from durable_case import Collector, add_all, assert_same
from durable_case import make_engine as make_durable
from engines import each_of, logprobs_of, suspending, tokens_of
from lora_cases import random_adapter
from model_kinds import KINDS, make_model

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError, StaleCache
from megatron_infer.kernels.native import native_build
from megatron_infer.kernels.native.cpu_native import QUANTISED_PANELS
from megatron_infer.kernels.native.native_layers import NativeLayers
from megatron_infer.kernels.select import choose
from megatron_infer.kernels.weight_dtypes import OUTPUT_DTYPE, WEIGHT_DTYPE_BYTES
from megatron_infer.models.adopt import AdoptedModel
from megatron_infer.rl.session import RolloutSession
from megatron_infer.runner.speculative.model_drafter import LowTokens
from megatron_infer.testing.inspect import inspect

SIZES = {"max_sequence_length": 96, "max_requests": 6, "max_tokens": 64, "enable_chunked_prefill": True}
FEATURES: dict[str, dict[str, Any]] = {
    "chunked": {"max_tokens": 16},
    "prefix": {"prefix": "lru"},
    "overlap_chunked": {"overlap": True, "max_tokens": 24},
    "alone": {"max_requests": 1},
    "tiny_pool": {"pool_blocks": 8},
    "drafts": {"speculative": {"method": "ngram", "adaptive": False}},
    "swap": {"pool_blocks": 8, "preemption_mode": "swap", "swap_buffer_size_gb": 0.01, "overlap": True},
}
ROUNDING = 5e-3
"""Of log probabilities of models with scans, whose states are rounded where a chunk ends: the last digit of an
activation decides about one of eight bits."""
LIMITS = {"int8": (0.08, 0.5), "int4": (0.6, 4.0)}
"""The mean and the largest difference of log probabilities from those of unrounded weights, on random tiny models:
0.053 and 0.24 measured for int8, 0.37 and 2.3 for int4."""

pytestmark = pytest.mark.usefixtures("native_kernels")
kind = each_of(KINDS)
weight_dtype = each_of(LIMITS)


def make_engine(model: torch.nn.Module, weight_dtype: str, **settings: Any) -> DynamicInferenceEngine:
    return engines.make_engine(model, weight_dtype=weight_dtype, **SIZES | settings)


def work() -> list[list[int]]:
    stem = list(range(4, 44))
    return [stem + [50 + i] * (2 * i + 1) for i in range(5)] + [[9, 8, 7], list(range(100, 60, -1))]


Answers = dict[str, tuple[list[int], list[float]]]


def run(engine: DynamicInferenceEngine, *, suspend: str | None = None, **params: Any) -> Answers:
    """Tokens and log probabilities of each request; suspended every fourth step."""
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, **params)
    before_step = None if suspend is None else suspending(suspend, *range(2, 500, 4))
    outputs = engines.run(engine, [(prompt, greedy) for prompt in work()], before_step)
    return {output.request_id: (output.outputs[0].token_ids, logprobs_of(output.outputs[0])) for output in outputs}


def prompt_logprobs(engine: DynamicInferenceEngine) -> torch.Tensor:
    """Log probabilities of all tokens of `work` that have one before them."""
    outputs = engine.generate(work(), SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    rows = [
        [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        for output, prompt in zip(outputs, work(), strict=True)
    ]
    return torch.tensor([value for row in rows for value in row])


def check_saved_requests_go_on(source: DynamicInferenceEngine, target: DynamicInferenceEngine, folder: Path) -> None:
    """In `target`, from the keys that they were saved with, to the answers that `source` gives."""
    add_all(source)
    before = Collector().step(source, 6)
    source.save_requests(folder, kv=True)
    want = Collector()
    want.__dict__.update({name: dict(value) for name, value in before.__dict__.items()})
    want.step(source)
    report = target.load_requests(folder)
    assert report.with_kv and not report.recomputed
    assert_same(before.step(target), want)


def check_same(engine: DynamicInferenceEngine, got: Answers, want: Answers) -> None:
    """To the bit without scans."""
    assert {key: tokens for key, (tokens, _) in got.items()} == {key: tokens for key, (tokens, _) in want.items()}
    limit = 0.0 if engine.kernels.scan is None else ROUNDING
    for key, (_, logprobs) in want.items():
        assert max(abs(a - b) for a, b in zip(got[key][1], logprobs, strict=True)) <= limit


@pytest.fixture(scope="module")
def expected(model, weight_dtype) -> Answers:
    engine = make_engine(model, weight_dtype)
    row = next(row for row in engine.kernels.rows if row.operation == "linear")
    assert row.chosen == QUANTISED_PANELS[weight_dtype] == engine.kernels.packed.layout.name
    for weight in inspect(engine).adopted.packable_weights():
        is_output = weight is inspect(engine).adopted.output_weight()
        size = weight.numel() * WEIGHT_DTYPE_BYTES[OUTPUT_DTYPE if is_output else weight_dtype]
        if weight.shape[0] % 64 == weight.shape[1] % 64 == 0:
            panels = weight.shape[0] // native_build.load().mi_panel_rows()  # each is whole cache lines
            assert engine.kernels.packed.get(id(weight)).numel() == panels * -(-size // (64 * panels)) * 64
    return run(engine)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.filterwarnings('ignore:preemption_mode="swap" has no effect')
def test_features_give_the_same_answers(weight_dtype, model, expected, name):
    engine = make_engine(model, weight_dtype, **FEATURES[name])
    check_same(engine, run(engine), expected)
    if name == "prefix":
        assert engine.stats().counters["prefix_hit_tokens"] > 0
    if name == "drafts":
        assert engine.spec_decode_metrics().num_drafted > 0


def test_a_draft_model_is_rounded_as_the_model_and_so_always_right(weight_dtype, model, expected, monkeypatch):
    if make_engine(model, weight_dtype).kernels.scan is not None:
        pytest.skip("a draft model has no recurrent states")
    monkeypatch.setattr(LowTokens, "count", None)  # else drafts are among the tokens that are drawn often
    drafting = {"method": "draft", "draft_model": model, "adaptive": False}
    engine = make_engine(model, weight_dtype, speculative=drafting)
    check_same(engine, run(engine), expected)
    found = engine.spec_decode_metrics()
    assert found.num_drafted > 0 and found.acceptance_rate == 1


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_suspends_give_the_same_answers(weight_dtype, model, expected, mode):
    engine = make_engine(model, weight_dtype)
    check_same(engine, run(engine, suspend=mode), expected)
    engine.verify_weights()


def test_layers_in_one_call_have_the_bits_of_many(weight_dtype, model, expected, monkeypatch):
    monkeypatch.setattr(NativeLayers, "run", lambda *arguments, **_: None)
    engine = make_engine(model, weight_dtype)
    check_same(engine, run(engine), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_answers_differ_little_from_those_of_unrounded_weights(weight_dtype, dtype):
    model = make_model("attention").to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    found = [prompt_logprobs(make_engine(model, name)) for name in ("auto", weight_dtype)]
    difference = (found[0] - found[1]).abs()
    mean, largest = LIMITS[weight_dtype]
    assert mean / 4 < difference.mean() < mean and difference.max() < largest
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_serves_the_values_of_a_4_bit_file(kind):
    model = make_model("attention")
    adopted = inspect(make_engine(model, "auto")).adopted
    with torch.no_grad():
        for weight in adopted.packable_weights():
            if weight is not adopted.output_weight():
                of_file = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(of_file, gguf.GGMLQuantizationType[kind])))
    found = [prompt_logprobs(make_engine(model, name)) for name in ("auto", "int8", "int4")]
    by_int8, by_int4 = ((found[0] - logprobs).abs().mean() for logprobs in found[1:])
    assert by_int4 < 1.1 * by_int8


@pytest.mark.parametrize("update", ["add", "data", "replace"])
def test_an_update_is_quantised_before_the_next_token(weight_dtype, update):
    model = make_model("attention")
    engine = make_engine(model, weight_dtype)
    before = run(engine)
    with torch.no_grad():
        layer = model.decoder.layers[0].mlp.linear_fc1
        if update == "add":
            layer.weight.add_(0.1)
        elif update == "data":
            layer.weight.data.view(-1)[::3] = 0.2
        else:
            layer.weight = torch.nn.Parameter(layer.weight.flip(0))
    engine.refresh_weights()
    after = run(engine)
    assert after == run(make_engine(model, weight_dtype)) != before
    engine.verify_weights()


def test_a_copy_of_old_weights_is_found(weight_dtype):
    model = make_model("attention")
    engine = make_engine(model, weight_dtype)
    model.decoder.layers[0].mlp.linear_fc1.weight.data.mul_(2)
    with pytest.raises(StaleCache, match="packed weights"):
        engine.verify_weights()


def test_sessions_generate_from_the_weights_that_training_leaves(weight_dtype):
    model = make_model("attention")
    config = InferenceConfig(buffer_size_gb=0.01, weight_dtype=weight_dtype, **engines.BASE | SIZES)
    session = RolloutSession(model, config, meter=None)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)

    def answers() -> list[list[int]]:
        with session.generating() as roll:
            return [group.samples[0].token_ids for group in roll.generate(work(), params)]

    before = answers()
    with session.training(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert answers() != before
    fresh = make_engine(model, weight_dtype).generate(work(), params)
    assert answers() == tokens_of(fresh)


def test_adapters_are_added_to_rounded_products(weight_dtype):
    model = make_model("attention")
    engine = make_engine(model, weight_dtype, lora=LoRAConfig(max_loras=2, max_rank=8))
    base = run(engine)
    assert base == run(make_engine(model, weight_dtype))
    engine.load_adapter("a", random_adapter(model, "a", rank=4, seed=1))
    assert run(engine, adapter="a") != base == run(engine)


def test_requests_saved_with_their_keys_go_on_only_with_the_same_weight_dtype(weight_dtype, tmp_path):
    model = make_model("attention")
    source, target = (make_durable(model, weight_dtype=weight_dtype) for _ in range(2))
    check_saved_requests_go_on(source, target, tmp_path / "requests")
    report = make_durable(model).load_requests(tmp_path / "requests")
    assert not report.with_kv and report.recomputed
    assert all(why == f"weight_dtype is auto, it was {weight_dtype}" for why in report.recomputed.values())
    other = make_durable(model, weight_dtype="int4" if weight_dtype == "int8" else "int8")
    assert not other.load_requests(tmp_path / "requests").with_kv


def test_what_it_excludes_is_refused_by_name(weight_dtype, monkeypatch):
    with pytest.raises(ConfigError, match=f"weight_dtype='{weight_dtype}' excludes batch_invariant=True"):
        InferenceConfig(weight_dtype=weight_dtype, batch_invariant=True)
    with pytest.raises(ConfigError, match=f"did you mean '{weight_dtype}'"):
        InferenceConfig(weight_dtype=weight_dtype + "_0")
    of = {"specs": (), "block_size": 16, "weight_dtype": weight_dtype}
    with pytest.raises(ConfigError, match=f"weight_dtype='{weight_dtype}' excludes linear_backend='vendor'"):
        choose("cpu", torch.float32, **of, linear="vendor")
    with pytest.raises(ConfigError, match="needs the native kernels: needs float32 or bfloat16, got"):
        choose("cpu", torch.float64, **of)
    with pytest.raises(ConfigError, match="needs the native kernels: runs on a CPU, the model is on cuda"):
        choose("cuda", torch.bfloat16, **of)
    with pytest.raises(ConfigError, match=f"'{weight_dtype}' needs the native kernels, which run on a CPU"):
        InferenceConfig(weight_dtype=weight_dtype).on_device(is_cuda=True)
    monkeypatch.setenv("MEGATRON_INFER_BACKEND", "torch")
    with pytest.raises(ConfigError, match="needs the native kernels: MEGATRON_INFER_BACKEND=torch"):
        choose("cpu", torch.float32, **of)


def test_a_model_whose_layers_multiply_by_themselves_is_refused(weight_dtype, monkeypatch):
    model = make_model("attention")
    monkeypatch.setattr(AdoptedModel, "foreign_layer", lambda self: "decoder.layers.1")
    with pytest.raises(ConfigError, match=f"'{weight_dtype}': decoder\\.layers\\.1 is of a class of its own"):
        make_engine(model, weight_dtype)
