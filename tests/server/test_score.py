"""/v1/score against the model's own forward, and the routes that describe a server."""

from __future__ import annotations

import math

import pytest
import torch
from server_case import post, serving, tiny_engine, tiny_model, tokenizer

from megatron_infer.rl.weight_receiver import WeightReceiver
from megatron_infer.server import score


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def case(model):
    with serving(tiny_engine(model), control=True, commands_of=lambda one: WeightReceiver(one).commands()) as one:
        yield one


def logprobs_behind(model, ids):
    """Log probabilities of the next token by the model's own forward."""
    with torch.no_grad():
        tokens = torch.tensor([ids])
        logits = model(tokens, torch.arange(len(ids))[None], None)
    return logits[0, -1].double().log_softmax(-1)


def test_labels_have_the_probabilities_that_the_model_gives(case, model):
    labels = [65, 66, 200]
    asked = {"query": "Is it red? ", "items": ["a rose", "grass"], "label_token_ids": labels}
    plain = post(case, "/v1/score", **asked).json()
    among = post(case, "/v1/score", **asked, apply_softmax=True).json()
    for place, item in enumerate(asked["items"]):
        expected = logprobs_behind(model, tokenizer().encode(asked["query"] + item))[labels]
        assert plain["scores"][place] == pytest.approx(expected.exp().tolist(), rel=1e-3)
        assert among["scores"][place] == pytest.approx(expected.softmax(-1).tolist(), rel=1e-3)
    ids = post(case, "/v1/score", query=[1, 2], items=[[3]], label_token_ids=[4], item_first=True).json()
    assert ids["scores"][0][0] == pytest.approx(logprobs_behind(model, [3, 1, 2])[4].exp().item(), rel=1e-3)


@pytest.mark.parametrize(
    ("logprobs", "expected"), [((-800.0, -800.0 - math.log(3)), [0.75, 0.25]), ((-math.inf, -math.inf), [0.5, 0.5])]
)
def test_labels_that_are_next_to_impossible_still_have_shares(case, monkeypatch, logprobs, expected):
    found = iter(logprobs)
    monkeypatch.setattr(score, "_last_logprob", lambda output: next(found))
    asked = {"query": "Is it red? ", "items": ["a rose"], "label_token_ids": [65, 66]}
    reply = post(case, "/v1/score", **asked, apply_softmax=True)
    assert reply.status_code == 200 and reply.json()["scores"] == [pytest.approx(expected)]


def test_likeness_of_texts_is_the_cosine_of_their_embeddings(case):
    reply = post(case, "/v1/score", text_1="red", text_2=["red", "a green one"]).json()
    assert reply["data"][0]["score"] == pytest.approx(1.0, abs=1e-5)
    vectors = [one["embedding"] for one in post(case, "/v1/embeddings", input=["red", "a green one"]).json()["data"]]
    expected = math.fsum(a * b for a, b in zip(*vectors, strict=True))
    assert reply["data"][1]["score"] == pytest.approx(expected, abs=1e-5) and reply["object"] == "list"


def test_prompts_have_log_probabilities_in_sglangs_dialect(case, model):
    ids = [5, 6, 7, 8]
    asked = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
    whole = post(case, "/generate", **asked, logprob_start_len=0).json()
    assert whole["output_ids"] == [] and whole["meta_info"]["completion_tokens"] == 0 and whole["text"] == ""
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    entries = whole["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == ids and entries[0][0] is None
    for place in range(1, 4):
        assert entries[place][0] == pytest.approx(logprobs_behind(model, ids[:place])[ids[place]].item(), abs=1e-4)
    part = post(case, "/generate", **asked, logprob_start_len=2, top_logprobs_num=2).json()["meta_info"]
    assert [entry[:2] for entry in part["input_token_logprobs"]] == [entry[:2] for entry in entries[2:]]
    assert all(len(top) == 2 for top in part["input_top_logprobs"])
    both = {**asked, "input_ids": [ids, ids], "return_logprob": [True, False], "logprob_start_len": [3, -1]}
    first, second = post(case, "/generate", **both).json()
    assert len(first["meta_info"]["input_token_logprobs"]) == 1 and "output_token_logprobs" not in second["meta_info"]
    wrong = post(case, "/generate", **{**both, "return_logprob": [True]})
    assert wrong.status_code == 400 and "1 entries for 2 prompts" in wrong.json()["error"]["message"]


def test_server_describes_itself_under_the_names_of_other_servers(case):
    assert case.http.get("/ping").status_code == case.http.get("/ready").status_code == 200
    assert case.http.get("/load").json() == {"server_load": 0}
    for path in ("/model_info", "/get_model_info"):
        info = case.http.get(path).json()
        assert info["model_path"] == "tiny" and info["is_generation"] and not info["has_image_understanding"]


def test_version_labels_are_any_text_with_an_order_beside(case):
    def info():
        found = case.http.get("/weight_info").json()
        return found["weight_version"], found["order"]

    before = info()[1]
    assert post(case, "/update_weight_version", new_version="step-12").json()["new_version"] == "step-12"
    assert info() == ("step-12", before + 1)
    assert case.http.get("/get_weight_version").json() == {"weight_version": "step-12"}
    post(case, "/update_weight_version", new_version="step-12")
    assert info() == ("step-12", before + 1), "the same label without new weights is the same version"
    reply = post(case, "/generate", input_ids=[1], sampling_params={"max_new_tokens": 1}).json()["meta_info"]
    assert reply["weight_version"] == "step-12" and reply["version_spans"][0]["policy_version"] == before + 1
    for path, prompt in (
        ("/v1/completions", {"prompt": [1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
    ):
        more = {} if "sampling_params" in prompt else {"max_tokens": 1, "return_token_ids": True}
        (choice,) = post(case, path, **prompt, **more).json()["choices"]
        assert choice["weight_version"] == "step-12", path
    post(case, "/update_weight_version", new_version="40")
    assert info() == (40, 40)
    post(case, "/update_weight_version", weight_version="default")
    assert info() == ("default", 41)
    sums = post(case, "/weight_checker", action="checksum").json()["checksums"]
    assert post(case, "/weight_checker", action="compare", baseline=sums).json()["match"]
    other = post(case, "/weight_checker", action="compare", baseline={"weights": "0"}).json()
    assert not other["match"] and other["mismatches"] == ["weights"]


def test_parameters_that_leave_nothing_to_draw_are_the_callers_mistake(case):
    asked = {"prompt": "a", "max_tokens": 4}
    for body, named in (
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"min_tokens": 2, "allowed_token_ids": [257]}, "all allowed_token_ids end the sequence"),
        ({"min_tokens": 2, "allowed_token_ids": [65], "stop_token_ids": [65]}, "all allowed_token_ids end"),
    ):
        reply = post(case, "/v1/completions", **asked, **body)
        assert reply.status_code == 400 and named in reply.json()["error"]["message"], reply.text
    assert post(case, "/v1/completions", **asked, min_tokens=2, allowed_token_ids=[257, 65]).status_code == 200
