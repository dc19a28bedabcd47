"""bench: the workload has the requested lengths, and its figures are right."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from megatron_infer.cli import bench
from megatron_infer.cli.bench import (
    RunResult,
    Workload,
    latency_summary,
    make_workload,
    measure_ceiling,
    parse_range,
    percentile,
    render_suspensions,
    summarize_suspensions,
)
from megatron_infer.config.model_shape import ModelShape, StateShape
from megatron_infer.config.step_work import Ceiling, WorkloadWork, least_work
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.scheduler.drafts import SpecDecodeMetrics
from megatron_infer.utils.host import CpuClock

SHAPE = ModelShape(
    num_layers=2,
    num_attention_layers=2,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=32,
    vocab_size=100,
    padded_vocab_size=128,
    max_position=None,
    kv_dtype_bytes=2,
    dtype="bfloat16",
    num_parameters=10_000,
)


def workload(**changes) -> Workload:
    settings = {
        "num_requests": 6,
        "input_len": (4, 9),
        "output_len": (2, 5),
        "concurrency": 3,
        "token_ids": range(1, 50),
        "seed": 1,
    }
    return make_workload(**{**settings, **changes})


def least(shape: ModelShape, load: Workload, **options) -> WorkloadWork:
    """The least work of a workload."""
    counts = {"concurrency": load.concurrency, "num_samples": load.num_samples}
    return least_work(shape, list(map(len, load.prompts)), load.output_lens, **counts, **options)


def test_ranges_are_inclusive_and_wrong_ones_refused():
    assert parse_range("64:256") == (64, 256) and parse_range("128") == (128, 128)
    for text in ("0:4", "5:4", "x", "1:y", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            parse_range(text)


def test_workload_is_the_same_for_a_seed_and_keeps_to_its_ranges():
    one = workload(num_requests=200)
    assert one == workload(num_requests=200) != workload(num_requests=200, seed=2)
    assert {len(p) for p in one.prompts} == set(range(4, 10)) and set(one.output_lens) == {2, 3, 4, 5}
    assert {t for p in one.prompts for t in p} <= set(range(1, 50))


def test_shared_prefix_is_shared_and_never_the_whole_prompt():
    prompts = workload(shared_prefix=6).prompts
    assert len({tuple(p[:6]) for p in prompts}) == 1
    assert all(len(p) > 6 for p in prompts)


def test_percentiles_are_linear_between_neighbours():
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, p) for p in (0, 50, 90, 100)] == pytest.approx([1.0, 2.5, 3.7, 4.0])


def test_latencies_are_those_of_the_token_times():
    result = RunResult(seconds=3, arrivals=[1.0, 1.0], token_times=[[1.5, 1.6, 2.0], [2.0]])
    summary = latency_summary(result)
    assert summary["ttft_ms"]["mean"] == pytest.approx(750)
    assert summary["itl_ms"]["p50"] == pytest.approx(250)
    assert summary["tpot_ms"]["p99"] == pytest.approx(250)


def test_engine_run_holds_at_most_concurrency_requests_and_samples_all_tokens(llm):
    most, engine, step = 0, llm.engine, llm.engine.step

    def counting_step():
        nonlocal most
        most = max(most, len(engine.live))
        return step()

    engine.step = counting_step
    load = workload()
    result = bench.run_engine(engine, load)
    assert most == 3
    assert [len(tokens) for tokens in result.outputs] == load.output_lens
    assert [len(times) for times in result.token_times] == load.output_lens
    assert result.details["steps"] == engine.num_steps


def test_a_failed_request_ends_the_benchmark_with_its_error(llm):
    load = workload()
    llm.engine.fail = {bytes(load.prompts[2])}
    with pytest.raises(InferenceError, match="forward raised"):
        bench.run_engine(llm.engine, load)


def test_a_model_without_tokenizer_is_measured_with_any_of_its_ids(llm):
    llm.engine.shape = SHAPE
    assert bench._plain_ids(llm) == list(range(1, 100))  # the fake tokenizer's special id is 0
    llm.tokenizer = None
    assert bench._plain_ids(llm) == list(range(100))


def test_least_work_counts_recurrent_states():
    """States are read and written per decoded token, written per prompt; 5 operations per entry and token."""
    load = Workload(prompts=[[1] * 3, [1] * 5], output_lens=[4, 2], concurrency=2)
    state = StateShape(
        num_layers=3, conv_shape=(24, 4), ssm_shape=(2, 4, 8), conv_dtype="bfloat16", ssm_dtype="float32"
    )
    plain, work = (least(dataclasses.replace(SHAPE, state=state), load) for state in (None, state))
    assert work.prefill_flops - plain.prefill_flops == 5 * 3 * (2 * 4 * 8) * 8
    assert work.decode_flops - plain.decode_flops == 5 * 3 * (2 * 4 * 8) * 4
    slot = 3 * 24 * 4 * 2 + 3 * 2 * 4 * 8 * 4
    assert work.prefill_bytes - plain.prefill_bytes == 2 * slot
    assert work.decode_bytes - plain.decode_bytes == 2 * 4 * slot


def test_least_work_is_the_sum_over_tokens_and_keys():
    load = Workload(prompts=[[1] * 3, [1] * 5], output_lens=[4, 2], concurrency=2)
    work = least(SHAPE, load)
    projection, per_key = 128 * 32, 4 * 2 * 4 * 8
    prefill = decode = keys_read = 0
    for prompt, out in ((3, 4), (5, 2)):
        for position in range(prompt + out - 1):  # the last token is sampled, never computed
            draws = position >= prompt - 1
            flops = 2 * (10_000 - (0 if draws else projection)) + per_key * (position + 1)
            if position < prompt:
                prefill += flops
            else:
                decode += flops
                keys_read += position + 1
    assert (work.prefill_flops, work.decode_flops) == (prefill, decode)
    kv_token = 2 * 2 * 2 * 8 * 2
    assert work.decode_bytes == 2 * 20_000 + kv_token * keys_read  # 4 decoded tokens, 2 at once: 2 steps
    assert least(SHAPE, load, kv_dtype_bytes=1).decode_bytes == 2 * 20_000 + kv_token // 2 * keys_read
    for weight_dtype, num_bytes in (("int8", 10_625), ("int4", 6_250 + projection * 14 // 32)):
        rounded = least(SHAPE, load, weight_dtype=weight_dtype)
        assert work.decode_bytes - rounded.decode_bytes == 2 * (20_000 - num_bytes)
    assert work.prefill_bytes == 20_000 + kv_token * 8


def test_bound_takes_the_scarcer_resource_of_each_phase():
    work = WorkloadWork(prefill_flops=4e9, decode_flops=1e9, prefill_bytes=1e9, decode_bytes=6e9)
    assert work.best_seconds(Ceiling(read_gb_s=2.0, gemm_gflop_s=1.0)) == pytest.approx(4 + 3)


def test_ceiling_is_measured_on_this_machine():
    ceiling = measure_ceiling("float32", "cpu", megabytes=16, size=128)
    assert 0.1 < ceiling.read_gb_s < 10_000 and 0.1 < ceiling.gemm_gflop_s < 1e6


def test_least_work_of_samples_shares_the_prefill():
    one = Workload(prompts=[[1] * 3, [1] * 5], output_lens=[4, 2], concurrency=2)
    apart, shared = least(SHAPE, one), least(SHAPE, dataclasses.replace(one, num_samples=3))
    assert shared.prefill_flops == apart.prefill_flops and shared.prefill_bytes == apart.prefill_bytes
    assert shared.decode_flops == 3 * apart.decode_flops
    weights = 2 * 2 * 10_000  # 4 tokens at 2 rows, or 12 at 6: 2 steps
    assert shared.decode_bytes - weights == 3 * (apart.decode_bytes - weights)


def test_rounds_are_interleaved_and_engines_take_turns_to_be_first():
    order = []

    def runner(name):
        return lambda load: order.append(name) or RunResult(seconds=1)

    runners = {name: runner(name) for name in "abc"} | {"cannot": lambda load: None}
    results = bench.interleave(runners, workload(), 4)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert {name: len(r) for name, r in results.items()} == {"a": 4, "b": 4, "c": 4}


def test_disturbed_runs_are_repeated_and_the_quieter_one_counts():
    loads = {"ours": iter([0.5, 0.02, 0.0]), "peer": iter([0.9, 0.8, 0.7, 0.6])}

    def runner(name):
        return lambda load: RunResult(seconds=1, other_load=next(loads[name]))

    results = bench.interleave({name: runner(name) for name in loads}, workload(), 2)
    assert [r.other_load for r in results["ours"]] == [0.02, 0.0]
    assert [r.other_load for r in results["peer"]] == [0.7, 0.6]  # two repeats for two rounds


def test_run_too_short_for_the_clock_tells_nothing_of_others():
    start = CpuClock(wall=0.0, own=0.0, cores=0.0)
    assert CpuClock(wall=0.001, own=0.0, cores=0.01).other_load(start) is None
    assert CpuClock(wall=2.0, own=0.5, cores=1.5).other_load(start) == 0.5
    assert CpuClock(wall=2.0, own=0.5, cores=None).other_load(start) is None


def test_ratio_is_against_the_better_peer():
    def figures(median, low, high):
        return {"tok_s": {"median": median, "min": low, "max": high}}

    engines = {bench.OURS: figures(200, 180, 210), "slow": figures(50, 50, 50), "fast": figures(80, 70, 90)}
    assert bench.ratio(engines) == {"peer": "fast", "tok_s": 2.5, "worst_case": 2.0}
    assert bench.ratio({bench.OURS: figures(1, 1, 1)}) is None


def test_samples_of_a_prompt_are_counted_and_held_apart(llm):
    load = workload(num_samples=3)
    result = bench.run_engine(llm.engine, load)
    assert [len(tokens) for tokens in result.outputs] == [n for n in load.output_lens for _ in range(3)]
    assert sum(map(len, result.outputs)) == load.num_output_tokens == sum(map(len, result.token_times))
    assert {(r.params.n, r.params.temperature, r.params.logprobs) for r in llm.engine.added} == {(3, 1.0, 0)}


def test_prompts_are_counted_where_answers_have_one_token():
    load = workload(**bench.column("prefill"))
    assert load.num_counted_tokens == 4096 and load.concurrency == 4
    load = workload(**bench.column("64"))
    assert len(load.prompts) == load.concurrency == 64 and load.num_counted_tokens == load.num_output_tokens


def test_cores_used_by_processes_of_the_engine_are_not_others():
    spin = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\ninput()"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen([sys.executable, "-c", child, spin], stdin=subprocess.PIPE) as process:
        try:
            both, alone = CpuClock.now([process.pid]), CpuClock.now()
            while (used := CpuClock.now([process.pid])).own - both.own < 0.35:
                assert used.wall - both.wall < 60
                time.sleep(0.02)
            without = CpuClock.now()
        finally:
            process.stdin.close()
    seen = without.other_load(alone) * (without.wall - alone.wall)
    assert seen - used.other_load(both) * (used.wall - both.wall) == pytest.approx(0.4, abs=0.25)


@pytest.fixture
def bench_llm(llm):
    weight = SimpleNamespace(device="cpu")
    forgotten = []
    llm.engine.shape = SHAPE
    llm.engine.config = SimpleNamespace(kv_dtype_of=lambda shape: "bfloat16", weight_dtype="int8")
    llm.engine.model = SimpleNamespace(parameters=lambda: iter([weight]))
    llm.engine.reset_prefix_cache = lambda: forgotten.append(True)
    llm.forgotten = forgotten
    return llm


def test_report_holds_every_figure_and_is_printed(command, bench_llm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_ceiling", lambda *a: Ceiling(read_gb_s=10, gemm_gflop_s=100))
    out = tmp_path / "out.json"
    argv = ["--num-requests", "3", "--input-len", "4:8", "--output-len", "3", "--concurrency", "1", "--rounds", "2"]
    assert command("bench", "m", *argv, "--json", str(out)) == 0
    report = json.loads(out.read_text())
    column = report["columns"]["workload"]
    ours = column["engines"][bench.OURS]
    assert ours["details"]["steps"] == 9 and set(ours["latency"]) == {"ttft_ms", "itl_ms", "tpot_ms"}
    assert ours["single_stream_decode_tok_s"] > 0
    assert ours["shares"]["bound"] == pytest.approx(column["least_work"]["best_seconds"] / ours["seconds"]["median"])
    assert column["ratio"] is None and report["ceiling"] == {"read_gb_s": 10, "gemm_gflop_s": 100}
    assert len(bench_llm.forgotten) == 2  # no round finds an earlier round's cache
    text = capsys.readouterr().out
    for part in ("tok/s (min..max)", "TTFT ms", "p99", "steps 9", "single-stream decode", "GB/s"):
        assert part in text


def test_speculation_is_measured_against_the_same_engine_without(command, bench_llm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_ceiling", lambda *a: Ceiling(read_gb_s=10, gemm_gflop_s=100))
    bench_llm.engine.drafts = SpecDecodeMetrics()
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "copy this"}\n{"token_ids": [5, 6, 7]}\n')
    argv = ["--prompts-file", str(prompts), "--output-len", "3", "--rounds", "1", "--json", str(out)]
    assert command("bench", "m", "--speculative", "ngram", "--vs", "off", *argv) == 0
    report = json.loads(out.read_text())
    column = report["columns"]["workload"]
    assert set(column["engines"]) == set(report["engines"]) == {bench.OURS, "off"}
    assert column["ratio"]["peer"] == "off" and report["settings"]["sizes"]["workload"]["num_requests"] == 2
    assert column["speculation"]["accepted_per_position"] == [2, 0]
    assert column["speculation"]["tokens_per_verification"] == 2.0
    assert "drafts: 2 of 3 kept, by position 100% 0%; 2.0 tokens a verification" in capsys.readouterr().out
    added = [one for one in bench_llm.engine.added if one.ids == [5, 6, 7]]
    assert added[-1].params.max_tokens == 3
    assert column["speculation"]["synthetic_acceptance_rate"] is None
    synthetic = ["--speculative", "ngram", "--synthetic-acceptance-rate", "0.75", *argv]
    assert command("bench", "m", *synthetic) == 0
    assert json.loads(out.read_text())["columns"]["workload"]["speculation"]["synthetic_acceptance_rate"] == 0.75
    assert "SYNTHETIC: drafts kept at rate 0.75, tokens mean nothing; drafts: 2 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "argv", "message"),
    [
        ("", ["--vs", "off"], "--vs off is this engine without --speculative, which is not given"),
        ("", ["--columns", "16"], "--columns is of random prompts"),
        ('{"prompt": "a", "top_p": 0.5}', [], "prompts.jsonl:1: answers are greedy and of one length; leave top_p out"),
        ('{"prompts": "a"}', [], "prompts.jsonl:1: unknown field"),
        ("", [], "has no prompts"),
    ],
)
def test_wrong_prompts_of_a_benchmark_are_refused(command, bench_llm, tmp_path, line, argv, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(line)
    with pytest.raises(ConfigError, match=message):
        command("bench", "m", "--prompts-file", str(prompts), *argv)


class SuspendingEngine:
    """Adds suspend and resume to an engine without them, and records when they are called."""

    def __init__(self, engine):
        self._engine, self.calls = engine, []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def _report(self, command, milliseconds):
        self.calls.append((command, self.num_steps, len(self.live)))
        tags = {"kv_cache": {"bytes_freed": 3 << 20, "bytes_copied": 1 << 20, "bytes_resident": 2 << 20}}
        values = {"command": command, "mode": "offload", "seconds": milliseconds / 1e3, "num_requests": 2, "tags": tags}
        return SimpleNamespace(to_dict=lambda: values)

    def suspend(self):
        return self._report("suspend", 2 * len(self.calls))

    def resume(self):
        return self._report("resume", 4)


def test_suspend_every_measures_the_cycle_on_live_requests(llm):
    engine = SuspendingEngine(llm.engine)
    plain = bench.run_engine(engine, workload())
    assert not engine.calls and not plain.suspensions
    result = bench.run_engine(engine, workload(), suspend_every=3)
    assert [command for command, *_ in engine.calls[:4]] == ["suspend", "resume"] * 2
    assert all(step % 3 == 0 and live for _, step, live in engine.calls)
    assert len({step for _, step, _ in engine.calls}) * 2 == len(engine.calls) == len(result.suspensions)
    summary = summarize_suspensions([result], [plain], every=3)
    assert summary["tokens_identical"] and summary["cycles"] == len(engine.calls) // 2
    assert summary["commands"]["suspend"]["tags"]["kv_cache"]["bytes_freed"] == 3 << 20
    text = "\n".join(render_suspensions(summary))
    assert "identical to" in text and "kv_cache" in text and "3.0 MiB" in text
    plain.outputs[0][0] += 1
    summary = summarize_suspensions([result], [plain], every=3)
    assert "DIFFERENT from" in render_suspensions(summary)[0]
    none = summarize_suspensions([plain], [plain], every=300)
    assert "ended before step 300" in render_suspensions(none)[0]


def test_a_report_that_cannot_be_written_is_reported_first(command, bench_llm, tmp_path):
    with pytest.raises(InferenceError, match="cannot be written"):
        command("bench", "m", "--json", str(tmp_path / "no" / "out.json"))
    assert not bench_llm.engine.added
