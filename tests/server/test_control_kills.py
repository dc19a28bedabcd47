"""An engine dies within a weight update, or is started again after one: requests go on, with one version everywhere."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace

import pytest
from control_case import Background, call, get, put_weights, safetensors, serving_with_control, state_of, wait_for
from coordinator_case import replica
from echo import EchoEngine, echo_tokens
from server_case import serving
from test_coordinator_loss import Restarted

OCTETS = {"Content-Type": "application/octet-stream"}
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
BODY = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}


class Mortal(EchoEngine):
    """An engine whose process ends as the command `dies_at` comes, for the `count`-th time."""

    def __init__(self):
        super().__init__(step_s=0.005)
        self.dies_at, self.count = "", 1
        self.before, self.does = "", None
        """A command, and what happens before it."""

    def __getattr__(self, name):
        if name == self.__dict__.get("before"):
            self.before = ""
            self.does()
        if name == self.__dict__.get("dies_at"):
            self.count -= 1
            if not self.count:
                raise SystemExit  # ends its replica's thread: no command's error is one
        return super().__getattr__(name)


@contextlib.contextmanager
def served(*engines, root):
    """A server whose engines are started again when they have died; `.now` has the engines by name."""
    put_weights(root, "step1")
    put_weights(root, "step2", a=("F32", [2], b"\1" * 8))
    with contextlib.ExitStack() as stack:
        case = stack.enter_context(serving_with_control(*engines, weights_root=str(root)))
        now = {f"r{i}": SimpleNamespace(engine=one, replica=case.replicas[i]) for i, one in enumerate(case.engines)}

        def start_again():
            for name, one in now.items():
                if not one.replica.thread.is_alive():
                    engine = EchoEngine(step_s=0.005)
                    again = stack.enter_context(replica(case.coordinator.address, engine, name=name))
                    now[name] = SimpleNamespace(engine=engine, replica=again)

        yield SimpleNamespace(**vars(case), now=now, start_again=start_again)


def load(case, path, expected=200, **more):
    return call(case, "/update_weights_from_disk", {"model_path": path, **more}, expected=expected)


def kill(case, name):
    case.now[name].replica.stop()
    case.now[name].replica.thread.join(30)
    wait_for(lambda: name not in [one["name"] for one in replicas(case)])


def replicas(case):
    return case.coordinator.core.stats()["replicas"]


def has_settled(case):
    found = replicas(case)
    return len(found) == len(case.now) and not any(one["restoring"] for one in found)


def update(case, how):
    """The status of the last of an update's calls, which ends with the first error."""
    if how == "files":
        return case.http.post("/update_weights_from_disk", json={"model_path": "step2"}).status_code
    body = {"content": safetensors(a=("F32", [2], b"\2" * 8)), "headers": OCTETS}
    for path, more in (
        ("/start_weight_update", {}),
        ("/update_weights", body),
        ("/update_weights", body),
        ("/finish_weight_update", {}),
    ):
        reply = case.http.post(path, **more)
        if reply.status_code != 200:
            break
    return reply.status_code


def check_serving(case, expected_version):
    """Requests are computed, by engines with the same weights, and no engine is left paused."""
    assert state_of(case) == "SERVING"
    for number in range(4):
        reply = Background(case, "/v1/completions", BODY | {"prompt": [number]}).result()
        choice = reply.json()["choices"][0]
        assert choice["token_ids"] == echo_tokens([number], 4)
        assert {span["policy_version"] for span in choice["version_spans"]} == {expected_version}
    open_ones = [case.now[one["name"]].engine for one in replicas(case) if not one["outdated"]]
    assert open_ones and {engine.state for engine in open_ones} == {"running"}
    assert len({engine.controls.digest for engine in open_ones}) == 1


