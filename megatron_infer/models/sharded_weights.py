"""Weights that are gathered for generation and released afterwards: those that a trainer's FSDP holds in shards over
data-parallel ranks, and those of a model that generates in another layout (`rl.generation_weights`).

    released   the trainer's state: parameters are DTensors, FSDP's hooks gather them where a module is called
    gathered   parameters are plain tensors of the dtype that the training forward computes with, all at once

FSDP's own buffers hold the gathered weights, so that the parameters are the same objects each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_infer.distributed.collective_errors import is_of_collective, mark_shared
from megatron_infer.errors import AdoptionError, InferenceError, ModelError, OtherRankFailed
from megatron_infer.kernels.checksum import content_sums
from megatron_infer.memory.device import Device
from megatron_infer.models.model_chunks import ModelChunks
from megatron_infer.models.module_guard import fsdp2_module, megatron_fsdp_classes, modules_of, plain_class


def is_dtensor(tensor: Tensor) -> bool:
    """Whether this rank holds a part of it (torch.distributed.tensor, which is imported where one exists)."""
    return hasattr(tensor, "full_tensor")


def is_managed(model: torch.nn.Module) -> bool:
    """Whether FSDP shards weights of the model, also while they are gathered."""
    in_megatron = any(hasattr(parameter, "__fsdp_param__") for parameter in model.parameters())
    return in_megatron or any(getattr(module, "_is_fsdp_managed_module", False) for module in modules_of(model))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor itself."""
    return tensor.to_local().detach() if is_dtensor(tensor) else tensor  # type: ignore[operator]


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, by a collective of the ranks of its mesh; another tensor itself."""
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor  # type: ignore[operator]


class ShardedWeights:
    """The weights of one model. Every rank of the shards makes the same calls."""

    def __init__(self, shards: Shards, *, by_part: GatheredParts | None = None) -> None:
        self.shards = shards
        self.by_part = by_part
        """The same weights where FSDP holds them in shards; None: another layout's, which are gathered all at once."""
        self._announced: list[int] | None = None
        """Checksums of this rank's shards when a version was announced; None: none was since they were gathered."""
        self.is_gathered = False

    @classmethod
    def of(cls, chain: Sequence[Any]) -> ShardedWeights | None:
        """chain: `models.trainer_state.wrapper_chain`. None: the weights are whole. Raises AdoptionError."""
        megatron = [part for part in chain if isinstance(part, megatron_fsdp_classes())]
        fsdp = fsdp2_module()
        is_sharded = megatron or (fsdp is not None and any(isinstance(module, fsdp) for module in chain[0].modules()))
        if is_sharded and isinstance(chain[-1], ModelChunks):
            raise AdoptionError(
                "",
                "FSDP around virtual pipeline stages, which megatron-core does not train either: its arguments refuse "
                "FSDP2 over pipeline stages, and its mesh for Megatron-FSDP has none; take megatron-core's DDP",
            )
        if not is_sharded:
            return None
        shards = MegatronFsdpShards(megatron[0]) if megatron else Fsdp2Shards(chain[0])
        return cls(shards, by_part=shards)

    def gather(self) -> bool:
        """Gather all weights, or raise on all ranks with the model as it was -> whether the shards of any rank are
        others than when a version was announced.

        Raises ModelError without room for them, and OtherRankFailed where another rank failed.
        """
        assert not self.is_gathered
        device = self.shards.device
        with self.together("making room for the gathered weights"):
            self.shards.check()
            self.shards.reshard()
            Device(device).trim()
            needed, free = self.shards.num_bytes, Device(device).available_bytes()
            if needed > free:
                raise ModelError(
                    f"the gathered weights take {needed / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free on "
                    f"{device}; offload the optimizer's state (offload_optimizer=True), or lower buffer_size_gb"
                )
            changed = self._announced is not None and self._checksums() != self._announced
        try:
            with self.together("gathering the weights"), torch.inference_mode(False):
                self.shards.gather()
        except BaseException:
            self.shards.release()
            raise
        self.is_gathered, self._announced = True, None
        return self.largest("weights that changed", changed) > 0

    def release(self) -> None:
        """Parameters are shards again, and the gathered weights are freed; does nothing where they are released."""
        if self.is_gathered:
            self.is_gathered = False
            self.shards.release()

    def announce(self) -> None:
        """The shards have a new version; what they become until they are gathered is another one."""
        if not self.is_gathered:
            self._announced = self._checksums()

    def largest(self, what: str, value: int) -> int:
        """The largest value of any rank. what: named where ranks are in different calls."""
        found = self._exchange(what, int(value))
        return max(found.values())

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """A forward of the block leaves no unit gathered that was in shards before: a later one would not see that an
        optimizer has written the shards."""
        if self.is_gathered:
            yield
            return
        put_back = self.shards.put_back()
        try:
            yield
        finally:
            put_back()

    def _checksums(self) -> list[int]:
        return content_sums(self.shards.local_tensors())

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """The body succeeds on all ranks of the shards, or raises on all."""
        try:
            yield
        except BaseException as error:
            if is_of_collective(error):  # the ranks' groups are of no use
                raise
            self._exchange(
                what, str(error) if isinstance(error, InferenceError) else f"{type(error).__name__}: {error}"
            )
            mark_shared(error)
            raise
        failed = {rank: text for rank, text in self._exchange(what, None).items() if text is not None}
        if failed:
            raise OtherRankFailed(
                "; ".join(f"rank {rank} failed while {what}: {text}" for rank, text in failed.items()),
                ranks=list(failed),
            )

    def _exchange(self, what: str, value: Any) -> dict[int, Any]:
        """Every rank's value, by rank in the world."""
        found = {dist.get_rank(): value}
        for group in self.shards.groups:
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, (what, found), group=group)
            if {name for name, _ in parts} != {what}:
                raise ModelError(
                    f"ranks that gather weights together are in different calls: {', '.join(n for n, _ in parts)}"
                )
            found = {rank: own for _, part in parts for rank, own in part.items()}
        return found


