"""The stand-ins of `fake_packages` take what the real packages take: read off their sources, which need not import."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

import fake_packages as fakes
import pytest
from fake_saver import Saver

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
FUNCTIONS = [
    ("flashinfer", "decode.py", f"{DECODE}.__init__", fakes.Decode.__init__),
    ("flashinfer", "decode.py", f"{DECODE}._plan_impl", fakes.Decode.plan),
    ("flashinfer", "decode.py", f"{DECODE}.run", fakes.Decode.run),
    ("flashinfer", "prefill.py", f"{PREFILL}.__init__", fakes.Prefill.__init__),
    ("flashinfer", "prefill.py", f"{PREFILL}.plan", fakes.Prefill.plan),
    ("flashinfer", "prefill.py", f"{PREFILL}.run", fakes.Prefill.run),
    ("flashinfer", "rope.py", "apply_rope_with_cos_sin_cache_inplace", fakes.apply_rope_with_cos_sin_cache_inplace),
    ("flash_attn", "flash_attn_interface.py", "flash_attn_with_kvcache", fakes.flash_attn_with_kvcache),
    ("flash_attn", "flash_attn_interface.py", "flash_attn_varlen_func", fakes.flash_attn_varlen_func),
    ("flash_attn_interface", "", "flash_attn_with_kvcache", fakes.flash_attn_3_with_kvcache),
    ("mamba_ssm", "ops/triton/selective_state_update.py", "selective_state_update", fakes.selective_state_update),
    ("mamba_ssm", "ops/triton/ssd_combined.py", "mamba_chunk_scan_combined", fakes.mamba_chunk_scan_combined),
    ("causal_conv1d", "causal_conv1d_interface.py", "causal_conv1d_fn", fakes.causal_conv1d_fn),
    ("causal_conv1d", "causal_conv1d_interface.py", "causal_conv1d_update", fakes.causal_conv1d_update),
    ("torch_memory_saver", "entrypoint.py", "TorchMemorySaver.region", Saver.region.__wrapped__),
    ("torch_memory_saver", "entrypoint.py", "TorchMemorySaver.pause", Saver.pause),
    ("torch_memory_saver", "entrypoint.py", "TorchMemorySaver.resume", Saver.resume),
]  # fmt: skip


@pytest.mark.parametrize(("package", "file", "name", "fake"), FUNCTIONS, ids=[f"{f[0]}.{f[2]}" for f in FUNCTIONS])
def test_every_call_of_ours_binds_to_the_real_function(package, file, name, fake):
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    real = _signature(Path(spec.origin).parent / file if file else Path(spec.origin), name)
    ours = inspect.signature(fake).parameters
    positional = [key for key, item in ours.items() if item.kind is item.POSITIONAL_OR_KEYWORD]
    assert positional == real[: len(positional)], "in the same order"
    assert set(ours) <= set(real)


def _signature(path: Path, name: str) -> list[str]:
    """Names of its parameters; of several definitions (overloads) the last."""
    found = None
    *owner, function = name.split(".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for child in ast.iter_child_nodes(node):
            inside = (isinstance(node, ast.ClassDef) and [node.name] == owner) or not owner
            if inside and isinstance(child, ast.FunctionDef) and child.name == function:
                found = child
    assert found is not None, f"{path}: no {name}"
    return [item.arg for item in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
