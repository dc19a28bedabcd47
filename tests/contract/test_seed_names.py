"""Every name of the pages that pipelines follow has a place here and a test that shows it acting."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib

import pytest
from load_file import ROOT, load_file

from megatron_infer.pipelines.config import NAMES, PipelineConfig
from megatron_infer.pipelines.field_rows import rows_of

docs = load_file("tools/option_docs.py")
ROWS = docs.seed_names(ROOT)


@functools.cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_there(where: str) -> bool:
    """Whether module:Class.member, or module:name, exists."""
    module, _, dotted = where.partition(":")
    found = importlib.import_module(module)
    for name in dotted.split("."):
        fields = getattr(found, "model_fields", {})
        annotated = {item for base in getattr(found, "__mro__", ()) for item in getattr(base, "__annotations__", {})}
        if not (hasattr(found, name) or name in fields or name in annotated):
            return False
        found = getattr(found, name, None)
    return True


def test_every_name_has_a_place_and_a_test():
    wrong = []
    for name, where, test in ROWS:
        if where.startswith(docs.NOT_BUILT):
            wrong += [f"{name}: claims {test}"] if test != "-" else []
            continue
        path, _, function = test.partition("::")
        if not is_there(where):
            wrong.append(f"{name}: no {where}")
        if not (ROOT / path).is_file() or function not in functions_of(path):
            wrong.append(f"{name}: no {test}")
    assert not wrong, "\n".join(wrong)
    assert len({name for name, _, _ in ROWS}) == len(ROWS)


def test_the_test_of_a_name_has_the_name_or_the_option_that_it_sets():
    """A test that never names the field, nor what it is mapped to, cannot show it acting."""
    wrong, rows = [], {path: row for path, _, row in rows_of(PipelineConfig)}
    for name, _, test in ROWS:
        if test == "-" or name.rpartition(".")[2][0].isupper():  # a class, or a member of an enum
            continue
        last = name.rpartition(".")[2]
        row = rows.get((last,))
        words = {last, getattr(row, "option", last), *SHOWN_AS.get(last, ())}
        text = (ROOT / test.partition("::")[0]).read_text(encoding="utf-8")
        wrong += [] if any(word.lower() in text.lower() for word in words) else [f"{name}: {test} has none of {words}"]
    assert not wrong, "\n".join(wrong)


SHOWN_AS = {
    "model_config": ("defer_resolve",),
    "model_post_init": ("defer_resolve",),
    "profiling": ("step_ranges",),
    "sampling": ("enable_penalties",),
    "prefix_caching_coordinator_policy": ("replica_child",),
    "prepend_prompt_speech_tokens": ("prepend=",),
    "prepend_prompt_speech_tokens_causal": ("prompt_causal=",),
}
"""Name -> what a test of it may have in its place: sections by one of their fields, pydantic's own by what they do,
an option by the helper that sets it."""


def test_no_name_of_the_built_pages_lacks_its_row():
    from megatron_infer.config import inference
    from megatron_infer.config.mamba_state import MambaInferenceStateConfig
    from megatron_infer.pipelines import interfaces, overlap

    named = {name for name, _, _ in ROWS}
    top = {path[0] for path in (*NAMES.paths, *NAMES.sections)} - {"options"}
    expected = {f"config.PipelineConfig.{name}" for name in top}
    expected |= {f"megatron.{kind.__name__}.{member.name}" for kind in _enums(inference) for member in kind}
    expected |= {
        f"megatron.MambaInferenceStateConfig.{item.name}" for item in dataclasses.fields(MambaInferenceStateConfig)[:3]
    }
    for kind in (interfaces.PipelineModel, interfaces.KVCacheMixin, overlap.OverlapTextGenerationPipeline):
        page = "overlap" if kind is overlap.OverlapTextGenerationPipeline else "interfaces"
        expected |= {f"{page}.{kind.__name__}.{name}" for name in SEEN[kind.__name__] if name in vars(kind)}
    assert expected - named - OURS == set()


SEEN = {
    "PipelineModel": ("execute", "calculate_max_seq_len", "compute_log_probabilities", "prepare_next_token_inputs"),
    "KVCacheMixin": ("estimate_kv_cache_size", "get_kv_params", "get_num_layers", "load_kv_manager"),
    "OverlapTextGenerationPipeline": ("execute", "has_pending_outputs", "release", "warmup_graph_capture"),
}
OURS = {"megatron.PrefixCachingCoordinatorPolicy.LOAD_BALANCED"}
"""Members that the page does not have."""


def _enums(module) -> list[type[enum.Enum]]:
    names = ("PrefixCachingEvictionPolicy", "PrefixCachingCoordinatorPolicy", "KVCacheManagementMode")
    return [getattr(module, name) for name in names]


@pytest.mark.skipif(not (ROOT / docs.FIELDS).is_file(), reason="the page is not in this tree")
def test_tables_of_the_page_are_what_the_tool_writes():
    text = (ROOT / docs.FIELDS).read_text(encoding="utf-8")
    assert text == docs.fields_page(ROOT), "run python tools/option_docs.py"
    assert PipelineConfig.__doc__
