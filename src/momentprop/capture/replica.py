"""Copies a model's modules but not their tensors: what is done to the copy is not done to the model."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def replica(model: nn.Module, copy_tensors: bool = False) -> nn.Module:
    """Copy the tree of modules, with their modes, attributes, hooks and containers, but not the tensors.

    With `copy_tensors`, buffers and other tensors are copied too, so that the replica may be run in training
    mode. Parameters are large and no forward pass writes to them: they are the model's in any case. What
    refers to a module of the model, such as a bound method or a closure, refers to its copy in the replica.
    """
    return _Copying(model, copy_tensors).copied(model)


class _Copying:
    """Copies values as `copy.deepcopy` does, but leaves alone what neither is nor holds a module."""

    def __init__(self, model: nn.Module, copy_tensors: bool) -> None:
        self.tree = {id(module) for module in model.modules()}
        self.copy_tensors = copy_tensors
        self.copies: dict[int, tuple[Any, Any]] = {}  # with the original, whose id must stay its own

    def copied(self, value: Any) -> Any:
        if id(value) in self.copies:
            return self.copies[id(value)][1]
        how = next((how for kinds, how in _HOW if isinstance(value, kinds)), _Copying._object)
        return how(self, value)

    def keep(self, value: Any, made: Any) -> Any:
        self.copies[id(value)] = value, made
        return made

    def _tensor(self, value: Tensor) -> Tensor:
        is_written = self.copy_tensors and not isinstance(value, nn.Parameter)
        return self.keep(value, value.clone() if is_written else value)

    def _scripted(self, value: torch.jit.ScriptModule) -> Any:
        """Scripted modules keep their mode and their parts in C++, where tensors cannot be shared."""
        return self.keep(value, copy.deepcopy(value))

    def _module(self, value: nn.Module) -> nn.Module:
        made = self.keep(value, object.__new__(type(value)))
        object.__setattr__(made, "__dict__", self._mapped(vars(value)))
        return made

    def _mapped(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {name: self.copied(attribute) for name, attribute in attributes.items()}

    def _dict(self, value: dict[Any, Any]) -> Any:
        if type(value) not in (dict, collections.OrderedDict, collections.defaultdict):
            return self._object(value)
        made = self.keep(value, value.copy())
        for key, item in value.items():
            made[key] = self.copied(item)
        return made

    def _list(self, value: Any) -> Any:
        if type(value) not in (list, set, collections.deque):
            return self._object(value)
        made = self.keep(value, value.copy())
        items = [self.copied(item) for item in value]
        made.clear()
        (made.update if isinstance(made, set) else made.extend)(items)
        return made

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        items = [self.copied(item) for item in value]
        if all(item is before for item, before in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)

    def _method(self, value: types.MethodType) -> types.MethodType:
        return types.MethodType(self.copied(value.__func__), self.copied(value.__self__))

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """A function with variables of its own; one that has none, and no modules as defaults, is itself."""
        defaults = value.__defaults__ and self.copied(value.__defaults__)
        if not value.__closure__ and defaults is value.__defaults__:
            return value
        new = [cell for cell in value.__closure__ or () if id(cell) not in self.copies]
        for cell in new:
            self.keep(cell, types.CellType())
        cells = tuple(self.copied(cell) for cell in value.__closure__ or ())
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, cells)
        self.keep(value, made)
        made.__kwdefaults__ = value.__kwdefaults__
        made.__qualname__, made.__module__ = value.__qualname__, value.__module__
        made.__dict__.update(self._mapped(vars(value)))
        for cell in new:
            with contextlib.suppress(ValueError):  # a variable without a value
                self.copied(cell).cell_contents = self.copied(cell.cell_contents)
        return made

    def _partial(self, value: functools.partial[Any]) -> Any:
        if type(value) is not functools.partial:
            return self._object(value)
        arguments = [self.copied(argument) for argument in value.args]
        return functools.partial(self.copied(value.func), *arguments, **self._mapped(value.keywords))

    def _reference(self, value: weakref.ref[Any]) -> Any:
        target = value()
        return weakref.ref(self.copied(target)) if id(target) in self.tree else value

    def _object(self, value: Any) -> Any:
        """Any other object is shared, for it may be a lock or a file, unless it holds a module."""
        held = getattr(value, "__dict__", None)
        if isinstance(value, (type, types.ModuleType)) or not isinstance(held, dict):
            return value
        if not any(isinstance(getattr(v, "__self__", v), nn.Module) for v in held.values()):
            return value
        try:
            made = self.keep(value, copy.copy(value))
        except TypeError:  # it cannot be copied
            return value
        vars(made).update(self._mapped(held))
        return made


_HOW: tuple[tuple[Any, Callable[[_Copying, Any], Any]], ...] = (
    (Tensor, _Copying._tensor),
    (torch.jit.ScriptModule, _Copying._scripted),
    (nn.Module, _Copying._module),
    (dict, _Copying._dict),
    ((list, set, collections.deque), _Copying._list),
    (tuple, _Copying._tuple),
    (types.MethodType, _Copying._method),
    (types.FunctionType, _Copying._function),
    (functools.partial, _Copying._partial),
    (weakref.ref, _Copying._reference),
)
