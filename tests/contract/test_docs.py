"""README and the pages of docs name files, modules, classes and links that exist; their blocks: tests/docs."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""Without docs/results: reports of runs, which stay as they were."""
FOREIGN_FILES = (
    *(
        "slime/rollout/sglang_rollout.py",
        "server_control.py",
        "examples/inference/advanced/gpt_dynamic_inference.py",
        "examples/inference/advanced/gpt_dynamic_inference_with_coordinator.py",
        "examples/inference/launch_inference_server.py",
        "examples/inference/offline_inference.py",
        "gpt_static_inference.py",
        "run_text_generation_server.py",
        "tools/run_dynamic_text_generation_server.py",
        "train_rl.py",
        "nemo_rl/algorithms/grpo.py",
    ),
    *(
        "pretrain_gpt.py",
        "pretrain_and_generate.py",
        "examples/run_simple_mcore_train_loop.py",
        "run_simple_mcore_train_loop.py",
    ),
)
"""Files of other projects."""
SHIPPED = ("megatron_infer", "tests", "tools", "examples", "docs", ".ci", "requirements")

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w/.-])([\w/.-]*\w\.(?:py|cpp|md))\b")
DOTTED = re.compile(r"(?<![\w/])megatron_infer(?:\.\w+)+")
"""Not the names of files: those come behind a slash."""
MEMBER = re.compile(r"\b([A-Z]\w*)\.([a-z_]\w*)\b")
OBJECT = re.compile(r"(?<![\w./-])(engine|session|roll)\.([a-z_]\w*)\b(?!\.(?:py|md))")
OBJECTS = {"engine": "DynamicInferenceEngine", "session": "RolloutSession", "roll": "Rollout"}
"""What the pages call the objects of these classes."""
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]+)?\)")


@functools.cache
def files() -> set[str]:
    """What is in the tree."""
    found = {path.name for path in ROOT.iterdir() if path.is_file()}
    for top in SHIPPED:
        found |= {str(path.relative_to(ROOT)) for path in (ROOT / top).rglob("*") if path.is_file()}
    return found


@functools.cache
def classes_of_package() -> dict[str, list[ast.ClassDef]]:
    """By name."""
    found = defaultdict(list)
    for path in (ROOT / "megatron_infer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return found


@functools.cache
def _members(node: ast.ClassDef) -> set[str]:
    """Methods and attributes of a class and of its bases in the package."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(inner.name)
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            found.add(inner.target.id)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self":
            found.add(inner.attr)
    for given in node.bases:
        base = given.value if isinstance(given, ast.Subscript) else given
        if isinstance(base, ast.Name):
            for other in classes_of_package().get(base.id, ()):
                if other is not node:
                    found |= _members(other)
    return found


def missing_files(text: str) -> list[str]:
    """Files named in code spans that are not in the tree; a name may leave out leading folders, or be of a commit."""
    spans = CODE.findall(re.sub(r"`[^`]+` of commit [0-9a-f]{8}", "", BLOCK.sub("", text)))
    named = {name.removeprefix("./") for span in spans for name in FILE.findall(span)}
    shown = {name for name in named - set(FOREIGN_FILES) if name[0].islower() or name[0] == "R"}
    return sorted(name for name in shown if not any(file == name or file.endswith(f"/{name}") for file in files()))


def missing_names(text: str) -> list[str]:
    """Dotted names below megatron_infer, and members of the package's classes, that are not there."""
    wrong = []
    for name in sorted(set(DOTTED.findall(text))):
        parts, attributes = name.split("."), []
        while parts:
            try:
                found = importlib.import_module(".".join(parts))
                break
            except ModuleNotFoundError as error:
                if str(error.name).partition(".")[0] != "megatron_infer":  # of a framework that is not installed
                    stem = "/".join(parts)
                    attributes = [] if {f"{stem}.py", f"{stem}/__init__.py"} & set(files()) else [parts[-1]]
                    found = None
                    break
                attributes.insert(0, parts.pop())
        if attributes and not hasattr(found, attributes[0]):
            wrong.append(name)
    classes = classes_of_package()
    for span in set(CODE.findall(BLOCK.sub("", text))):
        for owner, member in MEMBER.findall(span):
            nodes = classes.get(owner)
            if nodes and not any(member in _members(node) for node in nodes):
                wrong.append(f"{owner}.{member}")
    text_of_code = "\n".join([*CODE.findall(BLOCK.sub("", text)), *(block for _, block in BLOCK.findall(text))])
    for name, member in set(OBJECT.findall(text_of_code)):
        owned = any(member in _members(node) for node in classes[OBJECTS[name]])
        if not owned and f"megatron_infer/{name}/{member}.py" not in files():
            wrong.append(f"{name}.{member}")
    return sorted(wrong)


def _anchors(text: str) -> set[str]:
    """Anchors that GitHub generates for headings."""
    heads = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(text: str, page: Path) -> list[str]:
    wrong = []
    for target, anchor in LINK.findall(BLOCK.sub("", text)):
        if "://" in target:
            continue
        path = page if not target else (page.parent / target).resolve()
        if not path.exists() or (anchor and anchor not in _anchors(path.read_text(encoding="utf-8"))):
            wrong.append(target + anchor)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    wrong = {
        "files": missing_files(text),
        "names": missing_names(text),
        "links": broken_links(text, page),
    }
    assert not any(wrong.values()), wrong


def test_nouns_of_the_glossary_are_names_of_the_package():
    paths = (ROOT / "megatron_infer").rglob("*.py")
    words = {word for path in paths for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    rows = re.findall(r"^\| (.+?) \| ", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(named) > 40
    assert not set(named) - words
