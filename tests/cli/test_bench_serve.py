"""`bench-serve` prints commands that load the server, and replays what a server has recorded."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from echo import EchoEngine
from server_case import post, raw_stream, serving, stream, wait_for

from megatron_infer.cli import bench_serve
from megatron_infer.cli.main import main

sys.path.append(str(Path(__file__).parents[2] / "tools" / "clients"))

import guidellm_load
import vllm_bench


@pytest.fixture(scope="module")
def server():
    with serving(EchoEngine(step_s=0.002)) as case:
        yield case


def parsed(*argv):
    parser = argparse.ArgumentParser()
    bench_serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench-serve", *argv])


def recorded(path="/v1/completions", *, at=0.0, complete=True, seconds=1.0, **body):
    usage = {"include_usage": True}
    body = {"model": "tiny", "prompt": [1, 2, 3], "stream": True, "stream_options": usage, **body}
    return {"at": at, "path": path, "body": body, "seconds": seconds, "first_s": 0.1, "complete": complete}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def replayed(capsys, tmp_path, url, *argv):
    """(exit code, report, what it printed)."""
    report = tmp_path / "report.json"
    code = main(["bench-serve", url, *argv, "--json", str(report)])
    return code, json.loads(report.read_text()), capsys.readouterr().out


def test_printed_commands_name_the_server_its_model_and_what_is_asked(server, capsys):
    assert main(["bench-serve", server.url, "--endpoint", "chat", "--rate", "8", "--num-requests", "100"]) == 0
    guidellm, vllm = map(shlex.split, capsys.readouterr().out.splitlines()[:2])
    assert guidellm[:2] == ["guidellm", "run"] and f"target={server.url},request_format=/v1/chat" in guidellm[3]
    assert "kind=poisson,rate=8" in guidellm and "kind=max_requests,count=100" in guidellm
    assert vllm[:3] == ["vllm", "bench", "serve"]
    pairs = {("--model", "tiny"), ("--request-rate", "8"), ("--num-prompts", "100"), ("--backend", "openai-chat")}
    assert pairs <= set(zip(vllm, vllm[1:], strict=False))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_printed_commands_are_those_that_are_run_against_a_server(endpoint):
    """tools/clients has both tools' clients; `test_recorded_clients.py` runs them where the tools are installed."""
    sizes = {"--num-requests": guidellm_load.NUM_REQUESTS, "--output-len": guidellm_load.NUM_TOKENS, "--input-len": 64}
    typed = [str(word) for pair in sizes.items() for word in pair]
    typed += ["--concurrency", "4", "--endpoint", endpoint, "--tokenizer", "T"]
    args = argparse.Namespace(**bench_serve.LOAD | vars(parsed("http://h:1", *typed)))
    backend, path = bench_serve.ENDPOINTS[endpoint]
    assert bench_serve.guidellm_options(args) == guidellm_load.options("http://h:1", "T", path, 4)
    assert guidellm_load.RAN and vllm_bench.RAN  # rows of docs/clients.md
    assert bench_serve.vllm_options(args, "m") == vllm_bench.options("http://h:1", "T", "m", backend, path, 4)


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
        code, report, shown = replayed(capsys, tmp_path, case.url, "--replay", str(path), "--speed", "2")
        in_flight = r"^megatron_infer_requests_in_flight 0(\.0)?$"
        wait_for(lambda: re.search(in_flight, case.http.get("/metrics").text, re.MULTILINE))
    assert code == 0 and report["codes"] == {"200": 2, "left": 1} and "200: 2" in shown
    latency = report["latency"]
    assert 0 < latency["ttft_ms"]["p50"] <= latency["ttft_ms"]["p99"] and set(latency) > {"itl_ms", "e2e_ms"}
    lines = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["at"])
    calls = bench_serve.recorded_calls(str(path), speed=2.0, model="other")
    assert [one.at for one in calls] == pytest.approx([line["at"] / 2 for line in lines])
    assert [one.leave_after is not None for one in calls] == [not line["complete"] for line in lines]
    assert {one.body["model"] for one in calls} == {"other"}


def test_time_per_token_counts_the_tokens_of_a_piece():
    usage = {"completion_tokens": 10}
    answer = bench_serve.Answer(sent=0.0, late=0.0, ended=1.0, code="200", token_times=[0.1, 1.0], usage=usage)
    latency = bench_serve.summarize([answer])["latency"]
    assert latency["tpot_ms"]["p50"] == pytest.approx(100) and latency["itl_ms"]["p50"] == pytest.approx(900)


