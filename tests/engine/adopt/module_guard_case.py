"""What is done to a model's modules, when, how it is undone, and the words of its refusal; on one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import engines
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import InferenceError
from megatron_infer.rl.session import RolloutSession
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt, tiny_hybrid

SETTINGS: dict[str, Any] = {"init_method_std": 0.2}
MODELS: dict[str, Callable[..., Any]] = {
    "gpt": lambda **more: tiny_gpt(**SETTINGS, **more),
    "moe": lambda **more: tiny_gpt(**SETTINGS, **EXPERTS, **more),
    "hybrid": lambda **more: tiny_hybrid("M*-E", **SETTINGS, **more),
}
CONFIG: dict[str, Any] = {
    "buffer_size_gb": 0.004,
    "block_size_tokens": 16,
    "max_requests": 4,
    "max_tokens": 64,
    "max_sequence_length": 64,
    "check_invariants": True,
}
PROMPT = list(range(5, 40))
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0, logprobs=1)
Undo = Callable[[], Any]
Answer = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Change:
    """make(model, donor) -> how to undo it. words: of the refusal; "" for a change that is served. donor: another
    model with other weights."""

    make: Callable[[Any, Any], Undo]
    words: str = ""
    before: str | None = None
    """Words of the refusal before adoption, if they differ; "": the change is served then."""

    def refusal(self, *, is_adopted: bool) -> str:
        return self.words if is_adopted or self.before is None else self.before


def body(model: Any) -> tuple[Any, str]:
    """The first body of the first layer: attention, or a mixer."""
    layer = model.decoder.layers[0]
    return layer, "mixer" if hasattr(layer, "mixer") else "self_attention"


def first_norm(model: Any) -> tuple[Any, str]:
    layer = model.decoder.layers[0]
    return layer, "norm" if hasattr(layer, "mixer") else "input_layernorm"


def first_linear(model: Any) -> tuple[Any, str]:
    owner = getattr(*body(model))
    return owner, "in_proj" if hasattr(owner, "in_proj") else "linear_qkv"


def mlp(model: Any) -> tuple[Any, str]:
    """The last layer's: experts in "moe" and "hybrid"."""
    return model.decoder.layers[-1], "mlp"


