"""An engine that owns its weights on a CPU frees those that it has packed: same answers, and every reader gets them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lora_cases import random_adapter
from model_kinds import KINDS, make_model
from torch import nn

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import StaleCache, WeightUpdateError
from megatron_infer.kernels import native_build
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.exact_forward import exact_math
from megatron_infer.rl.weights import WeightUpdate, apply, as_source
from megatron_infer.rl.weights.verify import verify_update
from megatron_infer.testing.tiny import tiny_gpt

SETTINGS: dict[str, Any] = {
    "buffer_size_gb": 0.01,
    "block_size_tokens": 16,
    "max_sequence_length": 96,
    "max_requests": 6,
    "max_tokens": 24,
    "enable_chunked_prefill": True,
    "check_invariants": True,
}
PROMPTS = [[5, 9, 30, 7, 66, 12, 3], list(range(20, 60)), [7] * 3]
PARAMS = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=0)

pytestmark = pytest.mark.usefixtures("native_kernels")


@pytest.fixture(scope="module")
def native_kernels() -> None:
    try:
        native_build.load()
    except native_build.NativeUnavailable as error:
        pytest.skip(str(error))


def make_engine(model: nn.Module, *, owns: bool = True, **settings: Any) -> DynamicInferenceEngine:
    return DynamicInferenceEngine(model, InferenceConfig(**SETTINGS | settings), owns_weights=owns)


def answers(engine: DynamicInferenceEngine, **changes: Any) -> list[tuple[list[int], list[float]]]:
    found = []
    for output in engine.generate(PROMPTS, replace(PARAMS, **changes)):
        out = output.outputs[0]
        found.append((out.token_ids, [e[t].logprob for e, t in zip(out.logprobs, out.token_ids, strict=True)]))
    return found


def freed(model: nn.Module) -> list[str]:
    """Names of the parameters whose memory is freed: they show one value in all their places."""
    return [name for name, one in model.named_parameters() if one.numel() > 1 and not any(one.stride())]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    wrong = [name for name, one in wanted.items() if not torch.equal(found[name], one)]
    assert not wrong


def moved(model: nn.Module, factor: float = -1.3) -> dict[str, torch.Tensor]:
    """Other weights, by name."""
    return {name: one * factor if one.is_floating_point() else one for name, one in state(model).items()}


# ---------------------------------------------------------------------- the same answers, less memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_an_engine_that_keeps_its_weights(kind, dtype):
    kept, model = make_model(kind, params_dtype=dtype), make_model(kind, params_dtype=dtype)
    before = state(model)
    other, engine = make_engine(kept, owns=False), make_engine(model)
    assert answers(engine) == answers(other)
    linears = [name for name, one in before.items() if one.ndim == 2 and (".linear_" in name or "_proj." in name)]
    assert set(linears) <= set(freed(model)) and not freed(kept)
    num_bytes = sum(before[name].nbytes for name in freed(model))
    assert other.weights.num_bytes - engine.weights.num_bytes >= num_bytes - 8 * len(freed(model))
    engine.verify_weights()
    assert_equal(state(model), before)
    assert not freed(model) and engine.weight_version == 0
    assert answers(engine) == answers(other) and engine.weight_version == 0
    engine.verify_weights()
    engine.refresh_weights()
    assert set(linears) <= set(freed(model))
    assert answers(engine) == answers(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_that_is_the_output_layer_is_freed_and_its_rows_are_unpacked(dtype):
    settings = {"share_embeddings_and_output_weights": True, "params_dtype": dtype, "vocab_size": 203}
    model, kept = tiny_gpt(**settings), tiny_gpt(**settings)
    engine, other = make_engine(model), make_engine(kept, owns=False)
    name = "embedding.word_embeddings.weight"
    assert name in freed(model)
    assert answers(engine) == answers(other)
    ops, ids = engine.kernels.ops, torch.tensor([[0, 202, 7], [202, 3, 3]])
    weight, wanted = model.embedding.word_embeddings.weight, kept.embedding.word_embeddings.weight
    assert torch.equal(ops.embedding(ids, weight), wanted[ids])
    assert torch.equal(ops.embedding(torch.arange(203).repeat(3), weight), wanted.repeat(3, 1))
    assert ops.embedding(ids[:0], weight).shape == (0, 3, 64)
    for wrong in (-1, 203):
        with pytest.raises(IndexError, match="203 rows"):
            ops.embedding(torch.tensor([3, wrong]), weight)
    assert name in freed(model)
    assert_equal(state(model), state(kept))


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_dtype": "int8"},  # whose codes do not tell the weights
        {"batch_invariant": True},
        {"linear_backend": "vendor"},
    ],
)
def test_weights_stay_where_their_copies_do_not_tell_them_or_are_not_all_that_is_read(settings):
    model = tiny_gpt()
    engine = make_engine(model, **settings)
    answers(engine)
    assert not freed(model)


@pytest.mark.parametrize("router_dtype", [None, "fp32", "fp64"])
def test_routers_and_gates_of_experts_stay(router_dtype):
    settings = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_dtype": router_dtype,
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_gate": True,
        "params_dtype": torch.bfloat16,
        "init_method_std": 0.2,
    }
    model, kept = tiny_gpt(**settings), tiny_gpt(**settings)
    engine, other = make_engine(model), make_engine(kept, owns=False)
    assert answers(engine) == answers(other)
    names = freed(model)
    assert any(".experts." in name for name in names) and any("shared_experts.linear" in name for name in names)
    assert not any("router" in name or "gate_weight" in name for name in names)


def test_beside_a_layer_of_a_class_of_ones_own_weights_stay():
    class Doubled(mcore.TransformerLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, *rest = super().forward(*args, **kwargs)
            return (out * 2, *rest)

    model = tiny_gpt()
    model.decoder.layers[1].__class__ = Doubled
    engine = make_engine(model)
    answers(engine)
    assert not freed(model)


def test_adapters_are_added_to_linears_whose_weights_are_freed():
    found = []
    for owns in (True, False):
        engine = make_engine(tiny_gpt(init_method_std=0.2), owns=owns, lora=LoRAConfig(max_loras=1, max_rank=4))
        first = answers(engine)
        engine.load_adapter("a", random_adapter(engine.model, "a"))
        found.append(answers(engine, adapter="a"))
        assert found[-1] != first and bool(freed(engine.model)) is owns
    assert found[0] == found[1]


# ---------------------------------------------------------------------- whoever reads them


@pytest.mark.parametrize("reader", ["model", "module", "restore"])
def test_a_reader_gets_the_weights(reader):
    model = tiny_gpt(init_method_std=0.2)
    before = state(model)
    engine = make_engine(model)
    first = answers(engine)
    name = "decoder.layers.1.mlp.linear_fc1"
    assert f"{name}.weight" in freed(model)
    if reader == "model":
        assert_equal(state(model), before)
    elif reader == "module":
        found = model.get_submodule(name).state_dict()["weight"]
        assert torch.equal(found, before[f"{name}.weight"])
    else:
        engine.weights.restore()
        assert_equal({key: one.detach() for key, one in model.named_parameters()}, before)
    assert not freed(model)
    assert answers(engine) == first and engine.weight_version == 0


def test_weights_outlive_the_engine_that_freed_them():
    model = tiny_gpt()
    before = state(model)
    engine = make_engine(model)
    assert freed(model)
    del engine
    assert_equal(state(model), before)


def test_a_second_engine_and_the_trainers_forward_read_the_weights_from_then_on():
    model = tiny_gpt(init_method_std=0.2)
    engine = make_engine(model)
    first = answers(engine)
    assert freed(model)
    second = make_engine(model, owns=False)
    assert not freed(model)
    for _ in range(2):
        assert answers(second) == answers(engine) == first
        engine.refresh_weights()
        assert not freed(model), "the other engine reads them"
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(-1.3)
    third = answers(engine)
    assert third == answers(second) != first and not freed(model)


def test_weights_that_an_engine_has_read_before_stay():
    model = tiny_gpt(init_method_std=0.2)
    trainers = make_engine(model, owns=False)
    first = answers(trainers)
    assert answers(make_engine(model)) == first and not freed(model)
    assert answers(trainers) == first and trainers.weight_version == 0


def test_an_exact_forward_reads_the_weights():
    model, other = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    make_engine(model)
    ids = torch.tensor([PROMPTS[0]])
    positions = torch.arange(ids.shape[1])[None]
    found = []
    for one in (model, other):
        with torch.no_grad(), exact_math(one):
            found.append(one(ids, positions, None))
    assert torch.equal(*found)


# ---------------------------------------------------------------------- whoever writes them


@pytest.mark.parametrize("how", ["apply", "strict", "partial", "load_state_dict"])
def test_an_update_arrives_and_the_weights_are_freed_again(how):
    model = make_model("hybrid")
    engine, new = make_engine(model), moved(model)
    engine.refresh_weights()
    first = answers(engine)
    assert freed(model)
    if how == "apply":
        report = apply(engine, new, checksum=True)
        assert report.checksum == verify_update(engine, new).checksum
        engine.refresh_weights()
    elif how == "strict":
        with WeightUpdate(engine) as update:
            update.write_all(new.items())
    elif how == "partial":
        name = "decoder.layers.2.mlp.linear_fc1.weight"
        new = state(model) | {name: new[name]}
        engine.refresh_weights()
        with WeightUpdate(engine, strict=False) as update:
            update.write(name, new[name])
    else:
        model.load_state_dict(new)
    fresh = make_model("hybrid")
    fresh.load_state_dict(new)
    assert answers(engine) == answers(make_engine(fresh, owns=False)) != first
    assert freed(model)
    engine.verify_weights()
    assert_equal(state(model), new)


def test_an_update_that_fails_or_is_rolled_back_leaves_the_weights_of_before():
    model = tiny_gpt(init_method_std=0.2)
    engine, before, new = make_engine(model), state(model), moved(model)
    engine.refresh_weights()
    first = answers(engine)
    with pytest.raises(WeightUpdateError), WeightUpdate(engine, undo=True) as update:
        update.write_all(list(new.items())[:5])
    assert answers(engine) == first
    update = WeightUpdate(engine, undo=True)
    update.write_all(new.items())
    update.finish()
    assert freed(model) and answers(engine) != first
    update.rollback()
    assert answers(engine) == first
    assert_equal(state(model), before)


def test_a_trainers_model_is_a_source_for_an_engines_and_the_other_way_round():
    model, other = tiny_gpt(init_method_std=0.2, seed=1), tiny_gpt(init_method_std=0.2, seed=2)
    engine, receiver = make_engine(model), make_engine(other)
    assert freed(model) and freed(other)
    apply(receiver, as_source(model))
    assert answers(receiver) == answers(engine)


def test_a_write_past_the_engine_raises_or_is_noticed():
    model = tiny_gpt(init_method_std=0.2)
    engine = make_engine(model)
    first, weight = answers(engine), model.decoder.layers[1].mlp.linear_fc1.weight
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        weight.mul_(2.0)
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        weight.copy_(torch.ones_like(weight))
    assert answers(engine) == first and engine.weight_version == 0
    with torch.no_grad():
        weight.zero_()  # torch allows it
    other = tiny_gpt(init_method_std=0.2)
    torch.nn.init.zeros_(other.decoder.layers[1].mlp.linear_fc1.weight)
    second = answers(engine)
    assert second == answers(make_engine(other, owns=False)) != first and engine.weight_version == 1
    engine.verify_weights()
    model.decoder.layers[0].mlp.linear_fc1.weight = nn.Parameter(torch.ones_like(weight))
    torch.nn.init.ones_(other.decoder.layers[0].mlp.linear_fc1.weight)
    assert answers(engine) == answers(make_engine(other, owns=False)) != second and engine.weight_version == 2


def test_a_parameter_that_is_taken_out_has_its_values():
    model = tiny_gpt(init_method_std=0.2)
    before = state(model)
    engine = make_engine(model)
    first, linear = answers(engine), model.decoder.layers[1].mlp.linear_fc1
    taken = linear.weight
    linear.weight = nn.Parameter(torch.ones_like(taken))
    assert answers(engine) != first
    assert torch.equal(taken, before["decoder.layers.1.mlp.linear_fc1.weight"])
    linear.weight = taken
    assert answers(engine) == first


# ---------------------------------------------------------------------- suspended


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("tags", [None, {"weights"}])
@pytest.mark.parametrize("changes", [False, True])
def test_a_suspended_engine_keeps_what_is_the_only_copy(mode, tags, changes):
    model = make_model("hybrid")
    engine, new = make_engine(model), moved(model)
    engine.refresh_weights()
    first, names = answers(engine), freed(model)
    for prompt in PROMPTS:
        engine.add_request(prompt, PARAMS)
    for _ in range(4):
        engine.step()
    engine.suspend(mode, tags)
    assert freed(model) == names
    if changes:
        apply(engine, new, version=3, running="recompute")
    engine.resume()
    while engine.has_unfinished():
        engine.step()
    assert freed(model) == names
    if changes:
        fresh = make_model("hybrid")
        fresh.load_state_dict(new)
        assert answers(engine) == answers(make_engine(fresh, owns=False)) != first
    else:
        assert answers(engine) == first
        assert engine.weight_version == 1
    engine.verify_weights()


def test_a_copy_that_was_damaged_is_found():
    model = tiny_gpt()
    engine = make_engine(model)
    weight = model.decoder.layers[1].mlp.linear_fc1.weight
    engine.verify_weights()
    panels = engine.kernels.packed.get(id(weight))
    panels.view(torch.uint8)[64 + 5] ^= 1
    with pytest.raises(StaleCache, match="this copy alone"):
        engine.verify_weights()


# ---------------------------------------------------------------------- models that draft


def test_a_live_draft_model_may_share_the_weights_which_stay():
    model, other = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    found = []
    for one, draft in ((model, model), (other, tiny_gpt(init_method_std=0.2))):
        engine = make_engine(one, speculative={"method": "draft", "draft_model": draft})
        found.append(answers(engine))
        assert not freed(one) and not freed(draft)
    assert found[0] == found[1] == answers(make_engine(tiny_gpt(init_method_std=0.2), owns=False))


def test_an_mtp_layer_drafts_with_freed_weights():
    model = tiny_gpt(init_method_std=0.2, mtp_num_layers=1)
    engine = make_engine(model, speculative={"method": "mtp", "num_speculative_tokens": 1})
    assert any(".mtp." in f".{name}" for name in freed(model))
    assert answers(engine) == answers(make_engine(tiny_gpt(init_method_std=0.2, mtp_num_layers=1), owns=False))
    assert engine.spec_decode_metrics().num_drafted > 0
