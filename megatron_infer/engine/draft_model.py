"""The model that drafts tokens: loaded or adopted, and held against the model it drafts for.

`runner.speculative.model_drafter` runs it before each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megatron_infer.config.checks import check_draft, check_draft_weights, check_mtp
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.model_shape import ModelShape, mtp_shape
from megatron_infer.config.resolved_sizes import ResolvedSizes
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.errors import ConfigError, ModelError
from megatron_infer.kernels.base import PagedModel
from megatron_infer.kernels.select import ChosenKernels
from megatron_infer.memory.device import Device
from megatron_infer.memory.store import CacheStore, DraftCache
from megatron_infer.models.adopt import AdoptedModel, adopt
from megatron_infer.models.adoption_checks import unwrap
from megatron_infer.models.loading.build_model import build_model, load_weights
from megatron_infer.models.loading.description_shape import shape_of
from megatron_infer.models.weights.derived import DerivedCaches, packed_weights
from megatron_infer.runner.batch import BatchBuilder
from megatron_infer.runner.parallel.tensor_parallel_sampler import for_group
from megatron_infer.runner.row_tensors import RowTensors
from megatron_infer.runner.sampling.row_params import RowParams
from megatron_infer.runner.speculative.model_drafter import ModelDrafter
from megatron_infer.runner.speculative.mtp import MTPModel, MTPTarget
from megatron_infer.runner.speculative.residual import DraftSampler

if TYPE_CHECKING:
    from megatron_infer.models.loading.sources import ModelSource

log = logging.getLogger("megatron_infer")

NUM_DIFFERENCES = 3
"""Tokens that an error names of two vocabularies that differ."""


def make_draft(
    config: InferenceConfig,
    target: AdoptedModel,
    device: Device,
    tokenizer: Any,
    choose: Callable[[AdoptedModel, InferenceConfig, Device], ChosenKernels],
    rank_group: RankGroup,
) -> DraftModel | None:
    """What drafts by `config` on the ranks and device of `target`: a model, or the target's MTP layer; None: neither,
    or another pipeline stage, the last one, has it.

    tokenizer: the target's, None where it has none. choose: the kernels of a model. Raises ConfigError or CapacityError
    for a model that cannot draft for the target, before its weights are read, on every rank.
    """
    if config.speculative is None or not config.speculative.drafts_on_device:
        return None
    is_residual = config.speculative.verification == "residual"
    if is_residual and target.tp_group is not None:
        raise ConfigError(
            "speculative: verification 'residual' needs whole distributions on each rank, tensor parallel ranks have "
            "parts of them; use 'same_tokens'"
        )
    if "mtp" in config.speculative.methods:
        with rank_group.together("adopting the MTP layer"):
            if target.is_last_stage:
                check_mtp(target.shape)
                target.adopt_heads()
        if not target.is_last_stage:
            return None
        dtype = getattr(torch, config.kv_dtype_of(target.shape))
        shape = mtp_shape(target.shape, kv_element_bytes=dtype.itemsize)
        return DraftModel(adopted=target, shape=shape, kernels=None, is_residual=is_residual, is_own=True)
    asked, live = config.speculative.draft_model, None
    with rank_group.together("checking the draft model"):
        if isinstance(asked, str):
            source, described = _described(config, asked, target, device, tokenizer)
            live = _built(source, target, device) if target.is_last_stage else None
        elif target.is_last_stage:
            adopted = _adopted(config, asked, target)
    if isinstance(asked, str):
        with rank_group.together("loading the draft model"):  # in which all ranks may take part
            if live is None:
                source.load_into(None)
            else:
                load_weights(live, source)
                log.info("draft model %s: %s parameters", asked, f"{described.num_parameters:,}")
                adopted = adopt(live, name=asked, vocab_size=described.vocab_size)
    if not target.is_last_stage:
        return None
    kernels, is_own = choose(adopted, config, device), isinstance(asked, str)
    return DraftModel(adopted=adopted, shape=adopted.shape, kernels=kernels, is_residual=is_residual, is_own=is_own)


def _adopted(config: InferenceConfig, model: Any, target: AdoptedModel) -> AdoptedModel:
    """A live model."""
    draft = target if unwrap(model) is target.live else adopt(model, name="draft")
    check_draft(config, target.shape, draft.shape)
    return draft


def _described(
    config: InferenceConfig, name: str, target: AdoptedModel, device: Device, tokenizer: Any
) -> tuple[ModelSource, ModelShape]:
    """A model of that name that can draft for the target, before its weights are read."""
    from megatron_infer.models.loading.sources import open_source  # needs the tokenizers package

    source, shape = open_source(name), target.shape
    size = 1 if target.tp_group is None else target.tp_group.size()
    described = shape_of(source.config(), dtype=shape.dtype, tensor_parallel_size=size)
    check_draft(config, shape, described)
    if target.is_last_stage:
        check_draft_weights(name, described, device.available_bytes())
    _check_tokenizers(name, source, tokenizer)
    return source, described


def _built(source: ModelSource, target: AdoptedModel, device: Device) -> Any:
    """The source's model on this rank, without its weights."""
    groups = copy(target.live.pg_collection)
    groups.pp = groups.embd = groups.pos_embd = None  # all of its layers are on this stage
    return build_model(
        source.config(),
        dtype=target.shape.dtype,
        device=device.torch,
        pg_collection=groups,
        sequence_parallel=target.live.config.sequence_parallel,
        max_sequence_length=target.shape.max_position,
    )


