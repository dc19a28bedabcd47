"""What FP8 products assume of Transformer Engine is in its sources; calls: kernels/test_foreign_signatures.py.

Transformer Engine imports only on a GPU, so it is not imported: a wheel's unpacked folder on PYTHONPATH is enough.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from megatron_infer.kernels import te_tensors

TENSORS = ("float8", "float8_blockwise", "mxfp8")
WORDS = [
    ("module/base.py", 'fp8_meta_tensor_key = "scaling_fwd" if fwd else "scaling_bwd"'),
    ("module/base.py", 'self.fp8_meta["num_gemms"] * 3 if fwd'),
    ("module/grouped_linear.py", 'self._offsets = {"input": 0, "weight": 1, "output": 2'),
    ("module/grouped_linear.py", "self.num_gemms = num_gemms"),
    ("module/linear.py", "force_pow_2_scales = recipe.fp8_quant_fwd_inp.power_2_scale"),
    ("module/linear.py", "amax_epsilon = recipe.fp8_quant_fwd_weight.amax_epsilon"),
    ("module/linear.py", "use_split_accumulator = recipe.fp8_gemm_fprop.use_split_accumulator"),
]


@pytest.fixture(scope="module")
def sources():
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("transformer_engine is not installed")
    return Path(spec.origin).parent / "pytorch"


def one_of(folder, names):
    return next(folder / name for name in names if (folder / name).exists())


def parameters(path, name):
    owner, _, function = name.rpartition(".")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if owner:
        tree = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return [item.arg for item in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]


def test_a_workspace_is_asked_for_only_where_there_is_one_to_give(sources):
    if "workspace" in parameters(sources / "cpp_extensions" / "gemm.py", "general_gemm"):
        assert parameters(sources / "module" / "base.py", "get_workspace") == []


@pytest.mark.parametrize("kind", TENSORS)
def test_codes_and_scales_lie_where_they_are_looked_for(sources, kind):
    files = (f"tensor/storage/{kind}_tensor_storage.py", f"tensor/_internal/{kind}_tensor_base.py")
    text = one_of(sources, files).read_text(encoding="utf-8")
    wanted = ("_data", "_scale_inv") if kind == "float8" else ("_rowwise_data", "_rowwise_scale_inv")
    assert set(wanted) <= set(te_tensors.FORWARD)
    assert all(f"    {name}: " in text for name in wanted)


@pytest.mark.parametrize(("file", "words"), WORDS, ids=[f"{file}-{i}" for i, (file, _) in enumerate(WORDS)])
def test_quantisers_have_the_places_and_forms_that_ours_are_given(sources, file, words):
    joined = " ".join((sources / file).read_text(encoding="utf-8").split()).replace("[ ", "[").replace("{ ", "{")
    assert words in joined
