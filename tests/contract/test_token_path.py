"""docs/token_path.md names the functions that a token goes through: those that a trace of one request has."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from types import CodeType, FrameType

from load_file import ROOT, load_file

from megatron_infer import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_infer.testing.tiny import tiny_gpt

PAGE = ROOT / "docs" / "token_path.md"
BEGIN, END = "<!-- path begin -->", "<!-- path end -->"
FRAME = re.compile(r"`(\w+\.\w+)`")
"""`Class.method`, or `module.function` for a function of a module. Files have a slash, so they are not taken."""


layout = load_file("tools/check_layout.py")


def _is_left_out(code: CodeType, module: str) -> bool:
    """Comprehensions, functions within functions, properties and generated methods are details of their callers."""
    if "<" in code.co_qualname:
        return True
    found: object = importlib.import_module(module)
    for part in code.co_qualname.split("."):
        found = inspect.getattr_static(found, part, None)
    return isinstance(found, property)


def traced_calls() -> list[tuple[str, bool]]:
    """(name as the page writes it, whether it is on the path) of each call of the package's functions, in order."""
    config = InferenceConfig(
        buffer_size_gb=0.01,
        max_sequence_length=128,
        block_size_tokens=16,
        enable_prefix_caching=True,
        sampling_backend="torch",
    )
    engine = DynamicInferenceEngine(tiny_gpt(), config)
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=7, ignore_eos=True)
    codes: list[tuple[CodeType, str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("megatron_infer."):
            codes.append((frame.f_code, module))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        engine.add_request(list(range(30)), params)
        while engine.has_unfinished():
            engine.step()
    finally:
        sys.setprofile(before)
    names: dict[CodeType, tuple[str, bool] | None] = {}
    for code, module in codes:
        if code not in names:
            own, name = module.removeprefix("megatron_infer."), code.co_qualname
            shown = name if "." in name else f"{own.rpartition('.')[2]}.{name}"
            names[code] = None if _is_left_out(code, module) else (shown, layout.any_covers(layout.PATH, own))
    return [found for code, _ in codes if (found := names[code]) is not None]


def named_frames(text: str) -> list[str]:
    section = text.partition(BEGIN)[2].partition(END)[0]
    assert section, f"{PAGE.name} lacks {BEGIN} or {END}"
    return FRAME.findall(section)


def differences(named: list[str], calls: list[tuple[str, bool]]) -> list[str]:
    """What is wrong with the page, a line each."""
    called = [name for name, _ in calls]
    found, place = [], 0
    for name in named:
        if name not in called:
            found.append(f"`{name}` is named and never called")
        elif name not in called[place:]:
            found.append(f"`{name}` is named behind a function that is called later")
        else:
            place = called.index(name, place)
    previous = "the beginning"
    for name in dict.fromkeys(name for name, on_path in calls if on_path):
        if name not in named:
            found.append(f"`{name}` is called and not named; it is first called behind `{previous}`")
        previous = name
    return found


def test_the_path_of_a_token_names_what_a_trace_has():
    wrong = differences(named_frames(PAGE.read_text(encoding="utf-8")), traced_calls())
    assert not wrong, "docs/token_path.md:\n" + "\n".join(wrong)
