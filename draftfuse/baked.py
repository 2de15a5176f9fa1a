"""Host values that a trace took from Python objects: listed in the report, and checked before every replay.

Dynamo notes each number, flag, string and None that the loop looked at. A replay does not look again, so a value that
differs sends the batch to a split loop traced with the new one.
"""

from __future__ import annotations

import inspect
import re
import types
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch._guards import TracingContext

from draftfuse.absent import looked_for
from draftfuse.handlers import catches, of_users
from draftfuse.paths import asked_of, split_path, text_of_key, value_at
from draftfuse.writers import LIBRARIES, is_library

_CONSTANT = ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH")
_TABLES = (dict, list, tuple, set, deque)
_MAPPINGS = (dict, types.MappingProxyType)
_ALIASED = (list, dict, set, deque)
_ROUTINES = ("BUILTIN_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH", "CLASS_MATCH")
_LENGTHS = ("SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK")
_ENTRIES = ("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS")
BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)  # made anew at each read
SCALARS = (int, float, bool, str, type(None), bytes, complex, torch.dtype, torch.device, frozenset, Enum, range, slice)
_OF_MODULES = ("._modules", "._parameters", "._buffers")
_NOT_LISTED = (*_OF_MODULES, ".__dict__", "__defaults__")
_MOST_KEYS = 256  # of a dictionary that the trace did not run over
_KEYS = re.compile(r"list\(dict\.keys\(.+\)\)")
_ITEM = re.compile(r"dict\.__getitem__\((?P<owner>.+), list\(dict\.keys\((?P=owner)\)\)\[(?P<place>\d+)\]\)")
# How Dynamo writes a class attribute that it found through an object: ``dict(type(L['spec']).__dict__)['scale']``.
_OF_CLASS = re.compile(r"dict\(type\((?P<owner>.+)\)(\.__mro__\[\d+\])?\.__dict__\)\['(?P<name>\w+)'\]")
_MODULE = re.compile(r"G\['__import_(?P<top>.+?)(_dot_.*)?'\]")


def taken(roots: Mapping[str, Any], module_globals: dict[str, Any]) -> dict[str, Any]:
    """Values by path (``L['spec'].page_size``) that the trace in progress took; call it inside a Dynamo backend."""
    context = TracingContext.try_get()
    found, names = dict[str, Any](), list[str]()
    tries = any(catches(code, KeyError) for code in of_users(context.traced_code)) if context is not None else False
    for guard in context.guards_context.dynamo_guards if context is not None else ():
        names.append(_name(guard))
        for path in asked(names[-1], guard, tries):
            path = _by_key(path, roots, module_globals)
            if (question := asked_of(path)) is not None and question.kind in ("tuple", "is"):
                kind, container = guard.create_fn_name(), value_at(question.container, roots, module_globals)
                if question.kind == "tuple":
                    found |= _keys_of(question.container, container, kind)
                elif container is value_at(question.key, roots, module_globals) and isinstance(container, _ALIASED):
                    found[path] = True
                continue
            value = value_at(path, roots, module_globals)
            if isinstance(value, (set, frozenset)):  # Dynamo takes a whole set, and the loop may run over it
                if len(value) > 1 and is_taken(tuple(value)):
                    found[f"tuple({path})"] = tuple(value)
                value = frozenset(value)
            if is_taken(value) and not _is_watched_by_address(path, value, roots, module_globals):
                found[as_attribute(path, value, roots, module_globals)] = value
    if context is not None:
        found |= looked_for(context.traced_code, filter(_is_of_users, names), roots, module_globals)
    return dict(sorted(found.items()))


def _name(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)


def _keys_of(path: str, container: Any, kind: str) -> dict[str, Any]:
    """All keys of a container in their order: where the trace ran over them, else those of small dictionaries."""
    ran = kind == "DICT_KEYS_MATCH"
    if not isinstance(container, _MAPPINGS) and not (ran and isinstance(container, (set, frozenset))):
        return {}
    keys = tuple(container)
    if not ran and len(keys) > _MOST_KEYS:
        return {}
    return {f"tuple({path})": keys} if all(map(_is_key, keys)) else {f"len({path})": len(keys)}


def _by_key(path: str, roots: Mapping[str, Any], module_globals: dict[str, Any]) -> str:
    """An item of a subclass of dict, which Dynamo names by its place among the keys, by its key."""
    if (parts := _ITEM.fullmatch(path)) is None:
        return path
    owner, place = parts["owner"], int(parts["place"])
    key = list(dict.keys(value_at(owner, roots, module_globals)))[place]
    return f"{owner}[{text_of_key(key) or f'list(dict.keys({owner}))[{place}]'}]"


