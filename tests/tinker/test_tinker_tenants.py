"""Tenants of the Tinker API: each has a key, and what is another's is as if it were not there."""

from __future__ import annotations

import os
import threading
import time

import httpx
import pytest
from test_tinker import Api, Held, message_of_batch, output_of, serving

from megatron_infer.cli.main import main
from megatron_infer.errors import ConfigError
from megatron_infer.server.tinker import messages
from megatron_infer.server.tinker.tenants import read_keys
from megatron_infer.server.tinker.training import TrainingClient

pytestmark = pytest.mark.security

SERVER_KEY = "tml-server"
KEYS = {"one": "tml-one", "other": "tml-other"}


def serving_tenants(folder, **settings):
    return serving(folder, tenants=KEYS, api_key=SERVER_KEY, **settings)


def http_of(case, key):
    return httpx.Client(base_url=case.url, timeout=60, headers={"X-API-Key": key})


def asked(api, route, body):
    """(status, content) of a call, or of its future."""
    if route == "forward_backward":
        reply = api.send(message_of_batch(body["model_id"], 0, "cross_entropy"))
    elif body is None:
        reply = api.http.get(f"/api/v1/{route}")
    else:
        reply = api.http.post(f"/api/v1/{route}", json=body)
    content = reply.json()
    if reply.status_code == 200 and "request_id" in content:
        return api.http.post("/api/v1/retrieve_future", json={"request_id": content["request_id"]}).text
    return f"{reply.status_code} {content}"


def test_what_is_another_tenants_is_as_if_it_were_not_there(tmp_path):
    with serving_tenants(tmp_path, durable=True) as case:
        api, other = (Api(http_of(case, key)) for key in KEYS.values())
        id, own = api.train(), other.train()
        api.batch(id, 1, "cross_entropy")
        path = api.result(api.call("save_weights", model_id=id, seq_id=2, path="state"))["path"]
        unnamed, named = api.sampler(id, 3)["sampling_session_id"], api.sampler(id, 4, path="sampler")["path"]
        waiting = api.step(id, 6)["request_id"]
        made_up = {id: f"{'0' * 32}:train:0", unnamed: "0" * 32, waiting: "1" * 32, api.session: "2" * 32}
        made_up |= {one: one.replace(id, made_up[id]) for one in (path, named)}
        base, of_path = {"base_model": "tiny"}, {"model_path": named}
        prompt = {"prompt": {"chunks": [{"tokens": [5, 9]}]}, "sampling_params": {"max_tokens": 2}}
        for route, body in [
            ("session_heartbeat", {"session_id": api.session}),
            ("create_model", {"session_id": api.session, "model_seq_id": 0, "lora_config": {"rank": 4}, **base}),
            ("create_sampling_session", {"session_id": api.session, "sampling_session_seq_id": 0, **base}),
            ("get_info", {"model_id": id}),
            ("unload_model", {"model_id": id}),
            ("forward_backward", {"model_id": id}),
            ("optim_step", {"model_id": id, "seq_id": 6, "adam_params": {}}),
            ("save_weights", {"model_id": id}),
            ("save_weights_for_sampler", {"model_id": id}),
            ("load_weights", {"model_id": id, "path": path}),
            ("load_weights", {"model_id": own, "path": path}),
            ("weights_info", {"tinker_path": path}),
            ("create_sampling_session", {"session_id": other.session, "sampling_session_seq_id": 0, **of_path}),
            (f"samplers/{unnamed}", None),
            ("asample", {"sampling_session_id": unnamed, **prompt}),
            ("asample", {**of_path, **prompt}),
            ("retrieve_future", {"request_id": waiting}),
            ("cancel_future", {"request_id": waiting}),
            (f"sessions/{api.session}/finish", {}),
        ]:
            found = asked(other, route, body)
            for theirs, none in made_up.items():
                route = route.replace(theirs, none)
                body = body and {name: none if value == theirs else value for name, value in body.items()}
            absent = asked(other, route, body)
            for theirs, none in made_up.items():
                found = found.replace(theirs, none)
            assert found == absent, route
        assert "there is no model" in asked(other, "get_info", {"model_id": id})
        api.batch(id, 5, "cross_entropy")
        assert api.result({"request_id": waiting})["metrics"]["version"] == 1
        assert api.sample([5, 9], sampling_session_id=unnamed) and api.sample([5, 9], model_path=named)
        shown = http_of(case, SERVER_KEY).get("/v1/status").json()["clients"]
        assert set(shown) == {f"one:{api.session[:8]}-0", f"other:{other.session[:8]}-0"}
        assert 'client="one:' in http_of(case, SERVER_KEY).get("/metrics").text
    with serving_tenants(tmp_path, durable=True) as case:
        clients = {name: http_of(case, key) for name, key in KEYS.items()}
        assert clients["one"].post("/api/v1/get_info", json={"model_id": id}).json()["model_id"] == id
        assert clients["other"].post("/api/v1/get_info", json={"model_id": id}).status_code == 404
        assert clients["other"].post("/api/v1/weights_info", json={"tinker_path": path}).status_code == 404