POINTS = (
    (2, "files", "pause", 1),
    (2, "files", "load_weights", 1),
    (2, "files", "finish_weights", 1),
    (2, "files", "settle_weights", 1),
    (2, "bytes", "begin_weights", 1),
    (2, "bytes", "write_weights", 2),
    (2, "bytes", "unpause", 1),
    (1, "files", "load_weights", 1),
    (1, "files", "unpause", 1),
    (1, "bytes", "write_weights", 1),
    (1, "bytes", "settle_weights", 1),
)
"""(engines, how the update comes, the command at which one dies, which time it is sent after the first update)."""


@pytest.mark.few
@pytest.mark.parametrize(("num_engines", "how", "point", "count"), POINTS)
def test_engine_that_dies_within_an_update_leaves_no_engine_paused_and_one_version(
    tmp_path, num_engines, how, point, count
):
    engines = [Mortal() for _ in range(num_engines)]
    with served(*engines, root=tmp_path) as case:
        load(case, "step1")
        streams = [Background(case, "/v1/completions", BODY | {"prompt": [i], "max_tokens": 60}) for i in range(4)]
        wait_for(lambda: any(engine.stats()["num_running"] for engine in engines))
        engines[-1].dies_at, engines[-1].count = point, count
        status = update(case, how)
        assert status == (200 if point in ("settle_weights", "unpause") else 503)
        case.now[f"r{num_engines - 1}"].replica.thread.join(30)
        case.start_again()
        wait_for(lambda: has_settled(case))
        if status == 200 and how == "bytes" and num_engines == 1:
            assert {one.result().status_code for one in streams} <= {200, 503}
            assert call(case, "/v1/completions", BODY | {"prompt": [1]}, expected=503)
            load(case, "step2", weight_version=9)
            check_serving(case, 9)
            return
        check_serving(case, 2 if status == 200 else 1)
        for number, one in enumerate(streams):
            assert one.result().json()["choices"][0]["token_ids"] == echo_tokens([number], 60)
        load(case, "step2", weight_version=9)
        check_serving(case, 9)


def test_engine_that_is_lost_between_two_calls_of_an_update_ends_it_and_nothing_has_changed(tmp_path):
    with served(Mortal(), Mortal(), root=tmp_path) as case:
        load(case, "step1")
        call(case, "/start_weight_update")
        kill(case, "r1")
        case.start_again()
        wait_for(lambda: has_settled(case))
        reply = case.http.post("/update_weights", content=safetensors(a=("I8", [1], b"1")), headers=OCTETS)
        assert reply.status_code == 503 and "Retry-After" in reply.headers
        assert [one["name"] for one in reply.json()["error"]["replicas"]] == ["r1"]
        wait_for(lambda: has_settled(case))
        check_serving(case, 1)


def test_engine_started_again_reads_the_weights_in_force_before_it_serves(tmp_path):
    with served(Mortal(), root=tmp_path) as case:
        call(case, "/start_weight_update")  # from two files
        for name in ("step1", "step2"):
            call(case, "/update_weights", {"update_info": {"path": f"{name}/model.safetensors"}})
        call(case, "/finish_weight_update", {"weight_version": 0})  # the version of the model as it is loaded
        digest = case.now["r0"].engine.controls.digest
        kill(case, "r0")
        case.start_again()
        wait_for(lambda: has_settled(case))
        check_serving(case, 0)
        assert case.now["r0"].engine.controls.digest == digest != "made"


def test_what_is_written_next_to_weights_does_not_hinder_reading_them(tmp_path):
    with served(Mortal(), root=tmp_path) as case:
        (tmp_path / "step1" / ".#notes").symlink_to("someone@somewhere")  # a lock, as editors make them
        load(case, "step1", weight_version=3)
        (tmp_path / "step1" / "optimizer.pt").write_bytes(b"of a trainer")
        (tmp_path / "step1" / "trainer_state.json").write_text("{}")
        kill(case, "r0")
        case.start_again()
        wait_for(lambda: has_settled(case))
        check_serving(case, 3)


