"""Modules that were replaced, hooked, patched, parametrized or cast are served as they are now, or refused by name.

Every change at every time on every kind of model: the answers equal those of an engine that is built on the changed
model, or AdoptionError names the module and the reason, nothing is generated, and undoing the change lets requests go
on. None is served as it was.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from module_guard_case import (
    CHANGES,
    CONFIG,
    GREEDY,
    MODELS,
    PROMPT,
    SETTINGS,
    TIMES,
    answer,
    check_equal,
    engine_of,
    every_change,
    every_kind,
    first_linear,
    first_norm,
    read,
    refusing,
    replace,
    replace_layer,
    run_to_end,
    setting,
)
from replay_recorder import REPLAY
from static_kernels import STATIC
from torch import nn

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import AdoptionError, StaleCache
from megatron_infer.kernels.select import BACKEND_VARIABLE
from megatron_infer.models import module_guard
from megatron_infer.models.exact_forward import exact_math
from megatron_infer.models.mcore_compat import MLP, SelfAttention, TransformerLayer
from megatron_infer.models.module_guard import ModuleGuard
from megatron_infer.models.specs import gpt_spec
from megatron_infer.testing.inspect import inspect
from megatron_infer.testing.tiny import tiny_gpt


@pytest.fixture
def pair(kind: str) -> tuple[Any, Any]:
    """(model, donor)."""
    return MODELS[kind](seed=1), MODELS[kind](seed=2)


@pytest.mark.parametrize("time", TIMES)
@every_kind
@every_change
def test_every_change_is_served_or_refused(pair, kind, change, time):
    TIMES[time](change, *pair, MODELS[kind](seed=1))


# ---------------------------------------------------------------------- beside the matrix


PATCHED = {
    "moe": {
        "mlp.router": "gating",
        "mlp.experts.local_experts.0": "forward",
        "mlp.experts.local_experts.1.linear_fc2": "forward",
    },
    "gpt": {
        "mlp.linear_fc1": "forward",
        "self_attention": "get_query_key_value_tensors",
        "self_attention.core_attention": "forward",
    },
}


@pytest.mark.parametrize(("kind", "path", "method"), [(k, p, m) for k, ps in PATCHED.items() for p, m in ps.items()])
def test_any_method_on_any_module_of_a_layer_is_refused(kind, path, method):
    model = MODELS[kind](seed=1)
    engine = engine_of(model)
    where = f"decoder.layers.1.{path}"
    found = getattr(model.get_submodule(where), method)
    undo = setting(model.get_submodule(where), method, lambda *args, **kwargs: found(*args, **kwargs))
    with refusing(f"{where}: its {method} is set on the instance"):
        engine.set_weight_version(1)
    undo()
    answer(engine)


@pytest.mark.parametrize("path", ["", "embedding.word_embeddings", "decoder", "decoder.final_layernorm", "output_layer",
                                  "rotary_pos_emb"])  # fmt: skip
@pytest.mark.parametrize("how", ["hook", "forward"])
def test_modules_around_the_layers(path, how):
    model = MODELS["gpt"](seed=1)
    engine = engine_of(model)
    module = model.get_submodule(path)
    if how == "hook":
        undo = module.register_forward_hook(lambda *given: None).remove
    else:
        undo = setting(module, "forward", module.forward)
    with refusing(f"{path or '<root>'}: (has a forward hook|its forward is set)"):
        answer(engine)
    undo()
    answer(engine)
    with pytest.raises(AdoptionError), torch.nn.modules.module.register_module_forward_hook(lambda *given: None):
        answer(engine)
    answer(engine)


@pytest.mark.parametrize("kind", ["moe", "hybrid"])
def test_parts_of_experts_and_of_a_mixer_are_replaced(kind):
    model, donor = MODELS[kind](seed=1), MODELS[kind](seed=2)
    engine = engine_of(model)
    last = [name for name, module in model.named_modules() if name.endswith(("router", "local_experts.1", "out_proj"))]
    assert last
    for path in last:
        before = answer(engine)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, donor.get_submodule(path))
        found = answer(engine)
        assert found != before
        check_equal(found, answer(engine_of(model)))


def test_what_is_replaced_is_verified_and_named():
    model, donor = MODELS["gpt"](seed=1), MODELS["gpt"](seed=2)
    engine = engine_of(model)
    replace_layer(model, donor)
    with pytest.raises(StaleCache, match=r"decoder\.layers\.1 is another module than the one that was adopted"):
        engine.verify_weights()
    engine.refresh_weights()
    engine.verify_weights()
    check_equal(answer(engine), answer(engine_of(model)))


def test_a_prefix_of_other_modules_is_not_matched():
    model, donor = MODELS["gpt"](seed=1), MODELS["gpt"](seed=2)
    engine = engine_of(model)
    answer(engine)
    assert engine.generate([PROMPT], GREEDY)[0].num_cached_tokens > 0
    replace_layer(model, donor)
    output = engine.generate([PROMPT], GREEDY)[0]
    assert output.num_cached_tokens == 0 and output.outputs[0].spans[0].policy_version == 1


def test_a_module_that_was_replaced_is_freed():
    model, donor = MODELS["gpt"](seed=1), MODELS["gpt"](seed=2)
    engine = engine_of(model)
    gone = weakref.ref(model.decoder.layers[1]), weakref.ref(model.decoder.layers[1].mlp.linear_fc1.weight)
    replace_layer(model, donor)
    answer(engine)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_layers_that_do_not_fit_the_cache_are_refused():
    model, donor = MODELS["gpt"](seed=1), MODELS["gpt"](seed=2, num_query_groups=4)
    engine = engine_of(model)
    undo = replace_layer(model, donor)
    with refusing("heads differ between layers"):
        answer(engine)
    undo()
    answer(engine)
    for number in (0, 1):
        model.decoder.layers[number] = donor.decoder.layers[number]
    with refusing("num_kv_heads is 4 where the engine was built for 2.*build a new engine"):
        answer(engine)


class TheirLayer(TransformerLayer):
    """A layer of the user's own: megatron-core's decoder calls it."""


def their_spec(config: Any) -> Any:
    block = gpt_spec(config)
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        layer.module = TheirLayer
    return block


def test_a_layer_of_the_users_own_is_called_with_its_hooks():
    model = tiny_gpt(**SETTINGS, spec=their_spec)
    engine = engine_of(model)
    before, layer = answer(engine), model.decoder.layers[1]
    for module in (layer, layer.mlp.linear_fc1):
        hook = module.register_forward_hook(lambda m, given, out: (out[0] * 2, out[1]))
        found = answer(engine)
        assert found[1] != before[1]
        check_equal(found, answer(engine_of(model)))
        hook.remove()
        check_equal(answer(engine), before)
    hook = layer.self_attention.linear_qkv.register_forward_hook(lambda *_: None)
    with refusing("layers.1.self_attention.linear_qkv: has a forward hook"):
        answer(engine)
    hook.remove()
    layer.self_attention.forward = layer.self_attention.forward
    with refusing("layers.1.self_attention: its forward is set on the instance"):
        answer(engine)
    del layer.self_attention.forward
    check_equal(answer(engine), before)
    layer.mlp = tiny_gpt(**SETTINGS, seed=2).decoder.layers[1].mlp.train()  # in a model in eval mode
    check_equal(answer(engine), answer(engine_of(model)))
    assert layer.mlp.training


def test_captured_steps_of_other_modules_are_dropped(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, STATIC)
    monkeypatch.setenv("MEGATRON_INFER_GRAPHS", REPLAY)
    model, donor = MODELS["gpt"](seed=1), MODELS["gpt"](seed=2)
    engine = DynamicInferenceEngine(model, InferenceConfig(**CONFIG, num_cuda_graphs=-1))
    counts = inspect(engine).runner.graphs.pool.counts
    before = answer(engine)
    assert counts.replays and not counts.invalidated
    replace(first_linear)(model, donor)
    found = answer(engine)
    assert found != before and counts.invalidated == {"weights moved": 1}
    check_equal(found, answer(engine_of(model)))


def test_a_trainers_own_attributes_are_no_change():
    """Nor are this package's own hooks and forwards, which act in training."""
    model = MODELS["gpt"](seed=1)
    engine = engine_of(model)
    before = answer(engine)
    for module in model.modules():
        module.noted_by_the_trainer = 1
    model.decoder.layers[0].register_full_backward_hook(lambda *given: None)
    with exact_math(model):
        assert answer(engine) == before
    assert answer(engine) == before and engine.weight_version == 0
    engine.verify_weights()


