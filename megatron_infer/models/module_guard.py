"""What a model's modules were when they were adopted, as a value that can be compared later.

Adoption reads modules and binds their live parameters; a step calls no module. So a module that is replaced, hooked,
patched, parametrized or cast afterwards would be served as it was. `ModuleGuard` holds weak references only: a module
that was replaced is freed as without it.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from operator import attrgetter, call, contains, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_modules

from megatron_infer.kernels.native.native_module_guard import bind_module_guard
from megatron_infer.models.bridge_modules import name_of

PACKAGE = __name__.partition(".")[0]
LIBRARIES = (PACKAGE, "megatron.core", "torch", "transformer_engine", "apex")
"""Packages that may replace methods of each other's classes."""
READ = (f"{PACKAGE}.", "megatron.core.", "torch.")
"""Packages whose classes are compared with their code."""
FSDP2 = "torch.distributed.fsdp._fully_shard"
"""Package of `fully_shard`."""
MEGATRON_FSDP = ("megatron.core.distributed.fsdp.src.megatron_fsdp", "megatron_fsdp")
"""Packages of Megatron-FSDP: in megatron-core, and its own."""
GRAPH_MANAGER = "cudagraph_manager"
"""Name of the child that megatron-core's own graphs add to a module; it is there in training only."""
_STATE = attrgetter("__dict__")
_MAPPINGS = ("_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters")
"""Names of the mappings in a module's state of which `_facts` tells."""
HELD = "softmax_offset"
"""Name of the parameter that adoption itself holds, in an attention spec; others are read from their module."""


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """`model.modules()` in the same order and a tenth of the time: switching between training and rollout calls it
    several times."""
    found: dict[int, torch.nn.Module] = {}
    stack: list[torch.nn.Module | None] = [model]
    while stack:
        module = stack.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            stack += reversed(module._modules.values())
    return list(found.values())


def _facts(modules: list[torch.nn.Module]) -> list[int]:
    """Numbers that are others if a module's class, attributes, hooks, children or parameters are.

    Columns of an element for each module, then all children and all parameters. native/module_guard.cpp reads it too.
    """
    states = list(map(_STATE, modules))
    mappings = [list(map(itemgetter(name), states)) for name in _MAPPINGS]
    held = (map(dict.values, filter(None, column)) for column in mappings[2:])
    return [
        *map(id, modules),
        *map(id, map(type, modules)),
        *map(len, states),
        *map(contains, states, repeat("forward")),
        *map(dict.__len__, chain.from_iterable(mappings)),
        *map(id, chain.from_iterable(chain.from_iterable(held))),
    ]


class ModuleRecord(NamedTuple):
    """One module, by its path in the model."""

    module: Callable[[], torch.nn.Module | None]
    """A weak reference; two are equal if they are to the same module."""
    class_: type
    hooks: int
    """Forward hooks and pre-hooks that are not of this package."""
    patched: tuple[str, ...]
    """Methods that are set on the instance, or replaced on its class."""
    parameters: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    """(name, dtype, shape, identity if adoption holds it) of each."""

    def difference(self, now: ModuleRecord) -> str:
        """What another record says of the module at this path."""
        if self.module != now.module:
            return (
                f"is another module than the one that was adopted ({name_of(self.class_)}, now {name_of(now.class_)})"
            )
        if self.class_ is not now.class_:
            return f"changed its class from {name_of(self.class_)} to {name_of(now.class_)}"
        if self.hooks != now.hooks:
            return f"has {now.hooks} forward hooks, and had {self.hooks} when it was adopted"
        if self.patched != now.patched:
            return f"has other methods set on it or on its class: {', '.join(now.patched) or 'none'}"
        return f"has other parameters: {_listed(self.parameters)}, now {_listed(now.parameters)}"


