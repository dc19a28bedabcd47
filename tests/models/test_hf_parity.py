"""A model built from a Hugging Face directory computes what transformers computes, whatever its family."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from hf_models import CASES, DELTA, QWEN_MOE, SHARED, SIZES, config_of, draw, logits_of, random_model
from huggingface_hub.errors import StrictDataclassError
from paged_step import worst_difference
from plain_forward import full_logits
from safetensors.torch import load_file, save_file

from megatron_infer import LLM, DynamicInferenceEngine, InferenceConfig
from megatron_infer.config.model_shape import StateShape
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.models.adopt import adopt
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.checkpoint import DESCRIPTION_FILE, save_checkpoint, write_description
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.loading.families import FAMILIES
from megatron_infer.models.loading.hf_config import description_from_config
from megatron_infer.models.loading.hf_export import tensors_of, write_hugging_face
from megatron_infer.models.loading.hf_weights import source_shapes
from megatron_infer.models.loading.mxfp4 import dequantised
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.moe import softmax_as_sigmoid

IDS = torch.randint(0, 131, (60,), generator=torch.Generator().manual_seed(1)).tolist()
ONE_WAY = (
    "dense_granite",
    "dense_granite_tied",
    "granite_moe",
    "granite_factors",
    "granite_factors_tied",
    "granite_tied",
    "granite_biases",
    "granite_experts",
)
"""Loading multiplies factors into their weights."""


FIRST = {kind: case for case, (kind, _) in reversed(CASES.items())}
"""The case of each family that is quick."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=[pytest.mark.long] * (case not in FIRST.values())) for case in CASES],
)
def one(request, tmp_path_factory):
    """A model of transformers, its directory's source, and the model that is built of it."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = random_model(request.param)
    theirs.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # every key that transformers writes is known
        source = open_source(folder)
    return SimpleNamespace(case=request.param, theirs=theirs, folder=folder, source=source, model=build_model(source))


def test_logits_equal_transformers(one):
    expected = logits_of(one.theirs, IDS)
    assert expected.std() > 0.3
    assert (full_logits(one.model, IDS) - expected).abs().max() < 3e-4


def test_tensors_are_read_and_written_under_transformers_names(one):
    theirs = load_file(one.folder / "model.safetensors")
    assert source_shapes(one.model, one.source.config()) == {name: tuple(value.shape) for name, value in theirs.items()}
    if one.case not in ONE_WAY:
        ours = dict(tensors_of(one.model, one.source.config()))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_steps_compute_what_the_full_forward_does_and_the_shape_is_that_of_the_plan(one):
    """Chunks and decodes in mixed steps; sizes of `megatron-infer plan`, which builds nothing, are the engine's."""
    adopted = adopt(one.model)
    assert worst_difference(one.model, adopted) < 1e-4
    assert shape_of(one.source.config(), dtype="float32") == adopted.shape


def test_a_key_that_config_json_lacks_has_the_value_that_transformers_gives_it():
    """What end a model has and how long a prompt may be are said by other files, or by the user."""
    differ, read = [], set()
    for case in FIRST.values():
        theirs = config_of(case)
        classes = transformers.AutoModelForCausalLM._model_mapping[type(theirs)]
        given = theirs.to_dict() | {"architectures": [classes.__name__]}
        for key in given.keys() - {"architectures", "model_type", "max_position_embeddings"}:
            lacking = {name: value for name, value in given.items() if name != key}
            try:
                filled = type(theirs).from_dict(lacking).to_dict() | {"architectures": given["architectures"]}
            except (ValueError, TypeError, StrictDataclassError):
                continue  # transformers refuses it
            ours = [description_of(config) for config in (lacking, filled)]
            if None not in ours:
                read.add(case)
                if ours[0] != ours[1]:
                    differ.append((case, key, filled[key]))
    assert not differ and read == {*FIRST.values()}


def description_of(config):
    """Without ids of tokens; None: the config is refused."""
    try:
        return replace(description_from_config(config), eos_ids=(), bos_id=None, pad_id=None)
    except ModelError:
        return None


def test_every_family_has_a_case():
    kinds = {getattr(transformers, kind).model_type for kind, _ in CASES.values()}
    assert kinds == {family.model_type for family in FAMILIES.values()} - {
        "mimo",
        "bailing_moe_v2",
        "sarvam_moe",
        "sarvam_mla",
    }  # below


