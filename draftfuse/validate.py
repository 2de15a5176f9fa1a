"""Checks of a speculator and of options, before anything is traced; :mod:`draftfuse.batches` has those of batches."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor

from draftfuse.errors import InvalidOptionError, InvalidSpeculatorError, SourceLine
from draftfuse.speculator import DraftInputs
from draftfuse.step_log import is_watched

_INPUT_TYPES = {
    "input_ids": (torch.int32, 1),
    "positions": (torch.int64, 1),
    "seq_lens": (torch.int32, 1),
    "query_start_loc": (torch.int32, 1),
    "idx_mapping": (torch.int64, 1),
    "hidden_states": (None, 2),
    "last_token_indices": (torch.int64, 1),
    "temperature": (torch.float32, 1),
    "seeds": (torch.int64, 1),
    "draft_tokens": (torch.int64, 2),
    "draft_logits": (None, 3),
}
HOOKS = ("on_prefill_begin", "on_prefill_end", "on_multi_step_decode_begin", "on_multi_step_decode_end")
MODES = ("auto", "fused", "split", "eager")
COMPILERS = ("inductor", "none")


def source_of(value: Any) -> SourceLine | None:
    """Where a class or function was written, if that is known."""
    target = value if inspect.isclass(value) or inspect.isroutine(value) else type(value)
    if inspect.isclass(target) and target.__module__ == "types":  # made by make_dataclass, or types.new_class
        return _first_method(target)
    try:
        lines, number = inspect.getsourcelines(target)
        return SourceLine(inspect.getsourcefile(target) or "?", number, lines[0].strip())
    except (OSError, TypeError):
        return None


def _first_method(klass: type) -> SourceLine | None:
    """The line of the user's first function in a class that no ``class`` statement made."""
    codes = [f.__code__ for f in vars(klass).values() if inspect.isfunction(f)]
    users = [code for code in codes if is_watched(code.co_filename) and code.co_filename != "<string>"]
    return SourceLine.of(users[0].co_filename, users[0].co_firstlineno) if users else None


def check_speculator(spec: Any) -> None:
    """Raise :class:`InvalidSpeculatorError` unless ``spec`` has the protocol's attributes with sound values."""
    if isinstance(spec, (type, NoneType, str, int, float)) or inspect.isroutine(spec):
        came = "None" if spec is None else f"{spec!r}, a {type(spec).__name__}"
        todo = "Return the speculator from the factory, or call what makes it, and pass that."
        raise InvalidSpeculatorError("this is no speculator", came, "an object with draftfuse.Speculator's names", todo)
    for name in ("num_speculative_tokens", "max_num_reqs", "max_model_len"):
        _check_count(spec, name)
    for name in ("forward", "sample", "advance"):
        if not callable(getattr(spec, name, None)):
            _fail(spec, f"the speculator has no method {name}", f"{type(spec).__name__} without it", "a method", name)
    for name in ("prefill", *HOOKS):
        if (method := getattr(spec, name, None)) is not None and not callable(method):
            _fail(spec, f"spec.{name} cannot be called", repr(method), "a method, or nothing of that name", name)
    if not isinstance(getattr(spec, "inputs", None), DraftInputs):
        came = type(getattr(spec, "inputs", None)).__name__
        _fail(spec, "spec.inputs is not a DraftInputs", came, "draftfuse.DraftInputs", "inputs")
    if not hasattr(spec, "advance_positions"):
        _fail(
            spec, "the speculator has no attribute advance_positions", "nothing", "True or False", "advance_positions"
        )
    check_inputs(spec)
    check_groups(spec)


def _check_count(spec: Any, name: str) -> None:
    number = getattr(spec, name, None)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        _fail(spec, f"spec.{name} is not a count", repr(number), "an int >= 1", name)


def _fail(spec: Any, what: str, came: object, expected: object, name: str) -> NoReturn:
    todo = f"Set {name} on the speculator; draftfuse.Speculator documents the protocol."
    raise InvalidSpeculatorError(what, came, expected, todo, source_of(spec))


