"""chat: a conversation is kept, shortened, stopped and never lost."""

from __future__ import annotations

import io

import pytest

from megatron_infer.cli.chat import ChatSession
from megatron_infer.config.sampling_params import SamplingParams


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def session(llm, shown) -> ChatSession:
    return ChatSession(llm, SamplingParams(max_tokens=5), show=shown.append)


def asked(llm) -> list[bytes]:
    return [bytes(r.ids) for r in llm.engine.added]


def test_each_question_carries_the_conversation_so_far(session, llm):
    assert session.answer("abcdefg") == "gfedc"
    session.answer("hi")
    assert asked(llm) == [b"<u>abcdefg", b"<u>abcdefg<a>gfedc<u>hi"]


def test_text_streams_as_tokens_arrive(session, shown):
    session.answer("abcdefg")
    assert shown == ["g", "f", "e", "d", "c", "\n"]


def test_ctrl_c_stops_the_answer_and_keeps_the_session(session, llm, shown):
    llm.engine.interrupt_at = 3
    assert session.answer("abcdefg") == "gf"
    assert not llm.engine.live and "".join(shown) == "gf\n"
    session.answer("on")
    assert asked(llm)[-1] == b"<u>abcdefg<a>gf<u>on"


def test_reset_and_system_start_a_new_conversation(session, llm):
    session.handle("hi")
    session.handle("/system  be kind")
    session.handle("one")
    session.handle("/reset")
    session.handle("two")
    session.handle("/system")
    session.handle("three")
    assert asked(llm) == [b"<u>hi", b"<s>be kind<u>one", b"<s>be kind<u>two", b"<u>three"]


def test_a_conversation_too_long_forgets_its_oldest_exchange(session, llm, capsys):
    session.answer("a" * 90)
    session.answer("b" * 90)
    session.answer("c" * 90)
    assert asked(llm)[-1].startswith(b"<u>bbb") and asked(llm)[-1].endswith(b"ccc")
    assert "its oldest 1 exchanges are forgotten" in capsys.readouterr().err


def test_a_message_that_never_fits_is_refused_and_leaves_the_conversation(session, capsys):
    session.answer("hello")
    before = list(session.turns)
    assert session.answer("x" * 300) is None
    assert "prompt has" in capsys.readouterr().err
    assert session.turns == before


def test_a_failed_answer_leaves_the_conversation_as_it_was(session, llm, capsys):
    session.answer("hi")
    turns = list(session.turns)
    llm.engine.fail = {b"<u>hi<a>ih>u<<u>bad"}
    assert session.answer("bad") is None
    assert session.turns == turns
    assert "error: the forward raised" in capsys.readouterr().err


def test_commands_are_distinguished_from_messages(session, llm, capsys):
    assert session.handle("/stats") and session.handle("/help") and session.handle("/nope") and session.handle("  ")
    assert not session.handle("/quit")
    err = capsys.readouterr().err
    assert "no answer yet" in err and "/reset" in err and "unknown command /nope" in err
    assert not llm.engine.added


def test_stats_print_speed_and_cache(session):
    session.answer("hello")
    assert "5 tokens at" in session.stats() and "first after 250 ms" in session.stats()
    assert "prompt 8 tokens, 0 of them from the cache" in session.stats()


def test_a_pipe_is_a_conversation(command, llm, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n\nxy\n/quit\nnever\n"))
    assert command("chat", "m", "--system", "S", "--temperature", "0") == 0
    assert capsys.readouterr().out.splitlines()[0] == "cba>u<S>s<"
    assert asked(llm) == [b"<s>S<u>abc", b"<s>S<u>abc<a>cba>u<S>s<<u>xy"]


def test_a_model_without_template_is_refused_with_what_to_do(command, llm, capsys):
    llm.tokenizer.has_chat_template = False
    assert command("chat", "m") == 2
    assert "megatron-infer generate m --raw" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--n", "2"], ["--logprobs", "1"], ["--return-support"], ["--no-detokenize"]])
def test_flags_that_chat_cannot_honour_are_refused(command, llm, flags):
    assert command("chat", "m", *flags) == 2
    assert not llm.engine.added
