"""The exceptions of the package, one family. Messages say what is wrong, what was given, the limit and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence


class InferenceError(Exception):
    """Root of every error this package raises on purpose."""


class RequestError(InferenceError, ValueError):
    """A request that cannot be served as asked; other requests are not affected."""


class PromptTooLong(RequestError):
    """A prompt (plus one generated token) that exceeds a limit."""

    def __init__(self, *, got: int, limit: int, limit_name: str, remedy: str) -> None:
        super().__init__(f"prompt has {got:,} tokens, limit is {limit:,} ({limit_name}); {remedy}")
        self.got, self.limit, self.limit_name = got, limit, limit_name


class InvalidPrompt(RequestError):
    """An empty prompt, ids outside the vocabulary, or a prompt of the wrong type."""


class DuplicateRequest(RequestError):
    """A request id that is already in the engine."""


class UnknownAdapter(RequestError):
    """A LoRA adapter that the engine has not loaded."""


class AdapterInUse(InferenceError, ValueError):
    """An adapter of that name is loaded with another content, or requests compute with it; nothing was changed."""


class UnknownRequest(InferenceError, KeyError):
    """An operation on a request id that the engine does not have."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class StateReleased(InferenceError):
    """The KV cache or recurrent states were used while their memory is released (between suspend and resume)."""


class ConfigError(InferenceError, ValueError):
    """An option that is wrong by itself or together with another."""


class CapacityError(ConfigError):
    """The given memory cannot hold what the options ask for."""


class ModelError(InferenceError, ValueError):
    """A model or checkpoint that cannot be loaded."""


class AdoptionError(ModelError):
    """A live model that cannot be adopted for paged inference; names the module and the reason."""

    def __init__(self, module_name: str, reason: str) -> None:
        super().__init__(f"{module_name or '<root>'}: {reason}")
        self.module_name, self.reason = module_name, reason


class WrongState(InferenceError, RuntimeError):
    """A call that the engine's state does not allow; `state` is the name of that state."""

    def __init__(self, message: str, *, state: str) -> None:
        super().__init__(message)
        self.state = state


class FreedWeightsWritten(WrongState):
    """Weights were written past an engine that had freed them; they have the values of before."""


class TransitionFailed(InferenceError, RuntimeError):
    """A pause, suspend, resume or update that failed and was undone; the cause is its __cause__."""


class OtherRankFailed(TransitionFailed):
    """A transition that failed on other ranks and was undone on this one; `ranks` are those ranks, counted in the
    engine."""

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class SwitchFailed(TransitionFailed):
    """A sequence of suspend, update and resume that failed and was undone on all ranks.

    `rank` counts within the engine, `phase` is "suspend", "update" or "resume", `tensor` is the one that could not be
    written, "" if the failure was not about a tensor. `error.__cause__` is this rank's error.
    """

    def __init__(self, message: str, *, rank: int, phase: str, tensor: str) -> None:
        super().__init__(message)
        self.rank, self.phase, self.tensor = rank, phase, tensor


class TransitionTimeout(TransitionFailed, TimeoutError):
    """A transition that did not end within its deadline and was undone."""


class MismatchAlarm(InferenceError, RuntimeError):
    """Log probabilities of rollouts and of the trainer's forward differ by more than the alarm allows.

    `report` is the MismatchReport: the figures, the limit exceeded, and the place. The engine and its requests are
    unchanged.
    """

    def __init__(self, message: str, *, report: object) -> None:
        super().__init__(message)
        self.report = report


class StaleCache(InferenceError, RuntimeError):
    """A copy derived from the weights does not match the present weights of the model."""


class WeightUpdateError(InferenceError, ValueError):
    """Weights that could not be written, or that differ from what was sent.

    tensor: the first wrong one, "" if the error is not about a tensor. rank: the rank it happened on. written: tensors
    that had been written before and were not put back; 0: the model is unchanged.
    """

    def __init__(self, message: str, *, tensor: str = "", rank: int = 0, written: int = 0) -> None:
        super().__init__(message)
        self.tensor, self.rank, self.written = tensor, rank, written