def _is_watched_by_address(path: str, value: Any, roots: Mapping[str, Any], module_globals: dict[str, Any]) -> bool:
    """Whether ``value`` is the class of one of PyTorch's modules with parameters: another one comes with others."""
    is_module = isinstance(value, type) and issubclass(value, torch.nn.Module) and is_library(value)
    return is_module and has_parameters(value_at(path.removesuffix(".__class__"), roots, module_globals))


def has_parameters(owner: Any) -> bool:
    """Whether ``owner`` is a module with parameters."""
    return isinstance(owner, torch.nn.Module) and next(owner.parameters(), None) is not None


def asked(path: str, guard: Any, tries: bool = False) -> list[str]:
    """What the loop looked at, as expressions over Dynamo's path; none where that is no scalar.

    Beside values these are lengths (``len(L['spec'].scales)``), keys (``'x' in L['spec'].options``) and attributes that
    an object itself does not have (``'x' in L['spec'].__dict__``): what a default, or a class, stands in for. Of a key
    that a dictionary lacks, a length may be all that Dynamo notes, and nothing where the loop ``tries`` and catches.
    """
    kind, owner = guard.create_fn_name(), split_path(path)[0] if path else ""
    listed = [f"tuple({path})"] if _is_of_users(path) and not path.endswith(_NOT_LISTED) else []
    if _KEYS.fullmatch(owner):  # a key itself: values are asked for by it, and who runs over keys asks for them all
        return []
    if kind in _CONSTANT:
        return [path] if "[" in owner or _ITEM.fullmatch(path) else []
    if "[" not in path:
        return []
    if kind in _ROUTINES:
        return [path] if _is_of_users(path) else []
    if kind == "TYPE_MATCH":
        return [f"{path}.__class__", *(listed if tries else [])] if _is_of_users(path) else []
    if kind == "DUPLICATE_INPUT":
        other = _name(guard.create_fn.keywords["source_b"])
        return [f"{path} is {other}"] if path.startswith("L['spec']") and other.startswith("L['spec']") else []
    if kind == "DICT_KEYS_MATCH" and not path.endswith(_OF_MODULES):
        return [f"tuple({path})"]
    if kind in _LENGTHS:
        return [f"len({path})", *listed]
    return _of_entry(path, kind, getattr(guard.create_fn, "keywords", {}))


def _of_entry(path: str, kind: str, given: dict[str, Any]) -> list[str]:
    """Whether an object has an attribute, or a container an entry; all of them where no text stands for its key."""
    if kind in ("HASATTR", "NOT_PRESENT_IN_GENERIC_DICT"):
        # In torch 2.11 a HASATTR stands at the attribute itself.
        path, key = (path, given["attr"]) if given.get("attr") else split_path(path)
        return [f"{key!r} in {path}.__dict__"]
    if kind not in _ENTRIES:
        return []
    text = text_of_key(given.get("key"))
    if text is not None:
        return [f"{text} in {path}"]
    return [path if kind.startswith("SET") else f"tuple({path})"]


def _is_of_users(path: str) -> bool:
    """Whether a path begins at the speculator, or at a module of the user's."""
    module = _MODULE.match(path)
    return path.startswith("L['spec']") or (module is not None and module["top"] not in LIBRARIES)


def is_taken(value: Any) -> bool:
    """Whether a value that the loop looked at is one that is guarded: a scalar, a function, a class of the user's."""
    if isinstance(value, type):
        is_plain = not is_library(value) and not issubclass(value, (torch.Tensor, *_TABLES, *SCALARS))
        return is_plain or issubclass(value, torch.nn.Module)
    is_keys = isinstance(value, tuple) and all(isinstance(key, SCALARS) for key in value)
    return is_keys or isinstance(value, SCALARS) or inspect.isroutine(value)


def _is_key(key: Any) -> bool:
    """Whether a key is compared: with itself, where it is no scalar; a guard should hold no weights."""
    if isinstance(key, tuple):
        return all(map(_is_key, key))
    return not isinstance(key, (torch.Tensor, torch.nn.Module))


def as_attribute(path: str, value: Any, roots: Mapping[str, Any], module_globals: dict[str, Any]) -> str:
    """A class attribute as an attribute of the object that it was read through, where that reads the same."""
    parts = _OF_CLASS.fullmatch(path)
    if parts is None:
        return path
    through = f"{parts['owner']}.{parts['name']}"
    return through if same(value_at(through, roots, module_globals), value) else path


def same(now: Any, old: Any) -> bool:
    """Whether a loop computes the same with ``now``: 1 is not 1.0, 0.0 is not -0.0, and NaN is itself."""
    if type(now) is not type(old) and not isinstance(old, frozenset):
        return False
    if isinstance(old, (float, complex)):
        return repr(now) == repr(old)
    if isinstance(old, tuple):
        return len(now) == len(old) and all(map(same, now, old))
    return now is old or (isinstance(old, (*SCALARS, *BOUND)) and bool(now == old))