def test_a_forward_that_takes_the_place_of_another_attribute_is_refused():
    module = getattr(*first_norm(model := MODELS["gpt"](seed=1)))
    module.noted_by_the_trainer = 1
    engine = engine_of(model)
    before = answer(engine)
    del module.noted_by_the_trainer
    module.forward = lambda *given, **named: given[0]
    with refusing("forward"):
        answer(engine)
    del module.forward
    assert answer(engine) == before


CLASSES = [(TransformerLayer, "forward"), (MLP, "forward"), (SelfAttention, "get_query_key_value_tensors")]


@pytest.mark.parametrize(("cls", "method"), CLASSES)
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_methods_replaced_on_a_class_are_refused(monkeypatch, cls, method, is_wrapped):
    """As libraries patch a model's code, also with a wrapper that has the name of what it wraps."""
    engine = engine_of(MODELS["gpt"](seed=1))
    before, found = answer(engine), getattr(cls, method)

    def other(*args, **kwargs):
        return found(*args, **kwargs)

    monkeypatch.setattr(cls, method, functools.wraps(found)(other) if is_wrapped else other)
    words = rf"{cls.__name__}\.{method} was replaced by a function of another package"
    engine.add_request(PROMPT, GREEDY)
    with refusing(words):
        engine.step()
    with refusing(words):
        engine_of(MODELS["gpt"](seed=1))
    monkeypatch.undo()
    check_equal(read(run_to_end(engine)[0]), before)