class ModuleGuard:
    """The modules of a model at one time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.records = dict(_records(model))
        """By path, "" for the model itself. A module with several paths has a record at each."""
        self.global_hooks = global_hooks()
        modules = modules_of(model)
        parameters = [one for module in modules for one in module._parameters.values()]
        self._parameters = [None if one is None else weakref.ref(one) for one in parameters]
        self._gone: list[Any] = []
        """Has an element when a module or parameter exists no more: its address may be another object's."""
        died = self._gone.append  # which refers to the list alone
        self._modules = [weakref.ref(module, died) for module in modules]
        self._watched = [weakref.ref(one, died) for one in parameters if one is not None]
        self._classes = list(dict.fromkeys(map(type, modules)))
        """Kept alive, as their addresses are compared."""
        owners = dict.fromkeys(owner for cls in self._classes for owner in cls.__mro__)
        self._methods = [(owner, name, getattr(owner, name)) for owner in owners for name in _read_methods(owner)]
        self._facts = _facts(modules)
        self._holds: Callable[[], int] | None = None
        """The same comparison in C++, once the kernels are loaded."""

    def is_intact(self) -> bool:
        """Whether nothing has changed: no module or parameter was replaced, no class, hook or attribute is another.

        Cheap enough for every step. False may have a cause that does not count, such as an attribute of the
        trainer's: `difference` tells. A cast shows in the addresses of the weights.
        """
        if global_hooks() != self.global_hooks:
            return False
        if self._holds is not None and self._holds():
            return True
        modules: list[Any] = list(map(call, self._modules))
        if None in modules or _facts(modules) != self._facts:
            return False
        if any(getattr(owner, name) != method for owner, name, method in self._methods):
            return False
        if self._holds is None:
            self._holds = bind_module_guard(
                gone=self._gone,
                facts=self._facts,
                num_modules=len(modules),
                methods=self._methods,
                names=("forward", *_MAPPINGS),
            )
        return not self._gone  # last: until here all addresses were of what was recorded

    def has_same_parameters(self, other: ModuleGuard) -> bool:
        """Whether all parameters are the same objects."""
        # There is one weak reference without a callback to an object.
        mine, others = self._parameters, other._parameters
        return len(mine) == len(others) and all(map(is_, mine, others))

    def difference(self, now: ModuleGuard, *, calls: bool = True) -> tuple[str, str] | None:
        """(path, what) of the first module that another module guard describes otherwise; None: there is none.

        calls: False: whatever happens when a module is called: its hooks, and methods that are set on it.
        """
        if calls and self.global_hooks != now.global_hooks:
            return "", f"runs {now.global_hooks} forward hooks of all modules, and ran {self.global_hooks} when adopted"
        if self.records == now.records:
            return None
        for path, record in now.records.items():
            if (before := self.records.get(path)) is None:
                return path, f"is a module that was not there when the model was adopted ({name_of(record.class_)})"
            if before != (record if calls else record._replace(hooks=before.hooks, patched=before.patched)):
                return path, before.difference(record)
        gone = next((path for path in self.records if path not in now.records), None)
        return None if gone is None else (gone, "was there when the model was adopted, and is gone")


def foreign_hooks(module: torch.nn.Module) -> int:
    """Number of a module's forward hooks and pre-hooks that are not of this package: those act in training forwards."""
    if not module._forward_hooks and not module._forward_pre_hooks:
        return 0
    return sum(not _is_ours(hook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))


def global_hooks() -> int:
    """Number of forward hooks and pre-hooks of all modules of the process."""
    hooks, before = torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks
    return sum(not _is_ours(hook) for hook in (*hooks.values(), *before.values())) if hooks or before else 0


def patched_methods(module: torch.nn.Module) -> tuple[str, ...]:
    """Names of the methods that are set on the instance, as `module.forward = ...` does."""
    own = vars(module)
    if _methods(type(module)).isdisjoint(own):
        return ()
    return tuple(name for name in own if name in _methods(type(module)) and not _is_ours(own[name]))


def replaced_methods(cls: type) -> tuple[str, ...]:
    """Methods of READ's classes that no library's code is behind, as after `TransformerLayer.forward = ...`."""
    pairs = [(owner, name) for owner in cls.__mro__ for name in _read_methods(owner)]
    files = [(owner, name, _file_of(getattr(owner, name))) for owner, name in pairs]
    foreign = [one for one in files if one[2] is not None and not one[2].startswith(_folders())]
    return tuple(f"{owner.__qualname__}.{name}" for owner, name, _ in foreign)


