"""The memory that `PipelineConfig` estimates beside the peak of a process that uses all of it, on a CPU.

    python tools/bench/memory_estimate.py [CASE ...] [--dtype float32] [--max-batch-input-tokens 1024]

Each case runs in a process of its own: the model is built, prompts fill the cache, and the peak of the resident set is
read, less what the imports took. Weights of the hybrid and the expert model are random.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_infer.utils.child_process import run

COMMON = {
    "vocab_size": 32000, "hidden_size": 768, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
    "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any] | None] = {
    "smollm2": None,
    "hybrid": COMMON
    | {
        "architectures": ["BambaForCausalLM"], "model_type": "bamba", "intermediate_size": 2048,
        "num_hidden_layers": 12, "attn_layer_indices": [5, 11], "mamba_n_heads": 24, "mamba_d_head": 64,
        "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_chunk_size": 64, "mamba_expand": 2, "mamba_d_conv": 4,
    },
    "experts": COMMON
    | {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "head_dim": 64,
        "intermediate_size": 2048, "ssm_state_size": 64, "mamba_num_heads": 24, "mamba_head_dim": 64, "n_groups": 1,
        "chunk_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 1024,
        "moe_shared_expert_intermediate_size": 1024, "hybrid_override_pattern": "*E*E*E*E*E",
        "num_hidden_layers": 10, "mlp_hidden_act": "relu2",
    },
}  # fmt: skip
MIB = 1 << 20


def measure(case: str, dtype: str, max_tokens: int) -> dict[str, float]:
    """Figures of one case, in MiB."""
    import torch

    from megatron_infer.engine.engine import DynamicInferenceEngine
    from megatron_infer.engine.llm import LLM
    from megatron_infer.models.loading.build_model import build_model
    from megatron_infer.pipelines import PipelineConfig
    from megatron_infer.utils.process_memory import give_back

    folder = tempfile.mkdtemp()
    described = CASES[case]
    if described is not None:
        (Path(folder) / "config.json").write_text(json.dumps(described | {"torch_dtype": dtype}), encoding="utf-8")
    config = PipelineConfig(
        model_path=case if described is None else folder,
        quantization_encoding=dtype,
        max_batch_input_tokens=max_tokens,
        max_length=1024,
        max_batch_size=8,
        enable_prefix_caching=False,
        kvcache_ce_watermark=1.0,
    )
    resolved = config.resolved
    torch.zeros(256, 256) @ torch.zeros(256, 256)
    give_back()
    before = _status("VmRSS")
    if described is None:
        engine = LLM(**resolved.llm, config=resolved.engine).engine
    else:
        assert resolved.description is not None
        model = build_model(resolved.description, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        engine = DynamicInferenceEngine(model, resolved.engine, owns_weights=True)
    loaded = _status("VmHWM") - before
    resting = _status("VmRSS") - before
    Path("/proc/self/clear_refs").write_text("5")
    sizes, vocab = engine.sizes, engine.shape.vocab_size
    per_row = min(sizes.num_usable_blocks // sizes.max_requests * sizes.block_size, sizes.max_prompt_tokens) - 8
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, vocab, (per_row,), generator=generator).tolist() for _ in range(sizes.max_requests)]
    from megatron_infer.config.sampling_params import SamplingParams

    engine.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    estimate = resolved.estimate
    assert estimate is not None
    measured = _status("VmHWM") - before
    return {
        "weights": estimate.weights / MIB,
        "activations": estimate.activations / MIB,
        "cache": estimate.cache / MIB,
        "estimate": estimate.total / MIB,
        "load peak": loaded / MIB,
        "resting": resting / MIB,
        "peak": measured / MIB,
        "ratio": estimate.total / measured,
    }


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default all)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--max-batch-input-tokens", type=int, default=1024, metavar="N")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.cases[0], args.dtype, args.max_batch_input_tokens)))
        return
    columns = ("weights", "activations", "cache", "estimate", "load peak", "resting", "peak", "ratio")
    print(f"{'MiB':10}" + "".join(f"{name:>13}" for name in columns))
    for case in args.cases or CASES:
        tokens = str(args.max_batch_input_tokens)
        command = [sys.executable, __file__, "--child", case, "--dtype", args.dtype, "--max-batch-input-tokens", tokens]
        done = run(command)
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{case:10}" + "".join(f"{found[name]:13,.2f}" for name in columns), flush=True)


if __name__ == "__main__":
    main()
