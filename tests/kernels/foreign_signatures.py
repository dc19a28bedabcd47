"""Signatures of the packages that the GPU's side calls, and where it calls them.

`foreign_signatures.json` has, for each function, its parameters in the oldest version that is admitted and in the
newest that was read. They are read off sources, which neither have to import nor to be built. To record a version:

    pip download --no-deps --no-binary :all: PACKAGE==VERSION, or a wheel; unpack it
    python tests/kernels/foreign_signatures.py PACKAGE VERSION FOLDER
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_suffix(".json")
OURS = ROOT / "megatron_infer"

ROPE = "flashinfer/rope.py:apply_rope_with_cos_sin_cache_inplace"
SAVER = "torch_memory_saver/entrypoint.py:TorchMemorySaver"
TE = "transformer_engine/pytorch"
# A file that moved between versions: the first that is there.
QUANTISER = f"{TE}/quantized_tensor.py|{TE}/tensor/quantized_tensor.py:Quantizer"
STATE = f"{TE}/quantization.py|{TE}/fp8.py"
QUANTISERS = tuple(
    f"{TE}/tensor/{file}_tensor.py:{name}Quantizer"
    for file, name in (
        ("float8", "Float8"),
        ("float8", "Float8CurrentScaling"),
        ("float8_blockwise", "Float8Block"),
        ("mxfp8", "MXFP8"),
    )
)


@dataclass(frozen=True)
class Call:
    """Calls of one foreign function in one of our functions."""

    file: str
    """From megatron_infer."""
    within: str
    """Name of our function."""
    callee: str
    """The expression that is called, as `ast.unparse` writes it."""
    names: tuple[str, ...]
    """Foreign functions that it may be: file:name."""
    keyword: str = ""
    """Only calls that pass this keyword."""


REGION, FP8, GRAPHS = "memory/regions/saver.py", "models/fp8.py", "runner/cuda_graphs/graph_pool.py"
PRIVATE, GRAPH = "torch/_C/__init__.pyi", "torch/cuda/graphs.py:CUDAGraph"
SYMMETRIC = "torch/distributed/_symmetric_memory/__init__.py"
CALLS = {
    "flashinfer-python": [Call("kernels/flashinfer_rope.py", "run", "self._rotate", (ROPE,))],
    "torch-memory-saver": [
        Call(REGION, "__init__", "self._saver.region", (f"{SAVER}.region",)),
        Call(REGION, "release", "self._saver.pause", (f"{SAVER}.pause",)),
        Call(REGION, "restore", "self._saver.resume", (f"{SAVER}.resume",)),
        Call(REGION, "_pause", "saver.pause", (f"{SAVER}.pause",)),
    ],
    "transformer-engine": [
        Call(FP8, "__init__", "_quantization().RecipeState.create", (f"{STATE}:RecipeState.create",)),
        Call(FP8, "__init__", "self._made[place].set_usage", (f"{QUANTISER}.set_usage",)),
        Call(FP8, "__call__", "self._input", (f"{QUANTISER}.__call__",)),
        Call(FP8, "refresh", "self._weight.quantize", (f"{QUANTISER}.quantize",)),
        Call(FP8, "differs", "self._weight.quantize", (f"{QUANTISER}.quantize",)),
        Call(FP8, "refresh", "self._weight.update_quantized", tuple(f"{one}.update_quantized" for one in QUANTISERS)),
        Call(FP8, "run", "gemm", (f"{TE}/cpp_extensions/gemm.py:general_gemm",)),
        *(
            Call(FP8, "fp8_recipe", "getattr(_quantization().FP8GlobalStateManager, f'is_{kind}_available')",
                 (f"{STATE}:FP8GlobalStateManager.is_{kind}_available",))
            for kind in ("fp8", "mxfp8", "fp8_block_scaling")
        ),
    ],
    "torch": [
        Call(GRAPHS, "__init__", "torch.cuda.MemPool", ("torch/cuda/memory.py:MemPool.__init__",)),
        Call(GRAPHS, "reset", "torch.cuda.MemPool", ("torch/cuda/memory.py:MemPool.__init__",)),
        Call(GRAPHS, "capture", "torch.cuda.graph", ("torch/cuda/graphs.py:graph.__init__",)),
        Call(GRAPHS, "capture", "self._pool.use_count", (f"{PRIVATE}:_MemPool.use_count",)),
        Call(GRAPHS, "_undone_on_failure", "self._pool.use_count", (f"{PRIVATE}:_MemPool.use_count",)),
        Call(GRAPHS, "_undone_on_failure", "graph.reset", (f"{GRAPH}.reset",)),
        Call(GRAPHS, "_undone_on_failure", "torch._C._cuda_endAllocateToPool", (f"{PRIVATE}:_cuda_endAllocateToPool",)),
        Call(GRAPHS, "_undone_on_failure", "torch._C._cuda_releasePool", (f"{PRIVATE}:_cuda_releasePool",)),
        Call(GRAPHS, "_capture_cell", "graph.capture_begin", (f"{GRAPH}.capture_begin",)),
        Call(GRAPHS, "_capture_cell", "graph.capture_end", (f"{GRAPH}.capture_end",)),
        Call("kernels/symmetric_allreduce.py", "buffer", "symmetric.empty", (f"{SYMMETRIC}:empty",)),
        Call("kernels/symmetric_allreduce.py", "buffer", "symmetric.rendezvous", (f"{SYMMETRIC}:rendezvous",)),
    ],
}  # fmt: skip
"""Package -> what is called of it. Triton's language: `triton_calls`. Of torch: what is private, or of CUDA graphs."""
TRITON = "triton"
TRITON_FILES = tuple(f"triton/language/{name}.py" for name in ("core", "math", "standard", "random"))


