"""A model of one's own, examples/pipeline_model.py: served like any other, equal to its own dense forward."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pipeline_case import CLOSE, drawn, free_pages
from safetensors.torch import save_file
from server_case import END, post, serving, tokenizer
from test_interfaces import TableModel

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, ModelError, RequestError
from megatron_infer.outputs.request_output import GenerationError
from megatron_infer.pipelines import PipelineConfig
from megatron_infer.pipelines.foreign_runner import foreign_engine, load_model, read_description, read_weights
from megatron_infer.pipelines.inference_session import InferenceSession
from megatron_infer.pipelines.interfaces import ModelOutputs, ReturnLogits, get_paged_manager
from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.pipelines.text_generation import TextGenerationRequest, TextTokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_model.py"
TOY = {
    "architectures": ["ToyForCausalLM"],
    "vocab_size": 258,
    "hidden_size": 64,
    "num_heads": 4,
    "num_layers": 2,
    "max_seq_len": 256,
    "eos_token_id": END,
}
LONG_ONE = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    tokenizer().save(path)
    (path / "config.json").write_text(json.dumps(TOY))
    config = configure(path)
    model, _ = load_model(config, config.resolved.architecture.pipeline_model, config.resolved.engine, None, {}, None)
    rng = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(one.shape, generator=rng) * 0.2 for name, one in model.net.state_dict().items()}
    save_file(weights, path / "model.safetensors")
    return path


def configure(folder: Path, **settings) -> PipelineConfig:
    settings = {"quantization_encoding": "float32", "max_length": 200, "max_batch_input_tokens": 64} | settings
    settings |= {"model_path": str(folder), "custom_architectures": [str(EXAMPLE.with_suffix(""))]}
    return PipelineConfig(**{"device_specs": ["cpu"], "buffer_size_gb": 0.05, "max_batch_size": 4} | settings)


@pytest.fixture(scope="module")
def pipeline(folder) -> OverlapTextGenerationPipeline:
    config = configure(folder, enable_structured_output=True)
    text = TextTokenizer(str(folder))
    return OverlapTextGenerationPipeline(config, config.resolved.architecture.pipeline_model, END, {}, text)


def dense_logits(model, ids: list[int]) -> torch.Tensor:
    """Every position's logits, without any cache: [T, V]."""
    net, heads = model.net, TOY["num_heads"]
    with torch.no_grad():
        hidden = net["words"](torch.tensor(ids)) + net["places"](torch.arange(len(ids)))
        for layer in range(TOY["num_layers"]):
            q, k, v = (
                one.unflatten(-1, (heads, -1)).transpose(0, 1) for one in net[f"qkv{layer}"](hidden).chunk(3, -1)
            )
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = hidden + attended.transpose(0, 1).flatten(1)
            hidden = hidden + net[f"mlp{layer}"](hidden)
        return hidden @ net["words"].weight.T


def test_greedy_answers_are_those_of_its_dense_forward(pipeline):
    before = free_pages(pipeline.engine)
    asked = [TextGenerationRequest(prompt="x" * n + "yz" * n, sampling_params=LONG_ONE) for n in (1, 5, 30, 2, 50, 9)]
    answers = pipeline.generate(asked)  # more than fit at once, some in chunks
    for request, answer in zip(asked, answers, strict=True):
        prompt = pipeline.tokenizer.encode(request.prompt).tolist()
        logits = dense_logits(pipeline.pipeline_model, prompt + answer.tokens)[len(prompt) - 1 : -1]
        assert answer.tokens == logits.argmax(-1).tolist() and len(answer.tokens) == 12
        scored = logits.log_softmax(-1).max(-1).values
        assert answer.log_probabilities.token_log_probabilities == pytest.approx(scored.tolist(), abs=CLOSE)
    assert len({tuple(answer.tokens) for answer in answers}) > 3, "too alike to compare"
    assert free_pages(pipeline.engine) == before


