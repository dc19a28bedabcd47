"""generate: each line gets its output or its error, in order, and none is lost."""

from __future__ import annotations

import io
import json
import shlex
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest

from megatron_infer.cli import generate
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.errors import InferenceError, RequestError
from megatron_infer.outputs.request_output import Logprob


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_single_answer_is_its_text_alone_on_stdout(command, llm, capsys):
    assert command("generate", "m", "--prompt", "abc", "--raw") == 0
    assert capsys.readouterr().out == "cba\n"


def test_prompt_goes_through_the_chat_template_unless_raw(command, llm):
    command("generate", "m", "--prompt", "hi")
    command("generate", "m", "--prompt", "hi", "--raw")
    command("generate", "m", "--prompt", "hi", "--system", "be brief")
    llm.tokenizer.has_chat_template = False
    command("generate", "m", "--prompt", "hi")
    assert [bytes(r.ids) for r in llm.engine.added] == [b"<u>hi", b"hi", b"<s>be brief<u>hi", b"hi"]


def test_system_message_without_template_is_refused(command, llm, capsys):
    assert command("generate", "m", "--prompt", "hi", "--system", "x", "--raw") == 2
    assert "--system needs the model's chat template" in capsys.readouterr().err
    assert not llm.engine.added


def test_without_a_tokenizer_answers_are_token_ids(command, llm, tmp_path, capsys):
    llm.tokenizer = None
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": [7, 8, 9]}\n', encoding="utf-8")
    assert command("generate", "m", "--prompts-file", str(file)) == 0
    assert capsys.readouterr().out == "9 8 7\n"
    file.write_text('{"prompt": [7, 8, 9]}\n{"prompt": [5]}\n', encoding="utf-8")
    assert command("generate", "m", "--prompts-file", str(file)) == 0
    assert capsys.readouterr().out == "[1] 3 token ids\n9 8 7\n\n[2] 1 token ids\n5\n\n"


def test_tokens_without_text_are_scored_by_id(command, llm, capsys, monkeypatch):
    entry = {9: Logprob(-0.5, 1, None), 4: Logprob(-1.5, 2, None)}
    whole = llm.engine._output

    def undecoded(r, reason, error):
        output = whole(r, reason, error)
        output.outputs[0].logprobs = [entry]
        output.outputs[0].token_ids = [4]
        return output

    monkeypatch.setattr(llm.engine, "_output", undecoded)
    assert command("generate", "m", "--prompt", "a", "--raw", "--logprobs", "2", "--no-detokenize") == 0
    assert capsys.readouterr().out == "4\n  4 -1.500   9 -0.500\n"


def test_several_answers_are_numbered_in_prompt_order(command, capsys):
    assert command("generate", "m", "--raw", "--prompt", "abcdef", "--prompt", "xy") == 0
    assert capsys.readouterr().out == "[1] abcdef\nfedcba\n\n[2] xy\nyx\n\n"


def test_bad_lines_are_named_and_the_others_answered_in_order(command, tmp_path, capsys):
    file, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    rows = [
        b'{"prompt": "long one", "id": "first"}',
        b"{broken",
        b"",
        b'{"prompt": "caf\xe9"}',
        b'{"prompt": ""}',
        b'{"promt": "x"}',
        b'{"prompt": "x", "temperatur": 1}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "messages": []}',
        b'{"token_ids": "abc"}',
        b'{"prompt": [1, 2.5]}',
        b'"text"',
        b'{"prompt": "' + b"x" * 300 + b'"}',
        b'{"prompt": "x", "max_tokens": 0}',
        b'{"token_ids": [97, 98]}',
        b'{"messages": [{"role": "user", "content": "hey"}]}',
    ]
    file.write_bytes(b"\n".join(rows))
    assert command("generate", "m", "--prompts-file", str(file), "--output", str(out), "--raw") == 1
    err = capsys.readouterr().err
    for number, text in {
        2: "not JSON",
        4: "not UTF-8: byte 0xe9 at byte 16",
        5: "empty",
        6: "did you mean 'prompt'",
        7: "did you mean 'temperature'",
        8: "temperature is nan, it must be a finite number of 0 or more",
        9: "exactly one of prompt, messages and token_ids, got prompt and messages",
        10: "expected a list of token ids, got str",
        11: "token ids are integers",
        12: "expected an object",
        13: "prompt has 300 tokens, limit is 200",
        14: "max_tokens is 0, it must be at least 1",
    }.items():
        (line,) = [line for line in err.splitlines() if f"p.jsonl:{number}:" in line]
        assert text in line, line
    assert "3 answered" in err and "12 failed" in err
    written = lines(out)
    assert [w["index"] for w in written] == list(range(15))  # one line for each of the 15 nonempty lines
    assert [w["text"] for w in written if "text" in w] == ["eno gnol", "ba", "yeh>u<"]
    assert written[0]["id"] == "first" and written[0]["finish_reason"] == "length"
    assert all(f"p.jsonl:{i + 1 + (i > 1)}" in w["error"] for i, w in enumerate(written) if "error" in w)


