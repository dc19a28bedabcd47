"""An engine that owns its weights on a CPU frees those that it has packed: same answers, and every reader gets them."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import random_adapter
from model_kinds import KINDS, make_model
from safetensors.torch import load_file, save_file
from torch import nn

from megatron_infer import LLM
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.durable.kv_restore import content_digest
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ModelError, StaleCache, TransitionFailed, WeightUpdateError, WrongState
from megatron_infer.kernels import native_build
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.exact_forward import exact_math
from megatron_infer.rl.weights import WeightUpdate, apply, as_source
from megatron_infer.rl.weights.verify import verify_update
from megatron_infer.testing.inspect import inspect
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
transformers = pytest.importorskip("transformers")

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
        engine.weights.unpack()
        assert_equal({key: one.detach() for key, one in model.named_parameters()}, before)
    assert not freed(model)
    assert answers(engine) == first and engine.weight_version == 0


def test_weights_outlive_the_engine_that_freed_them():
    model = tiny_gpt()
    before = state(model)
    engine = make_engine(model)
    assert freed(model)
    gone = weakref.ref(engine.weights)
    del engine
    gc.collect()
    assert gone() is None and freed(model)
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


FC1 = "decoder.layers.1.mlp.linear_fc1"


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.zero_(),
        lambda weight: weight[3].fill_(2.0),
        lambda weight: weight[3, 4].add_(100.0),
        lambda weight: weight.masked_fill_(weight > 0, 0.0),
        lambda weight: weight.index_fill_(0, torch.tensor([1, 2]), 0.0),
        lambda weight: weight.numpy().__setitem__((2, 2), 1.0),
    ],
    ids=["all", "row", "place", "mask", "index", "numpy"],
)
@pytest.mark.parametrize("then", ["generate", "refresh_weights", "state_dict"])
def test_writes_to_freed_weights_raise_and_lose_nothing(write, then):
    model = tiny_gpt(init_method_std=0.2)
    before = state(model)
    engine = make_engine(model)
    first = answers(engine)
    write(model.get_submodule(FC1).weight.detach())
    is_seen = then != "generate" or "numpy" not in repr(write.__code__.co_names)  # as in every owner: by content only
    call = {"generate": lambda: answers(engine), "state_dict": model.state_dict}.get(then) or engine.refresh_weights
    if is_seen:
        with pytest.raises((WrongState, TransitionFailed)) as caught:
            call()
        assert "engine.weights.unpack()" in f"{caught.value} {caught.value.__cause__}"
    assert_equal(state(model), before) if is_seen else None
    assert answers(engine) == first
    engine.verify_weights()


def test_sums_in_place_raise_at_once():
    model = tiny_gpt()
    engine = make_engine(model)
    first, weight = answers(engine), model.get_submodule(FC1).weight
    for write in (lambda: weight.mul_(2.0), lambda: weight.copy_(torch.ones_like(weight))):
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            write()
    assert answers(engine) == first and engine.weight_version == 0


@pytest.mark.parametrize("cast", [lambda m: m.double().float(), lambda m: m._apply(lambda one: one.clone())])
def test_a_cast_of_freed_weights_raises_and_loses_nothing(cast):
    model = tiny_gpt(init_method_std=0.2)
    before, engine = state(model), make_engine(model)
    first = answers(engine)
    cast(model)
    with pytest.raises(WrongState, match=r"unpack\(\)"):
        answers(engine)
    assert answers(engine) == first
    assert_equal(state(model), before)


def test_weights_that_something_else_refers_to_stay():
    model, other = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    kept = model.state_dict()
    buffer = torch.cat([one.weight.detach().flatten() for one in (model.decoder.layers[0].mlp.linear_fc1,) * 2])
    for place, linear in enumerate((model.decoder.layers[0].mlp.linear_fc2, model.decoder.layers[1].mlp.linear_fc2)):
        size = linear.weight.numel()
        buffer[place * size :][:size] = linear.weight.detach().flatten()
        linear.weight.data = buffer[place * size :][:size].view(linear.weight.shape)
    engine, plain = make_engine(model), make_engine(other, owns=False)
    assert not freed(model)
    assert answers(engine) == answers(plain)
    for factor in (-1.3, 0.7):
        for found in (kept, other.state_dict()):
            found[f"{FC1}.weight"].mul_(factor)
        assert answers(engine) == answers(plain)
    del kept, found
    engine.refresh_weights()
    assert f"{FC1}.weight" in freed(model) and "decoder.layers.1.mlp.linear_fc2.weight" not in freed(model)
    buffer.mul_(1.5)
    for layer in other.decoder.layers:
        layer.mlp.linear_fc2.weight.data.mul_(1.5)
    engine.refresh_weights()
    plain.refresh_weights()
    assert answers(engine) == answers(plain)


def test_a_replaced_parameter_is_served():
    model, other = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    engine = make_engine(model)
    first = answers(engine)
    for one in (model, other):
        linear = one.get_submodule(FC1)
        linear.weight = nn.Parameter(torch.ones_like(linear.weight))
    assert answers(engine) == answers(make_engine(other, owns=False)) != first and engine.weight_version == 1


@pytest.mark.parametrize("meanwhile", ["refresh", "suspend"])
@pytest.mark.parametrize("undo", [False, True])
def test_weights_accepted_within_an_update_do_not_spoil_it(meanwhile, undo):
    model, other = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    engine, before, new = make_engine(model), state(model), moved(model)
    first = answers(engine)

    def accept() -> None:
        if meanwhile == "refresh":
            engine.refresh_weights()
        else:
            engine.suspend("recompute")
            engine.resume()

    with WeightUpdate(engine, undo=undo) as update:
        update.write_all(list(new.items())[:5])
        accept()
        update.write_all(list(new.items())[5:])
    other.load_state_dict(new)
    assert answers(engine) == answers(make_engine(other, owns=False)) != first
    if undo:
        update = WeightUpdate(engine, undo=True)
        update.write_all(list(before.items())[:5])
        accept()
        update.write(*list(before.items())[5])
        update.rollback()
        assert_equal(state(model), new)
        assert answers(engine) == answers(make_engine(other, owns=False))


def test_state_dicts_of_another_thread_have_all_values_and_change_no_version():
    model = tiny_gpt(init_method_std=0.2)
    before, engine = state(model), make_engine(model)
    first, errors = answers(engine), []

    def read() -> None:
        try:
            for _ in range(20):
                assert_equal(state(model), before)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert answers(engine) == first
    assert not errors and engine.weight_version == 0


def test_digests_leave_freed_weights_freed():
    model, kept = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    engine, other = make_engine(model), make_engine(kept, owns=False)
    names, num_bytes = freed(model), engine.weights.num_bytes
    assert verify_update(engine).checksum == verify_update(other).checksum
    assert content_digest(inspect(engine).adopted) == content_digest(inspect(other).adopted)
    assert apply(engine, state(kept), checksum=True).checksum == verify_update(other).checksum
    assert freed(model) == names and engine.weights.num_bytes == num_bytes
    engine.verify_weights()
    assert answers(engine) == answers(other)


def test_a_forward_of_the_model_reads_the_weights():
    model, other = tiny_gpt(init_method_std=0.2), tiny_gpt(init_method_std=0.2)
    engine = make_engine(model)
    first, ids = answers(engine), torch.tensor([PROMPTS[0]])
    x = torch.randn(3, 1, 64)
    for one in (model, other):
        with torch.no_grad():
            one.found = one.decoder.layers[0].mlp(x)[0], one(ids, torch.arange(ids.shape[1])[None], None)
    assert all(map(torch.equal, model.found, other.found))
    assert answers(engine) == first and engine.weight_version == 0


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


# ---------------------------------------------------------------------- copies that do not tell the weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama of transformers with an embedding that is the output layer."""
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_rounded_weights_are_read_again_from_the_models_files(folder, weight_dtype):
    def load(dtype: str = weight_dtype) -> DynamicInferenceEngine:
        return LLM(str(folder), dtype="float32", config=SETTINGS | {"weight_dtype": dtype}).engine

    before = state(load("auto").model)
    engine = load()
    first, names = answers(engine), freed(engine.model)
    assert len(names) == 8 and not any("embedding" in name for name in names)
    engine.verify_weights()
    assert freed(engine.model) == names
    assert_equal(state(engine.model), before)
    assert answers(engine) == first and engine.weight_version == 0
    engine.refresh_weights()
    assert freed(engine.model) == names and answers(engine) == first
    new = {name: one * -1.3 for name, one in before.items()}
    apply(engine, new)
    assert not freed(engine.model), "no file has them"
    other = make_engine(load("auto").model, owns=False, weight_dtype=weight_dtype)
    apply(other, new)
    assert answers(engine) == answers(other) != first
    assert_equal(state(engine.model), new)


def test_rounded_weights_whose_files_changed_are_not_taken_for_the_models(folder):
    engine = LLM(str(folder), dtype="float32", config=SETTINGS | {"weight_dtype": "int8"}).engine
    first, file = answers(engine), folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    for read in (engine.model.state_dict, engine.verify_weights, lambda: apply(engine, {})):
        with pytest.raises(ModelError, match="not what they were"):
            read()
    assert answers(engine) == first
