"""A pipeline of a Hugging Face directory beside transformers: lengths, echo, top log probabilities, token vectors."""

from __future__ import annotations

import pytest
import torch
from hf_models import random_model
from pipeline_case import contexts_of, run_to_end

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.pipelines import McorePipelineModel, OverlapTextGenerationPipeline, PipelineConfig

CLOSE = 1e-4
PROMPTS = [[5 * i % 127 + 2 for i in range(n)] for n in (23, 4, 11)]
LENGTH = 32


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """(the reference, a pipeline of its files)."""
    folder = tmp_path_factory.mktemp("peer")
    reference = random_model("llama_tied")
    reference.save_pretrained(folder)
    config = PipelineConfig(
        model_path=str(folder),
        max_length=LENGTH,
        max_batch_size=4,
        buffer_size_gb=0.02,
        quantization_encoding="float32",
        device="cpu",
        enable_echo=True,
    )
    return reference, OverlapTextGenerationPipeline(config, McorePipelineModel, 1, {}, None)


def logits_of(reference, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0]


def test_max_length_ends_sequences_where_it_ends_those_of_transformers(peers):
    reference, pipeline = peers
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    answers = run_to_end(pipeline, contexts_of([(prompt, params) for prompt in PROMPTS]))
    for number, prompt in enumerate(PROMPTS):
        asked = {"max_length": LENGTH, "min_length": LENGTH, "do_sample": False, "pad_token_id": 0}
        expected = reference.generate(torch.tensor([prompt]), **asked)[0].tolist()
        assert prompt + answers[str(number)].tokens == expected and len(expected) == LENGTH
        assert answers[str(number)].final_status.value == "maximum_length"


def test_echo_and_top_log_probabilities_are_log_softmax_of_the_logits_of_transformers(peers):
    reference, pipeline = peers
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=4, prompt_logprobs=4)
    for prompt, output in zip(PROMPTS, pipeline.engine.generate(PROMPTS, params), strict=True):
        tokens = prompt + output.outputs[0].token_ids
        scores = logits_of(reference, tokens).log_softmax(-1)
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for at, (token, entry) in enumerate(zip(tokens[1:], entries, strict=True)):
            best = scores[at].topk(4).indices.tolist()
            assert entry.keys() == {token, *best}
            for one, found in entry.items():
                assert found.logprob == pytest.approx(scores[at, one].item(), abs=CLOSE)


def test_vectors_of_tokens_are_the_last_hidden_states_of_transformers(peers):
    reference, pipeline = peers
    outputs = pipeline.engine.generate(PROMPTS, SamplingParams(pooling="all", max_tokens=1))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(torch.as_tensor(output.pooled), expected, atol=CLOSE, rtol=0)
