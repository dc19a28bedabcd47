"""docs/rl_frameworks.md says under which names frameworks read the fields of a sample: replies have these names."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from control_case import call, serving_with_control
from engines import make_engine
from test_framework_verl import imported

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.mcore import results
from megatron_infer.rl.frameworks import trl
from megatron_infer.testing.tiny import tiny_gpt

pytestmark = pytest.mark.long
PAGE = Path(__file__).parents[2] / "docs" / "rl_frameworks.md"
PROMPT = [5, 6, 7]
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}


def columns() -> dict[str, set[str]]:
    table = PAGE.read_text(encoding="utf-8").partition("## What a sample has")[2].partition("\n\nThe mismatch")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    head, _, *rows = rows
    cells = {name: [row[index].partition("(")[0] for row in rows] for index, name in enumerate(head)}
    return {name: set(re.findall(r"`(\w+)`", " ".join(parts))) for name, parts in cells.items()}


def names_in(reply) -> set[str]:
    if isinstance(reply, list):
        return set().union(*map(names_in, reply))
    return {*reply, *names_in(list(reply.values()))} if isinstance(reply, dict) else set()


def test_replies_have_the_names_of_the_table():
    expected = columns()
    assert min(len(names) for names in expected.values()) >= 2
    for column, module in (("TRL", trl), ("Megatron-RL, NeMo-RL", results)):
        source = inspect.getsource(module)
        assert [one for one in expected[column] if f'"{one}"' not in source and f"{one}=" not in source] == []
    engine = make_engine(tiny_gpt(vocab_size=128, max_sequence_length=256, **EXPERTS), max_sequence_length=256)
    params = SamplingParams(max_tokens=4, logprobs=0, return_routing=True, return_support=True, top_p=0.8)
    (output,) = engine.generate([PROMPT], params)
    with imported() as verl:
        found = verl.server_calls.token_output(output, 0)
    got = {name for name, value in vars(found).items() if value is not None} | set(found.extra_fields)
    assert expected["verl"] <= got
    assert expected["`RolloutSample`"] - {"spans"} <= {
        name
        for name in ("token_ids", "logprobs", "finish_reason", "routing", "support")
        if getattr(output.outputs[0], name) is not None
    }
    with serving_with_control(engine, show_cached_tokens=True) as case:
        sampling = {"max_new_tokens": 4, "top_p": 0.8, "custom_params": {"return_top_p_token_ids": True}}
        asked = {"sampling_params": sampling, "return_logprob": True, "return_routed_experts": True}
        reply = call(case, "/generate", {"input_ids": PROMPT, **asked})
        assert expected["SGLang's routes"] <= names_in(reply)
        reply = call(
            case, "/skyrl/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "logprobs": 0}}
        )
        assert expected["vLLM's routes"] <= names_in(reply)
        reply = call(
            case, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "logprobs": 0, "return_token_ids": True}
        )
        assert expected["OpenAI's routes"] <= names_in(reply)