def _check_tokenizers(name: str, source: ModelSource, tokenizer: Any) -> None:
    """Raise ConfigError where the tokens of both vocabularies differ; models without a tokenizer are not compared."""
    if not hasattr(tokenizer, "backend"):
        return
    try:
        own = source.tokenizer()
    except ModelError as error:
        log.warning("the draft model's tokenizer is not compared: %s", error)
        return
    ours, theirs = (one.backend.get_vocab(with_added_tokens=True) for one in (tokenizer, own))
    differing = sorted({token for token, _ in ours.items() ^ theirs.items()})
    if differing:
        shown = ", ".join(
            f"{token!r} is {theirs.get(token, 'unknown')} there and {ours.get(token, 'unknown')} here"
            for token in differing[:NUM_DIFFERENCES]
        )
        raise ConfigError(
            f"speculative: the tokenizer of the draft model {name} differs in {len(differing):,} tokens: {shown}; take "
            "a draft model of the same tokenizer"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """What drafts on one rank: a model of its own, or the MTP layer of the rank's model."""

    adopted: AdoptedModel
    """With an MTP layer: the model that has it."""
    shape: ModelShape
    kernels: ChosenKernels | None
    """None: the MTP layer, which the model's kernels run on the copies of weights that they keep."""
    is_residual: bool
    """Drafts are verified by `runner.speculative.residual`."""
    is_own: bool
    """No weights that others use: the engine has loaded the model, or it has none beside the model's."""

    @property
    def own_layers(self) -> ModelShape | None:
        """Layers beside the model's; None for an MTP layer."""
        return None if self.kernels is None else self.shape

    def drafter(
        self,
        device: Device,
        sizes: ResolvedSizes,
        store: CacheStore,
        rows: RowTensors,
        params: RowParams,
        kernels: ChosenKernels,
    ) -> ModelDrafter:
        """rows, params: those of the model's builder and sampler. kernels: the model's."""
        adopted, cache = self.adopted, DraftCache(store)
        model: PagedModel = adopted
        target: MTPTarget | None = None
        if self.kernels is None:
            model = MTPModel(adopted, cache, rows)
            target = MTPTarget(adopted, model)
            kernels = replace(kernels, lora=None, scan=None)
        else:
            kernels = self.kernels
        builder = BatchBuilder(
            device,
            sizes,
            cache,
            kernels,
            rotary=adopted.rotary_table(sizes.max_sequence_length),
            dtype=getattr(torch, adopted.shape.dtype),
            rows=rows,
        )
        sampler = DraftSampler(
            params,
            padded_vocab_size=adopted.shape.padded_vocab_size,
            argmax=kernels.argmax,
            kernels=kernels.sampling,
        )
        sampler.kept = [] if self.is_residual else None
        return ModelDrafter(model, builder, for_group(sampler, adopted.tp_group), kept=sampler.kept, target=target)

    def register_derived(self, derived: DerivedCaches) -> None:
        """Copies of a draft model's weights are renewed and released with the model's, which have an MTP layer's."""
        if self.kernels is not None:
            name = "packed weights of the draft model"
            derived.register(packed_weights(name, self.kernels.packed, self.adopted, is_own=self.is_own))
