"""`bench-serve` measures what the server did, under open, closed and replayed loads; mistakes are reported first."""

from __future__ import annotations

import json
import re
import sys

import pytest
from server_case import post, raw_stream, serving, stream, wait_for

from megatron_infer.cli import bench_serve
from megatron_infer.cli.load_generator import CallResult, LoadCall, LoadResult, run_load
from megatron_infer.cli.main import main
from megatron_infer.testing.echo import EchoEngine

QUICK = ("--input-len", "4:40", "--output-len", "3:9", "--token-range", "1:90")


def bench(capsys, tmp_path, url, *argv):
    """(exit code, report, what it printed)."""
    path = tmp_path / "report.json"
    code = main(["bench-serve", url, *argv, "--json", str(path)])
    return code, json.loads(path.read_text()), capsys.readouterr().out


@pytest.fixture(scope="module")
def server():
    with serving(EchoEngine(step_s=0.002)) as case:
        yield case


def scraped(case, name):
    text = case.http.get("/metrics").text
    return float(re.search(rf"^megatron_infer_{name} (\S+)$", text, re.MULTILINE)[1])


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_closed_loop_counts_what_the_server_counts(server, capsys, tmp_path, endpoint):
    before = scraped(server, "output_tokens_total")
    argv = ("--num-requests", "12", "--concurrency", "3", "--endpoint", endpoint)
    code, report, shown = bench(capsys, tmp_path, server.url, *argv, *QUICK)
    assert code == 0 and report["codes"] == {"200": 12} and report["model"] == "tiny"
    assert report["output_tokens"] == scraped(server, "output_tokens_total") - before
    assert 12 * 3 <= report["output_tokens"] <= 12 * 9
    latency = report["latency"]
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        values = latency[name]
        assert 0 < values["p50"] <= values["p90"] <= values["p99"] <= values["max"]
    assert latency["ttft_ms"]["mean"] < latency["e2e_ms"]["mean"]
    assert report["output_tokens_per_s"] == pytest.approx(report["output_tokens"] / report["seconds"])
    assert "first token" in shown and "200: 12" in shown and "3 at once" in shown


def test_open_loop_sends_at_its_times_whatever_comes_back(server):
    calls = [call(server, max_tokens=40, at=0.03 * i) for i in range(8)]
    load = run_load(server.url, calls, concurrency=None)
    assert [one.code for one in load.results] == ["200"] * 8
    assert all(one.sent >= 0.03 * i for i, one in enumerate(load.results))
    assert load.results[1].sent < load.results[0].ended, "it does not wait for answers"


def call(case, *, max_tokens, at=None, **fields):
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True, **fields}
    return LoadCall(path="/v1/completions", body=body, at=at)


def test_poisson_times_have_the_asked_rate(server, tmp_path):
    args = parsed(server.url, "--rate", "50", "--num-requests", "400", *QUICK)
    calls, _ = bench_serve.calls_of(args, "tiny")
    times = [one.at for one in calls]
    assert times == sorted(times) and 400 / times[-1] == pytest.approx(50, rel=0.2)
    again, _ = bench_serve.calls_of(args, "tiny")
    assert again == calls, "the same seed asks the same"


def parsed(*argv):
    import argparse

    parser = argparse.ArgumentParser()
    bench_serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench-serve", *argv])


def test_failures_are_counted_by_code_and_fail_the_command(capsys, tmp_path):
    with serving(EchoEngine(max_requests=1, step_s=0.01), max_queue=1) as case:
        argv = ("--num-requests", "8", "--concurrency", "8", "--input-len", "4", "--output-len", "30")
        code, report, shown = bench(capsys, tmp_path, case.url, *argv, "--token-range", "1:90")
    assert code == 1 and set(report["codes"]) == {"200", "429"} and sum(report["codes"].values()) == 8
    assert "429: " in shown and "max_queue" in report["messages"]["429"]


def test_lengths_of_conversations_spread_and_prompts_come_from_a_file(server, tmp_path):
    _, work = bench_serve.calls_of(parsed(server.url, "--sharegpt", "--num-requests", "300"), "tiny")
    sizes = sorted(map(len, work.prompts))
    assert sizes[0] < 30 < sizes[150] < 150 < sizes[-1] <= 1024
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b"}\n{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}\n')
    calls, _ = bench_serve.calls_of(parsed(server.url, "--prompts", str(path), "--num-requests", "3"), "tiny")
    assert [one.path for one in calls] == ["/v1/completions", "/v1/chat/completions", "/v1/completions"]
    assert calls[1].body["max_tokens"] == 3
    load = run_load(server.url, calls, concurrency=1)
    assert [one.code for one in load.results] == ["200"] * 3


