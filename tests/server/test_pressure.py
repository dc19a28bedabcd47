"""Full queues, clients that disconnect or do not read, timeouts, failing engines, shutdown."""

from __future__ import annotations

import contextlib
import time

import httpx
import pytest
from echo import EchoEngine, echo_tokens
from server_case import Background, events, free_blocks, post, raw_stream, serving, stream, wait_for

COMPLETION = "/v1/completions"


def ask(**changes):
    return {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, **changes}


def running(case):
    return sum(engine.stats()["num_requests"] for engine in case.engines)


def go_on(case):
    """Unpause the engine without its replica."""
    case.engines[0].unpause()
    case.replicas[0]._post(None)


def test_client_that_leaves_ends_its_requests_within_a_step_and_frees_their_blocks():
    engine = EchoEngine(step_s=0.02)
    with serving(engine) as case:
        before = free_blocks(case)
        one = raw_stream(case, COMPLETION, **ask(prompt=[[1, 2], [3, 4], [5]], max_tokens=1000, n=2))
        two = raw_stream(case, COMPLETION, **ask(max_tokens=1000))
        wait_for(lambda: running(case) == 4)
        one.close()
        wait_for(lambda: running(case) == 1)
        two.close()
        wait_for(lambda: running(case) == 0)
        assert free_blocks(case) == before
        with pytest.raises(httpx.ReadTimeout):  # not a stream: nothing has been sent yet
            httpx.post(case.url + COMPLETION, json=ask(max_tokens=1000), timeout=0.3)
        wait_for(lambda: running(case) == 0)
        assert free_blocks(case) == before
        assert case.http.get("/health").json()["status"] == "ok"


def test_full_queue_is_429_with_retry_after_and_waiting_calls_are_answered():
    engine = EchoEngine(step_s=0.02, max_requests=1)
    with serving(engine, max_queue=2) as case:
        engine.pause()
        calls = [Background(case, COMPLETION, ask(max_tokens=10, stream=True)) for _ in range(8)]
        wait_for(lambda: sum(one.is_done for one in calls) == 4)
        go_on(case)
        replies = [one.result() for one in calls]
        codes = sorted(reply.status_code for reply in replies)
        assert codes == [200] * 4 + [429] * 4  # one computed, one more at the engine, two in the queue
        for reply in replies:
            if reply.status_code == 429:
                error = reply.json()["error"]
                assert error["code"] == "queue_full" and int(reply.headers["retry-after"]) > 0
                assert "limit is 2 (max_queue)" in error["message"]
            else:
                text = "".join(chunk["choices"][0]["text"] for chunk in events(reply.text.splitlines()))
                assert text.split() == [str(token) for token in echo_tokens([1, 2, 3], 10)]
        engine.pause()  # several prompts are accepted together or not at all
        first = raw_stream(case, COMPLETION, **ask())
        wait_for(lambda: running(case) == 1)
        reply = post(case, COMPLETION, **ask(prompt=[[i] for i in range(1, 5)]))
        assert reply.status_code == 429
        go_on(case)
        first.close()
        wait_for(lambda: running(case) == 0)


@pytest.mark.parametrize("count", [6_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_slow_reader_loses_nothing_and_slows_no_other_call(count):
    engine = EchoEngine(num_blocks=1 << 14)
    with serving(engine) as case:
        slow = raw_stream(case, COMPLETION, receive_buffer=4096, **ask(max_tokens=count, return_token_ids=True))
        wait_for(lambda: running(case) == 1)
        began = time.monotonic()
        for _ in range(3):
            assert len(stream(case, COMPLETION, **ask(prompt=[7], max_tokens=20))) >= 1
        quick = time.monotonic() - began
        wait_for(lambda: running(case) == 0, 60)  # all tokens are sampled; none is read yet
        data = b""
        slow.settimeout(30)
        while b"[DONE]" not in data:
            data += slow.recv(1 << 16)
        slow.close()
        lines = [line for line in data.decode().split("\r\n") for line in line.split("\n")]
        chunks = events([line for line in lines if line.startswith("data: ")])
        tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert tokens == echo_tokens([1, 2, 3], count)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks).split() == [str(token) for token in tokens]
        assert len(chunks) < count / 4, "outputs that were not read were joined"
        assert quick < 10


def test_engine_failure_is_an_error_object_in_the_stream_and_fails_health():
    class Failing(EchoEngine):
        broken = False

        def step(self):
            if self.broken:
                raise RuntimeError("the device has gone")
            return super().step()

    engine = Failing(step_s=0.02)
    with serving(engine, coordinator_options={"max_attempts": 1}) as case:
        with case.http.stream("POST", COMPLETION, json=ask(max_tokens=1000, stream=True)) as reply:
            lines = []
            for line in reply.iter_lines():
                lines.append(line)
                if len(lines) == 5:
                    engine.broken = True
        chunks = events(lines)
        assert (
            chunks[-1]["error"]["type"] == "overloaded_error" and "replicas were lost" in chunks[-1]["error"]["message"]
        )
        wait_for(lambda: case.http.get("/health").status_code == 503)
        assert case.http.get("/health").json()["status"] == "unavailable"
        case.replicas[0].failure = None


def test_sigterm_finishes_running_calls_and_refuses_new_ones():
    with serving(EchoEngine(step_s=0.02), drain_timeout_s=20) as case:
        last = Background(case, COMPLETION, ask(max_tokens=60))
        wait_for(lambda: running(case) == 1)
        with httpx.Client(base_url=case.url) as client:
            case.server.shut_down()
            wait_for(lambda: client.get("/health").json()["status"] == "draining")
            refused = client.post(COMPLETION, json=ask())
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert "shutting down" in refused.json()["error"]["message"]
            reply = last.result()
        assert reply.status_code == 200 and len(reply.json()["choices"][0]["text"].split()) == 60
        case.thread.join(10)
        assert not case.thread.is_alive()


def test_calls_that_outlast_the_drain_time_end_with_an_error():
    with serving(EchoEngine(step_s=0.02), drain_timeout_s=0.3) as case:
        last = Background(case, COMPLETION, ask(max_tokens=5000, stream=True))
        wait_for(lambda: running(case) == 1)
        case.server.shut_down()
        chunks = events(last.result().text.splitlines())
        case.thread.join(10)
        assert chunks[-1]["error"]["code"] == "shutting_down" and not case.thread.is_alive()
        wait_for(lambda: running(case) == 0)


def test_second_sigterm_waits_for_nothing():
    with serving(EchoEngine(step_s=0.02), drain_timeout_s=60) as case:
        cut = Background(case, COMPLETION, ask(max_tokens=20_000))
        wait_for(lambda: running(case) == 1)
        case.server.shut_down()
        wait_for(lambda: case.http.get("/health").json()["status"] == "draining")
        case.server.shut_down()
        case.thread.join(10)
        assert not case.thread.is_alive() and case.server.was_forced
        with contextlib.suppress(httpx.TransportError):  # its connection was closed
            assert cut.result(10).status_code == 503
