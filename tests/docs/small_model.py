"""SmolLM2 made small: its name, chat template and the first part of its vocabulary; random weights of two layers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np

from megatron_infer.models.loading.find import ALIASES
from megatron_infer.models.loading.gguf_file import GGUFFile

PACKAGE, FILE, _ = ALIASES["smollm2"]
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS = 2, 64, 96, 4, 2
VOCAB, LENGTH = 2048, 8192


def installed() -> bool:
    return importlib.util.find_spec(PACKAGE) is not None


def write_package(folder: Path) -> None:
    """Write into `folder` a package that is found in place of the installed one where `folder` comes first."""
    spec = importlib.util.find_spec(PACKAGE)
    real = GGUFFile(Path(spec.submodule_search_locations[0]) / FILE).metadata
    tokens = "tokenizer.ggml."
    words = real[tokens + "tokens"][:VOCAB]
    known = set(words)  # in the order of the merges that make them, behind special tokens and bytes
    merges = [pair for pair in real[tokens + "merges"] if pair.replace(" ", "", 1) in known]
    target = folder / PACKAGE
    target.mkdir(parents=True)
    (target / "__init__.py").touch()
    writer = gguf.GGUFWriter(target / FILE, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_tokenizer_model(real[tokens + "model"])
    writer.add_tokenizer_pre(real[tokens + "pre"])
    writer.add_token_list(words)
    writer.add_token_types(real[tokens + "token_type"][:VOCAB])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(real[tokens + "bos_token_id"])
    writer.add_eos_token_id(real[tokens + "eos_token_id"])
    writer.add_add_bos_token(real[tokens + "add_bos_token"])
    writer.add_chat_template(real["tokenizer.chat_template"])
    for name, tensor in _weights():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights() -> list[tuple[str, np.ndarray]]:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (0.1 * random.standard_normal((rows, columns))).astype(np.float32)

    norm, kv = np.ones(HIDDEN, np.float32), HIDDEN // HEADS * KV_HEADS
    found = [("token_embd.weight", matrix(VOCAB, HIDDEN)), ("output_norm.weight", norm)]
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", FFN, HIDDEN),
            ("ffn_up", FFN, HIDDEN),
            ("ffn_down", HIDDEN, FFN),
        ):
            found.append((f"blk.{layer}.{name}.weight", matrix(rows, columns)))
        found += [(f"blk.{layer}.{name}.weight", norm) for name in ("attn_norm", "ffn_norm")]
    return found
