"""FlashInfer's rotation behind our seam, on a stand-in of it: indices, padding, layouts."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial

import fake_packages
import paged_case
import pytest
import torch

from megatron_infer.kernels import flashinfer_rope, optional_packages
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


@pytest.fixture
def make(monkeypatch):
    """Makes a new backend."""
    fake_packages.install(monkeypatch)
    return lambda: flashinfer_rope.FlashInferRope(TorchPagedAttention())


@pytest.mark.few
@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize(("num_decode", "rows"), [(4, MIXED), (2, MIXED[:2]), (0, MIXED[4:])])
def test_ragged_steps_match_the_reference(make, window, num_decode, rows):
    backend = make()
    case = make_case(rows, num_decode=num_decode, dtype=torch.bfloat16, window=window, rotary_dim=64)
    assert backend.supports(case.spec, dtype=torch.bfloat16, block_size=16) is None
    paged_case.check_case(backend, case)


@pytest.mark.few
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


def test_flashinfer_before_the_version_whose_source_was_read_is_refused(monkeypatch):
    fake_packages.install(monkeypatch)
    monkeypatch.setattr(flashinfer_rope, "not_on_gpu", lambda device: None)
    monkeypatch.setattr(flashinfer_rope, "no_compiler", lambda: None)
    monkeypatch.setattr(flashinfer_rope, "missing", optional_packages.missing.__wrapped__)  # without its cache
    monkeypatch.setattr(sys.modules["flashinfer"], "__version__", "0.7.1", raising=False)
    reason = "needs flashinfer-python 0.7.2 or newer, this is 0.7.1"
    assert flashinfer_rope.unavailable(CPU, torch.bfloat16) == reason


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
    asked = {"dtype": torch.bfloat16, "block_size": 16}
    assert backend.supports(dataclasses.replace(spec, head_dim=80), **asked) is None, "nothing to rotate"
    assert "rotary dims in sixteens" in backend.supports(dataclasses.replace(spec, rotary_dim=20), **asked)
    spec = dataclasses.replace(spec, rotary_dim=32)
    assert "float16 or bfloat16" in backend.supports(spec, dtype=torch.float32, block_size=16)
    assert "head_dim" in backend.supports(dataclasses.replace(spec, head_dim=260), **asked)


def test_equal_layers_with_other_sinks_keep_their_own_behind_the_rope(monkeypatch):
    fake_packages.install(monkeypatch)

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


def test_without_a_gpu_there_is_a_reason_and_nothing_is_imported(monkeypatch):
    monkeypatch.setattr("builtins.__import__", _refuse)
    assert flashinfer_rope.unavailable(CPU, torch.bfloat16) == "runs on a GPU, the model is on cpu"


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
