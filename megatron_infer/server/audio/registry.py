"""Audio decoders by name: which there are, and how one is opened. Only then their modules are imported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_infer.errors import ConfigError, InferenceError, ModelError, brief, check_known

if TYPE_CHECKING:
    from megatron_infer.server.audio.decoder import OpenedDecoder

Opener = Callable[..., "OpenedDecoder"]
"""(weights: Path, **audio_decoder_config) -> OpenedDecoder; without `weights` if the decoder has none."""

DECODERS: Mapping[str, tuple[str, str]] = {
    "tones": ("tones", "open_tones"),
    "codec": ("codec", "open_codec"),
    "mimi": ("library_codecs", "open_mimi"),
    "encodec": ("library_codecs", "open_encodec"),
    "dac": ("library_codecs", "open_dac"),
}
"""Name -> module and function that opens it."""
WITHOUT_WEIGHTS = ("tones",)


def check_decoder(name: str, weights: str, own: Mapping[str, Opener] | None = None) -> None:
    """Raises ConfigError for an unknown name, and for weights that are missing, or given where there are none.

    own: decoders of one's own, which go first.
    """
    own = own or {}
    known = [*own, *(one for one in DECODERS if one not in own)]
    if not name:
        raise ConfigError(f"audio_decoder is empty; give one of {', '.join(known)}")
    check_known("audio_decoder", [name], known, lists_known=True)
    has_weights = "weights" in inspect.signature(own[name]).parameters if name in own else name not in WITHOUT_WEIGHTS
    if weights and not has_weights:
        raise ConfigError(f"audio_decoder_weights is {weights!r}, but {name} has no weights; leave it empty")
    if has_weights and not weights:
        raise ConfigError(f"audio_decoder_weights is empty, but {name} has weights; give their file or directory")
    if weights and not Path(weights).expanduser().exists():
        raise ConfigError(f"audio_decoder_weights: there is no {weights}")


def open_decoder(
    name: str,
    weights: str = "",
    config: Mapping[str, Any] | None = None,
    *,
    own: Mapping[str, Opener] | None = None,
) -> OpenedDecoder:
    """weights: a file or directory. config: arguments of the decoder's opener. own: see `check_decoder`.

    Raises ConfigError as `check_decoder` does and for an unknown key, ModelError for weights of something else and for
    an opener that fails.
    """
    check_decoder(name, weights, own)
    if own and name in own:
        opener = own[name]
    else:
        module, function = DECODERS[name]
        opener = getattr(importlib.import_module(f"megatron_infer.server.audio.{module}"), function)
    known = [one for one in inspect.signature(opener).parameters if one != "weights"]
    check_known(f"option of {name}", config or {}, known, where="audio_decoder_config: ")
    given = {"weights": Path(weights).expanduser()} if weights else {}
    where = f"audio_decoder_weights {weights}" if weights else f"audio_decoder {name}"
    try:
        opened = opener(**given, **(config or {}))
    except InferenceError:
        raise
    except Exception as error:  # whatever a library or a function of one's own raises
        raise ModelError(f"{where} cannot be opened: {brief(error)}") from error
    for part in ("decoder", "format", "encoder"):
        if not hasattr(opened, part):
            raise ModelError(f"{where}: its function returns a {type(opened).__name__}, it must be an OpenedDecoder")
    return opened