def check_inputs(spec: Any) -> None:
    """Types, dims, lengths and devices of the persistent inputs."""
    inputs, k = spec.inputs, spec.num_speculative_tokens
    for name in _INPUT_TYPES:
        if name != "draft_logits" or inputs.draft_logits is not None:
            _check_input(spec, name, getattr(inputs, name, None))
    rows, tokens = spec.max_num_reqs, inputs.positions.shape[0]
    for name, tensor in inputs.named_tensors().items():
        need = tokens if name in ("input_ids", "hidden_states") else rows + (name == "query_start_loc")
        if tensor.shape[0] < need:
            why = f"{tokens} positions" if need == tokens else f"max_num_reqs={rows}"
            _fail(spec, f"inputs.{name} is too short", tensor.shape[0], f"at least {need} for {why}", name)
        if name.startswith("draft_") and tensor.shape[1] < k:
            expected = f"num_speculative_tokens={k} columns"
            _fail(spec, f"inputs.{name} is too narrow", tensor.shape[1], expected, name)
    devices = {tensor.device for tensor in inputs.named_tensors().values()}
    if len(devices) != 1 or inputs.positions.is_meta:
        _fail(spec, "the inputs are on several devices", sorted(map(str, devices)), "one device with memory", "inputs")


def _check_input(spec: Any, name: str, tensor: Any) -> None:
    dtype, dims = _INPUT_TYPES[name]
    expected = f"{dims} dims of {dtype or 'a floating dtype'}"
    if not isinstance(tensor, Tensor):
        _fail(spec, f"inputs.{name} is no tensor", name_of_type(tensor), expected, name)
    fits = tensor.dtype == dtype if dtype is not None else tensor.is_floating_point()
    if not fits or tensor.dim() != dims or tensor.layout != torch.strided:
        _fail(spec, f"inputs.{name} has a wrong dtype or shape", _words(tensor), expected, name)
    if dims == 1 and not tensor.is_contiguous():
        _fail(spec, f"inputs.{name} is not contiguous", tensor.stride(), "a contiguous tensor", name)


def name_of_type(value: object) -> str:
    """``None`` or the name of a type, for messages."""
    return "None" if value is None else type(value).__name__


def _words(tensor: Tensor) -> str:
    layout = "" if tensor.layout == torch.strided else f"{tensor.layout} of "
    return f"{layout}{tensor.dtype}{list(tensor.shape)}"


def check_groups(spec: Any) -> None:
    """Attention groups: builder, table, slots, names of layers and caches."""
    groups = getattr(spec, "attn_groups", None)
    if not isinstance(groups, Sequence):
        _fail(spec, "spec.attn_groups is no sequence", type(groups).__name__, "a list of AttentionGroup", "attn_groups")
    tokens = spec.inputs.positions.shape[0]
    for index, group in enumerate(groups):
        builder, size = getattr(group, "builder", None), getattr(group, "page_size", None)
        at = f"attn_groups[{index}]"
        if not callable(getattr(builder, "build", None)):
            _fail(spec, f"{at}.builder has no build", type(builder).__name__, "build(common)", "build")
        _check_table(spec, index, group, torch.int32, 2, "block_table", spec.max_num_reqs)
        _check_table(spec, index, group, torch.int64, 1, "slot_mapping", tokens)
        if not isinstance(size, int) or size < 1:
            _fail(spec, f"{at}.page_size is no size", repr(size), "an int >= 1", "page_size")
        layers, caches = getattr(group, "layer_names", None), getattr(group, "kv_caches", None)
        if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
            _fail(spec, f"{at}.layer_names is no list of names", repr(layers), "a list of texts", "layer_names")
        if not _are_caches(caches):
            expected = "a mapping of layer names to sequences of tensors"
            _fail(spec, f"{at}.kv_caches has no caches", type(caches).__name__, expected, "kv_caches")


def _are_caches(caches: Any) -> bool:
    pairs = caches.values() if isinstance(caches, Mapping) else [None]
    return all(isinstance(p, Sequence) and all(isinstance(t, Tensor) for t in p) for p in pairs)


def _check_table(spec: Any, index: int, group: Any, dtype: torch.dtype, dims: int, name: str, rows: int) -> None:
    table, what = getattr(group, name, None), f"attn_groups[{index}].{name}"
    if not isinstance(table, Tensor) or table.dtype != dtype or table.dim() != dims:
        came = _words(table) if isinstance(table, Tensor) else name_of_type(table)
        _fail(spec, f"{what} has a wrong dtype or shape", came, f"{dims} dims of {dtype}", name)
    if table.shape[0] < rows:
        _fail(spec, f"{what} is too short", table.shape[0], f"at least {rows} rows", name)
    if table.device != spec.inputs.positions.device:
        _fail(spec, f"{what} is on another device", table.device, spec.inputs.positions.device, name)