def test_ids_are_taken_by_the_name_that_outputs_have(command, tmp_path):
    file, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt_token_ids": [97, 98]}\n{"token_ids": [97, 98]}\n{"prompt_token_ids": "ab"}\n')
    assert command("generate", "m", "--prompts-file", str(file), "--output", str(out), "--raw") == 1
    first, second, third = lines(out)
    assert first["text"] == second["text"] == "ba"
    assert "prompt_token_ids: expected a list of token ids, got str" in third["error"]


def test_a_lines_own_sampling_fields_win_over_the_flags(command, llm, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "temperature": 0.5, "logit_bias": {"7": -1}}\n{"prompt": "b"}\n')
    command("generate", "m", "--prompts-file", str(file), "--temperature", "0.9", "--stop", "x", "--stop", "y")
    first, second = (r.params for r in llm.engine.added)
    assert (first.temperature, second.temperature) == (0.5, 0.9)
    assert first.logit_bias == {7: -1.0} and second.logit_bias is None
    assert first.stop == second.stop == ("x", "y")


def test_every_sampling_field_has_a_flag_that_arrives(command, llm):
    argv = shlex.split(
        "--n 2 --max-tokens 9 --min-tokens 3 --temperature 0.3 --top-k 5 --top-p 0.8 --min-p 0.1 "
        "--repetition-penalty 1.2 --presence-penalty 0.4 --frequency-penalty 0.6 --logit-bias 7=-1.5 --logit-bias 8=2 "
        "--allowed-token-ids 1,2,7 --bad-token-ids 3 --seed 11 --stop END --stop-token-ids 4,5 --ignore-eos "
        "--include-stop-str-in-output --logprobs 2 --prompt-logprobs 0 "
        "--return-sampled-logprobs --return-support --return-routing --return-index-choices "
        "--regex a+ --priority -3 --no-skip-special-tokens "
        "--no-detokenize --no-speculate --adapter french"
    )
    command("generate", "m", "--prompt", "hello there", *argv)
    params = llm.engine.added[0].params
    expected = SamplingParams(
        n=2,
        max_tokens=9,
        min_tokens=3,
        temperature=0.3,
        top_k=5,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        logit_bias={7: -1.5, 8: 2.0},
        allowed_token_ids=(1, 2, 7),
        bad_token_ids=(3,),
        seed=11,
        stop="END",
        stop_token_ids=(4, 5),
        ignore_eos=True,
        include_stop_str_in_output=True,
        logprobs=2,
        prompt_logprobs=0,
        return_sampled_logprobs=True,
        structured=StructuredOutput(regex="a+"),
        return_support=True,
        return_routing=True,
        return_index_choices=True,
        priority=-3,
        skip_special_tokens=False,
        speculate=False,
        adapter="french",
        detokenize=False,
    )
    assert params == expected
    unchanged = [f.name for f in fields(params) if getattr(params, f.name) == getattr(SamplingParams(), f.name)]
    # A field added to SamplingParams needs its flag, and its place above.
    assert unchanged == ["pooling", "metadata"]  # with a single token; with request_metadata_types alone
    command("generate", "m", "--prompt", "hello there", "--pooling", "mean", "--max-tokens", "1")
    assert llm.engine.added[-1].params.pooling == "mean"


