"""`execute` on two tensor-parallel ranks and on two pipeline stages gives the tokens of one process."""

from __future__ import annotations

import json
import random
from pathlib import Path

import engine_ranks
import pytest
import stage_case
import torch
from gloo_ranks import run_on_ranks
from pipeline_case import CLOSE, check_same, contexts_of, drawn, run_to_end

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.outputs.request_output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from megatron_infer.pipelines.mcore_model import McorePipelineModel
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.pipelines.text_generation import TextGenerationInputs

pytestmark = pytest.mark.long


def work_of():
    work = [(prompt[:60], params) for prompt, params in engine_ranks.workload(8)]  # one step of 64 tokens takes each
    return work + [
        (prompt, SamplingParams(max_tokens=9, temperature=1.0, seed=5, logprobs=1)) for prompt, _ in work[:3]
    ]


def tokens_of(engine) -> list:
    outputs = engine.generate([prompt for prompt, _ in work_of()], [params for _, params in work_of()])
    return [(one.outputs[0].token_ids, drawn(one.outputs[0])) for one in outputs]


def as_outputs(saved) -> list[RequestOutput]:
    outputs = []
    for number, (tokens, values) in enumerate(saved):
        logprobs = [{token: Logprob(value)} for token, value in zip(tokens, values, strict=True)]
        sequence = CompletionOutput(0, "", tokens, logprobs=logprobs, finish_reason="length")
        outputs.append(RequestOutput(str(number), None, [], None, [sequence], True, RequestMetrics(0.0)))
    return outputs


def check_pipeline(engine, saved, *, seed: int, disable_overlap: bool = False) -> None:
    """Every rank names the same requests; between two calls some are released, and begin again under another id."""
    pipeline = OverlapTextGenerationPipeline.of_engine(engine, disable_overlap=disable_overlap)
    rng = random.Random(seed)
    for _ in range(2):  # an id is free again at once, on every rank
        extra = contexts_of(work_of()[:2], "gone")
        for _ in range(3):
            pipeline.execute(TextGenerationInputs.of(extra))
        for context in extra:
            pipeline.release(context.request_id)
    check_same(run_to_end(pipeline, contexts_of(work_of()), rng), as_outputs(saved))
    assert engine.replay.context.num_free_blocks == engine.replay.context.num_blocks


def run_tensor_parallel(rank: int, size: int, folder: str) -> None:
    saved = json.loads(Path(folder, "expected.json").read_text())
    for kind, overlap in (("attention", True), ("hybrid", False)):
        model = engine_ranks.part_of_model(kind, folder, rank, size)
        engine = engine_ranks.make_engine(model, overlap=overlap, enable_chunked_prefill=True, max_tokens=64)
        check_pipeline(engine, saved[kind], seed=overlap)
        hand = McorePipelineModel.wrap(engine)
        contexts = contexts_of([(prompt, SamplingParams(max_tokens=4)) for prompt, _ in work_of()[:1]])
        inputs, steps = hand.prepare_initial_token_inputs(contexts), []
        for _ in range(4):
            logits = hand.execute(inputs).next_token_logits
            steps.append((int(logits.argmax()), float(logits.log_softmax(-1).max())))
            inputs = hand.prepare_next_token_inputs(logits.argmax(-1), inputs)
        tokens, values = saved[kind][0]
        assert [token for token, _ in steps] == tokens[:4]
        assert max(abs(a - b) for (_, a), b in zip(steps, values, strict=False)) < CLOSE
        hand.kv_manager.release("0")


def test_tensor_parallel_ranks(tmp_path):
    saved = {}
    for kind in ("attention", "hybrid"):
        model = engine_ranks.whole_model(kind)
        torch.save(model.state_dict(), tmp_path / f"{kind}.weights.pt")
        saved[kind] = tokens_of(engine_ranks.make_engine(model))
    stage_case.write_json(tmp_path / "expected.json", saved)
    engine_ranks.run_ranks(run_tensor_parallel, tmp_path)


STAGED = ("tied", "last stage without Mamba")


def run_stages(rank: int, size: int, folder: Path) -> None:
    saved = json.loads((folder / "expected.json").read_text())
    for name in STAGED:
        model = stage_case.load_model(folder, name, pipeline_parallel=size)
        for disabled, features in enumerate(stage_case.FEATURES):
            engine = stage_case.make_engine(model, features)
            check_pipeline(engine, saved[name], seed=disabled, disable_overlap=bool(disabled) == (name == "tied"))
        hand = McorePipelineModel.wrap(engine)
        with pytest.raises(NotImplementedError, match="pipeline stages"):
            hand.execute(hand.prepare_initial_token_inputs(contexts_of([([5, 6], SamplingParams())])))


def test_pipeline_stages(tmp_path):
    saved = {}
    for name in STAGED:
        model = stage_case.MODELS[name]()
        stage_case.save_checkpoint(model, tmp_path / name)
        saved[name] = tokens_of(stage_case.make_engine(stage_case.load_model(tmp_path, name)))
    stage_case.write_json(tmp_path / "expected.json", saved)
    run_on_ranks(run_stages, 2, tmp_path)
