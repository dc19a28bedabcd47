"""What drafts tokens in tests: another model, the model itself, or its MTP layer; like the model, or unlike it.

The model that knows: one decoder layer, and an MTP layer that is the same layer and reads the token alone. It predicts
what the model draws wherever its keys and values are right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import engines
import torch
from model_kinds import make_model

from megatron_infer.engine.engine import DynamicInferenceEngine

VOCAB = 128
MTP: dict[str, Any] = {"method": "mtp", "adaptive": False}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
KINDS = ("model", "mtp")


def guessing(**settings: Any) -> torch.nn.Module:
    """A model with an MTP layer of random weights."""
    return make_model("attention", **{"vocab_size": VOCAB, "mtp_num_layers": 1} | settings)


def knowing(*, num_layers: int = 1, **settings: Any) -> torch.nn.Module:
    """The model that knows. Its layers before the last one add nothing."""
    model = guessing(num_layers=num_layers, **settings)
    layer, width = model.mtp.layers[0], model.config.hidden_size
    *before, last = model.decoder.layers
    with torch.no_grad():
        for one in before:
            one.self_attention.linear_proj.weight.zero_()
            one.mlp.linear_fc2.weight.zero_()
        words = model.embedding.word_embeddings.weight
        words.div_(words.square().mean(1, keepdim=True).sqrt())
        words.mul_((1 - 1e-5) ** 0.5)  # enorm with weights of one leaves them as they are
        layer.enorm.weight.fill_(1)
        layer.eh_proj.weight.zero_()
        layer.eh_proj.weight[:, :width] = torch.eye(width)  # the embedding comes first
        layer.transformer_layer.load_state_dict(last.state_dict())
        layer.final_layernorm.load_state_dict(model.decoder.final_layernorm.state_dict())
    return model


def noisy() -> torch.nn.Module:
    """The attention model with other weights, so that some of its drafts are kept and some are not."""
    model, generator = make_model("attention", vocab_size=VOCAB), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


@dataclass(frozen=True)
class Drafter:
    """A model, and what drafts for it."""

    model: torch.nn.Module
    draft: Any
    """A model, or "mtp": `model`'s own MTP layer."""

    @property
    def method(self) -> dict[str, Any]:
        """The fields of SpeculativeConfig that name it."""
        return {"method": "mtp"} if self.draft == "mtp" else {"method": "draft", "draft_model": self.draft}

    def engine(self, **settings: Any) -> DynamicInferenceEngine:
        """settings: those of `engines.make_engine`; "speculative" is added to what names the drafter."""
        if (more := settings.pop("speculative", None)) is not None:
            settings["speculative"] = self.method | {"adaptive": False} | more
        return engines.make_engine(self.model, draft=self.draft, **settings)

    def plain(self, **settings: Any) -> DynamicInferenceEngine:
        """An engine without drafts."""
        return engines.make_engine(self.model, **settings)


def like(kind: str) -> Drafter:
    """All drafts are kept."""
    model = knowing() if kind == "mtp" else make_model("attention", vocab_size=VOCAB)
    return Drafter(model, "mtp" if kind == "mtp" else make_model("attention", vocab_size=VOCAB))


def unlike(kind: str, **settings: Any) -> Drafter:
    """Some drafts are not kept. settings: of the model."""
    if kind == "mtp":
        return Drafter(guessing(**settings), "mtp")
    return Drafter(make_model("attention", vocab_size=VOCAB, **settings), noisy())


def check_all_kept(engine: DynamicInferenceEngine) -> None:
    found = engine.spec_decode_metrics()
    assert found is not None and found.num_accepted == found.num_drafted > 0, found
