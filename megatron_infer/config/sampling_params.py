"""Options of one request, `SamplingParams`: how tokens are drawn, when it ends, what is returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_infer.config.from_megatron import sampling_values
from megatron_infer.config.options import CHECKED, checked, finite_number, option, options_of, whole_number
from megatron_infer.config.request_metadata import Scalar, checked_scalars
from megatron_infer.config.structured_output import StructuredOutput, structured_of
from megatron_infer.errors import RequestError, unknown_name

MAX_N = 1024
MAX_LOGPROBS = 100
PENALTIES = (1e-3, 1e3)
"""Bounds of repetition_penalty: what it makes of a logit stays far from the end of fp32."""
MAX_BIAS = 1e30
"""Largest absolute value in logit_bias: a larger one overflows fp32 when it is scaled."""
NO_LOGPROBS = "None turns them off, 0 gives those of the tokens themselves"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Checked at construction: an invalid value raises RequestError.

    Logits are changed in this order before a token is drawn: penalties and logit_bias, allowed and bad ids, structured
    output, temperature, top_k, top_p, min_p.
    """

    n: int = option(1, least=1, most=MAX_N, remedy="ask in several requests for more", is_common=True)
    """Sequences drawn from one prompt, which is computed once; 1 to 1024."""
    max_tokens: int | None = option(
        16,
        least=1,
        remedy="use None for as many as fit; to score a prompt ask for prompt_logprobs and 1 token",
        is_common=True,
    )
    """The most tokens to draw; None: up to the sequence limit."""
    min_tokens: int = option(0, least=0, remedy="0 lets it stop at once")
    """Tokens to draw before a stop id or a stop text may end the sequence."""
    temperature: float = option(
        1.0, least=0.0, remedy="0 draws the most likely token, 1 leaves the model's distribution", is_common=True
    )
    """Logits are divided by it; 0: always draw the most likely token."""
    top_k: int = option(0, least=-1, remedy="0 or -1 turns it off", is_common=True)
    """Draw among the k most likely tokens; 0 or -1: all."""
    top_p: float = option(1.0, above=0.0, most=1.0, remedy="1 turns it off", is_common=True)
    """Draw among the smallest set of most likely tokens whose probabilities add up to top_p; 1: all."""
    min_p: float = option(0.0, least=0.0, most=1.0, remedy="0 turns it off", is_common=True)
    """Draw among tokens at least min_p times as likely as the most likely one; 0: all."""
    repetition_penalty: float = option(
        1.0, least=PENALTIES[0], most=PENALTIES[1], remedy="1 turns it off, more than 1 discourages", is_common=True
    )
    """Divides positive and multiplies negative logits of tokens in prompt or output; 0.001 to 1000, 1: off."""
    presence_penalty: float = option(0.0, least=-2.0, most=2.0, remedy="0 turns it off")
    """Subtracted from the logits of tokens in the output; -2 to 2."""
    frequency_penalty: float = option(0.0, least=-2.0, most=2.0, remedy="0 turns it off")
    """Subtracted from the logits of tokens in the output, once per occurrence; -2 to 2."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> number added to its logit, -1e30 to 1e30."""
    allowed_token_ids: Sequence[int] | None = None
    """Draw only these ids; None: all."""
    bad_token_ids: Sequence[int] | None = None
    """Never draw these ids."""
    seed: int | None = option(
        None,
        least=-(2**63),
        most=2**64 - 1,
        remedy="any 64-bit integer will do; None lets the engine pick one",
        is_common=True,
    )
    """The same seed, prompt and weights give the same tokens, whatever else is served. None: the engine picks one."""
    stop: str | Sequence[str] | None = option(None, is_common=True)
    """Texts that end the sequence, also across token borders; stored as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the sequence, besides the model's own."""
    ignore_eos: bool = option(False, is_common=True)
    """Continue past the model's end-of-sequence ids; stop_token_ids still end the sequence."""
    include_stop_str_in_output: bool = False
    """Keep the stop text at the end of the output text."""
    logprobs: int | None = option(None, least=0, most=MAX_LOGPROBS, remedy=NO_LOGPROBS, is_common=True)
    """Log probabilities of output tokens. None: off; 0: of the drawn token; k up to 100: also of the k most likely."""
    prompt_logprobs: int | None = option(None, least=0, most=MAX_LOGPROBS, remedy=NO_LOGPROBS)
    """The same for prompt tokens."""
    return_sampled_logprobs: bool = False
    """Return two numbers for each drawn token: its log probability under the model's own softmax and under the
    distribution it was drawn from (0.0 where temperature is 0), whatever `logprobs` and the engine's logprobs_mode
    are."""
    return_support: bool = False
    """Return the ids that each token was drawn among, after top_k, top_p, min_p, allowed and bad ids."""
    return_routing: bool = False
    """Return the experts of every position in every mixture-of-experts layer; the prompt uses no cached prefix."""
    return_index_choices: bool = False
    """Return the keys that every position attends to in every layer with an indexer (sparse attention), 4 bytes a key
    and layer; the prompt uses no cached prefix."""
    pooling: str | None = option(None, choices=("last", "mean", "all"))
    """Return the prompt's final hidden states: "last" that of its last position, "mean" the mean over all positions,
    "all" one for each position; the latter two use no cached prefix. Needs max_tokens=1 and n=1. None: off."""
    structured: StructuredOutput | None = option(None, flag=None)
    """What the output text must be: a JSON schema, regular expression, grammar or choice. None: any text."""
    priority: int = option(0, least=-(2**31), most=2**31 - 1, remedy="0 is as others, smaller is sooner")
    """Smaller is served sooner: waiting requests start in this order, then in order of arrival; the largest is
    preempted first."""
    adapter: str | None = option(None, is_common=True)
    """Name of the LoRA adapter to compute with, one that the engine has loaded; None: the base model."""
    metadata: Mapping[str, Scalar] | None = option(None, flag=None)
    """Label -> number or bool, one for each entry of the engine's request_metadata_types: what `engine.on_logits` hooks
    get, and `RequestOutput.metadata`. None: the engine has no such types."""
    speculate: bool | None = None
    """False: draw one by one on an engine that drafts tokens. True: draft; an engine that drafts none refuses the
    request. None: as the engine does. Changes no token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Make text: of the output, and of the tokens in log probabilities. False: token ids only."""

    def __post_init__(self) -> None:
        for one in _NUMBERS_AND_SWITCHES:
            value = getattr(self, one.name)
            if value is not one.default:
                object.__setattr__(self, one.name, checked(one, value, RequestError))
        self._check_together()
        self._check_tokens()
        object.__setattr__(self, "structured", structured_of(self.structured))
        object.__setattr__(self, "metadata", checked_scalars(self.metadata))
        if self.adapter is not None and (not isinstance(self.adapter, str) or not self.adapter):
            raise RequestError(f"adapter is the name of a loaded adapter, got {_show(self.adapter)}; None: none")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from parsed JSON; an unknown key is refused, with the nearest known one.

        The keys of logit_bias may be strings, since JSON has no other keys.
        """
        if not isinstance(values, Mapping):
            raise RequestError(f"sampling parameters are a mapping of names to values, got {_show(values)}")
        known = options_of(cls)
        unknown = [name for name in values if name not in known]
        if unknown:
            messages = "; ".join(unknown_name("sampling parameter", str(name), known) for name in unknown)
            raise RequestError(f"{messages} (known: {', '.join(known)})")
        values = dict(values)
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):
            values["logit_bias"] = {_id_of_key(key): value for key, value in bias.items()}
        return cls(**values)

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Those of a request that an engine has accepted: where it asked for drafts, an engine without them may go on
        with it, since its tokens are the same."""
        params = cls.from_dict(values)
        return replace(params, speculate=None) if params.speculate else params

    @classmethod
    def from_megatron(cls, params: object, *, num_prompt_tokens: int | None = None) -> SamplingParams:
        """Parameters from megatron-core's own, 0.16 to 0.19, or from a mapping of its fields.

        num_prompt_tokens: needed only for num_tokens_total, which counts the prompt. Raises RequestError naming a field
        that has no counterpart here and is set. docs/configuration.md has the table.
        """
        return cls(**sampling_values(params, num_prompt_tokens))

    def to_dict(self) -> dict[str, Any]:
        """Every field as a JSON value, some only if they are given; `from_dict` of it, also after a trip through JSON,
        equals these parameters."""
        values = {name: getattr(self, name) for name in options_of(SamplingParams)}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        if self.logit_bias is not None:
            plain["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        for name in ("metadata", "adapter", "speculate"):  # rarely given, and earlier versions read files without
            if plain[name] is None:
                del plain[name]
        if self.structured is not None:
            plain["structured"] = self.structured.to_dict()
        return plain

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def reads_positions(self) -> bool:
        """Whether something is returned of each position that was computed, and not of drawn tokens alone."""
        return self.return_routing or self.return_index_choices

    @property
    def carries(self) -> bool:
        """Whether its sequences return more than tokens, text and `logprobs`."""
        return any(getattr(self, name) for name in _RETURNED)

    def _check_together(self) -> None:
        """Raise RequestError for values that contradict each other."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens:,}, more than max_tokens, which is {self.max_tokens:,}; "
                "lower min_tokens or raise max_tokens"
            )
        if self.pooling is not None:
            known = options_of(SamplingParams)["pooling"].words
            if self.pooling not in known:
                raise RequestError(f"pooling is {', '.join(known)}, got {_show(self.pooling)}; None turns it off")
            if self.max_tokens != 1 or self.n != 1:
                raise RequestError(f"pooling needs max_tokens=1 and n=1, got {self.max_tokens} and {self.n}; ask apart")

    def _check_tokens(self) -> None:
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias("logit_bias", self.logit_bias))
        for name in ("allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None or name == "stop_token_ids":
                object.__setattr__(self, name, _token_ids(name, () if value is None else value))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty, which leaves no token to draw; use None to allow all")
        object.__setattr__(self, "stop", _stop_texts(self.stop))


_RETURNED = tuple(name for name in options_of(SamplingParams) if name.startswith("return_"))


def _show(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _token_ids(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise RequestError(f"{name} is a sequence of token ids, got {_show(values)}; give a list such as [1, 2]")
    ids = []
    for value in values:
        number = whole_number(value)
        if number is None or number < 0:
            raise RequestError(f"{name} holds token ids, integers of at least 0, got {_show(value)}; remove it")
        ids.append(number)
    return tuple(ids)


def _bias(name: str, values: object) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise RequestError(f"{name} maps token ids to numbers, got {_show(values)}; give a dict such as {{5: -1.0}}")
    bias = {}
    for key, value in values.items():
        token = whole_number(key)
        if token is None or token < 0:
            raise RequestError(f"{name} has token ids as keys, integers of at least 0, got {_show(key)}; remove it")
        number = finite_number(value)
        if number is None:
            raise RequestError(
                f"{name}[{token}] is a finite number, got {_show(value)}; to forbid a token use bad_token_ids"
            )
        if abs(number) > MAX_BIAS:
            text = f"{name}[{token}] is between -{MAX_BIAS:g} and {MAX_BIAS:g}, got {_show(value)}"
            raise RequestError(f"{text}; 100 decides as much")
        bias[token] = number
    return bias


def _stop_texts(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Sequence):
        raise RequestError(f"stop is a text or a list of texts, got {_show(value)}; token ids go into stop_token_ids")
    for text in value:
        if not isinstance(text, str):
            raise RequestError(f"stop holds texts, got {_show(text)}; token ids go into stop_token_ids")
        if not text:
            raise RequestError("stop holds an empty text, which would end every output at once; remove it")
    return tuple(value)


def _id_of_key(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


_NUMBERS_AND_SWITCHES = tuple(one for one in options_of(SamplingParams).values() if one.kind in CHECKED)
