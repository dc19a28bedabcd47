"""Shared by tests of the control routes: a server with them, its states, safetensors bytes."""

from __future__ import annotations

import contextlib
import json

from server_case import Background, serving, wait_for

GREEDY = {"prompt": [1, 2, 3], "temperature": 0}


@contextlib.contextmanager
def serving_with_control(*engines, **settings):
    """`serving` with the control routes on, once every replica has joined."""
    with serving(*engines, control=True, **settings) as case:
        wait_for(lambda: len(case.coordinator.core.stats()["replicas"]) == len(case.engines))
        yield case


def call(case, path, body=None, *, method="POST", expected=200, **headers):
    """The reply's JSON; `expected` is its status."""
    reply = case.http.request(method, path, json=body, headers=headers)
    assert reply.status_code == expected, (path, reply.status_code, reply.text)
    return reply.json()


def get(case, path, **how):
    return call(case, path, method="GET", **how)


def state_of(case):
    return get(case, "/is_paused")["state"]


NAMES = {
    "SERVING": "SERVING",
    "PAUSED": "PAUSED(keep)",
    "DROWSY": "ASLEEP(graphs, kv_cache)",
    "ASLEEP": "ASLEEP(weights, graphs, kv_cache)",
    "UPDATING": "UPDATING",
    "SPOILED": "SPOILED",
}
STATES = tuple(NAMES)
"""DROWSY: asleep with its weights loaded."""


def enter_state(case, state, path):
    """Takes the server from any state to `state`. path: weights of the update that leaves SPOILED."""
    now = state_of(case)
    if now == NAMES[state]:
        return
    if now == "UPDATING":
        now = call(case, "/cancel_weight_update")["state"]
    if now == "SPOILED":
        now = call(case, "/update_weights_from_disk", {"model_path": path})["state"]
    if now.startswith("ASLEEP"):
        now = call(case, "/wake_up")["state"]
    if now.startswith("PAUSED"):
        now = call(case, "/resume")["state"]
    assert now == "SERVING"
    if state == "PAUSED":
        call(case, "/pause?mode=keep")
    elif state == "DROWSY":
        call(case, "/sleep?tags=kv_cache")
    elif state == "ASLEEP":
        call(case, "/sleep")
    elif state == "UPDATING":
        call(case, "/start_weight_update")
    elif state == "SPOILED":
        call(case, "/weights_checker", {"action": "reset"})


def safetensors(**tensors):
    """Bytes of a safetensors file; tensors: name -> (dtype, shape, bytes)."""
    header, at, parts = {}, 0, []
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
        parts.append(data)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(parts)


WEIGHTS = {"a": ("F32", [2], bytes(8)), "b": ("BF16", [3, 1], bytes(range(6)))}


def put_weights(folder, name="step1", **changes):
    """A directory with a safetensors file below `folder` -> its path from there."""
    (folder / name).mkdir()
    (folder / name / "model.safetensors").write_bytes(safetensors(**{**WEIGHTS, **changes}))
    return name


def num_requests(case):
    return sum(engine.stats()["num_requests"] for engine in case.engines)


__all__ = [
    "GREEDY",
    "STATES",
    "WEIGHTS",
    "Background",
    "call",
    "enter_state",
    "get",
    "num_requests",
    "put_weights",
    "safetensors",
    "serving_with_control",
    "state_of",
    "wait_for",
]
