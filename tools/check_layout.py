"""Holds the tree to its own rules: the order of folders, homes of foreign imports, a pure core. Stdlib only.

    python tools/check_layout.py [ROOT]            prints file:line: rule: what is wrong; exits 1 if anything is
    python tools/check_layout.py [ROOT] --write    writes folders and the picture of the doors into docs/architecture.md

The rules are documentation and test at once: `FOLDERS` says who may import whom, `HOMES` where a foreign package may
appear, `PATH` what a reader of one afternoon reads. Imports go down only, those for annotations too, so that no folders
and no doors import each other.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "megatron_infer"
PAGE = "docs/architecture.md"
PUBLIC_ATTRIBUTES_SHOWN = 12
LARGEST_SHOWN = 5

FOLDERS: tuple[tuple[str, str], ...] = (
    ("errors", "one exception family"),
    ("utils", "OpenMP, garbage collector, logging, child processes; objects named by environment variables"),
    ("kernels", "tensors in, tensors out: attention, scan, experts, sampling, on each backend"),
    ("config", "options, sampling parameters, and the sizes that follow from them"),
    ("text", "tokenizer, detokenizer, chat templates, tool calls"),
    ("scheduler.context", "which sequence holds which rows, blocks and state slots"),
    ("scheduler", "requests and what each step computes: ids only, no tensors"),
    ("outputs", "what a caller gets back, and its form in files and messages"),
    ("distributed", "process groups, the ranks of one engine in lockstep, and the wire between processes"),
    ("memory", "KV cache and state tensors, and their copies to the host and back"),
    ("models", "megatron-core models adopted in place"),
    ("models.loading", "weights from Hugging Face, GGUF and torch_dist checkpoints"),
    ("models.lora", "low-rank adapters: read, written, attached to a live model"),
    ("models.weights", "weight versions, change detection, copies derived from weights"),
    ("runner.sampling", "logits in, tokens out"),
    ("runner", "one step on one rank: batch, forward, sample"),
    ("runner.cuda_graphs", "captured steps"),
    ("runner.speculative", "drafted tokens: proposals, and what is kept of them"),
    ("runner.parallel", "steps over pipeline stages, tensor-parallel vocabularies and context-parallel ranks"),
    ("engine.metrics", "metric definitions and sinks: Prometheus, wandb"),
    ("engine.requests", "a caller's request on its way in and out"),
    ("engine.durable", "requests saved to files"),
    ("engine", "LLM and AsyncLLM, the step loop, suspend and resume, and how an engine is built"),
    ("coordinator", "one front for several replicas"),
    ("rl", "rollouts, weight updates and the mismatch meter of a training loop"),
    ("server.audio", "speech tokens to sound: blocks, audio decoders, voices"),
    ("server", "OpenAI-compatible HTTP"),
    ("server.tinker", "the Tinker API: clients train and sample adapters of one live model"),
    ("mcore", "megatron-core's inference surface, for its scripts as they are"),
    ("pipelines", "one configuration tree over engines and servers, and pipelines of models of one's own"),
    ("testing", "tiny models and stand-ins for tests"),
    ("cli", "the megatron-infer command"),
    ("__main__", "python -m megatron_infer"),
    ("__init__", "public names"),
)
"""Bottom to top, with what is in each: a module imports from its own folder and from folders that come before it.