def check_option(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise :class:`InvalidOptionError` unless ``value`` is one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidOptionError(f"unknown {name}", repr(value), f"one of {list(allowed)}", f"Pass another {name}.")


def check_flag(name: str, value: object) -> None:
    """Raise :class:`InvalidOptionError` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{name} is no switch", repr(value), "True or False", "Pass one of these.")


def check_disable(disable: object, known: Sequence[str]) -> frozenset[str]:
    """Names of passes to leave out."""
    expected = f"names among {list(known)}"
    if isinstance(disable, str) or not isinstance(disable, Collection):
        what = "disable is one text" if isinstance(disable, str) else "disable is no list"
        raise InvalidOptionError(what, repr(disable), f"a list of {expected}", f"Pass [{disable!r}].")
    unknown = [name for name in disable if not isinstance(name, str) or name not in known]
    if unknown:
        raise InvalidOptionError("disable names unknown passes", unknown, expected, "Correct the names.")
    return frozenset(disable)


def check_dump(dump: object) -> None:
    """Raise :class:`InvalidOptionError` unless ``dump`` is None or can be a folder."""
    if dump is None:
        return
    todo = "Pass a path that can be made a folder, or None."
    if not isinstance(dump, (str, Path)) or str(dump) == "" or "\0" in str(dump):
        raise InvalidOptionError("dump is no path", repr(dump), "a text or a pathlib.Path", todo)
    first = next(path for path in (Path(dump), *Path(dump).absolute().parents) if path.exists())
    if not first.is_dir():
        expected = "a folder, or a name that is free"
        raise InvalidOptionError("dump is no folder", f"{dump} ({first} is a file)", expected, todo)


def check_pool(pool: object) -> None:
    """Raise :class:`InvalidOptionError` unless ``pool`` is None or what ``torch.cuda.graph_pool_handle()`` returns."""
    if pool is not None and not (isinstance(pool, tuple) and [type(part) for part in pool] == [int, int]):
        todo = "Pass torch.cuda.graph_pool_handle(), the id of a MemPool, or None."
        raise InvalidOptionError("pool is no graph pool", repr(pool), "a pair of ints", todo)


def check_k(k: object, largest: int) -> int:
    """A number of draft tokens that a call may ask for, 0..largest."""
    if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= largest:
        todo = "Ask for fewer, or compile with a larger num_speculative_tokens."
        raise InvalidOptionError("k does not fit the compiled loop", repr(k), f"an int, 0 <= k <= {largest}", todo)
    return k


def check_largest(k: object, largest: int) -> int:
    """``num_speculative_tokens``: the largest k of any call, 1..largest."""
    if type(k) is not int or not 1 <= k <= largest:
        todo = "Pass a number that the speculator's own num_speculative_tokens allows, or None."
        raise InvalidOptionError("num_speculative_tokens does not fit", repr(k), f"an int, 1 <= k <= {largest}", todo)
    return k


def check_ks(ks: object, largest: int) -> list[int]:
    """Numbers of draft tokens to capture for."""
    if not isinstance(ks, Iterable):
        raise InvalidOptionError("ks is no list", repr(ks), f"a list of ints in 0..{largest}", f"Pass [{ks!r}].")
    return [check_k(k, largest) for k in ks]


def check_capacities(capacities: object, max_num_reqs: int) -> list[int]:
    """The request ladder, ascending: ``"pow2"`` or an explicit list."""
    if isinstance(capacities, str) and capacities == "pow2":
        powers = [1 << i for i in range(max_num_reqs.bit_length()) if 1 << i < max_num_reqs]
        return [*powers, max_num_reqs]
    if not isinstance(capacities, Sequence) or isinstance(capacities, str) or not capacities:
        raise InvalidOptionError(
            "unknown request_capacities", repr(capacities), "'pow2' or a list", "Pass one of these."
        )
    good = [c for c in capacities if isinstance(c, int) and not isinstance(c, bool) and 1 <= c <= max_num_reqs]
    if len(good) != len(capacities) or len(set(good)) != len(good):
        expected = f"distinct ints in 1..max_num_reqs={max_num_reqs}"
        raise InvalidOptionError("request_capacities has bad entries", list(capacities), expected, "Correct the list.")
    return sorted(good)


def check_table(table: object, largest: int) -> dict[int, int]:
    """``k_by_num_reqs``: the largest batch size to the number of draft tokens."""
    if not isinstance(table, Mapping) or not all(type(size) is int and size > 0 for size in table):
        expected = "a mapping of batch sizes (ints > 0) to k"
        raise InvalidOptionError("k_by_num_reqs is no table", repr(table), expected, "Correct it.")
    return {size: check_k(k, largest) for size, k in table.items()}


def check_budget(budget: object) -> None:
    """Raise :class:`InvalidOptionError` unless ``budget`` is None or a positive number of bytes."""
    if budget is not None and (type(budget) is not int or budget <= 0):
        raise InvalidOptionError("graph_memory_budget is no size", repr(budget), "bytes > 0, or None", "Correct it.")
