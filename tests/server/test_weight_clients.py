"""The frameworks' own clients broadcast weights to a server, with training steps between. One that is not installed is
skipped; what they send is replayed in test_weight_group_routes and test_weight_groups."""

from __future__ import annotations

import concurrent.futures
import importlib.machinery
import importlib.util
import sys
import threading
import types
from pathlib import Path

import pytest
import test_adapter_groups as adapter_groups
from broadcasting_trainer import Trainer, described, packed
from control_case import get, state_of
from test_real_clients import trained
from test_weight_groups import assert_policy, served, step, weights_of

from megatron_infer.config.lora import LoRAConfig

pytestmark = pytest.mark.slow
RATES = (0.0, 0.5)


@pytest.fixture
def case():
    with served(trained(0)) as one:
        yield one


def needs(*names):
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def check_syncs(case, sync):
    """sync(model): a weight update by the client. The policy after each step, and the same tokens at rate 0."""
    model = trained(1)
    sync(model)
    tokens = assert_policy(case, model)
    for rate in RATES:
        step(model, rate)
        sync(model)
        assert (assert_policy(case, model) == tokens) == (rate == 0.0)
    assert state_of(case) == "SERVING"


class Endpoint(Trainer):
    """What vLLM's trainer_init returns for devices without NCCL, as far as TRL uses it."""

    def __init__(self, init_info):
        super().__init__("stateless", init_info["world_size"])
        self.port = init_info["master_port"]
        self._form()
        assert self.failure is None, self.failure
        self.gloo, self.group = self.group, types.SimpleNamespace(store=None, socket=None)

    def broadcast(self, tensor, src=0):
        handle, self.group = self.group, self.gloo
        super().broadcast(tensor)
        self.group = handle


def packed_producer(iterator, group, src, post_iter_func):
    for part in packed([post_iter_func(item).detach().contiguous() for item in iterator], 1 << 30):
        group.broadcast(part, src)


@pytest.fixture
def vllm_of_the_trainer(monkeypatch):
    """The names of vLLM that TRL's client imports; vLLM itself is not installed where there is no GPU."""
    for name in ("vllm", "vllm.utils", "vllm.distributed", "vllm.distributed.weight_transfer"):
        module = types.ModuleType(name)
        module.__path__, module.__spec__ = [], importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__version__ = "0.30.0"
        monkeypatch.setitem(sys.modules, name, module)
    ports = types.ModuleType("vllm.utils.network_utils")
    ports.get_ip, ports.get_open_port = (lambda: "127.0.0.1"), (lambda: Trainer().port)
    common = types.ModuleType("vllm.distributed.weight_transfer.nccl_common")
    common.trainer_init = Endpoint
    packing = types.ModuleType("vllm.distributed.weight_transfer.packed_tensor")
    packing.packed_nccl_broadcast_producer = packed_producer
    for module in (ports, common, packing):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@needs("trl", "accelerate", "aiohttp", "requests", "datasets")
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
def test_trls_weight_transfer_client_updates_the_policy(case, vllm_of_the_trainer):
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient
    from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

    PartialState()
    client = WeightTransferClient(VLLMClient(case.url), described(weights_of(trained(1)), "dtype_names"), 120)
    client.init_weight_transfer()

    def sync(model):
        client.pause()
        client.send_weights(iter(weights_of(model).items()))
        client.resume()

    check_syncs(case, sync)
    client.destroy()


