"""New weights from every kind of source are written to a live engine completely and in place, or an error is raised."""

from __future__ import annotations

import asyncio
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from engines import finish, logprobs_of
from hf_models import random_model
from safetensors.torch import load_file, save_file

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError, ModelError, WeightUpdateError, WrongState
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import save_checkpoint
from megatron_infer.models.loading.sources import open_source
from megatron_infer.rl.updates import WeightUpdate, apply, apply_async, apply_undoable, as_source
from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

make_engine = partial(engines.make_engine, max_sequence_length=64, max_requests=4, max_tokens=64)
FAMILIES = (
    "nemotron_h_experts",
    "bamba",
    "mamba2_tied",
    "dense_granite_tied",
    "granite_factors",
    "qwen3_moe",
    "glm4_moe",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
)
NORM = "decoder.final_norm.weight"


def answer(engine: DynamicInferenceEngine) -> tuple[list[int], list[float]]:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    out = engine.generate([[5, 9, 30, 7, 66, 12, 3]], params)[0].outputs[0]
    return out.token_ids, logprobs_of(out)


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def addresses(engine: DynamicInferenceEngine) -> dict[str, tuple[int, int]]:
    found = engine.model.state_dict(keep_vars=True)
    return {name: (id(t), t.data_ptr()) for name, t in found.items() if isinstance(t, torch.Tensor)}


@pytest.fixture(scope="module")
def new() -> Any:
    """The model with the new weights: every kind of layer, and a router's bias."""
    model = hybrid(seed=1)
    with torch.no_grad():
        model.decoder.layers[3].mlp.router.expert_bias.copy_(torch.tensor([0.3, -0.2, 0.1, -0.3]))
    return model


@pytest.fixture(scope="module")
def wanted(new: Any) -> tuple[list[int], list[float]]:
    return answer(make_engine(new))


@pytest.fixture
def engine() -> DynamicInferenceEngine:
    return make_engine(hybrid(seed=2))


def hybrid(**settings: Any) -> Any:
    return tiny_hybrid("M*-E", moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", **settings)


def sources(new: Any, folder: Path) -> dict[str, Any]:
    """Every kind of source with megatron-core's names."""
    state = state_of(new)
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "weights.safetensors")
    (folder / "files").mkdir()
    for number, part in enumerate((slice(None, 9), slice(9, None))):
        save_file({n: state[n].clone() for n in list(state)[part]}, folder / "files" / f"{number}.safetensors")
    save_checkpoint(new, folder / "checkpoint")

    async def later() -> Any:
        for pair in state.items():
            await asyncio.sleep(0)
            yield pair

    return {
        "mapping": state,
        "with extra state": new.state_dict(),
        "of a wrapper": {f"module.{name}": tensor for name, tensor in state.items()},
        "model": new,
        "file": folder / "weights.safetensors",
        "directory": str(folder / "files"),
        "checkpoint": folder / "checkpoint",
        "iterator": iter(reversed(state.items())),
        "async": later(),
        "fp64": {name: tensor.double() for name, tensor in state.items()},
    }


def test_every_kind_of_source_gives_the_same_tokens_in_the_same_tensors(engine, new, wanted, tmp_path):
    old, places = state_of(engine.model), addresses(engine)
    old = {name: tensor.clone() for name, tensor in old.items()}
    refreshed = []
    engine.weights.derived.register(counting(refreshed))
    assert answer(engine) != wanted
    checksums = set()
    for number, (kind, source) in enumerate(sources(new, tmp_path).items(), start=1):
        refreshed.clear()
        done = apply(engine, source, checksum=True)
        assert answer(engine) == wanted, kind
        assert done.version == 2 * number - 1 == engine.weight_version and done.num_tensors == len(old), kind
        assert done.bytes_copied == sum(tensor.nbytes for tensor in old.values())
        assert refreshed == ["rebuilt"], kind
        checksums.add(done.checksum)
        assert apply(engine, old, checksum=True).checksum not in checksums
        assert answer(engine) != wanted
    assert len(checksums) == 1 and addresses(engine) == places


