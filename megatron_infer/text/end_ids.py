"""Token ids that end an output, in a model's files: all of them do, whichever file names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_infer.errors import ModelError
from megatron_infer.utils.json_file import read_json

# Spellings by which llama.cpp ends an output whatever the metadata say.
# Source: `special_eog_ids` in llama.cpp's src/llama-vocab.cpp.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[ "
    "<\uff5cend\u2581of\u2581sentence\uff5c> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> "
    "<fim-repo> <REPO> <reponame> <|file_sep|>".split()
)
# With these spellings in a vocabulary, that one does not end an output.
_EXCEPTIONS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)


def directory_end_ids(directory: Path) -> tuple[int, ...]:
    """The end tokens of a directory's generation_config.json and config.json together."""
    paths = (directory / "generation_config.json", directory / "config.json")
    return end_ids_of(*(read_json(path) for path in paths if path.is_file()))


def end_ids_of(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids under `eos_token_id` of all configs: each has a number, a list of numbers or none.

    Raises ModelError for anything else.
    """
    found = [id for config in configs if (ids := config.get("eos_token_id")) is not None for id in _listed(ids)]
    for id in found:
        if type(id) is not int:
            raise ModelError(f"eos_token_id is a token id or a list of token ids, got {str(id)[:80]!r}")
    return tuple(dict.fromkeys(found))


def gguf_end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens of GGUF metadata: those of sequence, turn and message, then those that llama.cpp knows by spelling."""
    keys = [f"{kind}_token_id" for kind in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")]
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    known = {token: id for id, token in enumerate(metadata.get("tokenizer.ggml.tokens") or ()) if token in _ENDS}
    ends = set(known) - {end for spellings, end in _EXCEPTIONS if spellings <= set(known)}
    return tuple(dict.fromkeys(id for id in (*ids, *sorted(known[end] for end in ends)) if id is not None))


def _listed(ids: Any) -> Iterable[int]:
    return ids if isinstance(ids, list | tuple) else (ids,)