class Shards(Protocol):
    """One kind of weights that are not there all the time, such as FSDP's around a model."""

    groups: list[Any]
    """Process groups whose ranks gather together, each once, in the same order on all ranks."""

    @property
    def device(self) -> torch.device:
        """Where the forward computes; shards may be elsewhere."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of the gathered weights that have no memory yet."""
        ...

    def local_tensors(self) -> list[Tensor]:
        """This rank's shards."""
        ...

    def check(self) -> None:
        """Raise AdoptionError for settings with which a step would not compute what the trainer's forward does."""
        ...

    def gather(self) -> None:
        """Parameters are plain tensors until `release`, also after a forward of the trainer's."""
        ...

    def release(self) -> None:
        """Undo `gather`, also one that raised."""
        ...

    def reshard(self) -> None:
        """Free what a forward of the trainer's without a backward has left gathered, so that the next one gathers."""
        ...

    def put_back(self) -> Callable[[], None]:
        """-> a function that frees what is gathered between the two calls."""
        ...

    def reset(self) -> None:
        """After a forward or backward that raised: the next one begins as if there had been none."""
        ...


class GatheredParts(Protocol):
    """Weights that can be gathered part by part, such as FSDP's. Every rank makes the same calls."""

    @property
    def parts(self) -> list[list[Tensor]]:
        """Gathered tensors that `part` gathers together, the same objects each time."""
        ...

    def gathered_tensors(self) -> dict[int, Tensor]:
        """The gathered tensors, by the id of the parameter that has this rank's shard."""
        ...

    def part(self, number: int) -> AbstractContextManager[None]:
        """Inside, the tensors of one part have memory and values."""
        ...


class Fsdp2Shards:
    """The units of torch's FSDP2 (`fully_shard`) in a model, gathered and released by FSDP2 itself.

    While the weights are gathered the units have their own classes, which adoption knows, and keep the weights after a
    forward: the trainer's forward then scores without a collective. FSDP2's hooks stay in place.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        fsdp = fsdp2_module()
        self._units: list[Any] = [module for module in root.modules() if isinstance(module, fsdp)]
        states = {id(state): state for unit in self._units if (state := unit._get_fsdp_state())}
        self._states = list(states.values())
        self._param_groups = [group for state in self._states for group in _param_groups(state)]
        self._trainer: list[tuple[Any, type]] = []
        """Units and the classes that they have in training, while the weights are gathered."""
        self._generating: dict[int, type] = {}
        """Classes that adoption has given, by id of the unit."""
        self._meshes: list[tuple[Any, Any]] = []
        """Parameter groups, and the ranks over which they are sharded again after a forward of the trainer's."""
        self.groups = _process_groups(self._parameters())

    @property
    def device(self) -> torch.device:
        found: torch.device = self._states[0]._device
        return found

    def _parameters(self) -> list[Any]:
        return [one for group in self._param_groups for one in group.fsdp_params]

    @property
    def num_bytes(self) -> int:
        return sum(_whole_bytes(one, group.mp_policy) for group in self._param_groups for one in group.fsdp_params)

    def local_tensors(self) -> list[Tensor]:
        return [local(one.sharded_param) for one in self._parameters()]

    def check(self) -> None:
        if any(plain_class(unit) is type(unit) for unit in self._units):
            raise ModelError("another session generates with the weights of this model; end its generating() first")
        for unit in self._units[1:]:
            policy = unit._get_fsdp_state()._mp_policy
            if policy.output_dtype not in (None, policy.param_dtype, torch.float32):
                raise AdoptionError(
                    plain_class(unit).__qualname__,
                    f"FSDP2's output_dtype={policy.output_dtype} rounds what the module returns, which the paged path "
                    "does not; leave it out, or set it on the root alone",
                )

    def gather(self) -> None:
        for group in self._param_groups:
            self._meshes.append((group, group.post_forward_mesh_info))
        for unit in self._units:
            unit.unshard()
        for group, _ in self._meshes:
            group.post_forward_mesh_info = None
        for unit in self._units:
            self._trainer.append((unit, type(unit)))
            unit.__class__ = self._generating.get(id(unit), plain_class(unit))

    def release(self) -> None:
        for unit, kind in self._trainer:
            self._generating[id(unit)] = type(unit)
            unit.__class__ = kind
        self._trainer = []
        for group, mesh in self._meshes:
            group.post_forward_mesh_info = mesh
        self._meshes = []
        for state in self._states:
            if state._is_root and state._auto_reshard_after_forward:  # became the root in a forward meanwhile
                for group in _param_groups(state):
                    group.post_forward_mesh_info = None
        self.reshard()

    def reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def put_back(self) -> Callable[[], None]:
        units = [one for one in self._units if all(group.is_sharded for group in _param_groups(one._get_fsdp_state()))]

        def reshard() -> None:
            for unit in units:
                unit.reshard()

        return reshard

    @property
    def parts(self) -> list[list[Tensor]]:
        self.gathered_tensors()
        return [
            [one._unsharded_param for group in _groups_of(unit) for one in group.fsdp_params] for unit in self._units
        ]

    def gathered_tensors(self) -> dict[int, Tensor]:
        for unit in self._units:  # the first time makes the tensors
            if not all(hasattr(one, "_unsharded_param") for group in _groups_of(unit) for one in group.fsdp_params):
                unit.unshard()
                unit.reshard()
        return {id(one.sharded_param): one._unsharded_param for one in self._parameters()}

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        self._units[number].unshard()
        try:
            yield
        finally:
            self._units[number].reshard()

    def reset(self) -> None:
        if hasattr(self._units[0], "reset_iter_state"):  # from torch 2.13 on
            self._units[0].reset_iter_state()