A name without a dot is a door, a folder of the package; a name with one is a room of a door. A door's own files are a
folder like its rooms. The rooms of a door stand next to each other, so doors import each other one way, too."""
_FOLDER_NAMES = {name for name, _ in FOLDERS}
_DOORS = {name.partition(".")[0] for name in _FOLDER_NAMES}
PEERS = ("models", "runner")
"""They never import each other: they meet in the protocols of kernels/base.py."""
PATH = (
    "engine.step_loop",
    "scheduler.scheduler",
    "scheduler.decode",
    "scheduler.prefill",
    "scheduler.preemption",
    "scheduler.policy",
    "scheduler.request",
    "scheduler.admitted_requests",
    "scheduler.waiting_queue",
    "scheduler.step_plan",
    "scheduler.step_budget",
    "scheduler.step_costs",
    "scheduler.caller_shares",
    "scheduler.recompute_progress",
    "scheduler.context.dynamic_context",
    "scheduler.context.leases",
    "scheduler.context.copies",
    "scheduler.context.block_pool",
    "scheduler.context.block_digest",
    "scheduler.context.row_pool",
    "runner",
)
"""What a reader of one afternoon reads: how a request becomes tokens."""
OPTIONAL = (
    "runner.cuda_graphs",
    "runner.parallel",
    "engine.durable",
    "runner.speculative",
    "runner.sampling.grammar_matchers",
    "scheduler.drafts",
    "scheduler.draft_depth",
    "scheduler.phases",
    "runner.step_padding",
    "runner.warm_up",
    "scheduler.context.build_context",
    "scheduler.context.adapter_slots",
    "scheduler.context.swap",
    "scheduler.context.state_cache",
    "scheduler.context.cached_state_slots",
    "scheduler.context.prefix_events",
)
"""What an engine may do without; no module of `PATH` imports it, but for annotations."""
HOMES: dict[str, tuple[str, ...]] = {
    "megatron": ("models", "distributed.groups", "rl.updates", "mcore", "testing"),
    "pydantic": ("pipelines",),
    "torch.cuda": (
        "memory.device",
        "memory.regions",
        "memory.copy_pipeline",
        "runner.cuda_graphs.graph_pool",
        "kernels",
        "models.mcore_compat",
        "testing",
    ),
}
"""Foreign module -> the only places of the package that may touch it."""
PURE = (
    "errors",
    "server.audio.blocks",
    "server.audio.layout",
    "server.audio.registry",
    "server.audio.speech_model",
    "config",
    "scheduler",
    "kernels.__init__",
    "kernels.triton_scratch",
    "engine.metrics.registry",
    "engine.metrics.monotonic",
    "engine.metrics.definitions",
    "engine.metrics.engine_snapshot",
    "engine.metrics.engine_meter",
    "engine.metrics.server_meter",
    "coordinator.__init__",
    "coordinator.router",
)
"""Importable with torch and numpy absent."""
FOR_GPUS: dict[str, tuple[str, ...]] = {
    "package": (
        *("kernels/triton/*.py", "runner/cuda_graphs/*.py", "config/graph_*.py"),
        *(f"kernels/{name}.py" for name in ("triton_scratch", "backend_candidates", "flashinfer_rope")),
        *(f"kernels/{name}.py" for name in ("draw_columns", "host_uploads", "symmetric_allreduce", "te_tensors")),
        *(f"memory/{name}.py" for name in ("copy_pipeline", "layerwise_restore", "suspend_copy")),
        *(f"memory/regions/{name}.py" for name in ("cuda", "managed", "saver")),
        *("engine/build_graphs.py", "models/fp8.py", "models/te_apex.py"),
    ),
    "tools": ("aot_*.py", "gpu_*.py", "gpu_checks/*.py", "bench/host_costs.py"),
    "tests": ("triton/*.py", "contract/test_gpu_setup.py", "contract/test_not_yet_on_a_gpu.py"),
}
"""Files that mostly or only a GPU needs, by the folder they are in; `summary` counts their lines."""
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


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed file of the package; `name` is its path inside the package ("scheduler.step_plan")."""

    path: Path
    name: str
    tree: ast.Module
    num_lines: int
    imports: tuple[Import, ...]

    @property
    def folder(self) -> str:
        return folder_of(self.name)


def folder_of(name: str) -> str:
    """The room or door of what `name` names ("runner.sampling.rng.mix"); its first part where none is declared."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in _FOLDER_NAMES:
            return prefix
    return parts[0]


def door_of(name: str) -> str:
    return name.partition(".")[0]


def covers(prefix: str, module: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def any_covers(prefixes: Iterable[str], module: str) -> bool:
    return any(covers(prefix, module) for prefix in prefixes)


def is_on_path(module: Module) -> bool:
    return any_covers(PATH, module.name) and not any_covers(OPTIONAL, module.name)


def _is_typing_guard(node: ast.AST) -> bool:
    if not isinstance(node, ast.If):
        return False
    test = node.test
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(node: ast.AST, package: str, typing_only: bool = False) -> Iterator[Import]:
    """Every import below `node`, inside functions too; relative ones resolved against `package`."""
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


def inside(found: Import) -> str | None:
    """The path inside the package of what is imported ("scheduler.step_plan.StepPlan"); None for a foreign one."""
    return found.module.removeprefix(PACKAGE).lstrip(".") or "__init__" if covers(PACKAGE, found.module) else None


# ---------------------------------------------------------------------- sizes


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _is_value(node: ast.ClassDef) -> bool:
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
    if node.decorator_list and not _is_value(node):
        names |= {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    return names


def _is_protocol(node: ast.ClassDef) -> bool:
    names = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return any(isinstance(name, ast.Name) and name.id == "Protocol" for name in names)


class Classes:
    """Every class of the package by module and name, to follow what one inherits."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._nodes: dict[tuple[str, str], ast.ClassDef] = {}
        self._scopes: dict[str, dict[str, tuple[str, str]]] = {}
        for module in modules:
            scope = {}
            for found in module.imports:
                target = inside(found)
                if target is not None:
                    home, _, name = target.rpartition(".")
                    scope[name] = (home, name)
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    self._nodes[module.name, node.name] = node
                    scope[node.name] = (module.name, node.name)
            self._scopes[module.name] = scope

    def ancestors(self, module: str, node: ast.ClassDef) -> list[ast.ClassDef]:
        """Classes of the package that `node` inherits from, protocols left out, each once."""
        found: dict[tuple[str, str], ast.ClassDef] = {}
        queue = [(module, base) for base in node.bases]
        while queue:
            home, base = queue.pop()
            if isinstance(base, ast.Subscript):
                base = base.value
            key = self._scopes.get(home, {}).get(base.id) if isinstance(base, ast.Name) else None
            parent = None if key is None else self._nodes.get(key)
            if key is not None and parent is not None and key not in found and not _is_protocol(parent):
                found[key] = parent
                queue += [(key[0], grand) for grand in parent.bases]
        return list(found.values())