def test_a_module_guard_tells_modules_apart_by_path():
    model = MODELS["moe"](seed=1)
    before = ModuleGuard(model)
    assert before.is_intact() and before.difference(ModuleGuard(model)) is None
    layers = model.decoder.layers
    layers[0], layers[1] = layers[1], layers[0]
    assert not before.is_intact() and before.difference(ModuleGuard(model))[0].startswith("decoder.layers.")
    layers[0], layers[1] = layers[1], layers[0]
    assert before.is_intact()
    model.value_head = nn.Linear(2, 2)
    assert before.difference(ModuleGuard(model))[0] == "value_head"
    del model.value_head
    model.decoder.layers[1].mlp.router.expert_bias = torch.zeros(4)
    assert before.difference(ModuleGuard(model)) is None


def guard_pair(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleGuard, ModuleGuard]:
    """(compares in C++, compares in Python)."""
    with monkeypatch.context() as patch:
        patch.setattr(module_guard, "bind_module_guard", lambda **_: None)
        python = ModuleGuard(model)
    compiled = ModuleGuard(model)
    assert compiled.is_intact() and compiled._holds is not None and compiled._holds() == 1
    monkeypatch.setattr(module_guard, "bind_module_guard", lambda **_: None)
    assert python.is_intact() and python._holds is None
    return compiled, python


@pytest.mark.usefixtures("native_kernels")
@every_kind
@every_change
def test_both_comparisons_notice_every_change(pair, change, monkeypatch):
    model, donor = pair
    compiled, python = guard_pair(model, monkeypatch)
    undo = change.make(model, donor)
    wanted = change is CHANGES["cast"]  # which the addresses of the weights show
    assert [bool(compiled._holds()), compiled.is_intact(), python.is_intact()] == [wanted] * 3
    undo()
    if compiled.is_intact():  # else an attribute or a hook mapping is left of it
        assert compiled._holds() and python.is_intact()


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("kind", ["gpt"])
def test_both_comparisons_notice_attributes_classes_methods_and_moved_children(pair, kind, monkeypatch):
    model, _ = pair
    compiled, python = guard_pair(model, monkeypatch)

    def notice() -> bool:
        found = {bool(compiled._holds()), compiled.is_intact(), python.is_intact()}
        assert len(found) == 1
        return not found.pop()

    layers, layer = model.decoder.layers, model.decoder.layers[1]
    layers[0], layers[1] = layers[1], layers[0]
    assert notice()
    layers[0], layers[1] = layers[1], layers[0]
    for name in ("noted", "forward"):
        setattr(layer, name, None)
        assert notice()
        delattr(layer, name)
    layer.mlp.register_parameter("more", None)
    assert notice()
    del layer.mlp.more
    cls = type(layer)
    layer.__class__ = type("Other", (cls,), {})
    assert notice()
    layer.__class__ = cls
    assert not notice()
    with monkeypatch.context() as patch:
        patch.setattr(MLP, "forward", lambda *given: None)
        assert notice()
    assert not notice()
    with torch.nn.modules.module.register_module_forward_pre_hook(lambda *given: None):
        assert not compiled.is_intact() and not python.is_intact()
    hooks, layer._forward_hooks = layer._forward_hooks, "none"  # not even a mapping
    assert not compiled._holds()
    layer._forward_hooks = hooks
    assert not notice()


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("kind", ["gpt"])
@pytest.mark.parametrize("what", ["module", "parameter"])
def test_what_exists_no_more_is_noticed_and_was_not_kept(pair, kind, what, monkeypatch):
    model, _ = pair
    compiled, python = guard_pair(model, monkeypatch)
    mlp = model.decoder.layers[1].mlp
    gone = weakref.ref(mlp if what == "module" else mlp.linear_fc1.weight)
    if what == "module":
        del model.decoder.layers[1].mlp
    else:
        del mlp.linear_fc1.weight
    del mlp
    gc.collect()
    assert gone() is None and compiled._gone and python._gone
    assert not (compiled._holds() or compiled.is_intact() or python.is_intact())
    freed = weakref.ref(compiled)
    del compiled
    gc.collect()
    assert freed() is None
    del model.decoder.layers[0].mlp  # calls no module guard that exists no more
