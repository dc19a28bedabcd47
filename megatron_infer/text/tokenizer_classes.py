"""What transformers makes of a tokenizer.json whose tokenizer class has a pipeline of its own.

transformers' AutoTokenizer takes vocabulary and merges of the file for such a class, and normalizer, pre-tokenizer and
decoder of the class. Token ids here are those of AutoTokenizer, with which the model is trained.
Source of the semantics: `AutoTokenizer.from_pretrained` and the tokenizer classes of transformers 5.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from megatron_infer.errors import ModelError

log = logging.getLogger("megatron_infer")

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_WORDS = rf"{_WORDS}|\p{{N}}|{_REST}"
LLAMA3_WORDS = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
"""How text is split before BPE: the patterns of the models' own tokenizer.json files."""

_PROBE = " Two  words,\n\t'll été 1234 日本 <s>"

_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerClass:
    """A class of transformers with a pipeline of its own."""

    apply: Callable[[Backend, Mapping[str, Any]], None]
    """Sets the pipeline of a backend; the mapping is tokenizer_config.json."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Its special tokens where tokenizer_config.json names no others."""
    adds_special: bool = True
    """Whether encode keeps the special tokens that the file's post-processor adds."""


def _byte_level(backend: Backend, normalizer: Any, pre_tokenizer: Any) -> None:
    _options(backend, unk_token=None, fuse_unk=False, byte_fallback=False)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()


def _gpt2(backend: Backend, config: Mapping[str, Any]) -> None:
    _byte_level(backend, None, pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space"))))


def _gpt_neox(backend: Backend, config: Mapping[str, Any]) -> None:
    prefix, trim = bool(config.get("add_prefix_space")), bool(config.get("trim_offsets", True))
    spaces = pre_tokenizers.ByteLevel(add_prefix_space=prefix, trim_offsets=trim)
    _byte_level(backend, normalizers.NFC(), spaces)


def _qwen2(backend: Backend, config: Mapping[str, Any]) -> None:
    prefix_space = bool(config.get("add_prefix_space"))
    _byte_level(backend, normalizers.NFC(), words_in_bytes(QWEN2_WORDS, add_prefix_space=prefix_space))


def words_in_bytes(pattern: str, *, add_prefix_space: bool) -> pre_tokenizers.Sequence:
    """Splits text by a pattern, and spells the parts in the byte alphabet."""
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)]
    )


def pieces_decoder(*, strips: bool) -> decoders.Sequence:
    """Joins SentencePiece's pieces. strips: a text loses the space that it begins with."""
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if strips else steps)


def _llama(backend: Backend, config: Mapping[str, Any], *, always_strips: bool = False) -> None:
    prefix = config.get("add_prefix_space")
    scheme = "never" if prefix is False else "always" if config.get("legacy", False) else "first"
    _options(backend, unk_token=None, fuse_unk=True, byte_fallback=True)
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme=scheme, split=False)
    backend.decoder = pieces_decoder(strips=always_strips or prefix is not False)


def _code_llama(backend: Backend, config: Mapping[str, Any]) -> None:
    _llama(backend, {"add_prefix_space": config.get("add_prefix_space")}, always_strips=True)
    backend.model.unk_token = config.get("unk_token") or "<unk>"


def _gemma(backend: Backend, config: Mapping[str, Any]) -> None:
    _options(backend, unk_token=config.get("unk_token") or "<unk>", fuse_unk=True, byte_fallback=True)
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    backend.decoder = pieces_decoder(strips=False)


def _options(backend: Backend, *, unk_token: Any, fuse_unk: bool, byte_fallback: bool) -> None:
    model = backend.model
    model.unk_token = unk_token
    model.fuse_unk = fuse_unk
    model.byte_fallback = byte_fallback
    model.ignore_merges = False
    model.dropout = None