# Signatures


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def parameters_in(module: ast.Module, name: str) -> str | None:
    """Parameters of a function, of a method or (NAME.__init__) of a class; of several definitions the last.

    Without annotations, and with `...` for every default. None: there is no such definition.
    """
    owner, _, function = name.rpartition(".")
    scope: ast.Module | ast.ClassDef | None = module
    if owner:
        scope = next((one for one in module.body if isinstance(one, ast.ClassDef) and one.name == owner), None)
    found = [one for one in getattr(scope, "body", ()) if isinstance(one, ast.FunctionDef) and one.name == function]
    if not found:
        return None
    args = found[-1].args
    for one in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if one is not None:
            one.annotation = None
    args.defaults = [ast.Constant(...)] * len(args.defaults)
    args.kw_defaults = [None if one is None else ast.Constant(...) for one in args.kw_defaults]
    return ast.unparse(args)


def read(folder: Path, name: str) -> str | None:
    """Parameters of file:name of an unpacked package; None: it has none."""
    files, _, function = name.partition(":")
    for file in files.split("|"):
        if (folder / file).exists() and (found := parameters_in(parsed(folder / file), function)) is not None:
            return found
    return None


@functools.cache
def signature(parameters: str) -> inspect.Signature:
    """Example: "self, q, k, *, scale=..." -> what `inspect.signature` would give of it."""
    space: dict[str, object] = {}
    exec(f"def function({parameters}): pass", space)
    return inspect.signature(space["function"])