# ---------------------------------------------------------------------- imports


def check_imports(module: Module) -> Iterator[Violation]:
    """Rules on what a module of the package may import."""
    places = {name: place for place, (name, _) in enumerate(FOLDERS)}
    if module.folder not in places:
        message = f"{module.name} is in no folder of FOLDERS; give it a place in tools/check_layout.py"
        yield Violation(module.path, 1, "folder", message)
        return
    pure = any_covers(PURE, module.name)
    on_path = is_on_path(module)
    for found in module.imports:
        target = inside(found)
        if target is not None:
            folder = folder_of(target)
            if folder not in places or folder == "__init__":
                continue  # the package itself, or a name of its front
            if places[folder] > places[module.folder]:
                message = f"{module.name} imports {target}; {module.folder} stands below {folder}, imports go down only"
                yield Violation(module.path, found.line, "order", message)
            if module.folder != folder and {module.folder, folder} == set(PEERS):
                message = f"{module.folder} and {folder} never import each other: they meet in kernels/base.py"
                yield Violation(module.path, found.line, "peers", message)
            if on_path and not found.typing_only and any_covers(OPTIONAL, target):
                message = f"{module.name} is on the path of every request and {target} is optional"
                yield Violation(module.path, found.line, "path", message)
            continue
        if found.typing_only:
            continue
        root = found.module.split(".")[0]
        if pure and root in IMPURE_ROOTS:
            message = f"{module.name} must not import {root} (except for annotations)"
            yield Violation(module.path, found.line, "pure", message)
        for foreign, homes in HOMES.items():
            if covers(foreign, found.module) and not any_covers(homes, module.name):
                message = f"{foreign} belongs in {', '.join(homes)}, not in {module.name}"
                yield Violation(module.path, found.line, "home", message)
    yield from _check_front(module)
    yield from _check_cuda_uses(module)


def _check_cuda_uses(module: Module) -> Iterator[Violation]:
    homes = HOMES["torch.cuda"]
    if any_covers(homes, module.name):
        return
    for node in ast.walk(module.tree):
        is_cuda = isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name)
        if is_cuda and node.value.id == "torch":
            message = f"torch.cuda belongs in {', '.join(homes)}, not in {module.name}"
            yield Violation(module.path, node.lineno, "home", message)


def _check_front(module: Module) -> Iterator[Violation]:
    """The package's own front gives public names to users; inside, only the version is taken from it."""
    for found in module.imports:
        package, _, name = found.module.rpartition(".")
        if package == PACKAGE and name not in _DOORS and name != "__version__":
            message = f"{module.name} takes {name} from the package's front; import it from where it is defined"
            yield Violation(module.path, found.line, "front", message)


def arrows(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Door -> doors it imports, those for annotations included; the package's own front left out."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        own = door_of(module.name)
        for target in map(inside, module.imports):
            door = None if target is None else door_of(target)
            if door in _DOORS - {own} and "__init__" not in (door, own):
                found[own].add(door)
    return found


# ---------------------------------------------------------------------- the tree


def read_modules(root: Path) -> list[Module]:
    """The modules of the package."""
    own = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        shown, text = path.relative_to(root), path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(shown))
        dotted = ".".join(shown.with_suffix("").parts)
        found = tuple(imports_of(tree, dotted.rpartition(".")[0]))
        own.append(Module(shown, dotted.removeprefix(PACKAGE + "."), tree, len(text.splitlines()), found))
    return own


def path_lines(modules: Iterable[Module]) -> int:
    return sum(module.num_lines for module in modules if is_on_path(module))


def check_tree(own: list[Module]) -> list[Violation]:
    return [violation for module in own for violation in check_imports(module)]