def counting(calls: list[str]) -> Any:
    from megatron_infer.models.weights.derived import DerivedCache

    return DerivedCache(name="counted", refresh=lambda: calls.append("rebuilt"), differs=lambda: None)


@pytest.mark.few
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_names_work_from_a_directory_a_mapping_and_a_stream_in_any_order(family, tmp_path):
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path)
    expected = answer(make_engine(build_model(open_source(tmp_path))))
    state = load_file(tmp_path / "model.safetensors")
    engine = make_engine(build_model(open_source(tmp_path)))
    for source in (tmp_path, tmp_path / "model.safetensors", state, reusing(state)):
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.add_(0.1)
        assert answer(engine) != expected
        apply(engine, source)
        assert answer(engine) == expected
        if not isinstance(source, Path):
            break_one(engine, state)


def reusing(state: dict[str, torch.Tensor]) -> Any:
    """A stream in reverse order that reuses one buffer, as transports with a bucket do."""
    bucket = torch.empty(max(tensor.numel() for tensor in state.values()))
    for name, tensor in reversed(state.items()):
        view = bucket[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        yield name, view


def break_one(engine: DynamicInferenceEngine, state: dict[str, torch.Tensor]) -> None:
    name = next(name for name in state if name.endswith("norm.weight"))
    with pytest.raises(WeightUpdateError, match=name.replace(".", r"\.")):
        apply(engine, {key: value for key, value in state.items() if key != name})
    with pytest.raises(WeightUpdateError, match=name.replace(".", r"\.")):
        apply(engine, state | {name: state[name][:-1]}, undo=True)


def test_llama_names_find_a_plain_gpt_model(tmp_path):
    model, other = (tiny_gpt(seed=seed, share_embeddings_and_output_weights=True) for seed in (0, 1))
    engine, expected = make_engine(other), answer(make_engine(model))
    fused = state_of(model)
    names = {"model.embed_tokens.weight": fused["embedding.word_embeddings.weight"]}
    names["model.norm.weight"] = fused["decoder.final_layernorm.weight"]
    for i in range(2):
        ours, theirs = f"decoder.layers.{i}", f"model.layers.{i}"
        q, k, v = fused[f"{ours}.self_attention.linear_qkv.weight"].view(2, 4, 16, 64).split((2, 1, 1), 1)
        gate, up = fused[f"{ours}.mlp.linear_fc1.weight"].chunk(2)
        names |= {
            f"{theirs}.self_attn.q_proj.weight": q.reshape(64, 64),
            f"{theirs}.self_attn.k_proj.weight": k.reshape(32, 64),
            f"{theirs}.self_attn.v_proj.weight": v.reshape(32, 64),
            f"{theirs}.self_attn.o_proj.weight": fused[f"{ours}.self_attention.linear_proj.weight"],
            f"{theirs}.mlp.gate_proj.weight": gate,
            f"{theirs}.mlp.up_proj.weight": up,
            f"{theirs}.mlp.down_proj.weight": fused[f"{ours}.mlp.linear_fc2.weight"],
            f"{theirs}.input_layernorm.weight": fused[f"{ours}.input_layernorm.weight"],
            f"{theirs}.post_attention_layernorm.weight": fused[f"{ours}.pre_mlp_layernorm.weight"],
        }
    apply(engine, iter(names.items()))
    assert answer(engine) == expected
    apply(engine, {"lm_head.weight": names["model.embed_tokens.weight"], **names})
    with pytest.raises(WeightUpdateError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        apply(engine, {"lm_head.weight": torch.zeros(128, 64), **names})
    with pytest.raises(WeightUpdateError, match=r"embedding\.word_embeddings\.weight came twice"):
        apply(engine, {"output_layer.weight": torch.zeros(128, 64), **state_of(model)}, undo=True)
    assert answer(engine) == expected


def test_masters_in_fp32_are_rounded_to_the_nearest_of_a_bf16_model():
    master = tiny_gpt(seed=1)
    engine = make_engine(tiny_gpt(seed=2, params_dtype=torch.bfloat16, bf16=True).bfloat16())
    apply(engine, state_of(master))
    for name, live in engine.model.named_parameters():
        assert live.dtype == torch.bfloat16 and torch.equal(live, master.get_parameter(name).bfloat16()), name


def spoiled(state: dict[str, torch.Tensor]) -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    """Fault -> (state dict with it, error message)."""
    nan = state[NORM].clone()
    nan[3] = float("nan")
    return {
        "unknown": (state | {"decoder.final_norms.weight": nan}, r"did you mean 'decoder\.final_norm\.weight'"),
        "missing": ({k: v for k, v in state.items() if k != NORM}, rf"no value (came )?for {NORM}"),
        "layer that is not": (state | {"decoder.layers.4.norm.weight": nan}, r"decoder\.layers\.4\.norm\.weight"),
        "shape": (state | {NORM: nan[:5]}, rf"{NORM} has shape \[64\], got \[5\]"),
        "transposed": (
            state | {"decoder.layers.2.mlp.linear_fc2.weight": state["decoder.layers.2.mlp.linear_fc2.weight"].t()},
            r"linear_fc2\.weight has shape \[64, 96\], got \[96, 64\]",
        ),
        "integers": (
            state | {NORM: torch.ones(64, dtype=torch.int64)},
            rf"{NORM} is torch\.float32, got torch\.int64, which is not rounded to it",
        ),
    }


def test_a_mapping_that_does_not_fit_writes_nothing_and_names_the_tensor(engine, new):
    before, places = answer(engine), addresses(engine)
    for kind, (state, message) in spoiled(state_of(new)).items():
        with pytest.raises(WeightUpdateError, match=message + ".*nothing was written") as error:
            apply(engine, state)
        assert error.value.written == 0 and error.value.tensor and error.value.rank == 0, kind
    assert answer(engine) == before and addresses(engine) == places and engine.weight_version == 0


def test_a_stream_that_fails_stops_the_engine_until_weights_are_complete(engine, new, wanted):
    for kind, (state, message) in spoiled(state_of(new)).items():
        with pytest.raises(WeightUpdateError, match=f"{message}.*half old, half new") as error:
            apply(engine, iter(state.items()))
        assert error.value.written > 3, kind
        for call in (lambda: engine.generate([[1, 2]]), engine.step):
            with pytest.raises(WrongState, match=message):
                call()
        with pytest.raises(WeightUpdateError, match="nothing was written"):
            apply(engine, {})
        with pytest.raises(WrongState, match=message):  # still
            engine.generate([[1, 2]])
        apply(engine, {NORM: state_of(new)[NORM]}, strict=False)
        with pytest.raises(WrongState, match=message):  # a partial update does not complete it
            engine.generate([[1, 2]])
        apply(engine, new)
        assert answer(engine) == wanted
    with pytest.raises(RuntimeError, match="the trainer died") as died:
        apply(engine, dying(state_of(new)))
    assert "half old, half new" in died.value.__notes__[0]
    with pytest.raises(WrongState, match="RuntimeError: the trainer died"):
        engine.generate([[1, 2]])


def dying(state: dict[str, torch.Tensor]) -> Any:
    yield from list(state.items())[:5]
    raise RuntimeError("the trainer died")


def test_with_undo_a_failure_leaves_the_weights_and_the_version_before(engine, new, wanted):
    before = answer(engine)
    apply(engine, state_of(engine.model), version=7)
    for state, message in spoiled(state_of(new)).values():
        with pytest.raises(WeightUpdateError, match=f"{message}.*put back") as error:
            apply(engine, iter(state.items()), undo=True)
        assert error.value.written == 0 and engine.weight_version == 7
        assert answer(engine) == before
    update = apply_undoable(engine, new, version=8)
    assert answer(engine) == wanted and update.report.version == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the version goes back on purpose
        update.rollback()
    assert answer(engine) == before and engine.weight_version == 7
    engine.verify_weights()
    with pytest.warns(UserWarning, match="give 9 or more"):  # version 8 was other weights
        engine.set_weight_version(6)


def test_nan_and_infinity_are_refused_with_check_finite(engine, new):
    state = state_of(new)
    bad = state | {NORM: torch.full((64,), float("inf"))}
    with pytest.raises(WeightUpdateError, match=rf"{NORM} got 64 values of 64 that are NaN or infinite"):
        apply(engine, bad, check_finite=True, undo=True)
    too_large = state | {NORM: torch.full((64,), 1e300, dtype=torch.float64)}
    with pytest.raises(WeightUpdateError, match=r"64 values of 64 that are NaN or infinite in torch.float32"):
        apply(engine, too_large, check_finite=True, undo=True)
    apply(engine, bad)


def test_an_update_by_hand_takes_any_order_and_holds_the_engine_until_it_ends(engine, new, wanted):
    update = WeightUpdate(engine)
    for name, tensor in reversed(state_of(new).items()):
        with pytest.raises(WrongState, match="an update is under way"):
            engine.generate([[1, 2]])
        update.write(name, tensor)
    report = update.finish(41)
    assert report.version == 41 == engine.weight_version and answer(engine) == wanted
    with pytest.raises(WrongState, match="has ended"):
        update.write(NORM, state_of(new)[NORM])
    with pytest.raises(WrongState, match="kept nothing"):
        update.rollback()
    with pytest.raises(WeightUpdateError, match="no value came for"), WeightUpdate(engine, undo=True) as second:
        second.write(NORM, state_of(new)[NORM] + 1)
    assert answer(engine) == wanted
    with WeightUpdate(engine) as third:
        third.write_all(state_of(new).items())
    assert third.report.version == 42


def test_an_async_stream_is_taken_inside_an_event_loop(engine, new, wanted):
    async def pairs() -> Any:
        for pair in state_of(new).items():
            yield pair

    async def main() -> Any:
        with pytest.raises(WeightUpdateError, match=r"apply_async"):
            apply(engine, pairs())
        return await apply_async(engine, pairs(), version=5)

    assert asyncio.run(main()).version == 5 and answer(engine) == wanted


def test_running_requests_continue_with_both_versions_in_their_spans(engine, new):
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), request_id="r")
    for _ in range(3):
        engine.step()
    apply(engine, new, version=3)
    assert [span.policy_version for span in finish(engine)["r"].outputs[0].spans] == [0, 3]


