"""README and the pages of docs as blocks, and a reader who runs them as printed, one after the other.

```python      run in one namespace a page, empty at its beginning; one whose first line is `# torchrun ...` is a script
```bash        run line by line; a server, coordinator or replica runs on until the page ends
```console     lines after `$ ` are run, and what they print must be the lines below
```yaml ```json  parsed
```text ```mermaid   not for running
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (*sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")), "README.md")
"""Without docs/results: reports of runs, which stay as they were."""
LANGUAGES = {"python", "bash", "console", "yaml", "json", "text", "mermaid"}
COMMENT = re.compile(r"(^|\s)#\s.*$")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    """Of the page, where the block's first line is; from 1."""
    language: str
    text: str

    @property
    def launcher(self) -> list[str] | None:
        """`torchrun --nproc-per-node 2 script.py` of a script's first line; None: it runs in this process."""
        first = self.text.partition("\n")[0]
        return shlex.split(first[1:]) if first.startswith("# torchrun ") else None

    @property
    def commands(self) -> list[str]:
        """Command lines, without their comments; those of a console stand behind `$ `."""
        if self.language not in ("bash", "console"):
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in (COMMENT.sub("", line).strip() for line in lines) if line]

    @property
    def compiled_text(self) -> str:
        """As long as the page down to here, so that tracebacks have its lines."""
        return "\n" * (self.line - 1) + self.text


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, match.start(2)) + 1, match[1], match[2]) for match in FENCE.finditer(text)]


def all_blocks() -> Iterator[Block]:
    for page in PAGES:
        yield from blocks_of(page)


def undefined_names(text: str) -> list[str]:
    """Names that Python reads and that it does not have; the order within the text does not count."""
    read, bound = set(), {*dir(builtins), "__name__"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return sorted(read - bound)


def missing_imports(text: str) -> list[str]:
    """What Python imports from this package and is not there."""
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module, one.name) for node in found for one in node.names if node.module.startswith("megatron_infer")]
    return [f"{module}.{name}" for module, name in ours if not hasattr(importlib.import_module(module), name)]