CLASSES: dict[str, TokenizerClass] = {
    "GPT2Tokenizer": TokenizerClass(
        apply=_gpt2, special_tokens=dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT)
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        apply=_gpt_neox,
        special_tokens={
            **dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT),
            "pad_token": "<|padding|>",
        },
        adds_special=False,
    ),
    "Qwen2Tokenizer": TokenizerClass(
        apply=_qwen2, special_tokens=dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT)
    ),
    "LlamaTokenizer": TokenizerClass(
        apply=_llama, special_tokens={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    ),
    "CodeLlamaTokenizer": TokenizerClass(
        apply=_code_llama,
        special_tokens={
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "prefix_token": "\u2581<PRE>",
            "middle_token": "\u2581<MID>",
            "suffix_token": "\u2581<SUF>",
            "eot_token": "\u2581<EOT>",
            "fill_token": "<FILL_ME>",
        },
    ),
    "GemmaTokenizer": TokenizerClass(
        apply=_gemma,
        special_tokens={
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
}

# Other classes whose pipeline replaces that of tokenizer.json.
REFUSED = frozenset(
    f"{name}Tokenizer"
    for name in (
        "Albert Bart Barthez Bert BigBird Blenderbot CLIP Camembert Cohere DPRQuestionEncoder Deberta "
        "DebertaV2 Esmc Funnel Herbert LED Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke Lxmert MBart MBart50 MPNet "
        "MarkupLM MobileBert Mvp Nllb Nougat OpenAIGPT Pegasus Qwen3_5 Reformer RemBert RoFormer Roberta SeamlessM4T "
        "Siglip2 Splinter T5 Udop VideoPrism Whisper XGLM XLMRoberta XLNet"
    ).split()
)

AS_THE_FILE = "TokenizersBackend"
"""transformers' class that takes tokenizer.json as it is."""

# What transformers registers for a model type that has a class of its own.
_OF_MODEL_TYPE = {
    "gpt2": "GPT2Tokenizer",
    "mamba": "GPTNeoXTokenizer",
    "mamba2": "GPTNeoXTokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "mistral": AS_THE_FILE,
    "mixtral": AS_THE_FILE,
    "phi3": AS_THE_FILE,
    "granitemoehybrid": AS_THE_FILE,
    "nemotron": AS_THE_FILE,
    "jamba": AS_THE_FILE,
}

# Model types whose class goes before that of tokenizer_config.json.
_NOT_AS_DECLARED = frozenset({"qwen2", "phi3", "nemotron", "jamba"})


def class_of(config: Mapping[str, Any], model: Mapping[str, Any], *, is_byte_level: bool, name: str) -> str | None:
    """The class with a pipeline of its own that AutoTokenizer takes, a key of CLASSES; None: tokenizer.json as it is.

    config, model: tokenizer_config.json and config.json, {} for a missing one. is_byte_level: of tokenizer.json.
    Raises ModelError for a class whose pipeline is not known here.
    """
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    declared = declared.removesuffix("Fast") if isinstance(declared, str) else None
    kind = model.get("model_type")
    registered = _OF_MODEL_TYPE.get(kind) if isinstance(kind, str) else None
    if declared is None or kind in _NOT_AS_DECLARED or (registered == AS_THE_FILE and declared != registered):
        chosen = registered
    elif declared == "LlamaTokenizer" and is_byte_level:
        chosen = AS_THE_FILE
    else:
        chosen = declared
    if chosen in REFUSED:
        raise ModelError(
            f"{name}: tokenizer_class {chosen} has a pipeline of its own in transformers, and token ids would differ "
            f"from its; supported: {', '.join(sorted(CLASSES))}, and {AS_THE_FILE}, which takes tokenizer.json as it is"
        )
    return chosen if chosen in CLASSES else None


def apply_class(backend: Backend, chosen: str, config: Mapping[str, Any], *, name: str) -> None:
    """Give `backend` the pipeline of a class; a log line says so where token ids change by that.

    Raises ModelError for a vocabulary that is no BPE.
    """
    if not isinstance(backend.model, models.BPE):
        kind = type(backend.model).__name__
        raise ModelError(f"{name}: tokenizer_class {chosen} is BPE, and the model of tokenizer.json is {kind}")
    try:
        before = backend.encode(_PROBE, add_special_tokens=False).ids
        CLASSES[chosen].apply(backend, config)
        after = backend.encode(_PROBE, add_special_tokens=False).ids
    except Exception as error:  # the library raises bare Exception, for a vocabulary without its token for the unknown
        raise ModelError(f"{name}: tokenizer_class {chosen} does not fit the vocabulary: {error}") from error
    if not CLASSES[chosen].adds_special:
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    if after != before:
        text = "%s: text is split as %s does in transformers, not as tokenizer.json says"
        log.warning(text, name, chosen)