def test_suspended_engines_take_weights(new, wanted):
    for mode in ("persist", "offload", "recompute"):
        engine = make_engine(hybrid(seed=2))
        engine.suspend(mode=mode)
        apply(engine, new, version=2)
        engine.resume()
        assert answer(engine) == wanted and engine.weight_version == 2


def test_a_model_without_an_engine_takes_weights_too(new):
    model = hybrid(seed=5)
    report = apply(model, iter(state_of(new).items()))
    assert report.num_tensors == len(state_of(new))
    assert all(torch.equal(tensor, state_of(new)[name]) for name, tensor in state_of(model).items())


def test_invalid_sources_are_refused(engine, tmp_path):
    with pytest.raises(ConfigError, match="weights cannot come from a int"):
        as_source(7)
    with pytest.raises(ModelError, match="no such"):
        as_source(tmp_path / "nothing")
    with pytest.raises(ModelError, match="not a megatron-core language model"):
        apply(torch.nn.Linear(2, 2), {})
    with pytest.raises(WeightUpdateError, match="unknown kind of names 'globl'"):
        apply(engine, {NORM: torch.ones(64)}, names="globl")


@pytest.mark.parametrize("wrong", [{"version": "41"}, {"version": -1}, {"running": "recompile"}])
def test_an_invalid_version_is_refused_before_anything_is_written(engine, new, wrong):
    before = {name: tensor.clone() for name, tensor in state_of(engine.model).items()}
    with pytest.raises(ConfigError, match=r"version is|running: unknown"):
        apply(engine, new, **wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(engine.model).items())
    update = WeightUpdate(engine)
    update.write_all(state_of(new).items())
    with pytest.raises(ConfigError, match=r"version is|running: unknown"):
        update.finish(**wrong)
    with pytest.raises(WrongState, match="an update is under way"):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    assert update.finish(version=7).version == engine.weight_version == 7


def test_megatrons_list_of_one_chunk_is_the_model_in_it(engine, new, wanted):
    apply(engine, [new])
    assert answer(engine) == wanted
    with pytest.raises(ConfigError, match="2 chunks; give ReshardSource"):
        as_source([new, new])
