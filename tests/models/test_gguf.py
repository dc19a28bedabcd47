"""GGUF files: names, the q / k permutation, dequantisation, tokenizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_models import logits_of, random_model
from plain_forward import full_logits

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.gguf_file import GGUFFile
from megatron_infer.models.loading.gguf_source import hf_name
from megatron_infer.models.loading.sources import open_source

gguf = pytest.importorskip("gguf")

NAMES = [
    "token_embd", "output_norm", "output", "attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
    "attn_q_norm", "attn_k_norm", "ffn_gate", "ffn_up", "ffn_down",
]  # fmt: skip


def gguf_name(name: str) -> str:
    parts = name.split(".")
    layer, kind = (parts[2], parts[-1]) if parts[1] == "layers" else (None, parts[-1])
    for short in NAMES:
        candidate = f"blk.{layer}.{short}.{kind}" if layer is not None else f"{short}.{kind}"
        if hf_name(candidate) == name:
            return candidate
    raise AssertionError(name)


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of q and k rows: the two halves of a head interleaved."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path, model, architecture: str, *, freqs=None, extra=(), skip=()) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, value in extra:
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_string(key, value)
    for name, tensor in model.state_dict().items():
        if name in skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = permute(tensor, heads)
        writer.add_tensor(gguf_name(name), tensor.numpy())
    if freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(freqs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", {}), ("llama", {"attention_bias": True, "tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {})],
)
def test_logits_equal_transformers(architecture, options, tmp_path):
    model = random_model(architecture, **options)
    write_gguf(tmp_path / "model.gguf", model, architecture)
    ids = list(range(50))
    expected = logits_of(model, ids)
    built = build_model(open_source(tmp_path / "model.gguf"))
    assert (full_logits(built, ids) - expected).abs().max() < 1e-4


def test_rope_factors_of_the_file_act(tmp_path):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model = random_model("llama", rope_parameters=rope)
    write_gguf(tmp_path / "model.gguf", model, "llama", freqs=[4.0] * 4)
    ids = list(range(50))
    expected = logits_of(model, ids)
    built = build_model(open_source(tmp_path))
    assert (full_logits(built, ids) - expected).abs().max() < 1e-4


@np.errstate(all="ignore")  # infinities and NaN among the scales
def test_every_tensor_type_reads_as_the_gguf_package_reads_it(tmp_path):
    kinds = gguf.GGMLQuantizationType
    names = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    random = np.random.default_rng(0)
    for name in names:
        block, num_bytes = gguf.GGML_QUANT_SIZES[kinds[name]]
        shape = (6, 512 // block * num_bytes)
        raw = random.integers(0, 256, shape, dtype=np.uint8)
        writer.add_tensor(name, raw, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GGUFFile(tmp_path / "types.gguf")
    for tensor in gguf.GGUFReader(tmp_path / "types.gguf").tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = ours.read(tensor.name)
        assert got.shape == (6, 512)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(ours.read(tensor.name, rows=(2, 5)), expected[2:5])


def test_metadata_reads_as_the_gguf_package_reads_it(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "meta.gguf", "llama")
    values = {
        "u8": (writer.add_uint8, 200), "i8": (writer.add_int8, -3), "u16": (writer.add_uint16, 60000),
        "i16": (writer.add_int16, -5), "u32": (writer.add_uint32, 1 << 31), "i32": (writer.add_int32, -7),
        "u64": (writer.add_uint64, 1 << 40), "i64": (writer.add_int64, -(1 << 40)), "f64": (writer.add_float64, 0.1),
        "flag": (writer.add_bool, True), "text": (writer.add_string, "é日"), "list": (writer.add_array, [1, 2, 3]),
        "words": (writer.add_array, ["a", "", "ß"]), "flags": (writer.add_array, [True, False]),
    }  # fmt: skip
    for key, (add, value) in values.items():
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "meta.gguf").metadata
    assert {key: metadata[key] for key in values} == {key: value for key, (_, value) in values.items()}


def test_unknown_architecture_and_metadata_that_changes_the_arithmetic_are_refused(tmp_path):
    model = random_model("llama")
    write_gguf(tmp_path / "a.gguf", model, "gemma2")
    with pytest.raises(ModelError, match=r"gemma2.*supported: llama, qwen2, qwen3"):
        open_source(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", model, "llama", extra=[("llama.logit_scale", 2.0)])
    with pytest.raises(ModelError, match=r"llama\.logit_scale=2\.0"):
        open_source(tmp_path / "b.gguf")
    write_gguf(tmp_path / "c.gguf", model, "llama", extra=[("llama.rope.scaling.type", "yarn")])
    with pytest.raises(ModelError, match="yarn"):
        open_source(tmp_path / "c.gguf")


def test_missing_tensors_are_listed(tmp_path):
    model = random_model("llama")
    write_gguf(tmp_path / "a.gguf", model, "llama", skip={"model.layers.1.mlp.up_proj.weight", "model.norm.weight"})
    with pytest.raises(ModelError, match=r"missing \(2\): model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight"):
        build_model(open_source(tmp_path / "a.gguf"))


def test_file_without_tokenizer_says_so(tmp_path):
    write_gguf(tmp_path / "a.gguf", random_model("llama"), "llama")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        open_source(tmp_path / "a.gguf").tokenizer()


def test_truncated_anywhere_is_a_model_error(tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, random_model("llama"), "llama")
    whole = path.read_bytes()
    for size in (0, 3, 10, 23, 24, 40, 100, 300, 1000, len(whole) // 2, len(whole) - 100):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"a\.gguf"):
            open_source(path)


def test_a_file_that_is_no_gguf_says_so(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        open_source(path)