def test_mimo_is_qwen2_with_layers_that_draft(tmp_path):
    """transformers has no class of it; its own modelling file derives from Qwen2's."""
    theirs = random_model("qwen2")
    theirs.config.architectures = ["MiMoForCausalLM"]
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["MiMoForCausalLM"]}
    config |= {"model_type": "mimo", "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.mtp_layers.0.input_proj.weight": torch.ones(48, 96)}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert source.config().architecture == "MiMoForCausalLM"
    assert (full_logits(build_model(source), IDS) - logits_of(theirs, IDS)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("BailingMoeV2ForCausalLM", {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}),
        ("SarvamMoEForCausalLM", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ],
)
def test_ling_and_sarvam_are_glm_with_other_names_and_a_fused_projection(architecture, options, tmp_path):
    """transformers has no classes of them; their own modelling files compute what GLM-4.5's does."""
    theirs = random_model("glm4_moe", use_qk_norm=True, routed_scaling_factor=2.5, **options)
    theirs.save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    config = {key: given[key] for key in SIZES | options | {"head_dim": 0, "rms_norm_eps": 0, "num_experts_per_tok": 0}}
    config |= {"moe_intermediate_size": 24, "num_experts": 6, "num_shared_experts": 2, "routed_scaling_factor": 2.5}
    config |= {"architectures": [architecture], "use_qk_norm": True, "norm_topk_prob": True, "use_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        parts = [tensors.pop(f"{prefix}.self_attn.{name}_proj.weight") for name in "qkv"]
        tensors[f"{prefix}.attention.query_key_value.weight"] = torch.cat(parts)
    names = {
        "embed_tokens": "word_embeddings",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "e_score_correction_bias": "expert_bias",
    }
    for old, new in names.items():
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert (full_logits(build_model(source), IDS) - logits_of(theirs, IDS)).abs().max() < 1e-4
    write_hugging_face(source, tmp_path / "back")
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == tensors.keys() and all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert open_source(tmp_path / "back").config() == replace(source.config(), name=str(tmp_path / "back"))


def test_sarvam_mla_is_deepseek_v3_with_other_keys(tmp_path):
    """transformers has no class of it; its tensors have DeepSeek-V3's names."""
    options = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}
    theirs = random_model("deepseek_v3", **options)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for old, new in (("n_routed_experts", "num_experts"), ("n_shared_experts", "num_shared_experts")):
        config[new] = config.pop(old)
    for key in ("n_group", "topk_group", "q_lora_rank"):
        del config[key]
    config |= {"architectures": ["SarvamMLAForCausalLM"], "model_type": "sarvam_mla", "q_head_dim": 32}
    parameters = config.pop("rope_parameters")
    config |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters | {"type": "deepseek_yarn"}}
    del config["rope_scaling"]["rope_type"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_source(tmp_path)
    assert (full_logits(build_model(source), IDS) - logits_of(theirs, IDS)).abs().max() < 1e-4
    write_hugging_face(source, tmp_path / "back")
    written, given = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", tmp_path))
    assert written.keys() == given.keys() and all(torch.equal(written[name], given[name]) for name in given)


TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "image_size": 28,
    "num_attention_heads": 2,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 48,
    "embed_dim": 32,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


INTERLEAVED = MROPE | {"partial_rotary_factor": 0.5, "mrope_interleaved": True}


@pytest.mark.parametrize(
    ("config", "text", "is_flat"),
    [
        ("Qwen3_5Config", DELTA | {"rope_parameters": INTERLEAVED}, False),
        ("Qwen3_5MoeConfig", DELTA | QWEN_MOE | SHARED, False),
        ("Gemma3Config", {"head_dim": 16, "sliding_window": 7}, False),
        ("Mistral3Config", {"model_type": "mistral", "sliding_window": None}, False),
        ("Qwen2VLConfig", {"rope_parameters": MROPE}, False),
        ("Qwen2VLConfig", {"rope_parameters": MROPE}, True),
        ("Qwen2_5_VLConfig", {"rope_parameters": MROPE}, True),
    ],
)
def test_the_language_model_of_a_model_of_text_and_images_is_served_alone(config, text, is_flat, tmp_path):
    """is_flat: as the hub has Qwen2-VL, without a text_config and with rope_scaling of type mrope."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    whole = getattr(transformers, config)(text_config=SIZES | ids | text, vision_config=TOWER)
    torch.manual_seed(0)
    kind = getattr(transformers, config.replace("Config", "ForConditionalGeneration"))
    model = kind._from_config(whole, dtype=torch.float32, attn_implementation="eager").eval()
    draw(model, 0.75)
    model.save_pretrained(tmp_path)
    if is_flat:
        given = json.loads((tmp_path / "config.json").read_text())
        given |= given.pop("text_config") | {"model_type": given["model_type"], "rope_theta": 1e4}
        given |= {"rope_parameters": None, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
        (tmp_path / "config.json").write_text(json.dumps(given))
    source = open_source(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ModelError, match="quantization_config"):
        description_from_config(given | {"quantization_config": {"quant_method": "fp8"}})
    expected = logits_of(model, IDS)
    assert expected.std() > 0.3 and (full_logits(build_model(source), IDS) - expected).abs().max() < 1e-3
    write_hugging_face(source, tmp_path / "alone")
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone", attn_implementation="eager").eval()
    assert (logits_of(alone, IDS) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("case", ["gemma2", "gpt_oss", "mimo_v2_flash"])
def test_window_that_the_config_does_not_name_is_that_of_transformers(case):
    config = config_of(case)
    given = config.to_dict() | {"architectures": [type(config).__name__.replace("Config", "ForCausalLM")]}
    del given["sliding_window"]
    before, _ = description_from_config(given).transformer["window_size"]
    assert before + 1 == type(config)().sliding_window


def test_layers_that_draft_are_not_read_of_a_family_that_transformers_reads_without_them(tmp_path):
    theirs = random_model("glm4_moe")
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(48, 96)}, tmp_path / "model.safetensors")
    assert (full_logits(build_model(open_source(tmp_path)), IDS) - logits_of(theirs, IDS)).abs().max() < 1e-4
    save_file(tensors | {"model.layers.30.eh_proj.weight": torch.ones(48, 96)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected \(1\): model.layers.30.eh_proj.weight"):
        build_model(open_source(tmp_path))


def test_experts_in_mxfp4_are_what_transformers_reads_of_them(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = random_model("gpt_oss", hidden_size=64, intermediate_size=96)
    generator = torch.Generator().manual_seed(0)
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outer, inner // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(121, 126, (experts, outer, inner // 32), generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameters[name].data = convert_moe_packed_tensors(blocks, scales).float()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    built = build_model(open_source(tmp_path))
    expected = logits_of(model, IDS)
    assert (full_logits(built, IDS) - expected).abs().max() < 1e-4 * expected.abs().max()
    first = built.decoder.layers[0].mlp.experts.local_experts[2].linear_fc1.weight
    wanted = parameters["model.layers.0.mlp.experts.gate_up_proj"][2].t()
    assert torch.equal(first, torch.cat((wanted[::2], wanted[1::2]))), "not the bits' own values"
    streamed = dict(open_source(tmp_path).tensors())
    assert torch.equal(
        streamed["model.layers.0.mlp.experts.down_proj"].float(), parameters["model.layers.0.mlp.experts.down_proj"]
    )


@pytest.mark.parametrize("case", ["phi3_longrope", "phi3_longrope_partial"])
def test_the_longest_sequence_to_be_served_decides_between_the_factors_of_a_longrope(case, tmp_path):
    theirs = random_model(case)
    theirs.save_pretrained(tmp_path)
    for limit, ids, positions in ((32, IDS[:30], 32), (20, IDS[:20], 32), (100, IDS, 256), (None, IDS, 256)):
        built = build_model(open_source(tmp_path), max_sequence_length=limit)
        assert built.max_sequence_length == positions
        assert (full_logits(built, ids) - logits_of(theirs, ids)).abs().max() < 1e-4
    for limit, prompt in ((32, IDS[:20]), (100, IDS[:50])):
        llm = LLM(str(tmp_path), config={"max_sequence_length": limit, "buffer_size_gb": 0.01}, dtype="float32")
        sampled = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0].outputs[0]
        ids = prompt + sampled.token_ids
        assert logits_of(theirs, ids[:-1])[len(prompt) - 1 :].argmax(-1).tolist() == sampled.token_ids


def test_every_byte_and_scale_of_mxfp4_means_what_transformers_says():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).repeat(256, 1, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 16, 1)
    assert torch.equal(dequantised(blocks, scales), convert_moe_packed_tensors(blocks, scales))


def test_correction_biases_choose_the_experts(tmp_path):
    model = random_model("nemotron_h_experts")
    before = logits_of(model, IDS)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(-3 * buffer)
    after = logits_of(model, IDS)
    assert (after - before).abs().max() > 0.1
    model.save_pretrained(tmp_path)
    assert (full_logits(build_model(open_source(tmp_path)), IDS) - after).abs().max() < 1e-4


def test_an_engine_adds_correction_biases_to_the_scores_of_the_family(tmp_path):
    """ERNIE's are a softmax. A checkpoint of megatron-core's own model, whose scores are sigmoids, is another model."""
    model = random_model("ernie4_5_moe")
    model.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    built = build_model(source)
    engine = DynamicInferenceEngine(built, InferenceConfig(buffer_size_gb=0.01, max_sequence_length=64))
    (out,) = engine.generate([IDS[:20]], SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True))
    ids = out.outputs[0].token_ids
    expected = logits_of(model, IDS[:20] + ids).log_softmax(-1)[19:-1]
    assert ids == expected.argmax(-1).tolist()
    answered = torch.tensor([given[id].logprob for given, id in zip(out.outputs[0].logprobs, ids, strict=True)])
    assert (answered - expected.max(-1).values).abs().max() < 1e-4
    description = source.config()
    sigmoid = replace(description, extensions=replace(description.extensions, softmax_scores=False))
    with pytest.raises(ModelError, match="softmax_scores=False in the description"):
        save_checkpoint(built, tmp_path / "wrong", description=sigmoid)
    trained = build_model(sigmoid)
    trained.load_state_dict(built.state_dict())
    save_checkpoint(trained, tmp_path / "run", description=sigmoid)
    (tmp_path / "run" / DESCRIPTION_FILE).unlink()
    (tmp_path / "run" / "run_config.yaml").write_text("model: {}")
    with pytest.raises(ModelError, match="Megatron-Bridge's routers"):
        write_description(tmp_path / "run", description)
    assert open_source(tmp_path / "run", hf_config=tmp_path / "hf").config() == replace(
        sigmoid, name=str(tmp_path / "run")
    )
    assert (full_logits(trained, IDS) - full_logits(built, IDS)).abs().max() > 0.1


def test_scores_by_softmax_and_their_gradients_are_those_of_torch():
    logits = torch.cat([3 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), 1e3 * torch.eye(7)])
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    given, expected = softmax_as_sigmoid(ours).sigmoid(), theirs.softmax(-1)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for scores in (given, expected):
        (scores * weights).sum().backward()
    assert torch.allclose(given, expected, atol=1e-6) and torch.allclose(ours.grad, theirs.grad, atol=1e-6)


def test_bfloat16_weights_are_the_rounded_ones_load_exactly_into_fp32_and_leave_correction_biases_exact(tmp_path):
    theirs = random_model("nemotron_h_experts")
    theirs.save_pretrained(tmp_path / "fp32")
    exact = build_model(open_source(tmp_path / "fp32"))
    rounded = build_model(open_source(tmp_path / "fp32"), dtype="bfloat16")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    widened = build_model(open_source(tmp_path / "bf16"), dtype="float32")
    assert open_source(tmp_path / "bf16").config().dtype == "bfloat16"
    for a, b, c in zip(exact.parameters(), rounded.parameters(), widened.parameters(), strict=True):
        assert (b.dtype, c.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(a.to(torch.bfloat16), b) and torch.equal(b.float(), c)
    biases = [(name, a, b) for (name, a), b in zip(exact.named_buffers(), rounded.buffers(), strict=True)]
    found = [torch.equal(a, b) and b.dtype == torch.float32 for name, a, b in biases if name.endswith("expert_bias")]
    assert found == [True, True]


@pytest.mark.parametrize("case", ["llama", "granite_factors_tied"])
def test_padded_vocabulary_entries_are_zero_and_the_rest_is_unchanged(case, tmp_path):
    model = random_model(case)
    model.save_pretrained(tmp_path)
    built = build_model(open_source(tmp_path), vocab_multiple=64)
    assert built.vocab_size == 192
    assert built.output_layer.weight[131:].abs().sum() == 0
    assert built.embedding.word_embeddings.weight[131:].abs().sum() == 0
    assert (full_logits(built, IDS)[:, :131] - logits_of(model, IDS)).abs().max() < 1e-4


def test_end_tokens_of_both_configs_count(tmp_path):
    model = random_model("llama")
    model.generation_config.eos_token_id = [5, 9]
    model.save_pretrained(tmp_path)
    assert open_source(tmp_path).config().eos_ids == (5, 9, model.config.eos_token_id)
    (tmp_path / "generation_config.json").unlink()
    assert open_source(tmp_path).config().eos_ids == (2,)


def test_ranks_share_heads_and_groups(tmp_path):
    random_model("bamba").save_pretrained(tmp_path)
    plan = open_source(tmp_path).config()
    shape = shape_of(plan, dtype="bfloat16", tensor_parallel_size=2)
    assert (shape.num_query_heads, shape.num_kv_heads) == (3, 1)
    assert shape.state == StateShape(
        num_layers=2, conv_shape=(6 * 8 + 2 * 16, 4), ssm_shape=(6, 8, 16), conv_dtype="bfloat16", ssm_dtype="float32"
    )
    with pytest.raises(ConfigError, match="must divide the 2 Mamba groups"):
        shape_of(plan, dtype="float32", tensor_parallel_size=3)
    random_model("mamba2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="must divide the 12 Mamba heads"):
        shape_of(open_source(tmp_path).config(), dtype="float32", tensor_parallel_size=5)