def test_a_key_opens_what_is_its_holders(tmp_path):
    with serving_tenants(tmp_path) as case:
        for key, api, others in [
            ("tml-one", 200, 403),
            (SERVER_KEY, 403, 200),
            ("tml-on", 401, 401),
        ]:
            http = http_of(case, key)
            assert http.post("/api/v1/create_session", json={}).status_code == api
            assert {http.get(path).status_code for path in ("/metrics", "/v1/status", "/v1/models")} == {others}
        assert case.http.get("/health").status_code == 200, "without a key"


def test_a_tenant_has_its_part_of_the_limits_and_no_prefix_of_others(tmp_path):
    options = {"enable_prefix_caching": True, "block_size_tokens": 16}
    with serving_tenants(tmp_path, max_models=2, options=options, isolate_prefix_cache=True) as case:
        api, other = (Api(http_of(case, key)) for key in KEYS.values())
        assert api.train() and "1 training clients are the most" in api.create(1)["error"]
        assert other.train()
        cached = []
        for one in (api, api, other):
            how = {"session_id": one.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
            sampler = one.call("create_sampling_session", **how)["sampling_session_id"]
            made = messages.message("SampleResponse")
            made.ParseFromString(one.result(one.send_sample(list(range(64)), sampling_session_id=sampler)))
            cached.append(made.prompt_cache_hit_tokens > 0)
        assert cached == [False, True, False]


def test_tenants_take_turns_to_train(tmp_path, monkeypatch):
    order, begun, go_on, step = [], threading.Event(), threading.Event(), TrainingClient.optim_step

    def slow(client, **how):
        begun.set()
        assert go_on.wait(60)
        order.append(client.rank)
        return step(client, **how)

    monkeypatch.setattr(TrainingClient, "optim_step", slow)
    with serving_tenants(tmp_path) as case:
        api, other = (Api(http_of(case, key)) for key in KEYS.values())
        ids = [api.train(number, rank=number + 1) for number in range(4)]
        last = other.train(rank=8)
        sent = [api.step(ids[0], 1)]
        assert begun.wait(60)
        sent += [api.step(id, 1) for id in ids[1:]]
        late = other.step(last, 1)
        while sum(map(len, case.trainer._queue.values())) < 4:
            time.sleep(0.01)
        go_on.set()
        for one in sent:
            api.result(one)
        other.result(late)
    assert order.index(8) <= 2, "after the operation that ran, and one of the first tenant"


def test_a_batch_that_was_given_up_drops_no_later_one_whatever_another_tenant_gives_up(tmp_path, monkeypatch):
    held = Held(monkeypatch, TrainingClient, "optim_step")
    with serving_tenants(tmp_path) as case:
        api, other = (Api(http_of(case, key)) for key in KEYS.values())
        ids = [api.train(number) for number in range(4)]
        id = other.train()
        first = api.step(ids[0], 1)
        assert held.begun.wait(60)
        for one, given_up in [(api, name) for name in ids[1:]] + [(other, id)]:
            sent = one.send_batch(given_up, 1, "cross_entropy").json()
            one.call("cancel_future", request_id=sent["request_id"])
        batch, after = other.send_batch(id, 2, "cross_entropy").json(), other.step(id, 3)
        held.go_on.set()
        api.result(first)
        assert output_of(other.result(batch))[1]
        assert other.result(after)["metrics"]["version"] == 1


def test_a_file_of_tenants_that_is_wrong_is_refused_without_its_keys(tmp_path, capsys, monkeypatch):
    path = tmp_path / "tenants"
    path.touch(0o600)
    for text, why in {
        "": "names none",
        "one": "line 1 .*is not NAME KEY",
        "# a remark\n\nOne tml-secret": "line 3 .*a name has a-z",
        "../one tml-secret": "a name has a-z",
        "one secret": "begin with tml-",
        "one tml-secret\none tml-secret2": "line 2 .*there already",
        "one tml-secret\nother tml-secret": "line 2 .*there already",
        f"one {SERVER_KEY}": "line 1 .*there already",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=why) as caught:
            read_keys(path, server_key=SERVER_KEY)
        assert "secret" not in str(caught.value)
    path.write_text("one tml-one\nother\ttml-other  \n")
    assert read_keys(path, server_key=SERVER_KEY) == KEYS
    path.chmod(0o604)
    with pytest.raises(ConfigError, match="every user of this machine"):
        read_keys(path, server_key=SERVER_KEY)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none", server_key=SERVER_KEY)
    monkeypatch.delenv("MEGATRON_INFER_API_KEY", raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("MEGATRON_INFER_API_KEY", SERVER_KEY)
        patch.setenv("MEGATRON_INFER_ISOLATE_PREFIX_CACHE", "false")
        path.chmod(0o600)
        assert main(["tinker", "smollm2", "--tenants", os.fspath(path)]) == 2
        assert "--tenants with isolate_prefix_cache off" in capsys.readouterr().err
        path.chmod(0o604)
    for arguments, why in {("--full",): "--full with --tenants", (): "without api_key"}.items():
        assert main(["tinker", "smollm2", "--tenants", os.fspath(path), *arguments]) == 2
        assert why in capsys.readouterr().err
    monkeypatch.setenv("MEGATRON_INFER_API_KEY", "secret")
    assert main(["tinker", "smollm2"]) == 2
    assert "keys that begin with tml-" in capsys.readouterr().err, "the key of the environment is the server's"
