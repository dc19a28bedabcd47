"""Small tokenizers built for tests."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from megatron_infer.text.detokenizer import byte_level_alphabet
from megatron_infer.text.tokenizer import Tokenizer

SPECIAL = ["<|end|>", "<|user|>"]


def byte_level() -> Tokenizer:
    """256 single bytes, a few merges that cut characters apart, special tokens, and one added token with spaces."""
    alphabet = sorted(byte_level_alphabet(), key=byte_level_alphabet().get)
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges = []
    for left, right in (("h", "e"), ("l", "l"), ("ð", "Ł"), ("Ġ", "h"), ("Ã", "©")):
        if left in vocab and right in vocab:
            merges.append((left, right))
            vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken("two words 日本", special=False, normalized=False)])
    return Tokenizer(backend, special_tokens={"eos_token": "<|end|>"}, name="byte level")


def byte_fallback(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """A normalizer that puts ▁ before every text, as in Llama 2's tokenizer.json."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def sentencepiece() -> Tokenizer:
    """SentencePiece-style: ▁ for spaces, byte fall-back, the leading space stripped."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "h",
        "e",
        "l",
        "o",
        "é",
        "日",
        ".",
    ]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o")]
    vocab = {piece: index for index, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    backend = byte_fallback(vocab, merges)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special_tokens=special, name="sentencepiece")
