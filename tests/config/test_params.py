"""SamplingParams say what is wrong with a value, and keep what is right in one form."""

from __future__ import annotations

import math

import pytest

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import RequestError

WRONG = [
    ({"n": 0}, "n is 0, it must be 1 to 1024; ask in several requests"),
    ({"max_tokens": 2.0}, "max_tokens is 2.0 (float), it must be an integer or None; use None"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, more than max_tokens, which is 4"),
    ({"temperature": math.nan}, "temperature is nan, it must be a finite number of 0 or more; 0 draws"),
    ({"temperature": 10**400}, "temperature is 10000"),
    ({"temperature": "1"}, "temperature is '1' (str), it must be a finite number"),
    ({"top_p": 0}, "top_p is 0, it must be a number above 0 and at most 1; 1 turns it off"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0, it must be a number from 0.001 to 1000"),
    ({"logit_bias": {3: 1e39}}, "logit_bias[3] is between -1e+30 and 1e+30, got 1e+39"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias has token ids as keys"),
    ({"logit_bias": {-5: 1.0}}, "logit_bias has token ids as keys"),
    ({"logit_bias": {5: math.inf}}, "logit_bias[5] is a finite number"),
    ({"logit_bias": {5: 10**400}}, "logit_bias[5] is a finite number"),
    ({"logit_bias": {5: "x"}}, "logit_bias[5] is a finite number"),
    ({"logit_bias": [1, 2]}, "logit_bias maps token ids to numbers"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"allowed_token_ids": [1, -1]}, "allowed_token_ids holds token ids"),
    ({"bad_token_ids": 7}, "bad_token_ids is a sequence of token ids, got 7"),
    ({"bad_token_ids": "abc"}, "bad_token_ids is a sequence of token ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids holds token ids"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids holds token ids"),
    ({"stop": ""}, "stop holds an empty text"),
    ({"stop": ["a", ""]}, "stop holds an empty text"),
    ({"stop": ["a", 3]}, "stop holds texts, got 3 (int)"),
    ({"stop": b"a"}, "stop is a text or a list of texts"),
    ({"stop": 3}, "stop is a text or a list of texts, got 3 (int)"),
    ({"pooling": "cls"}, "pooling is last, mean, all, got 'cls' (str)"),
    ({"pooling": "last"}, "pooling needs max_tokens=1 and n=1, got 16 and 1"),
    ({"pooling": "mean", "max_tokens": 1, "n": 2}, "got 1 and 2"),
    ({"ignore_eos": 1}, "ignore_eos is 1 (int), it must be True or False"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_value_is_refused_with_name_value_and_limit(values, message):
    with pytest.raises(RequestError) as error:
        SamplingParams(**values)
    assert message in str(error.value)
    assert any(mark in str(error.value) for mark in (";", "True or False")), "no remedy"
    with pytest.raises(ValueError):
        SamplingParams.from_dict(values) if "logit_bias" not in values else SamplingParams(**values)


def test_unknown_key_is_refused_with_the_nearest_known_one():
    with pytest.raises(RequestError, match=r"'temprature'; did you mean 'temperature'\?"):
        SamplingParams.from_dict({"temprature": 1.0})
    with pytest.raises(RequestError, match=r"(?s)'zzz'.*'max_token'; did you mean 'max_tokens'.*known: n, max_tokens"):
        SamplingParams.from_dict({"zzz": 1, "max_token": 3})
    with pytest.raises(RequestError, match="mapping"):
        SamplingParams.from_dict([("n", 1)])


def test_json_values_make_parameters():
    params = SamplingParams.from_dict({"logit_bias": {"17": -1}, "stop": ["a", "b"], "temperature": 0, "seed": 3})
    assert params.logit_bias == {17: -1.0} and params.stop == ("a", "b") and params.greedy and params.seed == 3


def test_values_are_kept_in_one_form():
    bias = {1: 2}
    params = SamplingParams(stop="x", stop_token_ids=[1, 2], allowed_token_ids=range(3), logit_bias=bias, temperature=1)
    assert params.stop == ("x",)
    assert params.stop_token_ids == (1, 2) and params.allowed_token_ids == (0, 1, 2)
    assert isinstance(params.temperature, float)
    bias[1] = 9
    assert params.logit_bias == {1: 2.0}
    assert SamplingParams().stop == () and SamplingParams().stop_token_ids == ()


def test_limits_themselves_are_allowed():
    SamplingParams(n=1024, temperature=0.0, top_p=1, min_p=1, top_k=-1, logprobs=0, prompt_logprobs=100, seed=2**64 - 1)
    SamplingParams(n=4, temperature=0, max_tokens=None, min_tokens=50, presence_penalty=-2, frequency_penalty=2)
    SamplingParams(min_tokens=5, max_tokens=5, repetition_penalty=1e-3, seed=-(2**63))


def test_parameters_cannot_be_changed_and_unknown_keywords_are_type_errors():
    with pytest.raises(AttributeError):
        SamplingParams().n = 2
    with pytest.raises(TypeError):
        SamplingParams(unknown=1)
