"""Whether the expert-parallel ranks of an engine have requests of their own (data-parallel attention), and why not."""

from __future__ import annotations

import logging

import torch.distributed as dist

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.layout import dp_attention_pays
from megatron_infer.distributed.groups import ParallelGroups
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.engine.draft_model import DraftModel
from megatron_infer.errors import ConfigError
from megatron_infer.models.adopt import AdoptedModel

log = logging.getLogger("megatron_infer")


def has_own_requests(
    config: InferenceConfig,
    adopted: AdoptedModel,
    draft: DraftModel | None,
    rank_group: RankGroup,
    *,
    max_requests: int,
) -> bool:
    """What `dp_attention` comes to, the same on every rank. Raises ConfigError where it is True and cannot be."""
    if config.dp_attention is False:
        return False
    groups = rank_group.groups
    reason = rank_group.first_text("whether ranks have requests of their own", why_shared(adopted, draft, groups))
    if config.dp_attention and reason is not None:
        raise ConfigError(f"dp_attention=True: {reason}; leave it False")
    is_measured = groups.tp is None and groups.pp is None and groups.cp is None
    chosen = reason is None and (config.dp_attention or (is_measured and dp_attention_pays(max_requests)))
    log.info("dp_attention: %s (%s)", chosen, reason or f"max_requests is {max_requests}")
    return chosen


def why_shared(adopted: AdoptedModel, draft: DraftModel | None, groups: ParallelGroups) -> str | None:
    """Why the ranks must share their requests; None: each can have its own."""
    if groups.ep is None:
        return "the model has one expert-parallel rank"
    if groups.divides_experts_within_tp:
        return (
            "expert-parallel ranks are tensor-parallel ranks too (expert_tensor_parallel_size is less than tp), and "
            "compute the same tokens"
        )
    for model in (adopted, *(() if draft is None else (draft.adopted,))):
        whose = "" if model is adopted else "the draft model: "
        if (layer := model.foreign_layer()) is not None:
            return f"{whose}{layer} is of a class of the user's own, which exchanges tokens in its own way"
        if model.splits_experts:
            return f"{whose}expert_tensor_parallel_size is above tp: an expert's parts are on ranks with other tokens"
        ranks = dist.get_process_group_ranks(groups.ep)
        if any(dist.get_process_group_ranks(group) != ranks for group in model.expert_groups):
            return f"{whose}experts are divided over other ranks than the model's"
    return None
