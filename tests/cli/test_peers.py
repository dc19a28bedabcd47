"""tools/bench/peers.py: peers run in other processes, the table compares them, a peer that fails is named."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))

import peer_engines
import peers

from megatron_infer.cli import bench
from megatron_infer.cli.bench import NAMED_COLUMNS
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.config.step_work import Ceiling
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.models.loading.gguf_file import GGUFFile
from megatron_infer.utils.host import CpuClock

PEER = """
import json, sys, time
settings = json.loads(sys.argv[1])
print("loading", file=sys.stderr, flush=True)
if "{mood}" == "slow":
    time.sleep(1.0)
if "{mood}" == "no start":
    raise ModuleNotFoundError("No module named 'engine'")
print(json.dumps({{"version": "9", "start_s": 1.5}}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if work["is_warm_up"]:
        print("{{}}", flush=True)
    elif work["num_samples"] > 1:
        print(json.dumps({{"unsupported": "greedy only"}}), flush=True)
    elif "{mood}" == "dies":
        sys.exit("out of memory")
    else:
        lens = [n - ("{mood}" == "short") for n in work["output_lens"] for _ in range(work["num_samples"])]
        answers = [(ids[::-1] * 99)[:n] for ids, n in zip(work["prompts"], lens)]
        print(json.dumps({{"seconds": 2.0, "outputs": answers}}), flush=True)
"""
SHAPE = ModelShape(
    num_layers=1,
    num_attention_layers=1,
    num_query_heads=2,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=16,
    vocab_size=100,
    padded_vocab_size=100,
    max_position=None,
    kv_dtype_bytes=4,
    dtype="float32",
    num_parameters=1000,
)
SIZES = ["--num-requests", "3", "--input-len", "4:8", "--output-len", "3", "--concurrency", "2", "--rounds", "2"]


@pytest.fixture
def compare(llm, tmp_path, monkeypatch):
    """compare(mood, ...) -> exit code of `peers.py m --vs vllm ...` with a stand-in of the peer."""
    llm.engine.shape = SHAPE
    llm.engine.config = SimpleNamespace(kv_dtype_of=lambda shape: "float32", weight_dtype="auto")
    llm.engine.model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device="cpu")]))
    llm.engine.reset_prefix_cache = lambda: None
    ceiling = Ceiling(read_gb_s=10, gemm_gflop_s=100)
    monkeypatch.setattr(bench, "load_llm", lambda args: llm)
    monkeypatch.setattr(bench, "measure_ceiling", lambda *a: ceiling)
    monkeypatch.setattr(peers, "weights_for_peers", lambda *a, **k: {})
    monkeypatch.setattr(bench, "QUIET_CORES", 1000)

    def call(mood: str, *argv: str) -> int:
        (tmp_path / "peer.py").write_text(PEER.format(mood=mood))
        monkeypatch.setattr(peers, "ADAPTER", tmp_path / "peer.py")
        return peers.run(peers.parse_args(["m", "--vs", "vllm", "--peer-python", f"vllm={sys.executable}", *argv]))

    return call


def test_table_and_report_hold_every_engine(compare, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert compare("well", *SIZES, "--json", str(out)) == 0
    report = json.loads(out.read_text())
    column = report["columns"]["workload"]
    peer = column["engines"]["vllm"]
    assert peer["tok_s"] == {"median": 4.5, "min": 4.5, "max": 4.5} and len(peer["rounds"]) == 2
    assert peer["same_first_tokens"] == 3  # both answer with the prompt reversed
    assert column["ratio"]["peer"] == "vllm" and column["ratio"]["tok_s"] > 1
    assert report["engines"]["vllm"]["version"] == "9" and report["engines"]["vllm"]["start_s"] == 1.5
    table = capsys.readouterr().out
    assert "| vllm 9 |" in table and "| 3 prompts, 2 at once, 4 to 8 -> 3 | " in table and "x vllm |" in table


def test_a_peer_that_takes_long_to_load_is_named_meanwhile(compare, capsys, monkeypatch):
    monkeypatch.setattr(peers, "NEWS_S", 0.3)
    assert compare("slow", *SIZES) == 0
    err = capsys.readouterr().err
    assert re.search(r"loading vllm \.\.\.\n(still loading vllm: \d+ s\n)+vllm 9, loaded in 1\.5 s\n", err)
    assert "warming up vllm ..." in err
    monkeypatch.setattr(peers, "TIMEOUT_S", 0.1)
    with pytest.raises(InferenceError, match="vllm could not start: its process gave no answer within 0 s"):
        compare("slow", *SIZES)


def test_a_workload_that_a_peer_cannot_run_has_a_dash(compare, capsys, monkeypatch):
    monkeypatch.setitem(NAMED_COLUMNS, "rl", {**NAMED_COLUMNS["rl"], "input_len": (4, 8)})
    assert compare("well", "--columns", "rl,single", "--rounds", "1") == 0
    rl, single = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|") and " -> 128 |" in line]
    assert rl.endswith("| - |  |") and "8 samples" in rl and single.endswith("x vllm |")


@pytest.mark.parametrize(
    ("mood", "said"),
    [
        (
            "no start",
            "vllm could not start.*\n(.*\n)*ModuleNotFoundError: .*'engine'\n.*as --peer-python vllm=PATH",
        ),
        ("short", r"vllm gave answers of \[2, 2, 2\] tokens, \[3, 3, 3\]"),
    ],
)
def test_a_peer_that_fails_ends_the_benchmark_with_its_words(compare, mood, said):
    with pytest.raises(InferenceError, match=said):
        compare(mood, *SIZES)


def test_a_peer_that_dies_is_left_out_and_what_was_measured_is_shown(compare, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert compare("dies", *SIZES, "--json", str(out)) == 1
    shown, report = capsys.readouterr(), json.loads(out.read_text())
    assert re.search("vllm is left out.*could not run a workload.*\n(.*\n)*out of memory", shown.err)
    assert list(report["columns"]["workload"]["engines"]) == ["megatron_infer"]
    assert "out of memory" in report["engines"]["vllm"]["failure"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--vs", "vlm"], "unknown engine 'vlm'; there are vllm, openvino"),
        (["--vs", "vllm,vllm"], "an engine is named twice"),
        (
            ["--peer-python", "openvino=/bin/sh"],
            "--peer-python openvino=/bin/sh: expected NAME=PATH, with one of --vs vllm",
        ),
        (["--peer-python", "vllm=/nowhere"], "/nowhere is not a program"),
        (["--peer-python", "vllm"], "--peer-python vllm: expected NAME=PATH"),
        (["--columns", "16,many"], "'many' is neither a number of requests at once nor one of single, prefill, rl"),
        (["--columns", "16", "--concurrency", "4"], "--concurrency describes one workload, and --columns has its own"),
        (["--background-load", "1.5"], "--background-load is 1.5"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(compare, llm, argv, said):
    with pytest.raises(ConfigError, match=said):
        compare("well", *argv)
    assert not llm.engine.added


def test_an_interpreter_may_be_relative_or_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for typed in ("./python", "python"):
        assert peers.parse_pythons([f"vllm={typed}"], ["vllm"]) == {"vllm": str(tmp_path / "python")}


def test_an_interpreter_of_no_engine_is_refused_with_what_is_missing():
    with pytest.raises(ConfigError, match="--peer-python vllm=python: no engine is named; add --vs vllm"):
        peers.parse_pythons(["vllm=python"], [])


def test_bars_are_drawn(compare, tmp_path):
    pytest.importorskip("matplotlib")
    assert compare("well", *SIZES, "--plot", str(tmp_path / "bars.png")) == 0
    assert (tmp_path / "bars.png").read_bytes()[:4] == b"\x89PNG"


def test_background_load_uses_its_share_and_disturbs_no_run():
    with bench._background(0.5) as company:
        before = CpuClock.now(company)
        while (after := CpuClock.now(company)).own - before.own < 0.15:
            assert after.wall - before.wall < 60
            time.sleep(0.02)
    assert (after.own - before.own) / (after.wall - before.wall) < 0.7


def test_adapter_keeps_a_number_of_requests_in_flight_and_the_order_of_the_prompts():
    running, most = {}, 0

    def step():
        nonlocal most
        most = max(most, len(running))
        ended = max(running)  # the last one ends first
        return {ended: running.pop(ended)}

    work = {"prompts": ["a", "b", "c", "d"], "concurrency": 3}
    found = peer_engines.keep_in_flight(work, lambda i: running.update({i: work["prompts"][i]}), step)
    assert found == ["a", "b", "c", "d"] and most == 3


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0), ("bfloat16", 0.01), ("Q8_0", 0.01), ("Q4_0", 0.3)])
def test_gguf_for_llama_cpp_has_the_same_weights_and_metadata(tmp_path, dtype, error):
    import gguf

    source, target = tmp_path / "a.gguf", tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_context_length(64)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 1])
    matrix = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    eight = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", eight, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", matrix[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    peers.write_gguf(source, target, dtype)
    before, after = GGUFFile(source), GGUFFile(target)
    changed = ("general.file_type", "general.quantization_version")
    kept = {key: value for key, value in before.metadata.items() if key not in changed}
    assert {key: after.metadata[key] for key in kept} == kept
    wanted = before.read("output.weight")
    np.testing.assert_allclose(after.read("output.weight"), wanted, rtol=0, atol=error)
    assert (after.read("output_norm.weight") == matrix[0]).all()
    if dtype.startswith("Q"):
        assert after.tensors["output.weight"].type_id == gguf.GGMLQuantizationType[dtype]
    else:
        assert Path(target).stat().st_size > Path(source).stat().st_size


@pytest.mark.long
def test_transformers_drafts_by_lookup_and_by_an_assistant(tmp_path):
    """Peers that draft answer as the one that does not; the assistant is another model of the same vocabulary."""
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    for seed, name in enumerate(("model", "assistant")):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(**shape, num_hidden_layers=2 - seed, initializer_range=0.3)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    settings = {"model": str(tmp_path / "model"), "dtype": "float32", "device": "cpu", "threads": 1}
    work = {"prompts": [[1, 2, 3, 1, 2], [9, 8, 7]], "output_lens": [12, 9], "concurrency": 1, "num_samples": 1}
    answers, calls = {}, {}
    for name, more in (
        ("transformers", {}),
        ("transformers-lookup", {}),
        ("transformers-assisted", {}),
        ("transformers-assisted", {"assistant": str(tmp_path / "assistant")}),
    ):
        peer = peer_engines.ENGINES[name](settings | more)
        peer.warm_up(work)
        count = []
        peer.model.register_forward_hook(lambda *_, count=count: count.append(1))
        answers[name, len(more)] = peer.run(work)
        calls[name, len(more)] = len(count)
        if name != "transformers":
            with pytest.raises(peer_engines.Unsupported, match="one prompt at a time"):
                peer.run(work | {"concurrency": 2})
    first, *others = answers.values()
    assert [len(answer) for answer in first] == [12, 9] and all(one == first for one in others)
    assert calls["transformers-assisted", 0] < calls["transformers", 0] == 21  # a model agrees with itself
    assert set(peer_engines.ENGINES) == set(peers.PEERS)


@pytest.mark.long
def test_transformers_in_a_process_of_its_own_gives_the_same_first_tokens(tmp_path, capsys):
    out = tmp_path / "bench.json"
    argv = ["--vs", "transformers", "--rounds", "1", "--dtype", "float32", "--json", str(out)]
    sizes = ["--num-requests", "4", "--concurrency", "2", "--input-len", "8:16", "--output-len", "4"]
    assert peers.run(peers.parse_args(["smollm2", *sizes, *argv, "--buffer-size-gb", "0.2", "--threads", "1"])) == 0
    column = json.loads(out.read_text())["columns"]["workload"]
    assert column["engines"]["transformers"]["same_first_tokens"] == 4
    assert column["ratio"]["peer"] == "transformers"
    assert "| 4 prompts, 2 at once, 8 to 16 -> 4 | " in capsys.readouterr().out
