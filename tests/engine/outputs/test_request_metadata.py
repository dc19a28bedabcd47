"""request_metadata_types: numbers of a request reach the hooks of on_logits and its output, whatever happens to it."""

from __future__ import annotations

from functools import partial
from typing import Any

import engines
import pytest
import torch
from engines import finish
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import RequestError
from megatron_infer.outputs.request_output import RequestOutput

TYPES = [("target", torch.int64, True), ("scale", torch.float32, False), ("loud", torch.bool, True)]
make_engine = partial(engines.make_engine, max_sequence_length=96, max_requests=8, request_metadata_types=TYPES)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=0)


def push(logits: torch.Tensor, metadata: dict[str, torch.Tensor]) -> None:
    """Each row draws its own target while it is loud."""
    assert metadata["target"].dtype == torch.int64 and metadata["scale"].dtype == torch.float32
    rows = torch.arange(len(logits))
    logits[rows, metadata["target"]] += metadata["scale"].to(logits.dtype) * metadata["loud"]


def metadata_of(target: int, loud: bool = True) -> dict[str, Any]:
    return {"target": target, "scale": 1e5, "loud": loud}


def test_values_survive_evictions_suspends_files_and_moves(model, tmp_path):
    engine = make_engine(model, pool_blocks=8, enable_chunked_prefill=True, max_tokens=16)
    engine.on_logits(push)
    for number in range(4):
        engine.add_request(list(range(5, 30)), GREEDY, request_id=f"r{number}", metadata=metadata_of(40 + number))
    done: dict[str, RequestOutput] = {}
    for number in range(40):
        if number in (6, 14):
            engine.suspend("recompute" if number == 6 else "offload")
            engine.resume()
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert engine.stats().counters["evicted"]
    engine.save_requests(tmp_path / "saved")
    other = make_engine(model)
    other.on_logits(push)
    other.load_requests(tmp_path / "saved")
    done |= finish(engine)
    moved = finish(other)
    assert set(moved) <= set(done) == {f"r{number}" for number in range(4)} and moved
    for outputs in (done, moved):
        for name, output in outputs.items():
            target = 40 + int(name[1:])
            assert output.outputs[0].token_ids == [target] * 24
            assert output.metadata == metadata_of(target)
            assert output.outputs[0].logprobs[0][target].logprob > -1e-3, "of what the hook left"


@pytest.mark.parametrize("is_pair", [False, True], ids=["triples of 0.16", "pairs of 0.19"])
def test_labels_that_megatron_fills_have_its_values_for_every_request(model, is_pair):
    theirs = DynamicInferenceRequest.get_metadata_types()
    given = [(one[0], one[1]) if is_pair else tuple(one) for one in theirs]
    types = InferenceConfig.from_megatron({"request_metadata_types": given}).request_metadata_types
    assert [one[:2] for one in types] == [(one[0], one[1]) for one in theirs]
    engine, seen = make_engine(model, request_metadata_types=types), []
    engine.on_logits(lambda _, values: seen.append({label: value.tolist() for label, value in values.items()}))
    asked = [
        MegatronSamplingParams(num_tokens_to_generate=1, termination_id=-1),
        MegatronSamplingParams(
            num_tokens_to_generate=1, termination_id=7, temperature=0.5, top_k=3, return_log_probs=True,
            top_n_logprobs=2, skip_prompt_log_probs=True,
        ),
        MegatronSamplingParams(num_tokens_to_generate=1, termination_id=9, top_p=0.75, return_log_probs=True),
    ]  # fmt: skip
    engine.generate([[5], [6], [7]], [SamplingParams.from_megatron(one) for one in asked])
    columns = {label: [value for step in seen for value in step[label]] for label in seen[0]}
    assert columns == {one[0]: [getattr(params, one[0]) for params in asked] for one in theirs}
    with pytest.raises(RequestError, match="'top_k', which is filled from the sampling parameters; leave it out"):
        engine.add_request([5], GREEDY, metadata={"top_k": 3})
    mixed = make_engine(model, request_metadata_types=[*types, ("scale", torch.float32, True)])
    with pytest.raises(RequestError, match="metadata lacks 'scale'"):
        mixed.add_request([5], GREEDY)
    mixed.add_request([5], GREEDY, metadata={"scale": 1.0})


def test_hooks_can_be_removed_and_return_logits_of_their_own(model):
    engine = make_engine(model)
    params = [SamplingParams(max_tokens=4, temperature=0.0, metadata=metadata_of(9, loud)) for loud in (True, False)]
    plain = [output.outputs[0].token_ids for output in engine.generate([[5, 6, 7]] * 2, params)]
    assert plain[0] == plain[1]
    remove = engine.on_logits(lambda logits, metadata: logits.index_fill(1, torch.tensor([11]), 1e4))
    undo = engine.on_logits(push)
    both = [output.outputs[0].token_ids for output in engine.generate([[5, 6, 7]] * 2, params)]
    assert both == [[9] * 4, [11] * 4]
    remove(), undo()
    assert [output.outputs[0].token_ids for output in engine.generate([[5, 6, 7]] * 2, params)] == plain


def test_a_hook_that_fails_ends_the_requests_of_its_step_with_its_reason(model):
    engine = make_engine(model)
    remove = engine.on_logits(lambda logits, metadata: logits[:, :3])
    (output,) = engine.generate([[5]], SamplingParams(metadata=metadata_of(9)), on_error="return")
    assert "on_logits returned torch.float32 [1, 3], it must return torch.float32 [1, 128]" in str(output.error)
    remove()
    (output,) = engine.generate([[5]], SamplingParams(metadata=metadata_of(9), max_tokens=2))
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, "metadata lacks 'target'"),
        ({"target": 3, "scale": 1.0}, "metadata lacks 'loud'"),
        ({**metadata_of(3), "sclae": 1}, "'sclae'.*did you mean 'scale'"),
        ({**metadata_of(3), "target": 1.5}, r"metadata\['target'\] is 1.5 \(float\), .* int64"),
        ({**metadata_of(3), "target": 2**63}, "int64"),
        ({**metadata_of(3), "target": True}, "int64"),
        ({**metadata_of(3), "loud": 1}, r"metadata\['loud'\] is 1 \(int\), .* bool"),
        ({**metadata_of(3), "scale": 1e39}, "float32"),
        ({**metadata_of(3), "scale": float("nan")}, "finite"),
        ({**metadata_of(3), "scale": "high"}, "finite number or a bool, got 'high'"),
        ({3: 1}, "label 3"),
        ([1], "mapping"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name(model_engine, metadata, message):
    with pytest.raises(RequestError, match=message):
        model_engine.add_request([5, 6], metadata=metadata)
    assert not model_engine.has_unfinished()


@pytest.fixture(scope="module")
def model_engine(model) -> DynamicInferenceEngine:
    return make_engine(model)


def test_an_engine_without_types_takes_none(model):
    engine = make_engine(model, request_metadata_types=None)
    with pytest.raises(RequestError, match=r"metadata has 'x', this engine takes none; name it in"):
        engine.add_request([5], metadata={"x": 1})
    assert engine.generate([[5]], SamplingParams(max_tokens=1))[0].metadata is None


def test_options_and_parameters_are_plain_values():
    config = InferenceConfig(request_metadata_types=TYPES)
    assert config.to_dict()["request_metadata_types"][1] == ["scale", "float32", False]
    again = InferenceConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    params = SamplingParams(metadata=metadata_of(3))
    assert SamplingParams.from_dict(params.to_dict()) == params
