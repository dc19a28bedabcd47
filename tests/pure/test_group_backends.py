"""What carries a group's collectives is found however the trainer asked for it."""

from __future__ import annotations

import pytest
import torch

from megatron_infer.parallel.groups import _home_of, _is_nccl, backend_on


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
    assert _home_of(None) == torch.device(home)
    assert _is_nccl(None) == (home == "cuda"), "what waits for a rank that is gone is ended, however it was asked for"


def test_a_group_that_nobody_named_a_backend_for_is_gloos_on_a_cpu():
    if torch.distributed.is_initialized():
        pytest.skip("another test's groups are up")
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        if not torch.accelerator.is_available():
            assert backend_on(torch.distributed.group.WORLD, "cpu") == "gloo"
        assert torch.distributed.get_backend() == "undefined", "the name alone would do"
    finally:
        torch.distributed.destroy_process_group()
