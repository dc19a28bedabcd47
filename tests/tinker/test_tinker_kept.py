"""Training clients on the disk: nothing counts twice after a restart, and nothing is lost, taken or left by mistake."""

from __future__ import annotations

import contextlib
import threading

import pytest
from test_tinker import TOKENS, Api, Held, check_parameters, live_session, plain_loop, serving

from megatron_infer.engine.durable import file_format
from megatron_infer.errors import ConfigError
from megatron_infer.server.tinker import service
from megatron_infer.server.tinker.service import TinkerService
from megatron_infer.server.tinker.training import LiveModel, LiveTrainer, TrainingClient
from megatron_infer.testing.tiny import tiny_gpt


def is_after_one_step(client):
    _, _, parameters = plain_loop("cross_entropy", steps=1)
    assert client.version == 1
    check_parameters(client, parameters)


def refused(api, *batch):
    return api.result(api.send_batch(*batch).json())["error"]


def test_a_batch_that_comes_after_its_refused_step_counts_once(tmp_path):
    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        id = api.train()
        api.batch(id, 1, "cross_entropy")
    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        assert "[1] were lost" in api.result(api.step(id, 2))["error"]
        assert "new number" in refused(api, id, 1, "cross_entropy")
    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        assert "new number" in refused(api, id, 1, "cross_entropy")
        api.batch(id, 3, "cross_entropy")
        api.result(api.step(id, 4))
        is_after_one_step(case.service.model(id).client)


def test_states_are_loaded_next_to_clients_of_an_earlier_server(tmp_path):
    def load(**where):
        return api.result(api.call("load_weights", optimizer=True, **where))

    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        session, id, other = api.session, api.train(), api.train(1, rank=8)
        api.batch(id, 1, "cross_entropy")
        first = api.result(api.step(id, 2))
        paths = [
            api.result(api.call("save_weights", model_id=one, seq_id=seq, path="one"))["path"]
            for one, seq in ((id, 3), (other, 1))
        ]
        load(model_id=id, path=paths[0])  # without a number
        api.batch(id, 4, "cross_entropy")
        made = load(session_id=session, model_seq_id=2, path=paths[0])
    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        assert api.result(api.step(id, 2)) == first
        assert "there is a training client 0" in load(session_id=session, model_seq_id=0, path=paths[1])["error"]
        assert load(session_id=session, model_seq_id=2, path=paths[0]) == made, "the call that is sent again"
        assert (tmp_path / id / "client").exists()
        is_after_one_step(case.service.model(id).client)
        load(model_id=id, seq_id=5, path=paths[0])
        assert "new number" in refused(api, id, 4, "cross_entropy")
        api.batch(id, 6, "cross_entropy")
        assert api.result(api.step(id, 7))["metrics"]["version"] == 2, "the gradients that were lost do not count"


def test_a_step_that_cannot_be_written_is_not_made_and_a_session_that_ends_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        id = api.train()
        api.batch(id, 1, "cross_entropy")
        with monkeypatch.context() as patch:
            patch.setattr(file_format, "save_tensors", full)
            assert "No space left" in api.result(api.step(id, 2))["error"]
            assert "error" in api.create(1) and len(case.service.rows()) == 1
        assert "no gradients" in api.result(api.step(id, 3))["error"]
        api.batch(id, 4, "cross_entropy")
        api.result(api.step(id, 5))
        is_after_one_step(case.service.model(id).client)
        api.batch(id, 6, "cross_entropy")
        held = Held(monkeypatch, TrainingClient, "save")
        sent = api.step(id, 7)
        assert held.begun.wait(60)
        api.send_batch(id, 8, "cross_entropy")
        waiting = api.step(id, 9)
        api.call(f"sessions/{api.session}/finish")
        held.go_on.set()
        assert [api.result(one)["metrics"]["version"] for one in (sent, waiting)] == [2, 3]
        case.trainer.submit(lambda: None).result(60)
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_what_cannot_go_on_is_named_at_the_start(tmp_path, monkeypatch):
    synced, sync = [], file_format.sync
    monkeypatch.setattr(file_format, "sync", lambda path: synced.append(path) or sync(path))

    def start(live=None):
        trainer = LiveTrainer(LiveModel(*live_session(live)))
        with contextlib.closing(TinkerService(trainer, model_name="tiny", state_dir=tmp_path, durable=True)) as held:
            held.load()

    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        id = api.train()
        assert tmp_path in synced, "the entry of a new client's directory"
        path = api.result(api.call("save_weights", model_id=id, seq_id=1, path="one"))["path"]
        assert tmp_path / id / "operations.tmp" in synced
        with pytest.raises(ConfigError, match=r"another server .*process \d+.* --state-dir"):
            start()
    with pytest.raises(ConfigError, match=r"client: .*other base weights.*--state-dir"):
        start(tiny_gpt(seed=99))
    (tmp_path / id / "operations.json").write_text("")
    with pytest.raises(ConfigError, match=r"operations.json: damaged .*remove the file"):
        start()
    (tmp_path / id / "operations.json").unlink()
    start()
    (tmp_path / "other").mkdir()
    monkeypatch.setattr("test_tinker.model", lambda: tiny_gpt(seed=99))
    with serving(tmp_path / "other") as case:
        (tmp_path / "other" / "a").symlink_to(tmp_path / id)
        api = Api(case.http)
        other = api.train()
        load = api.call("load_weights", model_id=other, seq_id=1, path=path.replace(id, "a"))
        assert "other base weights" in api.result(load)["error"]