def test_a_wrong_flag_is_reported_before_the_model_loads(monkeypatch):
    monkeypatch.setattr(generate, "load_llm", lambda args: pytest.fail("the model was loaded"))
    args = SimpleNamespace(sampling_defaults={}, sampling_temperature=float("nan"))
    with pytest.raises(RequestError, match="temperature"):
        generate.run(args)


def test_samples_and_logprobs_are_lines_of_their_own(command, tmp_path):
    out = tmp_path / "o.jsonl"
    command("generate", "m", "--prompt", "ab", "--raw", "--n", "2", "--logprobs", "0", "--output", str(out))
    written = lines(out)
    assert [(w["index"], w["sample"]) for w in written] == [(0, 0), (0, 1)]
    assert written[0]["logprobs"][0] == [{"token_id": 98, "logprob": -0.5, "rank": 1, "token": "b"}]
    assert written[0]["cumulative_logprob"] == -1.0


def test_interrupt_keeps_finished_and_partial_answers(command, llm, tmp_path, capsys):
    out = tmp_path / "o.jsonl"
    llm.engine.interrupt_at = 4
    assert command("generate", "m", "--raw", "--prompt", "abcdefgh", "--prompt", "xy", "--output", str(out)) == 130
    assert [(w["text"], w["finish_reason"]) for w in lines(out)] == [("hgf", "abort"), ("yx", "length")]
    assert "interrupted: answers are partial" in capsys.readouterr().err
    assert not llm.engine.live


def test_a_request_that_fails_in_a_step_fails_alone(command, llm, tmp_path, capsys):
    out = tmp_path / "o.jsonl"
    llm.engine.fail = {b"bad"}
    assert command("generate", "m", "--raw", "--prompt", "bad", "--prompt", "ok", "--output", str(out)) == 1
    first, second = lines(out)
    assert first["error"] == "--prompt 1: the forward raised" and second["text"] == "ko"


def test_prompts_come_from_stdin_and_answers_go_to_stdout(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO('\ufeff{"prompt": "añb"}\n'.encode())))
    assert command("generate", "m", "--prompts-file", "-", "--output", "-", "--raw") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "añb"


def test_files_that_cannot_be_used_are_reported_before_the_model_loads(tmp_path, command, llm):
    (tmp_path / "utf16").write_bytes('{"prompt": "x"}'.encode("utf-16"))
    for argv, message in [
        (["--prompts-file", str(tmp_path / "none")], "cannot be read: No such file"),
        (["--prompts-file", str(tmp_path / "utf16")], "UTF-16, not UTF-8"),
        (["--prompt", "x", "--output", str(tmp_path / "no" / "out")], "cannot be written"),
    ]:
        with pytest.raises(InferenceError, match=message):
            command("generate", "m", *argv)
    assert not llm.engine.added


def test_no_prompt_is_a_usage_error(command, capsys):
    assert command("generate", "m") == 2
    assert "give --prompt TEXT or --prompts-file FILE" in capsys.readouterr().err


def test_structured_output_options_reach_the_engine(command, llm, tmp_path):
    schema, grammar = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "é"', encoding="utf-8")
    for flags, structured in {
        ("--json-schema", str(schema), "--compact"): StructuredOutput(json_schema={"type": "integer"}, compact=True),
        ("--json",): StructuredOutput(json_object=True),
        ("--regex", "a+"): StructuredOutput(regex="a+"),
        ("--grammar", str(grammar)): StructuredOutput(grammar='start: "é"'),
        ("--choice", "a", "--choice", "b"): StructuredOutput(choice=["a", "b"]),
        (): None,
    }.items():
        assert command("generate", "m", "--prompt", "x", "--raw", *flags) == 0
        assert llm.engine.added[-1].params.structured == structured
    for flags, message in {
        ("--regex", "a", "--json"): "exactly one of",
        ("--grammar", str(tmp_path / "none")): "none: cannot be read",
        ("--json-schema", str(grammar)): "json_schema is not JSON",
    }.items():
        with pytest.raises(RequestError, match=message):
            command("generate", "m", "--prompt", "x", "--raw", *flags)
