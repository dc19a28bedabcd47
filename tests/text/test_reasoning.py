"""Reasoning and answer: every way of cutting a text gives the same two, and neither has a mark."""

from __future__ import annotations

import random

import pytest

from megatron_infer.text.reasoning_parsers import REASONING, ReasoningParser


def split(name, pieces, prompt_end=""):
    parser = ReasoningParser(REASONING[name], prompt_end)
    reasoning = content = ""
    for delta in [one for text in pieces for one in parser.feed(text)] + parser.finish():
        assert delta.reasoning or delta.content
        assert not (delta.reasoning and content), "thoughts come first"
        reasoning, content = reasoning + delta.reasoning, content + delta.content
    return reasoning, content


CASES = [
    ("deepseek_r1", "<|assistant|>", "<think>\nOne\n\ntwo.\n</think>\n\nThree.\n", "One\n\ntwo.", "Three.\n"),
    ("deepseek_r1", "<|assistant|><think>\n", "One.</think>Two", "One.", "Two"),
    ("deepseek_r1", "<|assistant|>", "One <thin", "One <thin", ""),
    ("deepseek_r1", "<|assistant|></think>", "One", "", "One"),
    ("deepseek_r1", "<|assistant|>", " \n<th", " \n<th".lstrip("\r\n"), ""),
    ("qwen3", "<|assistant|>\n", "<think>\nSo.\n</think>\n\nYes </think> no", "So.", "Yes </think> no"),
    ("qwen3", "<|assistant|>\n", "\n <think>So</think>", "So", ""),
    ("qwen3", "<|assistant|>\n<think>\n", "So.\n\n</think>\n\nYes", "So.", "Yes"),
    ("qwen3", "<think>\n\n</think>\n\n", "Yes <think>", "", "Yes <think>"),
    ("qwen3", "<|assistant|>\n", " Yes, <think> is a tag", "", " Yes, <think> is a tag"),
    ("qwen3", "<|assistant|>\n", "<think>Cut off </thin", "Cut off </thin", ""),
    ("qwen3", "<|assistant|>\n", "<think></think>Yes", "", "Yes"),
    ("qwen3", "<|assistant|>\n", "<th", "", "<th"),
    ("qwen3", "<|assistant|>\n", "<think>a\n<\n", "a\n<", ""),
    ("granite", "", "Here is my thought process: a. Here's my response: b", " a. ", " b"),
    ("granite", "", "Here is my answer", "", "Here is my answer"),
    (
        *("gpt_oss", "<|start|>assistant"),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes<|end|>",
        *("Hm.", "Yes<|end|>"),
    ),
    ("gpt_oss", "<|start|>assistant", "<|channel|>final<|message|>Yes", "", "Yes"),
    (
        "gpt_oss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>as",
        "Hm.<|end|><|start|>as",
        "",
    ),
    ("gpt_oss", "<|start|>assistant", "<|channel|>commentary", "", "<|channel|>commentary"),
    (
        *("gpt_oss", "<|start|>assistant"),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}",
        *("Hm.", "<|channel|>commentary to=functions.f<|message|>{}"),
    ),
    (
        *("gpt_oss", "<|start|>assistant"),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary json",
        *("Hm.", " to=functions.f<|channel|>commentary json"),
    ),
    ("kimi_k2", "<think>", "Hm.<|tool_calls_section_begin|>...", "Hm.", "<|tool_calls_section_begin|>..."),
    ("granite", "", "", "", ""),
    ("ernie45", "<think>\n", "Hm.\n</think>\n\n\n<response>\nYes\n\nno\n</response>\n", "Hm.", "Yes\n\nno"),
    ("ernie45", "", "Hm.</think>\nYes </response>", "Hm.", "Yes </response>"),
    ("ernie45", "</think>\n", "<response>\nYes</resp", "", "Yes</resp"),
    ("ernie45", "", "Hm.</think>\n\n<resp", "Hm.", "<resp"),
    ("ernie45", "", "Hm.</think><response>Yes</response>\n<tool_call>", "Hm.", "Yes<tool_call>"),
    ("hunyuan_a13b", "", "<think>\nHm.\n</think>\n<answer>\nYes\n</answer>", "Hm.", "Yes"),
    ("hunyuan_a13b", "", "\n<answer>Yes", "", "Yes"),
    ("gemma4", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Yes", "Hm.", "Yes"),
    ("gemma4", "<|channel>thought\n<channel|>", "Yes", "", "Yes"),
    ("mistral", "", "[THINK]Hm.[/THINK]Yes", "Hm.", "Yes"),
]


@pytest.mark.parametrize(("form", "prompt_end", "text", "reasoning", "content"), CASES)
def test_every_way_of_cutting_a_text_gives_the_same_thoughts_and_answer(form, prompt_end, text, reasoning, content):
    assert split(form, [text], prompt_end) == (reasoning, content)
    assert split(form, list(text), prompt_end) == (reasoning, content)
    for at in range(len(text)):
        assert split(form, [text[:at], text[at:]], prompt_end) == (reasoning, content), (text[:at], text[at:])


@pytest.mark.parametrize("rounds", [100, pytest.param(500, marks=pytest.mark.long)])
def test_any_text_at_all_is_split_the_same_for_every_cut(rounds):
    draw = random.Random(3)
    fragments = [
        "<think>",
        "</think>",
        "\n",
        " ",
        "a",
        "<",
        "Here's my response:",
        "Here is my thought process:",
        "b\n\n",
        "<answer>",
        "</answer>",
    ]
    for _ in range(rounds):
        text = "".join(draw.choices(fragments, k=draw.randrange(1, 10)))
        text = text[: draw.randrange(len(text) + 1)] if draw.random() < 0.3 else text
        for name in REASONING:
            for end in ("", "<think>\n", "</think>"):
                wanted = split(name, [text], end)
                assert split(name, list(text), end) == wanted, (name, end, text)
                at = draw.randrange(len(text) + 1)
                assert split(name, [text[:at], text[at:]], end) == wanted, (name, end, text, at)
