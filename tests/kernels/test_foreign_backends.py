"""FlashInfer and flash-attn 3 behind our seams, on stand-ins of them: indices, padding, layouts."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import fake_packages
import paged_case
import pytest
import torch

from megatron_infer.kernels import optional_packages
from megatron_infer.kernels.attention_phases import PhasedAttention
from megatron_infer.kernels.packages import (
    flash_attn_attention,
    flash_attn_prompts,
    flashinfer_attention,
    flashinfer_rope,
)
from megatron_infer.kernels.packages.flash_attn_attention import FlashAttention
from megatron_infer.kernels.torch.cpu_torch import TorchPagedAttention
from megatron_infer.kernels.torch.torch_ref import ReferenceAttention

CPU = torch.device("cpu")
MIXED = [(1, 1), (1, 300), (1, 256), (1, 33), (9, 9), (20, 310), (1, 60), (70, 70)]


def make_case(*args, interleaved=False, **options):
    """As a model's table has them: both dims of a pair rotate by one angle."""
    case = paged_case.make_case(*args, interleaved=interleaved, **options)
    for table in (case.meta.cos_TR, case.meta.sin_TR):
        if table is not None and interleaved:
            table[:, 1::2] = table[:, ::2]
        elif table is not None:
            table[:, table.shape[1] // 2 :] = table[:, : table.shape[1] // 2]
    return case


@pytest.fixture(params=["flashinfer", "flashinfer rope", "flash_attn", "one each"])
def make(request, monkeypatch):
    """Makes a new backend."""
    fake_packages.install(monkeypatch, "flashinfer", "flash_attn_interface")
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1024)
    bf16 = torch.bfloat16
    flashinfer, flash_attn = (partial(one.make, CPU, bf16) for one in (flashinfer_attention, flash_attn_attention))
    return {
        "flashinfer": flashinfer,
        "flashinfer rope": lambda: flashinfer_rope.FlashInferRope(TorchPagedAttention()),
        "flash_attn": flash_attn,
        "one each": lambda: PhasedAttention(decode=flashinfer(), prefill=flash_attn()),
    }[request.param]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize(("num_decode", "rows"), [(4, MIXED), (2, MIXED[:2]), (0, MIXED[4:])])
def test_ragged_steps_match_the_reference(make, window, num_decode, rows):
    backend = make()
    case = make_case(rows, num_decode=num_decode, dtype=torch.bfloat16, window=window, rotary_dim=64)
    assert backend.supports(case.spec, dtype=torch.bfloat16, block_size=16) is None
    paged_case.check_case(backend, case)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotary_dim", "group_size"), [(0, 1), (32, 8)])
def test_rotation_and_groups_match_the_reference(make, interleaved, rotary_dim, group_size):
    options = {"rotary_dim": rotary_dim, "interleaved": interleaved, "group_size": group_size, "head_dim": 128}
    paged_case.check_case(make(), make_case(MIXED[3:6], num_decode=1, dtype=torch.bfloat16, **options))


def test_one_backend_serves_layers_and_steps_of_different_kinds(make):
    backend = make()
    for seed, (window, num_decode) in enumerate([(None, 2), (8, 1), (None, 1), (8, 2)]):
        rows = [(1, 20 + seed), (1, 7), (5, 9 + seed)]
        case = make_case(rows, num_decode=num_decode, dtype=torch.bfloat16, window=window, seed=seed)
        paged_case.check_case(backend, case)


def test_flashinfer_gets_what_the_host_makes_by_uploads_that_do_not_wait(monkeypatch):
    """A copy from pageable memory waits for the device; its planner alone takes host tensors, which it copies."""
    fake_packages.install(monkeypatch, "flashinfer")
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1024)
    upload, uploads = flashinfer_attention.upload, []
    monkeypatch.setattr(
        flashinfer_attention, "upload", lambda array, device: uploads.append(len(array)) or upload(array, device)
    )
    case = make_case([(1, 33), (9, 9)], num_decode=1, dtype=torch.bfloat16)
    moved = []
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda one, *args, **more: moved.append(args) or to(one, *args, **more))
    backend = flashinfer_attention.make(CPU, torch.bfloat16)
    backend.plan(case.meta)
    flashinfer_attention._lay_out(case.meta, 16)
    assert uploads == [3, 1] and [args for args in moved if torch.device in map(type, args)] == [(CPU,), (CPU,)]


