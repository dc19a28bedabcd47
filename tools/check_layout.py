"""Holds the tree to its own rules: sizes, layers, homes of foreign imports, purity of the core. Stdlib only.

    python tools/check_layout.py [ROOT]     prints file:line: rule: what is wrong; exits 1 if anything is

The rules are docs and test at once: `LAYERS` says who may know whom, `HOMES` where a foreign package may appear.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "megatron_infer"
ROOTS = (PACKAGE, "tests", "tools", "examples")
MAX_FILE_LINES = 600
MAX_CLASS_LINES = 300
MAX_CLASS_ATTRIBUTES = 20
MAX_FUNCTION_LINES = 80
MAX_INTERFACE_METHODS = 7

LAYERS: dict[str, int] = {
    "errors": 0,
    "config": 0,
    "config_checks": 0,
    "state_config": 0,
    "metrics.core": 0,
    "context.layout": 0,  # arithmetic that config resolves with
    "graph_shapes": 0,
    "graph_memory": 0,
    "schedule": 1,
    "context": 1,
    "kernels": 2,
    "kernels.scratch": 0,  # arithmetic that kernels allocate by and plans estimate with
    "forward": 3,
    "sampling": 3,
    "models": 3,
    "speculative": 3,
    "lora": 3,
    "text": 3,
    "metrics": 3,  # sinks: they know metrics.core and a writer, the engine feeds them
    "context.store": 3,
    "context.store_layout": 3,
    "context.store_content": 3,
    "context.memory": 3,
    "context.modes": 3,
    "context.regions": 3,
    "context.copies": 3,
    "context.arrival": 3,
    "context.layer_copy": 3,
    "context.pool_memory": 3,
    "engine": 4,
    "outputs": 4,
    "token_support": 3,
    "carried": 4,
    "figures": 4,
    "embeddings": 4,
    "parallel": 4,
    "graph_setup": 4,
    "compile_setup": 4,
    "assembly": 4,  # parts of the engine, each its own noun
    "waiting": 0,
    "collector": 0,
    "intake": 4,
    "ledger": 4,
    "controls": 4,
    "lifecycle": 4,
    "speeds": 4,
    "step_loop": 4,
    "suspension": 4,
    "tracking": 4,
    "durable": 4,
    "parallel.backends": 1,
    "parallel.ray": 5,  # loads models by name
    "llm": 5,
    "async_llm": 5,
    "server": 5,
    "rl": 5,
    "pipelines": 5,
    "cli": 5,
    "debug": 5,
    "testing": 5,
    "__main__": 5,
}
"""Module or package (longest match wins) -> layer; imports go to the same layer or down."""
PEERS = ("models", "forward")
"""Same layer, but they never import each other: they meet in kernels/base.py."""
HOMES: dict[str, tuple[str, ...]] = {
    "megatron": ("models", "parallel.groups", "rl.weights", "testing"),
    "torch.cuda": (
        "forward.device",
        "forward.graphs",
        "context.modes",
        "context.regions",
        "context.copies",
        "kernels",
        "models.mcore_compat",
        "testing",
    ),
}
"""Foreign module -> the only places of the package that may touch it."""
PURE = (
    "errors",
    "config",
    "config_checks",
    "graph_memory",
    "graph_shapes",
    "kernels.__init__",
    "kernels.scratch",
    "state_config",
    "schedule",
    "context.__init__",
    "context.block_pool",
    "context.prefix",
    "context.slots",
    "context.context",
    "context.leases",
    "context.host",
    "context.snapshots",
    "context.states",
    "context.swaps",
    "context.prefix_changes",
    "context.layout",
    "context.stages",
    "metrics.core",
    "metrics.books",
    "metrics.catalog",
    "metrics.figures",
    "metrics.meter",
    "metrics.serving",
    "parallel.__init__",
    "parallel.router",
)
"""Importable with torch and numpy absent."""
IMPURE_ROOTS = ("torch", "numpy", "megatron")


@dataclass(frozen=True, slots=True)
class Violation:
    path: Path
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


@dataclass(frozen=True, slots=True)
class Import:
    module: str
    line: int
    typing_only: bool


def covers(prefix: str, module: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def layer_of(module: str) -> int | None:
    """Layer of a module path inside the package ("schedule.plan"); None for the package itself."""
    matches = [name for name in LAYERS if covers(name, module)]
    return LAYERS[max(matches, key=len)] if matches else None


def _is_typing_guard(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(node: ast.AST, package: str, typing_only: bool = False) -> Iterator[Import]:
    """Every import below `node`; relative ones resolved against `package`."""
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, typing_only) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
        yield from (Import(f"{base}.{alias.name}", node.lineno, typing_only) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        guarded = typing_only or (_is_typing_guard(node) and child in getattr(node, "body", ()))
        yield from imports_of(child, package, guarded)


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _decorated_as_value(node: ast.ClassDef) -> bool:
    """A frozen dataclass: a value, whose fields are data and not state."""
    for decorator in node.decorator_list:
        if (
            isinstance(decorator, ast.Call)
            and isinstance(decorator.func, ast.Name)
            and decorator.func.id == "dataclass"
        ):
            return any(k.arg == "frozen" and getattr(k.value, "value", False) is True for k in decorator.keywords)
    return False


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Names an instance holds: assigned to self anywhere, and the fields of a dataclass that is not frozen."""
    names = set()
    for inner in ast.walk(node):
        stored = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if stored and isinstance(inner.value, ast.Name) and inner.value.id == "self":
            names.add(inner.attr)
    if node.decorator_list and not _decorated_as_value(node):
        names |= {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    return names


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def check_sizes(path: Path, tree: ast.Module, num_lines: int) -> Iterator[Violation]:
    if num_lines > MAX_FILE_LINES:
        yield Violation(path, 1, "file-size", f"{num_lines} lines, the limit is {MAX_FILE_LINES}")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > MAX_FUNCTION_LINES:
            message = f"{node.name} has {_length(node)} lines, the limit is {MAX_FUNCTION_LINES}"
            yield Violation(path, node.lineno, "function-size", message)
        if not isinstance(node, ast.ClassDef):
            continue
        if _length(node) > MAX_CLASS_LINES:
            message = f"{node.name} has {_length(node)} lines, the limit is {MAX_CLASS_LINES}"
            yield Violation(path, node.lineno, "class-size", message)
        attributes = attributes_of(node)
        if len(attributes) > MAX_CLASS_ATTRIBUTES:
            message = f"{node.name} holds {len(attributes)} attributes, the limit is {MAX_CLASS_ATTRIBUTES}"
            yield Violation(path, node.lineno, "class-attributes", message)
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        if _is_protocol(node) and len(methods) > MAX_INTERFACE_METHODS:
            message = f"{node.name} asks for {len(methods)} methods, the limit is {MAX_INTERFACE_METHODS}"
            yield Violation(path, node.lineno, "interface-size", message)


def check_imports(path: Path, tree: ast.Module, module: str, package: str) -> Iterator[Violation]:
    """Rules on what a module of the package (path inside it: "schedule.plan") may import."""
    own_layer = layer_of(module)
    if own_layer is None and module != "__init__":
        yield Violation(path, 1, "layer", f"{module} has no layer; give it one in tools/check_layout.py")
    pure = any(covers(name, module) for name in PURE)
    for found in imports_of(tree, package):
        if covers(PACKAGE, found.module):
            if not found.typing_only and own_layer is not None:
                yield from _check_layer(path, module, own_layer, found)
            continue
        if found.typing_only:
            continue
        root = found.module.split(".")[0]
        if pure and root in IMPURE_ROOTS:
            yield Violation(path, found.line, "pure", f"{module} must not import {root} (except for annotations)")
        for foreign, homes in HOMES.items():
            if covers(foreign, found.module) and not any(covers(home, module) for home in homes):
                yield Violation(path, found.line, "home", f"{foreign} belongs in {', '.join(homes)}, not in {module}")
    yield from _check_cuda_uses(path, tree, module)


def _check_layer(path: Path, module: str, own_layer: int, found: Import) -> Iterator[Violation]:
    target = found.module.removeprefix(PACKAGE).lstrip(".")
    target_layer = layer_of(target)
    if target_layer is None:
        return
    if target_layer > own_layer:
        message = f"{module} (L{own_layer}) imports {target} (L{target_layer}); imports go down only"
        yield Violation(path, found.line, "layer", message)
    sides = (module.split(".")[0], target.split(".")[0])
    if sides[0] != sides[1] and set(sides) == set(PEERS):
        message = f"{sides[0]} and {sides[1]} never import each other: they meet in kernels/base.py"
        yield Violation(path, found.line, "peers", message)


def _check_cuda_uses(path: Path, tree: ast.Module, module: str) -> Iterator[Violation]:
    homes = HOMES["torch.cuda"]
    if any(covers(home, module) for home in homes):
        return
    for node in ast.walk(tree):
        is_cuda = isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name)
        if is_cuda and node.value.id == "torch":
            yield Violation(path, node.lineno, "home", f"torch.cuda belongs in {', '.join(homes)}, not in {module}")


def check_file(path: Path, root: Path) -> list[Violation]:
    shown, text = path.relative_to(root), path.read_text(encoding="utf-8")
    tree = ast.parse(text, filename=str(shown))
    violations = list(check_sizes(shown, tree, len(text.splitlines())))
    if shown.parts[0] == PACKAGE:
        dotted = ".".join(shown.with_suffix("").parts)
        package = dotted.rpartition(".")[0]
        violations += check_imports(shown, tree, dotted.removeprefix(PACKAGE + "."), package)
    return violations


def check_tree(root: Path) -> list[Violation]:
    files = [path for top in ROOTS for path in sorted((root / top).rglob("*.py"))]
    return [violation for path in files for violation in check_file(path, root)]


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    violations = check_tree(root)
    for violation in violations:
        print(violation)
    print(f"check_layout: {len(violations)} violation{'s' * (len(violations) != 1)}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
