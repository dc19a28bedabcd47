"""Options of speculative decoding: `SpeculativeConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_infer.config.options import checked, option, options_of
from megatron_infer.errors import ConfigError, check_known, unknown_name

METHODS = ("ngram", "grammar", "draft", "mtp")
NOT_BUILT = {
    "standalone": "this method is named 'draft' here",
    "eagle": "megatron-core has no EAGLE heads",
}
"""Method that is known elsewhere -> why it is refused."""
VERIFICATIONS = ("same_tokens", "residual")
OTHER_VERIFICATIONS = {
    "greedy": "same_tokens at temperature 0 is greedy; set the temperature of the request",
    "typical-acceptance": "it changes the distribution that tokens are drawn from",
    "logit-comparison": "it changes the distribution that tokens are drawn from",
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted and verified. Raises ConfigError for a wrong value or an unknown name.

    A step computes a request's last token and its drafts and draws behind each of them what it would have drawn one
    by one; drafts are kept as far as they equal the draws. So no option but `verification` changes a token.
    """

    method: str | tuple[str, ...] = option("ngram", flag="speculative", is_common=True, default_text="default none")
    """What drafts the tokens that a step verifies. ngram: what followed the last tokens where they stood before, in
    prompt or answer. grammar: tokens that structured output forces. draft: what `draft_model` draws. mtp: what the
    model's own MTP layer draws. Several: the first that proposes anything; draft and mtp exclude each other."""
    num_speculative_tokens: int = option(4, least=1, remedy="for none leave speculative None", is_common=True)
    """The most tokens drafted for a request in a step; at least 1 and below the block size."""
    draft_model: Any = option(None, is_common=True)
    """The model that drafts: an alias, directory, hub id, .gguf file or checkpoint, or a live megatron-core model; of
    the same vocabulary and tokenizer. For method draft only."""
    adaptive: bool = option(True, flag="speculative-adaptive")
    """Measured costs of steps and how often such drafts were kept decide how many tokens are verified, none included.
    False: always as many as are found."""
    verification: str = option("same_tokens", flag="speculative-verification")
    """same_tokens: a draft is kept where it equals the token that is drawn at its position. residual: classic rejection
    of what a draft model or MTP layer drafts: other tokens, of the same distribution. For drafts without one both are
    the same."""
    synthetic_acceptance_rate: float | None = option(None, least=0, most=1, flag=None)
    """For benchmarks: a draft is kept with this probability if all before it are, whatever is drawn, and tokens mean
    nothing. Without a draft model or MTP layer the last token is drafted again, always. None: drafts are verified."""

    def __new__(cls, *args: object, **kwargs: object) -> SpeculativeConfig:
        """Refuse an unknown keyword, with the reason or the nearest known one."""
        check_known(f"{cls.__name__} field", kwargs, options_of(cls))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", _methods(self.method))
        _choice("verification", self.verification, VERIFICATIONS, OTHER_VERIFICATIONS)
        if ("draft" in self.methods) != (self.draft_model is not None):
            remedy = "leave it None, or set method='draft'"
            if "draft" in self.methods:
                remedy = "give the model that drafts, draft_model='small/'"
            raise ConfigError(
                f"speculative: draft_model is {self._shown_model()!r} with method {self.method!r}; {remedy}"
            )
        for name in ("num_speculative_tokens", "adaptive", "synthetic_acceptance_rate"):
            value = checked(options_of(SpeculativeConfig)[name], getattr(self, name), where="speculative: ")
            object.__setattr__(self, name, value)
        if {"draft", "mtp"} <= set(self.methods):
            raise ConfigError(
                f"speculative: method is {self.method!r}: one model draws a step's drafts; leave 'draft' or 'mtp' out"
            )
        if self.synthetic_acceptance_rate is not None and self.verification != "same_tokens":
            raise ConfigError(
                f"speculative: verification {self.verification!r} with synthetic_acceptance_rate, which verifies "
                "nothing; leave one of them out"
            )

    @property
    def methods(self) -> tuple[str, ...]:
        """In the order in which they are asked."""
        return (self.method,) if isinstance(self.method, str) else self.method

    @property
    def drafts_on_device(self) -> bool:
        """Whether a model draws drafts, which the host learns with the step's other outputs."""
        return not {"draft", "mtp"}.isdisjoint(self.methods)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which `speculative_of` takes back; a live draft model is only named."""
        return {name: getattr(self, name) for name in options_of(SpeculativeConfig)} | {
            "draft_model": self._shown_model()
        }

    def _shown_model(self) -> str | None:
        model = self.draft_model
        return model if model is None or isinstance(model, str) else f"a live {type(model).__name__}"


def _methods(value: object) -> str | tuple[str, ...]:
    """The value of `method`, checked: one name, or a tuple of several."""
    names = tuple(value) if isinstance(value, list | tuple) else (value,)
    for name in names:
        _choice("method", name, METHODS, NOT_BUILT)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"speculative: method is {value!r}, it must name at least one method, and none twice")
    return names if len(names) > 1 else names[0]


def speculative_of(value: object) -> SpeculativeConfig | None:
    """A config from what `InferenceConfig(speculative=...)` is given: one, a mapping of its fields, or None."""
    if isinstance(value, Mapping):
        return SpeculativeConfig(**{str(name): one for name, one in value.items()})
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    raise ConfigError(
        f"speculative is {value!r} ({type(value).__name__}), it must be a SpeculativeConfig, a mapping of its fields "
        'or None; SpeculativeConfig(method="ngram") drafts from prompt and answer'
    )


def refuse_synthetic(speculative: object, who: str) -> None:
    """Raise ConfigError for options whose tokens mean nothing. who: takes tokens for what the model answers."""
    asked = speculative_of(speculative)
    rate = None if asked is None else asked.synthetic_acceptance_rate
    if rate is not None:
        raise ConfigError(
            f"speculative: synthetic_acceptance_rate is {rate}, so that tokens mean nothing; {who} takes no such "
            "engine: it is for benchmarks; leave it None"
        )


def _choice(name: str, value: object, known: tuple[str, ...], refused: Mapping[str, str]) -> None:
    if value in known:
        return
    if isinstance(value, str) and value in refused:
        raise ConfigError(f"speculative: {name}={value!r} is not built: {refused[value]}; known: {', '.join(known)}")
    shown = unknown_name(name, str(value), known)
    raise ConfigError(f"speculative: {shown}; one of {', '.join(known)}")