def recorded() -> dict[str, dict[str, dict[str, str]]]:
    """Package -> file:name -> "version, version" -> parameters."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def of_versions(functions: dict[str, str]) -> Iterator[tuple[str, str]]:
    for versions, parameters in functions.items():
        for version in versions.split(", "):
            yield version, parameters


# Calls


def nodes_with_scopes(tree: ast.Module) -> Iterator[tuple[ast.Call, list[ast.FunctionDef]]]:
    """Every call and the functions around it, the innermost last."""

    def walk(node: ast.AST, scopes: list[ast.FunctionDef]) -> Iterator[tuple[ast.Call, list[ast.FunctionDef]]]:
        if isinstance(node, ast.Call):
            yield node, scopes
        inside = [*scopes, node] if isinstance(node, ast.FunctionDef) else scopes
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(tree, [])


def found_calls(call: Call) -> list[tuple[ast.Call, list[ast.FunctionDef]]]:
    return [
        (node, scopes)
        for node, scopes in nodes_with_scopes(parsed(OURS / call.file))
        if scopes
        and scopes[-1].name == call.within
        and ast.unparse(node.func) == call.callee
        and (not call.keyword or call.keyword in {one.arg for one in node.keywords})
    ]


def passed(node: ast.Call, scopes: list[ast.FunctionDef]) -> tuple[int, set[str], set[str]]:
    """(arguments by place, keywords, keywords that are passed under a condition).

    What is unpacked is looked up in the functions around: a tuple's length, a dictionary's keys.
    """
    places = sum(_length(one.value, scopes) if isinstance(one, ast.Starred) else 1 for one in node.args)
    always, sometimes = {one.arg for one in node.keywords if one.arg is not None}, set()
    for one in node.keywords:
        if one.arg is None:
            more, conditional = _keys(ast.unparse(one.value), scopes)
            always, sometimes = always | more, sometimes | conditional
    return places, always, sometimes - always


def _length(value: ast.expr, scopes: list[ast.FunctionDef]) -> int:
    name = ast.unparse(value)
    for scope in reversed(scopes):
        for one in ast.walk(scope):
            if isinstance(one, ast.arg) and one.arg == name and isinstance(one.annotation, ast.Subscript):
                return len(one.annotation.slice.elts)  # tuple[Tensor, Tensor]
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.Tuple) and ast.unparse(one.targets[0]) == name:
                return len(one.value.elts)
    raise AssertionError(f"*{name}: its length cannot be read off the source")


def _keys(name: str, scopes: list[ast.FunctionDef]) -> tuple[set[str], set[str]]:
    always, sometimes = set(), set()

    def walk(node: ast.AST, is_conditional: bool) -> None:
        into = sometimes if is_conditional else always
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == name:
                for one in ast.walk(node.value):
                    if isinstance(one, ast.Dict):
                        hidden = is_conditional or isinstance(node.value, ast.IfExp)
                        (sometimes if hidden else into).update(key.value for key in one.keys)
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
                into.add(target.slice.value)
        for child in ast.iter_child_nodes(node):
            walk(child, is_conditional or isinstance(node, ast.If))

    for scope in scopes:
        walk(scope, False)
    assert always or sometimes, f"**{name}: its keys cannot be read off the source"
    return always, sometimes


def refusal(node: ast.Call, scopes: list[ast.FunctionDef], name: str, parameters: str) -> str | None:
    """Why the call does not bind to file:name of these parameters; None: it does.

    Keywords that are passed under a condition are passed where the function takes them.
    """
    taken = signature(parameters)
    places, always, sometimes = passed(node, scopes)
    is_method = next(iter(taken.parameters), "") in ("self", "cls")
    keywords = always | (sometimes & set(taken.parameters))
    try:
        taken.bind(*[None] * (places + is_method), **dict.fromkeys(keywords))
    except TypeError as error:
        return f"{name}({parameters}): {error}"
    return None


# Triton's language


def triton_calls() -> Iterator[tuple[str, ast.Call, list[ast.FunctionDef]]]:
    """Calls of tl.NAME in our kernels: (file and line, call, functions around it)."""
    for path in sorted((OURS / "kernels" / "triton").glob("*.py")):
        for node, scopes in nodes_with_scopes(parsed(path)):
            if re.fullmatch(r"tl(\.\w+)+", ast.unparse(node.func)):
                yield f"{path.name}:{node.lineno}", node, scopes


def triton_name(node: ast.Call) -> str:
    """tl.load -> load; tl.extra.cuda.gdc_wait as it is."""
    return ast.unparse(node.func).removeprefix("tl.")


def read_triton(folder: Path, name: str) -> str | None:
    """Parameters of a function of Triton's language, or of a class of it."""
    files = (f"triton/language/extra/cuda/{file}.py" for file in ("gdc", "utils")) if "." in name else TRITON_FILES
    function = name.rpartition(".")[2]
    for file in files:
        for what in (function, f"{function}.__init__"):
            if (found := read(folder, f"{file}:{what}")) is not None:
                return found
    return None


# Recording


def names_of(package: str) -> list[str]:
    if package == TRITON:
        return sorted({triton_name(node) for _, node, _ in triton_calls()})
    return list(dict.fromkeys(name for call in CALLS[package] for name in call.names))


def read_package(package: str, folder: Path) -> dict[str, str]:
    """Name -> parameters of all that is called of it. Raises LookupError for what is not there."""
    one = read_triton if package == TRITON else read
    found = {name: one(folder, name) for name in names_of(package)}
    if lacking := [name for name, parameters in found.items() if parameters is None]:
        raise LookupError(f"{package} in {folder} has no {', '.join(lacking)}")
    return {name: parameters for name, parameters in found.items() if parameters is not None}


def record(package: str, version: str, folder: Path) -> None:
    """Add a version to the file; what is no longer called leaves it."""
    everything = recorded() if RECORDED.exists() else {}
    before, after = everything.get(package, {}), {}
    for name, parameters in read_package(package, folder).items():
        versions = dict(of_versions(before.get(name, {}))) | {version: parameters}
        grouped: dict[str, list[str]] = {}
        for one in sorted(versions, key=Version):
            grouped.setdefault(versions[one], []).append(one)
        after[name] = {", ".join(those): parameters for parameters, those in grouped.items()}
    everything[package] = after
    text = json.dumps(dict(sorted(everything.items())), indent=1)
    RECORDED.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