@pytest.mark.few
@pytest.mark.parametrize("how", ["bytes", "changed", "gone", "version"])
def test_engine_that_cannot_get_the_weights_in_force_is_a_503_with_the_reason_until_the_next_update(
    tmp_path, caplog, how
):
    caplog.set_level(logging.WARNING)
    with served(Mortal(), root=tmp_path) as case:
        if how == "bytes":
            update(case, "bytes")
        elif how == "version":
            call(case, "/update_weight_version", {"new_version": 4})
        else:
            load(case, "step1")
        file = tmp_path / "step1" / "model.safetensors"
        if how == "changed":
            file.write_bytes((tmp_path / "step2" / "model.safetensors").read_bytes())
        elif how == "gone":
            file.unlink()
        kill(case, "r0")
        waiting = Background(case, "/v1/completions", BODY | {"prompt": [1]})
        wait_for(lambda: case.coordinator.core.stats()["waiting"] == 1)
        case.start_again()
        wait_for(lambda: any(one["outdated"] for one in replicas(case)))
        assert waiting.result().status_code == 503
        reply = case.http.post("/v1/completions", json=BODY | {"prompt": [1]})
        assert reply.status_code == 503 and "Retry-After" in reply.headers
        error = reply.json()["error"]
        assert error["code"] == "outdated_weights" and "finish a weight update" in error["message"]
        assert "step1" not in error["message"]
        health = case.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "outdated"
        said = [one.getMessage() for one in caplog.records if "takes no requests" in one.getMessage()]
        assert len(said) == 1 and said[0].startswith("replica r0")
        load(case, "step2", weight_version=7)
        wait_for(lambda: case.http.get("/health").status_code == 200)
        check_serving(case, 7)


def test_other_engines_serve_while_one_has_old_weights_and_health_names_it(tmp_path):
    with served(Mortal(), Mortal(), root=tmp_path) as case:
        assert update(case, "bytes") == 200
        kill(case, "r1")
        case.start_again()
        wait_for(lambda: has_settled(case))
        check_serving(case, 1)
        wait_for(lambda: len(get(case, "/health")["replicas"]) == 2)
        assert sorted(one["outdated"] for one in get(case, "/health")["replicas"]) == [False, True]
        assert get(case, "/weight_info")["order"] == 1
        call(case, "/cancel_weight_update", expected=409)
        load(case, "step1")
        check_serving(case, 2)
        assert [one["outdated"] for one in replicas(case)] == ["", ""]


@pytest.mark.few
@pytest.mark.parametrize("point", ["write", "finish", "resume"])
def test_coordinator_that_dies_within_an_update_leaves_no_engine_paused_and_one_version(tmp_path, point):
    address = f"ipc://{tmp_path}/c"
    restarted = Restarted(address, timeout_s=20.0)
    try:
        with serving(Mortal(), Mortal(), control=True, address=address) as case:
            wait_for(lambda: len(case.http.get("/health").json()["replicas"]) == 2)
            stream = Background(case, "/v1/completions", BODY | {"prompt": [7], "max_tokens": 60})
            wait_for(lambda: any(engine.stats()["num_running"] for engine in case.engines))
            call(case, "/start_weight_update")
            data = {"content": safetensors(a=("F32", [2], b"\2" * 8)), "headers": OCTETS}
            assert case.http.post("/update_weights", **data).status_code == 200
            if point == "resume":
                case.engines[0].before = "unpause"
            elif point == "finish":
                case.engines[0].before = "finish_weights"
            case.engines[0].does = restarted.restart
            if point == "write":
                restarted.restart()
                reply = case.http.post("/update_weights", **data)
            else:
                reply = case.http.post("/finish_weight_update")
            assert (reply.status_code == 200) is (point == "resume")
            wait_for(lambda: len(restarted.one.core.stats()["replicas"]) == 2)
            wait_for(lambda: state_of(case) == "SERVING" and case.http.get("/health").status_code == 200)
            assert stream.result().json()["choices"][0]["token_ids"] == echo_tokens([7], 60)
            digests = {engine.controls.digest for engine in case.engines}
            assert len(digests) == 1 and ("made" in digests) is (point != "resume")
            assert {engine.state for engine in case.engines} == {"running"}
    finally:
        restarted.end()
