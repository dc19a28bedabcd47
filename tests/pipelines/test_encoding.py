"""The encoding of a .gguf file that a configuration names is the one that most of its weights have."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_infer.config.inference import ConfigWarning
from megatron_infer.errors import ConfigError
from megatron_infer.pipelines import QuantizationEncoding
from megatron_infer.pipelines.config import PipelineConfig

gguf = pytest.importorskip("gguf")
KINDS = gguf.GGMLQuantizationType


def test_encoding_is_held_against_the_files(tmp_path):
    def written(name, *types):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        for key, value in (("block_count", 2), ("context_length", 64), ("embedding_length", 256)):
            getattr(writer, f"add_{key}")(value)
        writer.add_feed_forward_length(256)
        writer.add_head_count(4)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(256)
        for number, kind in enumerate(types):
            row = gguf.quant_shape_to_byte_shape((256,), kind)[0]
            writer.add_tensor(f"blk.{number}.ffn_up.weight", np.zeros((256, row), np.uint8), raw_dtype=kind)
        writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
        for write in ("header", "kv_data", "tensors"):
            getattr(writer, f"write_{write}_to_file")()
        writer.close()
        return str(tmp_path / name)

    mixed = written("mixed.gguf", KINDS.Q4_K, KINDS.Q4_K, KINDS.Q6_K)
    config = PipelineConfig(model_path=mixed, quantization_encoding="q4_k", max_length=32)
    assert config.effective["quantization_encoding"].note == "dequantised when loaded"
    with pytest.raises(ConfigError, match=r"=q6_k, but most weights of '.*mixed.gguf' are q4_k; take q4_k, or leave"):
        PipelineConfig(model_path=mixed, quantization_encoding="q6_k")
    with pytest.warns(ConfigWarning, match="are q4_k; force: they are read as they are"):
        forced = PipelineConfig(model_path=mixed, quantization_encoding="q6_k", max_length=32, force=True)
    assert forced.effective["quantization_encoding"].value == "q6_k"
    with pytest.raises(ConfigError, match=r"=q4_0, but most weights of '.*whole.gguf' are q8_0; leave it out"):
        PipelineConfig(model_path=written("whole.gguf", KINDS.Q8_0), quantization_encoding="q4_0")


def test_encoding_of_a_gguf_file_is_the_graphs_and_none_for_float_types():
    config = PipelineConfig(defer_resolve=True)
    with pytest.raises(ConfigError, match="quantization_encoding is not set"):
        _ = config.graph_quantization_encoding
    config.model.quantization_encoding = "q4_k"
    assert config.graph_quantization_encoding is QuantizationEncoding.Q4_K
    config.model.quantization_encoding = "BFLOAT16"
    assert config.graph_quantization_encoding is None
