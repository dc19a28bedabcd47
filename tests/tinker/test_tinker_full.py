"""One client of the Tinker API trains all weights, and samples are of these weights as they are."""

from __future__ import annotations

import numpy as np
import pytest
from test_tinker import ADAM, TOKENS, Api, check_parameters, plain_loop, serving

from megatron_infer.server.engine_client import EngineClient


@pytest.mark.parametrize("name", ["cross_entropy", "ppo"])
def test_all_weights_train_as_a_plain_loop_does(tmp_path, name):
    losses, found, parameters = plain_loop(name, full=True)
    with serving(tmp_path, full=True) as case:
        api = Api(case.http)
        id = api.train()
        info = api.call("get_info", model_id=id)
        assert (info["is_lora"], info["lora_rank"]) == (False, None)
        for place in range(2):
            loss, scores = api.batch(id, 2 * place + 1, name)
            assert loss == pytest.approx(losses[place], rel=1e-4, abs=1e-5)
            for got, want in zip(scores, found[place], strict=True):
                np.testing.assert_allclose(got, want, atol=1e-5)
            assert api.result(api.step(id, 2 * place + 2))["metrics"]["version"] == place + 1
        check_parameters(case.service.model(id).client, parameters)


def test_one_client_at_a_time_and_one_version_of_the_weights(tmp_path):
    with serving(tmp_path, full=True) as case:
        api = Api(case.http)
        base = api.call("create_sampling_session", session_id=api.session, sampling_session_seq_id=0, base_model="tiny")
        of_base = {"sampling_session_id": base["sampling_session_id"]}
        before = api.sample([5, 9, 2], **of_base)
        id = api.train()
        assert "no second" in api.create(1)["error"]
        first = api.sampler(id, 1)
        of_first = {"sampling_session_id": first["sampling_session_id"]}
        assert first["version"] == 0 and api.sample([5, 9, 2], **of_first)[0][0][0] == before[0][0][0]
        sent = api.send_sample([5, 9, 2], **of_first, seq_id=1)
        drawn = api.drawn(sent)[0][0]
        api.batch(id, 2, "cross_entropy", TOKENS)
        api.result(api.step(id, 3, learning_rate=0.1))
        again = api.drawn(api.send_sample([5, 9, 2], **of_first, seq_id=1))[0][0]
        assert again[0] == drawn[0], "a call that is sent again has the result that was drawn before"
        for old in (of_base, of_first):
            reply = case.http.post("/api/v1/asample", json={**asked([5, 9, 2]), **old})
            assert reply.status_code == 400 and "another version" in reply.text
        second = api.sampler(id, 4, path="second")
        tokens, logprobs = api.sample([5, 9, 2], model_path=second["path"])[0][0]
        weights = {"weights": np.ones(8, np.float32)}
        (scores,) = api.batch(id, 5, "cross_entropy", [[5, 9, 2, *tokens]], given=weights, forward_only=True)[1]
        np.testing.assert_allclose(scores[2:], logprobs, atol=1e-4)
        saved = api.result(api.call("save_weights", model_id=id, seq_id=6, path="two"))["path"]
        api.result(api.call("unload_model", model_id=id, seq_id=7))
        assert "client that is gone" in api.create(2)["error"]
        body = {"path": saved, "session_id": api.session, "model_seq_id": 3}
        assert api.result(api.call("load_weights", **body))["path"] == saved


def test_a_state_of_all_weights_outlives_the_server(tmp_path):
    with serving(tmp_path, full=True) as case:
        api = Api(case.http)
        id = api.train()
        api.batch(id, 1, "cross_entropy")
        api.step(id, 2)
        saved = api.result(api.call("save_weights", model_id=id, seq_id=3, path="one"))["path"]
        sampler = api.sampler(id, 4, path="sampler")["path"]
        drawn = api.sample([5, 9, 2], model_path=sampler)
        api.batch(id, 5, "cross_entropy")
        want = api.result(api.step(id, 6))["metrics"]
    with serving(tmp_path, full=True) as case:
        api = Api(case.http)
        shown = api.call("weights_info", tinker_path=saved)
        assert (shown["is_lora"], shown["lora_rank"]) == (False, None)
        reply = case.http.post("/api/v1/asample", json={**asked([5, 9, 2]), "model_path": sampler})
        assert "another version" in reply.text, "the weights are the base model's"
        id = api.train()
        api.result(api.call("load_weights", model_id=id, seq_id=1, path=saved, optimizer=True))
        assert api.sample([5, 9, 2], model_path=sampler)[0][0][0] == drawn[0][0][0]
        api.batch(id, 2, "cross_entropy")
        assert api.result(api.step(id, 3))["metrics"] == want, "the optimizer goes on"
    with serving(tmp_path) as case:
        api = Api(case.http)
        id = api.train()
        refused = api.result(api.call("load_weights", model_id=id, seq_id=1, path=saved))
        assert "another rank" in refused["error"]


@pytest.mark.long
def test_all_weights_of_a_durable_server_go_on_with_the_next_one(tmp_path):
    with serving(tmp_path, full=True, durable=True) as case:
        api = Api(case.http)
        id = api.train()
        api.batch(id, 1, "cross_entropy")
        first = api.result(api.step(id, 2, learning_rate=0.1))
        sampler = api.sampler(id, 3, path="one")["path"]
        drawn = api.sample([5, 9, 2], model_path=sampler)[0][0][0]
    with serving(tmp_path, full=True, durable=True) as case:
        api = Api(case.http)
        assert api.result(api.step(id, 2, learning_rate=0.1)) == first
        assert api.sample([5, 9, 2], model_path=sampler)[0][0][0] == drawn


def test_no_sample_of_weights_that_change_before_it_is_drawn(tmp_path, monkeypatch):
    checked = EngineClient.checked

    def step_first(*args, **options):
        client = case.service.model(id).client
        case.trainer.submit(lambda: client.optim_step(**ADAM)).result(60)
        return checked(*args, **options)

    with serving(tmp_path, full=True) as case:
        api = Api(case.http)
        id = api.train()
        sampler = api.sampler(id, 1)["sampling_session_id"]
        api.batch(id, 2, "cross_entropy")
        monkeypatch.setattr(EngineClient, "checked", step_first)
        assert "weights have changed" in api.result(api.send_sample([5, 9, 2], sampling_session_id=sampler))["error"]


def asked(prompt):
    return {"prompt": {"chunks": [{"tokens": prompt}]}, "sampling_params": {"max_tokens": 6, "seed": 1}}
