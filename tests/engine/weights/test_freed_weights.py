"""An engine that owns its weights on a CPU frees those that it has packed: same answers, and every reader gets them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from freed_case import FC1, PARAMS, PROMPTS, SETTINGS, answers, assert_equal, freed, make_engine, moved, state
from hf_models import random_model
from lora_cases import random_adapter
from model_kinds import KINDS, make_model
from safetensors.torch import load_file, save_file
from torch import nn

from megatron_infer import LLM
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.engine.async_llm import AsyncLLM
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ModelError
from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models.exact_forward import exact_math
from megatron_infer.rl.updates import apply
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.usefixtures("native_kernels")


# ---------------------------------------------------------------------- the same answers, less memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_an_engine_that_keeps_its_weights(kind, dtype):
    kept, model = make_model(kind, params_dtype=dtype), make_model(kind, params_dtype=dtype)
    before = state(model)
    other, engine = make_engine(kept, owns=False), make_engine(model)
    assert answers(engine) == answers(other)
    linears = [name for name, one in before.items() if one.ndim == 2 and (".linear_" in name or "_proj." in name)]
    linears = [
        name for name in linears if "linear_kv_up_proj" not in name
    ]  # read in place (kernels/torch/latent_products.py)
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


# ---------------------------------------------------------------------- readers


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
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    random_model("llama_tied", **sizes).save_pretrained(tmp_path)
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


@pytest.mark.parametrize("how", ["assign", "replace", "replace unpacked"])
def test_rounded_weights_that_no_file_has_stay(folder, how):
    engine = LLM(str(folder), dtype="float32", config=SETTINGS | {"weight_dtype": "int8"}).engine
    kept = LLM(str(folder), dtype="float32", config=SETTINGS).engine.model
    other = make_engine(kept, owns=False, weight_dtype="int8")
    first, new = answers(engine), moved(kept)
    assert answers(other) == first
    if how == "assign":
        engine.model.load_state_dict({name: one.clone() for name, one in new.items()}, assign=True)
        kept.load_state_dict(new)
    else:
        if how == "replace unpacked":
            engine.weights.unpack()
        for model in (engine.model, kept):
            linear = model.get_submodule(FC1)
            linear.weight = nn.Parameter(torch.full(linear.weight.shape, 0.3))
    assert answers(engine) == answers(other) != first
    engine.verify_weights()
    assert_equal(state(engine.model), state(kept))
    engine.refresh_weights()
    assert answers(engine) == answers(other)
    assert f"{FC1}.weight" not in freed(engine.model)


def test_rounded_weights_are_read_again_wherever_the_process_is(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    engine = LLM(folder.name, dtype="float32", config=SETTINGS | {"weight_dtype": "int8"}).engine
    monkeypatch.chdir("/")
    assert freed(engine.model)
    engine.verify_weights()


def test_a_write_to_freed_weights_ends_no_request(folder):
    llm = LLM(str(folder), dtype="float32", config=SETTINGS)
    first = answers(llm.engine)[0][0]

    async def ask(served: AsyncLLM) -> list[int]:
        outputs = [output async for output in served.generate(PROMPTS[0], PARAMS)]
        return list(outputs[-1].outputs[0].token_ids)

    async def serve() -> list[list[int]]:
        async with AsyncLLM(llm) as served:
            before = await ask(served)
            llm.engine.model.get_submodule(FC1).weight.detach()[3].fill_(2.0)
            return [before, await ask(served), await ask(served)]

    assert asyncio.run(serve()) == [first] * 3


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