class SnapshotError(InferenceError, ValueError):
    """A file of saved requests that is damaged, does not fit this engine, or must not be overwritten; nothing was
    loaded or written."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason


class NotLeader(InferenceError, RuntimeError):
    """A call that only the first rank of an engine may make, made on another rank."""


class LockstepError(InferenceError, RuntimeError):
    """The ranks of an engine diverged: different calls, arguments or step plans."""


class PromptsDiffer(LockstepError):
    """Ranks share the prompts of an iterator that turned out not to be the same on each. The engine goes on."""


class RankFailure(InferenceError, RuntimeError):
    """A rank of the engine, or of the trainer's job, died, stalled or failed alone. The engine cannot continue on any
    rank.

    `rank` counts within the engine, or in the world if `is_of_job`: a rank of another data-parallel replica. `phase` is
    what the engine was doing when the failure was noticed.
    """

    def __init__(self, rank: int, phase: str, reason: str, *, is_of_job: bool = False) -> None:
        super().__init__(rank, phase, reason)
        self.rank = rank
        self.phase = phase
        self.reason = reason
        self.is_of_job = is_of_job
        self.job_rank = rank if is_of_job else None
        """In the world; None: not known yet."""

    def __str__(self) -> str:
        of_job = "" if self.job_rank in (None, self.rank) else f" (rank {self.job_rank} of the job)"
        place = "job" if self.is_of_job else "engine"
        return f"rank {self.rank} of the {place}{of_job} failed in {self.phase}: {self.reason}"


def brief(error: BaseException) -> str:
    """The kind of an error of a library, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


ELSEWHERE = {
    "eos_token_id": "stop_token_ids",
    "gpu_memory_utilization": "buffer_size_gb",
    "guided_json": "structured",
    "json_schema": "structured",
    "lora_request": "adapter",
    "max_batch_size": "max_requests",
    "max_model_len": "max_sequence_length",
    "max_new_tokens": "max_tokens",
    "max_num_batched_tokens": "max_tokens",
    "max_num_seqs": "max_requests",
    "num_return_sequences": "n",
    "num_tokens_to_generate": "max_tokens",
    "page_size": "block_size_tokens",
    "random_seed": "seed",
    "response_format": "structured",
    "return_log_probs": "logprobs",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "swap_space": "swap_buffer_size_gb",
    "termination_id": "stop_token_ids",
    "top_logprobs": "logprobs",
    "top_n_logprobs": "logprobs",
}
"""Name in vLLM, SGLang, transformers or Megatron -> the name here."""
NEAR = 0.6
"""Least similarity, of names and of their words, for one to be a misspelling of the other."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Message for an unknown name, with the known one that it misspells or has elsewhere, if there is any."""
    names = list(known)
    close = [one for one in difflib.get_close_matches(name, names, n=5, cutoff=NEAR) if _is_misspelt(name, one)]
    if ELSEWHERE.get(name) in names:
        close.insert(0, ELSEWHERE[name])
    return f"unknown {kind} {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def check_known(
    kind: str,
    names: Iterable[object],
    known: Collection[str],
    *,
    error: type[Exception] = ConfigError,
    where: str = "",
    lists_known: bool = False,
) -> None:
    """Raise `error` for the first of `names` that is not known. where: what its text begins with."""
    for name in names:
        if name not in known:
            listed = f"; one of {', '.join(known)}" if lists_known else ""
            raise error(f"{where}{unknown_name(kind, str(name), known)}{listed}")


def _is_misspelt(name: str, known: str) -> bool:
    """Whether each word of `name` is near to one of `known`, or `known` is `name` without some of its words.

    Example: frequence_penalty is frequency_penalty, max_new_tokens is max_tokens, prompt_token_ids is no
    stop_token_ids.
    """
    words, others = (re.split(r"[\W_]+", one.lower()) for one in (name, known))

    def is_near(word: str, other: str) -> bool:
        begins = word.startswith(other) or other.startswith(word)
        return begins or difflib.SequenceMatcher(None, word, other).ratio() >= NEAR

    return all(any(is_near(word, one) for one in others) for word in words) or set(others) < set(words)
