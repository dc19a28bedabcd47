"""What carries a group's collectives is found however the trainer asked for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_infer.distributed.backends import backend_on, device_of
from megatron_infer.distributed.stage_link import StageLink
from megatron_infer.rl.updates import reshard


@pytest.mark.parametrize(
    ("config", "on_cpu", "on_cuda", "home"),
    [
        ("cuda:nccl", "cuda:nccl", "nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "gloo", "nccl", "cuda"),
        ("cpu:gloo,cuda:gloo", "gloo", "gloo", "cpu"),
        ("cpu:gloo", "gloo", "cpu:gloo", "cpu"),
    ],
)
def test_a_group_of_several_backends_has_that_of_the_device(monkeypatch, config, on_cpu, on_cuda, home):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: config)
    assert (backend_on(None, "cpu"), backend_on(None, "cuda")) == (on_cpu, on_cuda)
    assert device_of(None) == torch.device(home)


def test_a_group_without_a_named_backend_is_gloos_on_a_cpu():
    if torch.distributed.is_initialized():
        pytest.skip("another test's groups are up")
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        if not torch.accelerator.is_available():
            assert backend_on(torch.distributed.group.WORLD, "cpu") == "gloo"
        assert torch.distributed.get_backend() == "undefined", "the name alone would do"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("config", ["gloo", "cpu:gloo,meta:nccl", "nccl"])
def test_stages_wait_over_gloo_alone_and_make_a_group_for_the_host_where_they_have_none(monkeypatch, config):
    """The device is one that every machine has."""
    made, waits = [], []
    dist, group = torch.distributed, SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "new_group", lambda *args, **options: made.append(args) or "another")
    work = SimpleNamespace(wait=lambda *limit: waits.append(limit))
    monkeypatch.setattr(dist, "irecv", lambda tensor, *args, **options: tensor.zero_() is tensor and work)
    link = StageLink(group, hidden_size=4, device=torch.device("meta"), timeout_s=7)
    link.receive(3)
    link.receive_result(2)
    assert made == ([([0, 1], "gloo")] if config == "nccl" else [])
    assert [bool(limit) for limit in waits] == [config == "gloo", True]


@pytest.mark.parametrize(("config", "where"), [("gloo", "cpu"), ("cpu:gloo,meta:nccl", "meta"), ("nccl", "meta")])
def test_weights_travel_from_where_the_backend_of_their_device_takes_them(monkeypatch, config, where):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: config)
    weights = torch.empty(1, device="meta")
    plan = SimpleNamespace(receives={0: [SimpleNamespace(target_index=5)]})
    source = SimpleNamespace(tensor=weights)
    assert reshard._device_of(None, [source], lambda index: torch.empty(1), plan).type == where
    assert reshard._device_of(None, [], {5: weights}.__getitem__, plan).type == where
