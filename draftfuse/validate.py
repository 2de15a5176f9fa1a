"""Checks of what a user hands in, before anything is traced or captured."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor

from draftfuse.errors import InvalidBatchError, InvalidOptionError, InvalidSpeculatorError, SourceLine
from draftfuse.speculator import DraftBatch, DraftInputs
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


def _fail(spec: Any, what: str, came: object, expected: object, name: str) -> None:
    todo = f"Set {name} on the speculator; draftfuse.Speculator documents the protocol."
    raise InvalidSpeculatorError(what, came, expected, todo, source_of(spec))


def check_inputs(spec: Any) -> None:
    """Types, dims and lengths of the persistent inputs."""
    rows, devices = spec.max_num_reqs, set()
    for name, tensor in spec.inputs.named_tensors().items():
        dtype, dims = _INPUT_TYPES[name]
        if (dtype is not None and tensor.dtype != dtype) or tensor.dim() != dims:
            expected = f"{dims} dims" + (f" of {dtype}" if dtype else "")
            _fail(
                spec, f"inputs.{name} has a wrong dtype or shape", f"{tensor.dtype}{list(tensor.shape)}", expected, name
            )
        need = rows + 1 if name == "query_start_loc" else rows
        if tensor.shape[0] < need:
            _fail(
                spec, f"inputs.{name} is too short", tensor.shape[0], f"at least {need} for max_num_reqs={rows}", name
            )
        devices.add(tensor.device)
    if spec.inputs.draft_tokens.shape[1] < spec.num_speculative_tokens:
        came, expected = (
            spec.inputs.draft_tokens.shape[1],
            f"num_speculative_tokens={spec.num_speculative_tokens} columns",
        )
        _fail(spec, "inputs.draft_tokens is too narrow", came, expected, "draft_tokens")
    if len(devices) != 1:
        _fail(spec, "the inputs are on several devices", sorted(map(str, devices)), "one device", "inputs")


def check_groups(spec: Any) -> None:
    """Attention groups: builder, table and slots."""
    groups = getattr(spec, "attn_groups", None)
    if not isinstance(groups, Sequence):
        _fail(spec, "spec.attn_groups is no sequence", type(groups).__name__, "a list of AttentionGroup", "attn_groups")
    for index, group in enumerate(spec.attn_groups):
        if not callable(getattr(group.builder, "build", None)):
            _fail(
                spec,
                f"attn_groups[{index}].builder has no build",
                type(group.builder).__name__,
                "build(common)",
                "build",
            )
        tokens = spec.inputs.positions.shape[0]
        _check_table(spec, index, group.block_table, torch.int32, 2, "block_table", spec.max_num_reqs)
        _check_table(spec, index, group.slot_mapping, torch.int64, 1, "slot_mapping", tokens)
        if not isinstance(group.page_size, int) or group.page_size < 1:
            _fail(spec, f"attn_groups[{index}].page_size is no size", repr(group.page_size), "an int >= 1", "page_size")


def _check_table(spec: Any, index: int, table: Any, dtype: torch.dtype, dims: int, name: str, rows: int) -> None:
    if not isinstance(table, Tensor) or table.dtype != dtype or table.dim() != dims:
        came = f"{table.dtype}{list(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
        _fail(spec, f"attn_groups[{index}].{name} has a wrong dtype or shape", came, f"{dims} dims of {dtype}", name)
    if table.shape[0] < rows:
        _fail(spec, f"attn_groups[{index}].{name} is too short", table.shape[0], f"at least {rows} rows", name)


def check_option(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise :class:`InvalidOptionError` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise InvalidOptionError(f"unknown {name}", repr(value), f"one of {list(allowed)}", f"Pass another {name}.")


def check_k(k: object, largest: int) -> int:
    """A number of draft tokens that a call may ask for, 0..largest."""
    if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= largest:
        todo = "Ask for fewer, or compile with a larger num_speculative_tokens."
        raise InvalidOptionError("k does not fit the compiled loop", repr(k), f"an int, 0 <= k <= {largest}", todo)
    return k


def check_ks(ks: object, largest: int) -> list[int]:
    """Numbers of draft tokens to capture for."""
    if not isinstance(ks, Iterable):
        raise InvalidOptionError("ks is no list", repr(ks), f"a list of ints in 0..{largest}", f"Pass [{ks!r}].")
    return [check_k(k, largest) for k in ks]


def check_capacities(capacities: object, max_num_reqs: int) -> list[int]:
    """The request ladder, ascending: ``"pow2"`` or an explicit list."""
    if capacities == "pow2":
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


def check_length(max_seq_len: object, largest: int) -> None:
    """Raise :class:`InvalidBatchError` unless ``max_seq_len`` can be a host bound on seq_lens, 0..largest."""
    if not isinstance(max_seq_len, int) or isinstance(max_seq_len, bool) or not 0 <= max_seq_len <= largest:
        todo = "Pass the longest seq_len of the batch, or None."
        raise InvalidBatchError("max_seq_len is out of range", repr(max_seq_len), f"0..max_model_len={largest}", todo)


def check_rows(num_reqs: object, largest: int) -> None:
    """Raise :class:`InvalidBatchError` unless ``num_reqs`` is a number of requests, 0..largest."""
    if not isinstance(num_reqs, int) or isinstance(num_reqs, bool) or not 0 <= num_reqs <= largest:
        todo = "Split the batch, or compile a larger speculator."
        raise InvalidBatchError("num_reqs is out of range", repr(num_reqs), f"0..max_num_reqs={largest}", todo)


def check_dummy(spec: Any, num_reqs: int, num_tokens: int) -> None:
    """Raise :class:`InvalidBatchError` unless a dummy run can have ``num_reqs`` rows of ``num_tokens`` in all."""
    check_rows(num_reqs, spec.max_num_reqs)
    room = spec.inputs.positions.shape[0]
    if not isinstance(num_tokens, int) or not 1 <= num_reqs <= num_tokens <= room:
        came, expected = f"{num_tokens} tokens in {num_reqs} rows", f"1 <= num_reqs <= num_tokens <= {room}"
        raise InvalidBatchError("a dummy run of these sizes cannot be", came, expected, "Correct them.")


def check_table(table: object, largest: int) -> dict[int, int]:
    """``k_by_num_reqs``: the largest batch size to the number of draft tokens."""
    if not isinstance(table, Mapping) or not all(isinstance(size, int) and size > 0 for size in table):
        expected = "a mapping of batch sizes (ints > 0) to k"
        raise InvalidOptionError("k_by_num_reqs is no table", repr(table), expected, "Correct it.")
    return {size: check_k(k, largest) for size, k in table.items()}


def check_budget(budget: object) -> None:
    """Raise :class:`InvalidOptionError` unless ``budget`` is None or a positive number of bytes."""
    if budget is not None and (not isinstance(budget, int) or budget <= 0):
        raise InvalidOptionError("graph_memory_budget is no size", repr(budget), "bytes > 0, or None", "Correct it.")


def check_batch(spec: Any, batch: DraftBatch) -> None:
    """Raise :class:`InvalidBatchError` unless the sizes of ``batch`` fit the persistent inputs of ``spec``.

    Reads host metadata only and is on the path of every call. That each request has at least one token, and that no
    value is out of range, stands on the device and is not looked at.
    """
    try:
        sound = _fits(spec, batch)
    except (AttributeError, TypeError):  # a field is no tensor: named below
        sound = False
    if not sound:
        _explain_batch(spec, batch)


_COUNTS = ("num_reqs", "num_tokens", "max_seq_len")
_PER_ROW = ("seq_lens", "num_rejected", "last_sampled", "temperature", "seeds", "idx_mapping")
_PER_TOKEN = ("input_ids", "positions")
_counts, _per_row, _per_token = attrgetter(*_COUNTS), attrgetter(*_PER_ROW), attrgetter(*_PER_TOKEN)


def _fits(spec: Any, batch: DraftBatch) -> bool:
    rows, tokens, bound = _counts(batch)
    inputs, hidden = spec.inputs, batch.hidden_states
    if not type(rows) is type(tokens) is type(bound) is int or not 0 <= rows <= spec.max_num_reqs:
        return False
    if not rows <= tokens <= min(rows * bound, inputs.positions.size(0)) or not 0 <= bound <= spec.max_model_len:
        return False
    return (
        _is_longest(batch.max_query_len, rows, tokens)
        and hidden.dim() == 2
        and hidden.size(1) == inputs.hidden_states.size(1)
        and hidden.size(0) >= tokens
        and hidden.is_contiguous()
        and _is_long(batch.query_start_loc, rows + 1)
        and all(_is_long(t, rows) for t in _per_row(batch))
        and all(_is_long(t, tokens) for t in _per_token(batch))
    )


def _is_long(tensor: Tensor, length: int) -> bool:
    return tensor.dim() == 1 and tensor.size(0) >= length and tensor.is_contiguous()


def _is_longest(longest: int | None, rows: int, tokens: int) -> bool:
    """Whether ``longest`` can be the most tokens of a request where ``rows`` requests have ``tokens`` in all."""
    if longest is None or type(longest) is not int:
        return longest is None
    return rows == 0 or (longest <= tokens - rows + 1 and longest * rows >= tokens)


def _explain_batch(spec: Any, batch: DraftBatch) -> NoReturn:
    """Raise the error for the first thing that is wrong."""

    def fail(what: str, came: object, expected: object) -> NoReturn:
        raise InvalidBatchError(what, came, expected, "Correct or split the batch, or compile a larger speculator.")

    if not any(hasattr(batch, name) for name in (*_COUNTS, *_PER_ROW, *_PER_TOKEN)):
        came = "None" if batch is None else type(batch).__name__
        todo = "Hand over the verified tokens of this scheduler step; DraftBatch documents its fields."
        raise InvalidBatchError("the batch is no DraftBatch", came, "draftfuse.DraftBatch", todo)
    for name in _COUNTS:
        if type(number := getattr(batch, name, None)) is not int:
            fail(f"batch.{name} is no count", repr(number), "an int")
    rows, tokens, room = batch.num_reqs, batch.num_tokens, spec.inputs.positions.shape[0]
    check_rows(rows, spec.max_num_reqs)
    if not rows <= tokens <= room or (tokens and not rows):
        fail("num_tokens is out of range", tokens, f"{rows}..{room if rows else 0} for num_reqs={rows}")
    if not 0 <= batch.max_seq_len <= spec.max_model_len or rows * batch.max_seq_len < tokens:
        expected = f"at most max_model_len={spec.max_model_len}, and room for num_tokens={tokens} in {rows} requests"
        fail("max_seq_len is out of range", batch.max_seq_len, expected)
    longest = getattr(batch, "max_query_len", None)
    if not _is_longest(longest, rows, tokens):
        fail("max_query_len cannot be", longest, f"what fits num_reqs={rows}, num_tokens={tokens}")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_PER_ROW, (rows,))
    shapes |= dict.fromkeys(_PER_TOKEN, (tokens,))
    shapes |= {"query_start_loc": (rows + 1,), "hidden_states": (tokens, spec.inputs.hidden_states.shape[1])}
    for name, shape in shapes.items():
        tensor = getattr(batch, name, None)
        if not isinstance(tensor, Tensor):
            fail(f"batch.{name} is no tensor", repr(tensor), f"a tensor of shape {shape}")
        if tensor.dim() != len(shape) or tensor.shape[1:] != shape[1:]:
            fail(f"batch.{name} has a wrong shape", tuple(tensor.shape), shape)
        if tensor.shape[0] < shape[0]:
            fail(f"batch.{name} is too short", tensor.shape[0], f"at least {shape[0]}")
        if not tensor.is_contiguous():
            fail(f"batch.{name} is not contiguous", tensor.stride(), "a contiguous tensor")
    raise AssertionError(f"a batch that does not fit for no known reason: {batch}")