@needs("skyrl", "requests")
def test_skyrls_weight_sync_client_updates_the_policy(case):
    """Its file alone: the package wants Python 3.12."""
    (folder,) = importlib.util.find_spec("skyrl").submodule_search_locations
    path = Path(folder) / "backends" / "skyrl_train" / "weight_sync" / "control_plane.py"
    spec = importlib.util.spec_from_file_location("control_plane", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client, one = (
        module.SkyrlWeightSyncClient([case.url], init_payload_fn=module.nccl_init_payloads),
        Trainer("stateless"),
    )
    where = {"master_address": "127.0.0.1", "master_port": one.port, "rank_offset": 1, "world_size": 2}
    one.begin()
    client.init_weight_transfer_engine({**where, "packed": True, "packed_buffer_size_bytes": 4096})
    one.joined()
    versions = iter(("3", "4", "5"))

    def sync(model):
        client.pause_generation()
        client.start_weight_update()
        one.send(weights_of(model).values(), buffer_bytes=4096)
        client.update_weights(described(weights_of(model), "dtype_names"))
        assert one.sent()
        client.finish_weight_update(next(versions))
        client.reset_prefix_cache()
        client.resume_generation()

    check_syncs(case, sync)
    assert get(case, "/get_weight_version")["weight_version"] == "5"
    client.close()
    one.end()


class Names(types.ModuleType):
    """A module that has every name: sglang's, which slime imports and does not use here."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


class SglangNames:
    def find_spec(self, name, path=None, target=None):
        is_ours = name.split(".")[0] in ("sglang", "sglang_router")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec):
        module = Names(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


class Handle:
    """What a Ray actor's handle does."""

    def __init__(self, engine, pool):
        self._engine, self._pool = engine, pool

    def __getattr__(self, name):
        method = getattr(self._engine, name)
        return types.SimpleNamespace(remote=lambda *args, **kwargs: self._pool.submit(method, *args, **kwargs))


@needs("slime", "ray")
def test_slimes_distributed_update_updates_the_policy(case, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [SglangNames(), *sys.meta_path])
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu_gloo")
    from slime.utils import accelerator

    names = {"name": "cpu_gloo", "device_type": "cpu", "communication_backend_name": "gloo"}
    kind = type("Cpu", (accelerator.CUDAAccelerator,), {**names, "is_available": lambda self: True})
    accelerator.register_accelerator("cpu_gloo", kind, lambda: True, communication_backends=("gloo",))
    from slime.backends.megatron_utils.update_weight import update_weight_from_distributed as update
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    services = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def results(found):
        return [one.result() for one in found] if isinstance(found, list) else found.result()

    ray = types.SimpleNamespace(get=results, _private=types.SimpleNamespace(services=services))
    monkeypatch.setattr(update, "ray", ray)
    engine = SGLangEngine.__new__(SGLangEngine)
    engine.node_rank, engine.server_host, engine.server_port, engine.args = 0, "127.0.0.1", case.port, None
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        handle = Handle(engine, pool)
        args = types.SimpleNamespace(rollout_num_gpus_per_engine=1)
        group = update.connect_rollout_engines_from_distributed(args, "slime-pp_0", [handle])

        def sync(model):
            sync.version += 1
            results([handle.pause_generation.remote(), handle.flush_cache.remote()])
            items = list(weights_of(model).items())
            for part in (items[:5], items[5:]):
                results(update.update_weights_from_distributed("slime-pp_0", group, sync.version, [handle], part))
            results([handle.continue_generation.remote()])

        sync.version = 0
        check_syncs(case, sync)
        assert engine.get_weight_version() == "3"
        update.disconnect_rollout_engines_from_distributed(args, "slime-pp_0", group, [handle])


@needs("areal", "omegaconf", "hydra")
@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_areals_distributed_update_updates_the_policy(case, backend):
    import torch.distributed as dist
    from areal.api import ParamSpec, WeightUpdateMeta
    from areal.api.alloc_mode import ModelAllocation
    from areal.api.cli_args import InferenceEngineConfig
    from areal.engine.core.distributed import init_custom_process_group

    if backend == "sglang":
        from areal.engine.sglang_remote import RemoteSGLangEngine as Engine
    else:
        from areal.engine.vllm_remote import RemotevLLMEngine as Engine
    engine = Engine(InferenceEngineConfig(experiment_name="x", trial_name="y", setup_timeout=10))
    engine.initialize(addr=f"127.0.0.1:{case.port}", train_data_parallel_size=1)
    meta = WeightUpdateMeta(type="xccl", gen_allocation=ModelAllocation.from_str(f"{backend}:d1", name="rollout"))
    meta.nccl_master_address, meta.nccl_master_port = "127.0.0.1", Trainer().port
    meta.nccl_group_name = f"update_weight_group_{backend}"
    formed = engine.init_weights_update_group(meta)
    where = f"tcp://127.0.0.1:{meta.nccl_master_port}"
    group = init_custom_process_group("gloo", where, world_size=2, rank=0, group_name=meta.nccl_group_name)
    formed.result(120)

    def sync(model):
        engine.pause_generation()
        items = list(weights_of(model).items())
        for part in (items[:5], items[5:]):
            specs = [ParamSpec(name=name, shape=tuple(one.shape), dtype="float32") for name, one in part]
            received = engine.update_weights_from_distributed(meta, specs)
            for _, tensor in part:
                dist.broadcast(tensor.contiguous(), 0, group=group)
            received.result(120)
        engine.continue_generation()

    check_syncs(case, sync)
    threading.Thread(target=engine.destroy, daemon=True).start()


@needs("areal", "omegaconf", "hydra")
def test_areals_distributed_update_of_an_adapter_updates_the_adapter():
    import requests
    import torch.distributed as dist
    from areal.api import ModelRequest, ParamSpec, WeightUpdateMeta
    from areal.api.alloc_mode import ModelAllocation
    from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
    from areal.engine.core.distributed import init_custom_process_group
    from areal.engine.vllm_remote import RemotevLLMEngine, VLLMBackend

    with adapter_groups.served(adapter_groups.BASE, lora=LoRAConfig(max_loras=2, max_rank=8)) as case:
        engine = RemotevLLMEngine(InferenceEngineConfig(experiment_name="x", trial_name="y", setup_timeout=10))
        engine.initialize(addr=f"127.0.0.1:{case.port}", train_data_parallel_size=1)
        meta = WeightUpdateMeta.from_fsdp_xccl(
            ModelAllocation.from_str("vllm:d1", name="rollout"),
            use_lora=True, lora_name="policy", lora_int_id=1, base_model_name="tiny",
        )  # fmt: skip
        meta.nccl_master_address, meta.nccl_master_port = "127.0.0.1", Trainer().port
        meta.nccl_group_name = "update_weight_group"
        rank, alpha, targets = adapter_groups.RANK, adapter_groups.ALPHA, "all-linear"
        meta.peft_config = {"r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}
        formed = engine.init_weights_update_group(meta)
        where = f"tcp://127.0.0.1:{meta.nccl_master_port}"
        group = init_custom_process_group("gloo", where, world_size=2, rank=0, group_name=meta.nccl_group_name)
        formed.result(120)

        def send(version, tensors):
            """As `FSDPEngine._update_weights_from_distributed` has its client do it."""
            engine.pause_generation()
            specs = [ParamSpec(name=name, shape=tuple(one.shape), dtype="float32") for name, one in tensors.items()]
            received = engine.update_weights_from_distributed(meta.with_version(version), specs)
            for tensor in tensors.values():
                dist.broadcast(tensor.contiguous(), 0, group=group)
            try:
                received.result(120)
            finally:
                engine.continue_generation()

        def rollout(version):
            settings = GenerationHyperparameters(max_new_tokens=8, greedy=True, lora_name="policy")
            request = ModelRequest(input_ids=list(adapter_groups.PROMPT), gconfig=settings)
            made = VLLMBackend().build_generation_request(request, with_lora=True, version=version)
            reply = requests.post(case.url + made.endpoint, json=made.payload, timeout=60)
            reply.raise_for_status()
            return VLLMBackend().parse_generation_response(reply.json()).output_tokens

        first, second = (adapter_groups.adapter_of(adapter_groups.BASE, seed) for seed in (1, 2))
        rollouts = []
        for version, tensors in enumerate((first, first, second)):
            send(version, tensors)
            policy = adapter_groups.merged(adapter_groups.BASE, tensors)
            tokens = assert_policy(case, policy, f"policy-v{version}")
            rollouts.append(rollout(version))
            assert rollouts[-1] == tokens[: len(rollouts[-1])]
        assert rollouts[0] == rollouts[1] != rollouts[2]
        assert adapter_groups.served_adapters(case) == ["policy-v2"]
        with pytest.raises(RuntimeError, match="areal_update_weights_lora_xccl"):
            send(3, dict(list(second.items())[:-1]))
        assert adapter_groups.served_adapters(case) == ["policy-v2"] and rollout(2) == rollouts[2]
        threading.Thread(target=engine.destroy, daemon=True).start()