def test_flashinfer_before_the_version_whose_source_was_read_is_refused(monkeypatch):
    fake_packages.install(monkeypatch, "flashinfer")
    monkeypatch.setattr(flashinfer_attention, "not_on_gpu", lambda device: None)
    monkeypatch.setattr(flashinfer_attention, "no_compiler", lambda: None)
    monkeypatch.setattr(flashinfer_attention, "missing", optional_packages.missing.__wrapped__)  # without its cache
    monkeypatch.setattr(sys.modules["flashinfer"], "__version__", "0.7.1", raising=False)
    reason = "needs flashinfer-python 0.7.2 or newer, this is 0.7.1"
    assert flashinfer_attention.unavailable(CPU, torch.bfloat16) == reason


@pytest.mark.parametrize("rows", [[(1, 40), (1, 3)], [(1, 40), (3, 3)], [(2, 5)]])
def test_padding_gives_zeros_and_changes_nothing_else(make, rows):
    num_decode = sum(q_len == 1 for q_len, _ in rows)
    options = {"num_decode": num_decode, "dtype": torch.bfloat16, "rotary_dim": 64, "num_padding": 5}
    case = make_case(rows, padding_rows=(0, 2), **options)
    case.fused[-5:] = 1e3
    want, _ = case.run(ReferenceAttention())
    out, cache = case.run(make())
    assert not out[-5:].any()
    torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=2e-2)
    dummy = case.meta.kv_pos_T[-1] // 16
    touched = {int(block) for block in case.meta.kv_pos_T // 16} - {int(dummy)}
    for block in set(range(cache.shape[2])) - touched - {int(dummy)}:
        assert torch.equal(cache[:, :, block], case.kv_cache[:, :, block])


def test_what_a_kernel_cannot_do_is_refused_with_the_reason(make):
    backend = make()
    spec = make_case([(1, 1)], num_decode=1, dtype=torch.bfloat16).spec
    sinks = dataclasses.replace(spec, sinks=lambda: torch.zeros(6))
    asked = {"dtype": torch.bfloat16, "block_size": 16}
    if isinstance(backend, flashinfer_rope.FlashInferRope):
        assert backend.supports(dataclasses.replace(spec, head_dim=80), **asked) is None, "nothing to rotate"
        assert "rotary dims in sixteens" in backend.supports(dataclasses.replace(spec, rotary_dim=20), **asked)
        spec = dataclasses.replace(spec, rotary_dim=32)
    else:
        assert "sinks" in backend.supports(sinks, **asked)
        assert "capped" in backend.supports(dataclasses.replace(spec, softcap=50.0), **asked)
    assert "float16 or bfloat16" in backend.supports(spec, dtype=torch.float32, block_size=16)
    assert "head_dim" in backend.supports(dataclasses.replace(spec, head_dim=260), **asked)


@pytest.mark.parametrize(
    ("head_dim", "window", "block_size", "word"),
    [
        (64, None, 128, None),
        (128, None, 256, None),
        (128, 512, 256, None),
        (256, 512, 64, None),
        (128, None, 64, "loads blocks of a multiple of 128 tokens at its full speed, got block_size_tokens=64"),
        (256, None, 256, "a multiple of 80 tokens"),
        (96, None, 256, "a multiple of 144 tokens"),
    ],
)
def test_prompts_take_flash_attn_where_it_loads_whole_tiles(monkeypatch, head_dim, window, block_size, word):
    fake_packages.install(monkeypatch, "flash_attn_interface")
    spec = dataclasses.replace(make_case([(1, 1)], num_decode=1, dtype=torch.bfloat16).spec, window=window)
    spec = dataclasses.replace(spec, head_dim=head_dim)
    reason = flash_attn_prompts.make(CPU, torch.bfloat16).supports(spec, dtype=torch.bfloat16, block_size=block_size)
    assert reason is None if word is None else word in reason


@pytest.mark.parametrize(
    ("flags", "fields", "word"),
    [
        ({}, {}, None),
        ({"LOCAL": True}, {}, None),
        ({"LOCAL": True}, {"window": 9}, "built without windows"),
        ({"HDIM128": True}, {"head_dim": 128}, None),
        ({"HDIM128": True, "HDIM192": True, "HDIM256": True}, {"head_dim": 128}, "without head dims of 128 and more"),
        ({"FP16": True}, {}, None),
    ],
)
def test_what_flash_attn_is_built_without_is_refused(monkeypatch, flags, fields, word):
    fake_packages.install(monkeypatch, "flash_attn_interface")
    config = ModuleType("flash_attn_config")
    config.CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{name}": value for name, value in flags.items()}}
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    spec = dataclasses.replace(make_case([(1, 1)], num_decode=1, dtype=torch.bfloat16).spec, **fields)
    reason = flash_attn_attention.make(CPU, torch.bfloat16).supports(spec, dtype=torch.bfloat16, block_size=128)
    assert reason is None if word is None else word in reason


def test_why_flash_attn_cannot_be_taken_at_all(monkeypatch):
    fake_packages.install(monkeypatch, "flash_attn_interface")
    for name in ("missing", "not_on_gpu"):
        monkeypatch.setattr(flash_attn_attention, name, lambda *what: None)
    capability, asked = [(9, 0)], (torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    assert flash_attn_attention.unavailable(*asked) is None
    config = ModuleType("flash_attn_config")
    config.CONFIG = {"build_flags": {"FLASHATTENTION_DISABLE_PAGEDKV": True}}
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    assert flash_attn_attention.unavailable(*asked) == "flash-attn-3 is built without PAGEDKV"
    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_with_kvcache", lambda q, cache_seqlens: None)
    assert "takes no page_table" in flash_attn_attention.unavailable(*asked)
    capability[0] = (10, 0)
    assert flash_attn_attention.unavailable(*asked).endswith("(compute capability 9.0), cuda is of capability 10.x")


@pytest.mark.parametrize(("num_tokens", "wanted"), [(64, 0), (128, 0), (129, 1), (4096, 1)])
def test_partial_sums_of_flash_attn_are_bounded(num_tokens, wanted):
    """A step with tokens enough to occupy a GPU by tiles of queries keeps a row's keys in one piece."""
    seen, heads = [], {"num_kv_heads": 8, "group_size": 4, "head_dim": 128}
    case = make_case([(num_tokens, num_tokens)], num_decode=0, dtype=torch.bfloat16, **heads)

    def attend(q, *cache, num_splits, **more):
        seen.append(num_splits)
        return q

    case.run(FlashAttention(SimpleNamespace(flash_attn_with_kvcache=attend)))
    assert seen == [wanted]


def test_equal_layers_with_other_sinks_keep_their_own_behind_the_rope(monkeypatch):
    fake_packages.install(monkeypatch, "flashinfer")

    class Recorder(ReferenceAttention):
        def run(self, *args, spec, **more):
            self.seen.append(spec.sinks_N)
            return super().run(*args, spec=spec, **more)

    behind = Recorder()
    behind.seen = []
    backend = flashinfer_rope.FlashInferRope(behind)
    case = make_case([(1, 5)], num_decode=1, dtype=torch.bfloat16, rotary_dim=64)
    for value in (1.0, 2.0):
        case.spec = dataclasses.replace(case.spec, sinks=partial(torch.full, (6,), value))
        case.run(backend)
    assert [float(sinks[0]) for sinks in behind.seen] == [1.0, 2.0]


MODULES = [flashinfer_attention, flash_attn_attention, flashinfer_rope]


@pytest.mark.parametrize("module", MODULES)
def test_without_a_gpu_there_is_a_reason_and_nothing_is_imported(module, monkeypatch):
    monkeypatch.setattr("builtins.__import__", _refuse)
    assert module.unavailable(CPU, torch.bfloat16) == "runs on a GPU, the model is on cpu"


def _refuse(name, *args, **more):
    raise AssertionError(f"{name} was imported")


def _package(folder, name, init, **files):
    for path, text in {"__init__.py": init, **files}.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)


@pytest.mark.parametrize(
    ("init", "word"),
    [
        ("import no_such_cuda_extension", "does not import: No module named 'no_such_cuda_extension'"),
        ("raise RuntimeError('Found empty meta package\\nmore')", "RuntimeError: Found empty meta package"),
        ("raise OSError('libcuda.so.1: cannot open')", "OSError: libcuda.so.1: cannot open"),
        ("__version__ = '2.7.2.post1+cu13'", "needs some-package 2.7.3 or newer, this is 2.7.2.post1+cu13"),
        ("__version__ = '2.10'", None),
    ],
)
def test_why_a_package_cannot_be_used_is_said_in_its_own_words(tmp_path, monkeypatch, init, word):
    optional_packages.missing.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_package", raising=False)
    _package(tmp_path, "some_package", init)
    reason = optional_packages.missing(("some_package",), "some-package", (2, 7, 3))
    assert reason is None if word is None else word in reason
    assert optional_packages.missing(("absent_package",), "absent-package") == "absent-package is not installed"
    sys.modules.pop("some_package", None)
    optional_packages.missing.cache_clear()