def test_seeded_answers_do_not_depend_on_what_else_runs_and_not_on_overlap(pipeline, folder):
    params = [SamplingParams(max_tokens=9, temperature=1.0, seed=seed, top_p=0.9, ignore_eos=True) for seed in range(6)]
    prompts = [[65 + seed] * (10 * seed + 1) for seed in range(6)]
    together = pipeline.engine.generate(prompts, params)
    alone = [pipeline.engine.generate([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    config = configure(folder)
    kind = config.resolved.architecture.pipeline_model
    other = OverlapTextGenerationPipeline(config, kind, END, {}, TextTokenizer(str(folder)), disable_overlap=True)
    assert pipeline.overlap_active and not other.overlap_active
    again = other.engine.generate(prompts, params)
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in (together, alone, again)]
    assert tokens[0] == tokens[1] == tokens[2] and len(set(map(tuple, tokens[0]))) == 6


def test_it_serves_over_http(pipeline):
    engine = pipeline.engine
    expected = engine.generate(["one", "two", "three"], LONG_ONE)
    with serving(engine, encoder=pipeline.tokenizer.delegate) as case:
        asked = {"max_tokens": 12, "temperature": 0, "logprobs": 2, "ignore_eos": True}
        with ThreadPoolExecutor(3) as pool:
            replies = list(
                pool.map(lambda text: post(case, "/v1/completions", prompt=text, **asked), ("one", "two", "three"))
            )
        for reply, output in zip(replies, expected, strict=True):
            (choice,) = reply.json()["choices"]
            assert choice["text"] == output.outputs[0].text
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(drawn(output.outputs[0]), abs=CLOSE)
        reply = post(case, "/v1/completions", prompt="n?", structured_outputs={"regex": "[a-c]{4}"}, max_tokens=9)
        assert re.fullmatch("[a-c]{4}", reply.json()["choices"][0]["text"])
        refused = post(case, "/v1/completions", prompt="one", echo=True, logprobs=1, max_tokens=1)
        assert refused.status_code == 400 and "enable_echo=True" in refused.text
        refused = post(case, "/v1/embeddings", input="one")
        assert refused.status_code == 400 and "hidden states are not known" in refused.text


def with_all_logits(folder: Path):
    """(the toy with logits of every position, its engine)."""
    config = configure(folder)
    kind = config.resolved.architecture.pipeline_model

    class Echo(kind):
        def execute(self, model_inputs):
            rows = model_inputs.input_row_offsets
            model_inputs.input_row_offsets = torch.arange(len(model_inputs.tokens) + 1)
            logits = super().execute(model_inputs).logits
            return ModelOutputs(logits=logits, next_token_logits=logits[rows[1:] - 1], logit_offsets=rows)

    session, devices = InferenceSession(num_threads=1), [torch.device("cpu")]
    given = (session, read_description(folder), "float32", devices, None, read_weights(folder), None)
    model = Echo(config, *given, ReturnLogits.ALL)
    return model, foreign_engine(model, config.resolved.engine)


def test_prompts_are_scored_where_echo_is_on(folder):
    model, engine = with_all_logits(folder)
    assert model.return_logits is ReturnLogits.ALL
    prompt = list(range(40, 140))
    params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=1, logprobs=0, ignore_eos=True)
    scored, plain = engine.generate([prompt, prompt[:7]], [params, LONG_ONE])
    reference = dense_logits(model, prompt).log_softmax(-1)
    found = [entry[token].logprob for token, entry in zip(prompt[1:], scored.prompt_logprobs[1:], strict=True)]
    assert found == pytest.approx(reference[torch.arange(99), prompt[1:]].tolist(), rel=1e-5)
    assert len(plain.outputs[0].token_ids) == 12


def test_what_the_model_does_wrong_is_an_error_of_the_requests_and_the_engine_goes_on(pipeline, monkeypatch):
    model, engine = pipeline.pipeline_model, pipeline.engine
    before = free_pages(engine)
    (expected,) = engine.generate([[5, 6]], LONG_ONE)

    def narrow(inputs):
        return ModelOutputs(logits=torch.zeros(1, 3))

    stale = {}

    def with_stale_cache(contexts, cache=None, n=1):
        inputs = type(model).prepare_initial_token_inputs(model, contexts, cache, n)
        inputs.kv_cache_inputs = stale.setdefault("cache", cache) if stale else stale.setdefault("cache", object())
        return inputs

    def broken(inputs):
        raise ZeroDivisionError("mine")

    for name, wrong, message in (
        ("execute", narrow, r"ToyModel.execute returned logits of shape \(1, 3\), it must be \(1, 258\)"),
        ("execute", broken, "ZeroDivisionError: mine"),
        ("prepare_initial_token_inputs", with_stale_cache, "cache of another step"),
    ):
        monkeypatch.setattr(model, name, wrong, raising=False)
        with pytest.raises(GenerationError, match=message):
            engine.generate([[5, 6]], LONG_ONE)
        monkeypatch.undo()
        assert engine.generate([[5, 6]], LONG_ONE)[0].outputs[0].token_ids == expected.outputs[0].token_ids
    assert free_pages(engine) == before


def test_its_weights_are_watched(pipeline):
    model, engine = pipeline.pipeline_model, pipeline.engine
    weight, version = model.net["words"].weight, engine.weight_version
    kept = weight.detach().clone()
    (before,) = engine.generate([[5, 6, 7]], LONG_ONE)
    try:
        weight.data.copy_(kept.flip(0))
        (changed,) = engine.generate([[5, 6, 7]], LONG_ONE)
        assert changed.outputs[0].token_ids != before.outputs[0].token_ids and engine.weight_version == version + 1
    finally:
        weight.data.copy_(kept)
    assert engine.generate([[5, 6, 7]], LONG_ONE)[0].outputs[0].token_ids == before.outputs[0].token_ids


def test_what_it_lacks_is_refused_by_name(pipeline, folder):
    model = pipeline.pipeline_model
    for option, value, what in (
        ("num_cuda_graphs", 4, "CUDA graphs"),
        ("pg_collection", object(), "pipeline stages"),
    ):
        with pytest.raises(NotImplementedError, match=f"{option}: ToyModel.*{what}"):
            foreign_engine(model, InferenceConfig(**{option: value}))
    with pytest.raises(ConfigError, match="weight_dtype='int8': ToyModel is a model of one's own"):
        foreign_engine(model, InferenceConfig(weight_dtype="int8"))
    for params, message in (
        (SamplingParams(prompt_logprobs=0), "prompt_logprobs: .*enable_echo=True"),
        (SamplingParams(pooling="last", max_tokens=1), "pooling: .*hidden states are not known"),
        (SamplingParams(return_routing=True), "return_routing: "),
    ):
        with pytest.raises(RequestError, match=message):
            pipeline.engine.add_request([5], params)
    with pytest.raises(NotImplementedError, match="TableModel keeps no keys and values"):
        bare = TableModel(None, None, None, "float32", [torch.device("cpu")], None, None)
        foreign_engine(bare, InferenceConfig())
    assert get_paged_manager(bare) is None
    with pytest.raises(ConfigError, match="quantization_encoding is not set"):
        config = configure(folder, quantization_encoding=None)
        load_model(config, type(model), config.resolved.engine, None, {}, None)
    with pytest.raises(ConfigError, match="structured output is off"):
        config = configure(folder)
        off = OverlapTextGenerationPipeline(config, type(model), END, {}, TextTokenizer(str(folder)))
        off.generate(TextGenerationRequest(prompt="x", sampling_params=SamplingParams(structured={"regex": "a"})))
    with pytest.raises(ValueError, match="300"):
        configure_and_load(folder, max_length=300)


def configure_and_load(folder, **settings):
    config = configure(folder, **settings)
    return load_model(config, config.resolved.architecture.pipeline_model, config.resolved.engine, None, {}, None)


def test_what_it_says_of_memory_is_of_its_own_parameters(folder, pipeline):
    config, model = pipeline.pipeline_config, pipeline.pipeline_model
    kind, kv = type(model), config.model.kv_cache
    params = kind.get_kv_params(model.huggingface_config, 1, kv, torch.float32)
    page = params.page_bytes(pipeline.kv_manager.page_size)
    (cache,) = pipeline.kv_manager.device_tensors
    assert cache.nbytes == (pipeline.kv_manager.total_num_pages + 1) * page
    given = (model.huggingface_config, model.devices, kv)
    batches = [kind.infer_optimal_batch_size(config, count * page, *given, torch.float32) for count in (0, 2, 4, 9)]
    assert batches == [1, 1, 3, 4], "max_batch_size is 4"
    assert kind.infer_optimal_batch_size(config, 2 * page, *given, torch.bfloat16) == 3
    sizes = [
        kind.estimate_kv_cache_size(config, 10**12, model.devices, model.huggingface_config, kv, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert sizes[0] // 2 == sizes[1] and 0 <= sizes[0] - cache.nbytes < page, (
        "the buffer, of which whole pages are used"
    )
    assert TableModel.infer_optimal_batch_size(config, 10**12, *given, torch.float32) == 1


def test_weights_go_through_the_adapter_of_their_format(folder, tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        configure_and_load(tmp_path)
    config = configure(folder)
    kind = config.resolved.architecture.pipeline_model
    renamed = {}

    class Adapted(kind):
        def __init__(self, *args, **kwargs):
            renamed["adapter"] = args[7]
            super().__init__(*args, **kwargs)

    marker = lambda weights: weights  # noqa: E731
    load_model(config, Adapted, config.resolved.engine, None, {"safetensors": marker}, None)
    assert renamed["adapter"] is marker
    with pytest.raises(ConfigError, match="weight_adapters has 'gguf'; the one format is 'safetensors'"):
        load_model(config, Adapted, config.resolved.engine, None, {"gguf": marker}, None)