@functools.cache
def _read_methods(owner: type) -> tuple[str, ...]:
    """The methods that a class of READ itself has and a forward may call."""
    return tuple(sorted(_methods(owner) & vars(owner).keys())) if owner.__module__.startswith(READ) else ()


def _file_of(method: Any) -> str | None:
    """Where the code of a function is; None for what is none. Its name and module may be those of what it wraps."""
    function = getattr(method, "__func__", method)
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return None if code is None else code.co_filename


@functools.cache
def _folders() -> tuple[str, ...]:
    """Folders of the libraries that are installed, which are imported by now."""
    found = [sys.modules[library] for library in LIBRARIES if library in sys.modules]
    return tuple(f"{os.path.dirname(one.__file__)}{os.sep}" for one in found if one.__file__ is not None)


@functools.cache
def _methods(cls: type) -> frozenset[str]:
    """Methods of a module class that a forward may call. Transformer Engine sets some of its own on the instance."""
    if cls.__module__.startswith("transformer_engine"):
        return frozenset({"forward"})
    return frozenset(
        name
        for name in dir(cls)
        if (name in ("forward", "__call__") or not hasattr(torch.nn.Module, name))
        and "state_dict" not in name
        and callable(getattr(cls, name, None))
    )


def _records(model: torch.nn.Module) -> Iterator[tuple[str, ModuleRecord]]:
    seen: set[int] = set()
    replaced: dict[type, tuple[str, ...]] = {}
    stack: list[tuple[str, torch.nn.Module]] = [("", model)]
    while stack:
        path, module = stack.pop()
        cls = type(module)
        if cls not in replaced:
            replaced[cls] = replaced_methods(cls)
        yield path, _record(module, replaced[cls])
        if id(module) not in seen:
            seen.add(id(module))
            prefix = f"{path}." if path else ""
            stack += [
                (prefix + name, child)
                for name, child in reversed(module._modules.items())
                if child is not None and name != GRAPH_MANAGER
            ]


def _record(module: torch.nn.Module, replaced: tuple[str, ...]) -> ModuleRecord:
    parameters = tuple(
        (name, one.dtype, tuple(one.shape), id(one) if name == HELD else 0)
        for name, one in module._parameters.items()
        if one is not None
    )
    patched = patched_methods(module) + replaced
    return ModuleRecord(weakref.ref(module), type(module), foreign_hooks(module), patched, parameters)


def fsdp2_module() -> type | None:
    """The class of modules that FSDP2's `fully_shard` was applied to; None where torch.distributed lacks it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def plain_class(module: torch.nn.Module) -> type:
    """The class of a module before FSDP2's `fully_shard` changed it."""
    fsdp = fsdp2_module()
    if fsdp is None or not isinstance(module, fsdp):
        return type(module)
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, fsdp))


def megatron_fsdp_classes() -> tuple[type, ...]:
    """The classes of Megatron-FSDP around a model, where its modules are imported."""
    found = (getattr(sys.modules.get(f"{package}.megatron_fsdp"), "MegatronFSDP", None) for package in MEGATRON_FSDP)
    return tuple(one for one in found if one is not None)


def _is_fsdp(hook: Any) -> bool:
    """Whether a forward hook is of FSDP2 or of Megatron-FSDP, which hides its hooks from torch.compile."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    if owner is not None:
        return type(owner).__module__.startswith(FSDP2)
    if "_dynamo" in (_file_of(hook) or ""):
        hook = getattr(hook, "__wrapped__", hook)
    file = _file_of(hook) or ""
    return any(package.replace(".", os.sep) + os.sep in file for package in (FSDP2, *MEGATRON_FSDP))


def _is_ours(function: Any) -> bool:
    """Whether the called object is one of this package: a wrapper may have the name and module of what it wraps.

    FSDP's hooks count as ours: they gather weights, and `models.sharded_weights` does that for a whole phase.
    """
    if _is_fsdp(function):
        return True
    owner = getattr(function, "__self__", function)
    return type(owner).__module__.partition(".")[0] == PACKAGE and not isinstance(owner, torch.nn.Module)


def _listed(parameters: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]) -> str:
    return ", ".join(f"{name} {list(shape)} {str(dtype)[6:]}" for name, dtype, shape, _ in parameters) or "none"