def setting(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute -> put back what was there."""
    if name not in vars(owner) and name not in owner._modules and name not in owner._parameters:
        setattr(owner, name, value)
        return lambda: delattr(owner, name)
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def replace(find: Callable[[Any], tuple[Any, str]]) -> Callable[[Any, Any], Undo]:
    return lambda model, donor: setting(*find(model), getattr(*find(donor)))


def replace_layer(model: Any, donor: Any) -> Undo:
    before = model.decoder.layers[1]
    model.decoder.layers[1] = donor.decoder.layers[1]
    return lambda: model.decoder.layers.__setitem__(1, before)


def swap_parameter(model: Any, donor: Any) -> Undo:
    linear = getattr(*first_linear(model))
    return setting(linear, "weight", nn.Parameter(getattr(*first_linear(donor)).weight.detach().clone()))


def add_hook(model: Any, donor: Any) -> Undo:
    return getattr(*first_linear(model)).register_forward_hook(lambda m, given, out: (out[0] * 2, out[1])).remove


def add_pre_hook(model: Any, donor: Any) -> Undo:
    return getattr(*first_norm(model)).register_forward_pre_hook(lambda m, given: (given[0] * 2,)).remove


def patch(find: Callable[[Any], tuple[Any, str]], method: str = "forward") -> Callable[[Any, Any], Undo]:
    def make(model: Any, donor: Any) -> Undo:
        module = getattr(*find(model))
        found = getattr(module, method)
        return setting(module, method, lambda *args, **kwargs: found(*args, **kwargs))

    return make


def last_layer(model: Any) -> tuple[Any, str]:
    return model.decoder.layers, "1"


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def parametrized(find: Callable[[Any], tuple[Any, str]], name: str = "weight") -> Callable[[Any, Any], Undo]:
    def make(model: Any, donor: Any) -> Undo:
        module = getattr(*find(model))
        cls, parameter = type(module), module._parameters[name]
        parametrize.register_parametrization(module, name, Doubled())

        def undo() -> None:
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            assert type(module) is cls and module._parameters[name] is parameter

        return undo

    return make


def plain_tensor(model: Any, donor: Any) -> Undo:
    linear = getattr(*first_linear(model))
    parameter = linear.weight
    del linear.weight
    linear.weight = 2 * parameter.detach()

    def undo() -> None:
        del linear.weight
        linear.weight = parameter

    return undo


def cast(model: Any, donor: Any) -> Undo:
    before = [(one, one.data) for one in (*model.parameters(), *model.buffers())]
    model.bfloat16()
    return lambda: [setattr(one, "data", data) for one, data in before]


def compiled_module(model: Any, donor: Any) -> Undo:
    before = model.decoder.layers[1]
    model.decoder.layers[1] = torch.compile(before, backend="eager")  # inductor takes a second to import
    return lambda: model.decoder.layers.__setitem__(1, before)


def compiled_forward(model: Any, donor: Any) -> Undo:
    layer = model.decoder.layers[1]
    return setting(layer, "forward", torch.compile(layer.forward, backend="eager"))


def compiled_in_place(model: Any, donor: Any) -> Undo:
    layer = model.decoder.layers[1]
    layer.compile(backend="eager")
    return lambda: setattr(layer, "_compiled_call_impl", None)


class Adapter(nn.Module):
    """A low-rank addition around a linear, as adapter libraries put it in the linear's place."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        rows, columns = base.weight.shape
        self.down, self.up = nn.Linear(columns, 2, bias=False), nn.Linear(2, rows, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        out, bias = self.base(x)
        return out + self.up(self.down(x)), bias


def wrap_linear(model: Any, donor: Any) -> Undo:
    owner, name = first_linear(model)
    return setting(owner, name, Adapter(getattr(owner, name)))


LINEAR, NORM = r"decoder\.layers\.0\.\w+\.(linear_qkv|in_proj)", r"decoder\.layers\.0\.(input_layer)?norm"
CHANGES = {
    "replace layer": Change(replace_layer),
    "replace linear": Change(replace(first_linear)),
    "replace norm": Change(replace(first_norm)),
    "replace attention or mixer": Change(replace(body)),
    "replace mlp": Change(replace(mlp)),
    "swap parameter": Change(swap_parameter),
    "forward hook": Change(add_hook, f"{LINEAR}: has a forward hook"),
    "pre-hook": Change(add_pre_hook, f"{NORM}: has a forward hook"),
    "forward of a layer": Change(patch(last_layer), r"decoder\.layers\.1: its forward is set on the instance"),
    "forward of attention or mixer": Change(patch(body), r"layers\.0\.(self_attention|mixer): its forward is set"),
    "forward of a linear": Change(patch(first_linear), f"{LINEAR}: its forward is set"),
    "forward of a norm": Change(patch(first_norm), f"{NORM}: its forward is set"),
    "forward of an mlp": Change(patch(mlp), r"layers\.\d\.mlp: its forward is set"),
    "parametrized linear": Change(parametrized(first_linear), f"{LINEAR}: weight is computed by torch.nn.utils.par"),
    "parametrized norm": Change(parametrized(first_norm), f"{NORM}: weight is computed by torch.nn.utils.parametrize"),
    "plain tensor": Change(plain_tensor, f"{LINEAR}: its weight is a plain tensor"),
    "cast": Change(cast, "bfloat16 where the engine's cache was laid out for float32.*build a new engine", before=""),
    "torch.compile(layer)": Change(compiled_module, r"layers\.1: layer class torch\._dynamo\S+OptimizedModule"),
    "torch.compile(layer.forward)": Change(compiled_forward, r"layers\.1: its forward is set .*compile\(\)"),
    "layer.compile()": Change(compiled_in_place),
    "adapter around a linear": Change(wrap_linear, rf"{LINEAR}: linear class \S*Adapter is not known"),
}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
every_kind = pytest.mark.parametrize("kind", MODELS)


def config_of(model: Any) -> InferenceConfig:
    """With a prefix cache: keys and values of other modules must not be matched."""
    states = {"prefix_caching_mamba_gb": 0.001} if model.config.is_hybrid_model else {}
    cache = {"enable_prefix_caching": True, "prefix_caching_eviction_policy": "lru"}
    return InferenceConfig(**CONFIG, **cache, **states)


def engine_of(model: Any) -> DynamicInferenceEngine:
    return DynamicInferenceEngine(model, config_of(model))


def answer(engine: DynamicInferenceEngine, prompt: list[int] = PROMPT) -> Answer:
    return read(engine.generate([prompt], GREEDY)[0])


def read(output: Any) -> Answer:
    (found,) = output.outputs
    assert found.finish_reason == "length", output
    return list(found.token_ids), engines.logprobs_of(found)


def check_equal(found: Answer | None, wanted: Answer | None) -> None:
    """found: None on a rank that has no output."""
    if found is None or wanted is None:
        return
    assert found[0] == wanted[0]
    assert found[1] == pytest.approx(wanted[1], abs=1e-5)


def refusing(words: str) -> Any:
    return pytest.raises(InferenceError, match=rf"(?s){words}")


def run_to_end(engine: DynamicInferenceEngine) -> list[Any]:
    return list(engines.finish(engine).values())


@contextmanager
def engine_on(model: Any) -> Iterator[DynamicInferenceEngine]:
    engine = engine_of(model)
    try:
        yield engine
    finally:
        engine.rank_group.lockstep.close()


def fresh_answer(model: Any) -> Answer:
    with engine_on(model) as engine:
        return answer(engine)


def add(engine: DynamicInferenceEngine) -> None:
    if engine.rank_group.groups.is_leader:
        engine.add_request(PROMPT, GREEDY)


def finished(engine: DynamicInferenceEngine) -> Answer | None:
    """Of the one request of `add`, run to its end. A rank that is not the leader may have none."""
    outputs = run_to_end(engine)
    assert len(outputs) == 1 or not engine.rank_group.groups.is_leader
    return read(outputs[0]) if outputs else None


# ---------------------------------------------------------------------- times: (change, model, donor, the model's twin)


def before_adoption(change: Change, model: Any, donor: Any, twin: Any) -> None:
    undo = change.make(model, donor)
    if words := change.refusal(is_adopted=False):
        with refusing(words):
            engine_of(model)
        undo()
    fresh_answer(model)


def while_idle(change: Change, model: Any, donor: Any, twin: Any) -> None:
    with engine_on(model) as engine:
        before = answer(engine)
        undo = change.make(model, donor)
        if not change.words:
            found = answer(engine)
            check_equal(found, fresh_answer(model))
            assert engine.weight_version == (0 if change is CHANGES["layer.compile()"] else 1)
            # the models on two ranks have norms of ones, and so the same answers with the other's norm
            assert engine.rank_group.size > 1 or (found == before) == (engine.weight_version == 0)
            return
        add(engine)
        for call in (engine.step, engine.step, engine.verify_weights):
            with refusing(change.words):
                call()
        assert engine.weight_version == 0
        undo()
        engine.verify_weights()
        check_equal(finished(engine), before)


def between_rollouts(change: Change, model: Any, donor: Any, twin: Any) -> None:
    session = RolloutSession(model, config_of(model))
    with session.generating() as roll:
        before = roll.generate([PROMPT], GREEDY)[0].samples[0]
    undo = change.make(model, donor)
    if change.words:
        calls = [session.update_weights, session.generating().__enter__]
        if "hook" not in change.words and "its forward" not in change.words:  # the trainer's forward runs those
            calls.append(lambda: session.score([PROMPT]))
        for call in calls:
            with refusing(change.words):
                call()
        undo()
    else:
        session.update_weights()
    with session.generating() as roll:
        found = roll.generate([PROMPT], GREEDY)[0].samples[0]
        assert [span.policy_version for span in found.spans] == [session.weight_version]
    if change.words or change is CHANGES["layer.compile()"]:
        assert found.token_ids == before.token_ids
    else:
        check_equal((found.token_ids, found.raw_logprobs), fresh_answer(model))
    session.engine.rank_group.lockstep.close()


def in_flight(change: Change, model: Any, donor: Any, twin: Any) -> None:
    """Served: as weights of the same values that are written in place, with the KV that the requests have."""
    with engine_on(model) as engine, engine_on(twin) as reference:
        for one in (engine, reference):
            add(one)
            for _ in range(2):
                one.step()
        undo = change.make(model, donor)
        if change.words:
            for _ in range(2):
                with refusing(change.words):
                    engine.step()
            assert engine.stats().num_running + engine.stats().num_waiting == 1 and engine.weight_version == 0
            undo()
            check_equal(finished(engine), finished(reference))
            return
        with torch.no_grad():
            for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
                if not torch.equal(mine, theirs):
                    mine.copy_(theirs)
        check_equal(finished(engine), finished(reference))
        assert engine.weight_version == reference.weight_version or engine.rank_group.size > 1
        check_equal(answer(engine), fresh_answer(model))


def while_suspended(change: Change, model: Any, donor: Any, twin: Any) -> None:
    with engine_on(model) as engine:
        before = answer(engine)
        add(engine)
        engine.step()
        engine.suspend("recompute")
        undo = change.make(model, donor)
        if change.words:
            for _ in range(2):
                with refusing(change.words):
                    engine.resume()
            undo()
        engine.resume()
        finished(engine)
        check_equal(answer(engine), before if change.words else fresh_answer(model))


TIMES = {one.__name__: one for one in (before_adoption, while_idle, between_rollouts, in_flight, while_suspended)}
