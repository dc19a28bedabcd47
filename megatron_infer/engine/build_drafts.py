"""What drafts tokens in an engine, made from its options."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.distributed.rank_group import RankGroup
from megatron_infer.errors import ConfigError
from megatron_infer.runner.sampling.grammar_matchers import Grammars
from megatron_infer.runner.speculative.ngram import NgramProposer
from megatron_infer.runner.speculative.proposers import FirstProposer, GrammarProposer
from megatron_infer.runner.speculative.synthetic import SyntheticAcceptance, SyntheticProposer
from megatron_infer.scheduler.context.dynamic_context import DynamicInferenceContext
from megatron_infer.scheduler.draft_depth import DraftDepth
from megatron_infer.scheduler.drafts import DeviceProposer, DraftPlanner, Proposer

log = logging.getLogger("megatron_infer")

NO_DRAFTS = "this engine drafts no tokens; build it with InferenceConfig(speculative=SpeculativeConfig()), or give None"


def without_drafts(config: InferenceConfig) -> dict[str, str]:
    """Parameters that need drafts, with the reason why this engine refuses them."""
    return {} if config.speculative is not None else {"speculate": NO_DRAFTS}


def max_drafts_of(config: InferenceConfig) -> int:
    """The most tokens drafted for a request in a step."""
    return 0 if config.speculative is None else config.speculative.num_speculative_tokens


def make_synthetic(config: InferenceConfig) -> SyntheticAcceptance | None:
    """What decides which drafts are kept where draws do not."""
    rate = None if config.speculative is None else config.speculative.synthetic_acceptance_rate
    return None if rate is None else SyntheticAcceptance(rate)


def make_drafts(
    config: InferenceConfig,
    shape: ModelShape,
    context: DynamicInferenceContext,
    grammars: Grammars,
    rank_group: RankGroup,
    *,
    has_tokenizer: bool,
) -> DraftPlanner | None:
    """None without `speculative`. Raises ConfigError, on every rank, for a method that needs what a rank lacks."""
    asked = config.speculative
    if asked is None:
        return None
    if "grammar" in asked.methods and rank_group.any_rank(not has_tokenizer):
        on_rank = "" if rank_group.size == 1 else " on every rank"
        raise ConfigError(
            "speculative: method 'grammar' drafts what structured output forces, and the engine has no tokenizer for "
            f"it{on_rank}; give it one{on_rank} or leave 'grammar' out"
        )
    proposers: dict[str, Callable[[], Proposer]] = {
        "ngram": NgramProposer,
        "grammar": lambda: GrammarProposer(grammars.forced),
        "draft": DeviceProposer,
        "mtp": DeviceProposer,
    }
    is_synthetic = asked.synthetic_acceptance_rate is not None
    chosen = [proposers[name]() for name in asked.methods]
    if is_synthetic:
        log.warning("synthetic_acceptance_rate: tokens of this engine mean nothing; it publishes no cached prefix")
        chosen = [DeviceProposer() if asked.drafts_on_device else SyntheticProposer()]
    return DraftPlanner(
        context,
        chosen[0] if len(chosen) == 1 else FirstProposer(chosen),
        max_drafts=asked.num_speculative_tokens,
        vocab_size=shape.vocab_size,
        depth=DraftDepth(learns_unverified=not is_synthetic) if asked.adaptive else None,
        num_allowed=partial(grammars.num_allowed, skips_slow=rank_group.size == 1),
        has_draft_model=asked.drafts_on_device,
    )