def test_recorded_calls_are_replayed_at_their_times_with_their_disconnects(capsys, tmp_path):
    path = tmp_path / "calls.jsonl"
    engine = EchoEngine(step_s=0.005)
    with serving(engine, record=str(path)) as case:
        assert stream(case, "/v1/completions", model="tiny", prompt=[1, 2, 3], max_tokens=7)
        assert post(case, "/v1/completions", model="tiny", prompt=[4] * 9, max_tokens=5).status_code == 200
        leaver = raw_stream(case, "/v1/completions", model="tiny", prompt=[5] * 20, max_tokens=3000)
        leaver.recv(4000)
        leaver.close()
        wait_for(lambda: len(path.read_text().splitlines()) == 3)
    with serving(engine) as case:
        code, report, _ = bench(capsys, tmp_path, case.url, "--replay", str(path), "--speed", "2")
        wait_for(lambda: scraped(case, "requests_in_flight") == 0)
    assert code == 0 and report["codes"] == {"200": 2, "left": 1} and report["load"] == "as recorded"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    args = parsed("http://x", "--replay", str(path), "--speed", "2")
    calls, _ = bench_serve.calls_of(args, "tiny")
    ordered = sorted(lines, key=lambda line: line["at"])
    assert [one.at for one in calls] == pytest.approx([(line["at"] - ordered[0]["at"]) / 2 for line in ordered])
    assert [one.leave_after is not None for one in calls] == [not line["complete"] for line in ordered]


def test_percentiles_are_those_of_completed_calls():
    answers = [
        CallResult(sent=1.0, ended=3.0, code="200", token_times=[1.5, 2.0, 3.0], num_prompt=4, num_output=3),
        CallResult(sent=0.0, ended=9.0, code="in_stream", message="it failed", token_times=[8.0], num_output=1),
    ]
    report = bench_serve.summarize(LoadResult(seconds=10.0, results=answers))
    latency = report["latency"]
    assert latency["ttft_ms"]["max"] == 500 and latency["e2e_ms"]["p50"] == 2000
    assert (latency["itl_ms"]["mean"], latency["tpot_ms"]["mean"]) == (750, 750)
    assert report["output_tokens_per_s"] == 0.4 and report["requests_per_s"] == 0.1
    assert report["codes"] == {"200": 1, "in_stream": 1} and report["messages"] == {"in_stream": "it failed"}


def test_offline_engine_does_the_same_work_in_alternate_rounds(server, capsys, tmp_path, monkeypatch):
    done = []

    class Offline:
        other_load = 0.5

        def __init__(self, name, workload):
            self.name, self.workload = name, workload

        def rate(self):
            done.append((self.name, self.workload))
            return 1e6 * len(done)

    monkeypatch.setattr(bench_serve, "_Offline", Offline)
    argv = ("--num-requests", "4", *QUICK, "--rounds", "3", "--compare-offline", "tiny")
    code, report, shown = bench(capsys, tmp_path, server.url, *argv)
    assert code == 0 and [name for name, _ in done] == ["tiny"] * 3
    (work,) = {id(work): work for _, work in done}.values()
    assert work.num_output_tokens == report["output_tokens"] and work.num_input_tokens == report["prompt_tokens"]
    assert report["offline"]["output_tokens_per_s"] == 2e6
    assert report["offline"]["share"] == pytest.approx(sorted(report["rounds"])[1] / 2e6)
    assert "the server reaches 0." in shown and "other processes used 0.5 cores" in shown


def test_mistakes_are_reported_before_anything_is_sent(capsys, tmp_path, monkeypatch):
    def misuse(*argv):
        code = main(["bench-serve", *argv])
        return code, capsys.readouterr().err

    assert misuse("127.0.0.1:8000") == (2, misuse("127.0.0.1:8000")[1]) and "http://HOST" in misuse("127.0.0.1:8000")[1]
    code, text = misuse("http://127.0.0.1:9")
    assert code == 1 and "no server at http://127.0.0.1:9" in text
    code, text = misuse("http://127.0.0.1:9", "--json", str(tmp_path / "no" / "x.json"))
    assert code == 2 and "no such folder" in text
    code, text = misuse("http://127.0.0.1:9", "--compare-offline", "smollm2", "--rate", "3")
    assert code == 2 and "--compare-offline needs" in text
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, text = misuse("http://127.0.0.1:9", "--plot", "x.png")
    assert code == 2 and "pip install matplotlib" in text


def test_plot_is_a_picture(server, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.png"
    argv = ("--num-requests", "6", "--concurrency", "2", *QUICK, "--plot", str(path))
    assert bench(capsys, tmp_path, server.url, *argv)[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
