"""Compares Python objects with recorded addresses in C++ (native/module_guard.cpp), with the GIL held."""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from array import array
from collections.abc import Callable
from itertools import chain
from typing import Any

from megatron_infer.kernels.native import native_build

_P, _I = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = (
    "Py_DecRef",
    "PyErr_Clear",
    "PyObject_Type",
    "PyObject_GenericGetDict",
    "PyObject_GetAttr",
    "PyObject_RichCompareBool",
    "PyDict_GetItemWithError",
    "PyDict_Size",
    "PyDict_Next",
    "PyList_Size",
)
"""Members of Python in native/module_guard.cpp, all of the stable interface."""
_NUM_NAMES = 5


class _ModuleGuard(ctypes.Structure):
    """ModuleGuard in native/module_guard.cpp."""

    _fields_ = [
        *((name, _P) for name in ("gone", "facts", "methods")),
        ("names", _P * _NUM_NAMES),
        *((name, _I) for name in ("num_modules", "num_methods")),
    ]
    kept: Any
    """What has the addresses in it."""


def bind_module_guard(
    *,
    gone: list[Any],
    facts: list[int],
    num_modules: int,
    methods: list[tuple[type, str, Any]],
    names: tuple[str, ...],
) -> Callable[[], int] | None:
    """Tells whether all is as recorded, if so surely; None: the native library is not loaded, or not for this Python.

    facts: see `_facts` in models/module_guard.py.
    """
    library, python = native_build.loaded(), _python()
    if library is None or python is None:
        return None
    assert len(names) == _NUM_NAMES
    arrays = [array("Q", numbers) for numbers in (facts, map(id, chain.from_iterable(methods)))]
    addresses = [one.buffer_info()[0] for one in arrays]
    packed = _ModuleGuard(id(gone), *addresses, (_P * _NUM_NAMES)(*map(id, names)), num_modules, len(methods))
    packed.kept = gone, arrays, methods, names
    function = ctypes.PYFUNCTYPE(ctypes.c_int, _P, _P)(("mi_guard_holds", library))  # keeps the GIL; CDLL's do not
    return functools.partial(function, ctypes.byref(python), ctypes.byref(packed))


@functools.cache
def _python() -> ctypes.Array[Any] | None:
    """Python's functions; None: an id is no address, there may be no GIL, or a function is missing."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED") or ctypes.sizeof(_P) != 8:
        return None
    try:
        found = [ctypes.cast(getattr(ctypes.pythonapi, name), _P).value for name in _FUNCTIONS]
    except AttributeError:
        return None
    return (_P * len(found))(*found)