def test_recording_may_have_blank_lines_and_any_separator_within_a_text(tmp_path):
    line = json.dumps(recorded(prompt="a\u2028b"), ensure_ascii=False)
    path = tmp_path / "calls.jsonl"
    path.write_text(f"\n{line}\n\n", encoding="utf-8")
    (call,) = bench_serve.recorded_calls(str(path), speed=1.0, model=None)
    assert call.body["prompt"] == "a\u2028b"


@pytest.mark.parametrize("words", [["--json", "out.json"], ["--speed", "2"]])
def test_options_of_a_replay_are_refused_without_one(server, words, capsys):
    assert main(["bench-serve", server.url, *words]) == 2
    assert "are of --replay FILE" in capsys.readouterr().err


def test_calls_are_sent_at_their_times_whatever_comes_back(server, tmp_path):
    path = write(tmp_path / "calls.jsonl", *(recorded(at=5 + 0.03 * i, max_tokens=40) for i in reversed(range(8))))
    answers = bench_serve.replay(server.url, bench_serve.recorded_calls(path, speed=1.0, model=None))
    assert [one.code for one in answers] == ["200"] * 8
    assert {one.num_output for one in answers} == {40}
    assert all(one.sent >= 0.03 * i for i, one in enumerate(answers))
    assert answers[1].sent < answers[0].ended, "it does not wait for answers"


def test_failures_are_counted_by_code_and_fail_the_command(capsys, tmp_path):
    path = write(tmp_path / "calls.jsonl", *(recorded(max_tokens=30) for _ in range(8)))
    with serving(EchoEngine(max_requests=1, step_s=0.01), max_queue=1) as case:
        code, report, shown = replayed(capsys, tmp_path, case.url, "--replay", path)
    assert code == 1 and set(report["codes"]) == {"200", "429"} and sum(report["codes"].values()) == 8
    assert "429: " in shown and "max_queue" in report["messages"]["429"]


def test_percentiles_are_those_of_completed_calls():
    answers = [
        bench_serve.Answer(sent=1.0, late=0, ended=3.0, code="200", token_times=[1.5, 2.0, 3.0]),
        bench_serve.Answer(sent=0.0, late=0, ended=10.0, code="in_stream", message="it failed", token_times=[8.0]),
    ]
    report = bench_serve.summarize(answers)
    latency = report["latency"]
    assert latency["ttft_ms"]["p99"] == 500 and latency["e2e_ms"]["p50"] == 2000
    assert (latency["itl_ms"]["mean"], latency["tpot_ms"]["mean"]) == (750, 750)
    assert report["output_tokens_per_s"] == 0.4 and report["requests_per_s"] == 0.1
    assert report["codes"] == {"200": 1, "in_stream": 1} and report["messages"] == {"in_stream": "it failed"}


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["127.0.0.1:8000"], 2, "http://HOST"),
        (["http://127.0.0.1:9"], 1, "no server at http://127.0.0.1:9"),
        (
            ["http://127.0.0.1:9", "--replay", "calls.jsonl", "--rate", "8", "--input-len", "128"],
            2,
            "--rate, --input-len: of the printed commands",
        ),
        (["http://127.0.0.1:9", "--replay", "calls.jsonl"], 1, "no server at http://127.0.0.1:9"),
        (["http://127.0.0.1:9", "--replay", "calls.jsonl", "--json", "no/x.json"], 1, "cannot be written"),
        (["http://127.0.0.1:9", "--replay", "other.jsonl"], 2, "other.jsonl, line 2: not what serve --record writes"),
        (["http://127.0.0.1:9", "--replay", "empty.jsonl"], 2, "empty.jsonl has no lines"),
        (["http://127.0.0.1:9", "--replay", "missing.jsonl"], 2, "No such file"),
    ],
)
def test_mistakes_are_reported_before_anything_is_sent(capsys, tmp_path, monkeypatch, argv, code, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "calls.jsonl", recorded())
    write(tmp_path / "other.jsonl", recorded(), {"prompt": "a"})
    write(tmp_path / "empty.jsonl")
    assert main(["bench-serve", *argv]) == code
    assert said in capsys.readouterr().err