class MegatronFsdpShards:
    """A model in Megatron-FSDP, gathered into the buffers of its own pipeline of all-gathers.

    While the weights are gathered the pipeline frees nothing: the trainer's forward then scores without a collective.
    """

    def __init__(self, fsdp: Any) -> None:
        """fsdp: the `MegatronFSDP` around the model."""
        self._fsdp, self._pipeline = fsdp, fsdp.all_gather_pipeline
        index = fsdp.dist_index
        found = [index.get_fsdp_group(), index.get_fsdp_group(is_expert_parallel=True), index.get_outer_fsdp_group()]
        self.groups = list({group.group_name: group for group in found if group is not None}.values())

    @property
    def device(self) -> torch.device:
        found: torch.device = next(iter(self._fsdp.raw_param.values())).device
        return found

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self._fsdp.raw_param.values())

    def local_tensors(self) -> list[Tensor]:
        return [local(one) for _, one in self._fsdp.param_and_grad_buffer.optimizer_named_parameters]

    def check(self) -> None:
        if getattr(self._fsdp.ddp_config, "fsdp_double_buffer", False):
            raise AdoptionError(
                "ddp_config",
                "fsdp_double_buffer=True: Megatron-FSDP has memory for two units then, and generation gathers all; "
                "set it to False (and nccl_ub, which sets it)",
            )

    def gather(self) -> None:
        self._fsdp.start_param_sync(force_sync=True)
        self._fsdp._replace_param_with_raw_if_needed()
        self._pipeline.release_bucket = _keep

    def release(self) -> None:
        vars(self._pipeline).pop("release_bucket", None)
        self.reshard()

    def reshard(self) -> None:
        self._pipeline.reset()
        self._fsdp._replace_param_with_distributed_if_needed()

    def put_back(self) -> Callable[[], None]:
        return self.reshard if self._fsdp.is_param_fsdp_distributed else lambda: None

    @property
    def parts(self) -> list[list[Tensor]]:
        return [list(group.params) for group in self._fsdp.param_and_grad_buffer.parameter_groups]

    def gathered_tensors(self) -> dict[int, Tensor]:
        named = self._fsdp.param_and_grad_buffer.optimizer_named_parameters
        return {id(shard): self._fsdp.raw_param[name] for name, shard in named}

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        self._fsdp.all_gather_and_wait_parameters_ready(params=self.parts[number], prefetch=False)
        try:
            yield
        finally:
            self._pipeline.reset()

    def reset(self) -> None:
        for module in modules_of(self._fsdp.module):
            if (state := getattr(module, "_training_state", None)) is not None:
                module._training_state = type(state).IDLE
        self.reshard()


def _keep(*_: Any, **__: Any) -> None:
    """In the place of the pipeline's `release_bucket`."""


def _param_groups(state: Any) -> list[Any]:
    """torch before 2.12 has one group or none in a unit."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _groups_of(unit: Any) -> list[Any]:
    return _param_groups(unit._get_fsdp_state())


def _process_groups(parameters: Sequence[Any]) -> list[Any]:
    """Those over which parameters are sharded or replicated, each once, in an order that is the same on all ranks."""
    found: dict[str, Any] = {}
    for one in parameters:
        mesh = one.mesh_info.mesh
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            found[group.group_name] = group
    return list(found.values())


def _whole_bytes(one: Any, policy: Any) -> int:
    sharded = one.sharded_param
    dtype = policy.param_dtype if policy.param_dtype is not None and sharded.is_floating_point() else sharded.dtype
    return 0 if one.sharded_state.name == "UNSHARDED" else one._orig_size.numel() * dtype.itemsize
