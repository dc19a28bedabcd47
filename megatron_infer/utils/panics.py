"""Panics of Rust extensions (tokenizers, llguidance, safetensors) as errors.

pyo3 raises a panic as a BaseException, which `except Exception` lets pass: it would end the thread that it reaches.
"""

from __future__ import annotations

from types import TracebackType


class LibraryPanic(RuntimeError):
    """A library met a state that it did not expect; its message says which."""


class _PanicsAsErrors:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            raise LibraryPanic(f"the library panicked: {error}") from error


panics_as_errors = _PanicsAsErrors()
"""`with panics_as_errors:` raises LibraryPanic for a panic within it. For any thread, and within itself."""