def test_an_operation_whose_number_cannot_be_written_is_an_error_and_does_not_count(tmp_path, monkeypatch):
    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        id, other = api.train(), api.train(1)
        api.batch(id, 1, "cross_entropy")
        (obstacle := tmp_path / id / "operations.tmp").mkdir()
        assert "operations.tmp" in refused(api, id, 2, "cross_entropy")
        sampler = api.sampler(id, 3)
        assert "could not be written" in sampler["error"] and sampler["category"] == "server"
        api.batch(other, 1, "cross_entropy")
        assert api.result(api.step(other, 2))["metrics"]["version"] == 1, "the other client is not hurt"
        obstacle.rmdir()
        api.result(api.step(id, 4))
        is_after_one_step(case.service.model(id).client)
        (tmp_path / id / "operations.tmp").mkdir()
        refused(api, id, 5, "cross_entropy")
    (tmp_path / id / "operations.tmp").rmdir()
    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        api.batch(id, 5, "cross_entropy")
        assert api.result(api.step(id, 6))["metrics"]["version"] == 2


def test_a_call_ends_when_its_number_is_on_the_disk_and_others_are_answered_meanwhile(tmp_path, monkeypatch):
    started, go_on, sync = threading.Event(), threading.Event(), file_format.sync

    def slow(path):
        if path.name == "operations.tmp":
            started.set()
            assert go_on.wait(60)
        sync(path)

    with serving(tmp_path, durable=True) as case:
        api = Api(case.http)
        id = api.train()
        monkeypatch.setattr(service, "HOLD_S", 0.2)
        monkeypatch.setattr(file_format, "sync", slow)
        sent = api.send_batch(id, 1, "cross_entropy").json()
        assert started.wait(60)
        assert case.http.get("/api/v1/healthz").status_code == 200
        assert case.http.post("/api/v1/retrieve_future", json={"request_id": sent["request_id"]}).status_code == 408
        go_on.set()
        monkeypatch.setattr(service, "HOLD_S", 40.0)
        assert isinstance(api.result(sent), bytes)


def give_up(api, id, number, monkeypatch):
    """Send a batch, and give it up while it runs."""
    with monkeypatch.context() as patch:
        held = Held(patch, TrainingClient, "forward_backward")
        sent = api.send_batch(id, number, "cross_entropy").json()
        assert held.begun.wait(60)
        api.call("cancel_future", request_id=sent["request_id"])
        held.go_on.set()


def test_a_batch_that_is_given_up_while_it_runs_leaves_no_gradients_and_earlier_ones_stay(tmp_path, monkeypatch):
    with serving(tmp_path) as case:
        api = Api(case.http)
        id = api.train()
        api.batch(id, 1, "cross_entropy", TOKENS)
        give_up(api, id, 2, monkeypatch)
        assert api.result(api.step(id, 3))["metrics"]["version"] == 1
        is_after_one_step(case.service.model(id).client)
        give_up(api, id, 4, monkeypatch)
        assert "no gradients" in api.result(api.step(id, 5))["error"]