def summary(own: list[Module], root: Path) -> Iterator[str]:
    """What the tree is like, for the reader of a CI log."""
    doors: dict[str, int] = defaultdict(int)
    for module in own:
        doors[door_of(module.name)] += module.num_lines
    folders = {module.folder for module in own}
    yield f"doors: {len(doors)}, folders: {len(folders)}"
    yield f"lines: {sum(doors.values()):,}, afternoon path: {path_lines(own):,}"
    yield from (f"    {count:,} {door}" for door, count in sorted(doors.items(), key=lambda one: -one[1]))
    for part, patterns in FOR_GPUS.items():
        files = {path for one in patterns for path in (root / (PACKAGE if part == "package" else part)).glob(one)}
        yield f"for GPUs, {part}: {sum(len(path.read_text('utf-8').splitlines()) for path in files):,}"
    classes, long, wide = Classes(own), [], []
    for module in own:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                family = [node, *classes.ancestors(module.name, node)]
                long.append((sum(map(_length, family)), f"{module.name}.{node.name}"))
                public = {name for one in family for name in attributes_of(one) if not name.startswith("_")}
                if len(public) > PUBLIC_ATTRIBUTES_SHOWN:
                    wide.append((len(public), f"{module.name}.{node.name}"))
    for what, sizes in ("files", [(one.num_lines, one.name) for one in own]), ("classes", long):
        yield f"longest {what}:"
        yield from (f"    {count} {name}" for count, name in sorted(sizes, reverse=True)[:LARGEST_SHOWN])
    yield f"over {PUBLIC_ATTRIBUTES_SHOWN} public attributes: {len(wide)}"
    yield from (f"    {count} {name}" for count, name in sorted(wide, reverse=True))


def picture(own: list[Module]) -> str:
    """The doors, top to bottom, and for each the doors right below it: arrows that others imply are left out."""
    graph = arrows(own)
    places = list(dict.fromkeys(door_of(name) for name, _ in FOLDERS))
    order = [name for name in places if name in graph or any(name in targets for targets in graph.values())]

    def below(door: str) -> set[str]:
        seen: set[str] = set()
        for target in graph.get(door, ()):
            seen |= {target} | below(target)
        return seen

    lines = ["flowchart TD"]
    for door in reversed(order):
        direct = graph.get(door, set())
        implied = set().union(*(below(target) for target in direct)) if direct else set()
        lines += [f"    {door} --> {target}" for target in reversed(order) if target in direct - implied]
    return "\n".join(lines)


def folder_list() -> str:
    """The doors, top to bottom, with what is in each; under a door its rooms, and its own files where they stand."""
    heads: dict[str, str] = {}
    rooms: dict[str, list[str]] = defaultdict(list)
    for name, what in reversed(FOLDERS):
        door = door_of(name)
        heads.setdefault(door, "")
        if name == door:
            heads[door] = f"* `{name}`: {what}"
            rooms[door].append(f"  * files of `{name}` itself")
        else:
            rooms[door].append(f"  * `{name.replace('.', '/')}`: {what}")
    lines = []
    for door, head in heads.items():
        lines.append(head)
        if len(rooms[door]) > 1:
            lines += rooms[door]
    return "\n".join(lines)


def with_layout(text: str, own: list[Module]) -> str:
    """The text of docs/architecture.md with what lies between its marks generated from FOLDERS and the imports."""
    for name, generated in ("folders", folder_list()), ("picture", f"```mermaid\n{picture(own)}\n```"):
        begin, end = f"<!-- {name} begin -->\n", f"<!-- {name} end -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"{PAGE} lacks its marks {begin.strip()} and {end}"
        text = f"{before}{begin}{generated}\n{end}{after}"
    return text


def main() -> int:
    arguments = [one for one in sys.argv[1:] if not one.startswith("--")]
    root = Path(arguments[0] if arguments else Path(__file__).parents[1]).resolve()
    gc.disable()  # trees of the whole package stay until the end
    own = read_modules(root)
    if "--write" in sys.argv:
        page = root / PAGE
        page.write_text(with_layout(page.read_text(encoding="utf-8"), own), encoding="utf-8")
        return 0
    violations = check_tree(own)
    page = root / PAGE
    if page.is_file() and with_layout(text := page.read_text(encoding="utf-8"), own) != text:
        violations.append(Violation(Path(PAGE), 1, "page", "it shows another tree: run tools/check_layout.py --write"))
    for violation in violations:
        print(violation)
    print(*summary(own, root), sep="\n")
    print(f"check_layout: {len(violations)} violation{'s' * (len(violations) != 1)}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
