"""Checks of the batches and sizes of a call, before anything is written."""

from __future__ import annotations

from itertools import pairwise
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from draftfuse.errors import InvalidBatchError
from draftfuse.speculator import DraftBatch


def check_length(max_seq_len: object, largest: int) -> None:
    """Raise :class:`InvalidBatchError` unless ``max_seq_len`` can be a host bound on seq_lens, 0..largest."""
    _check_range(
        "max_seq_len", max_seq_len, largest, "max_model_len", "Pass the longest seq_len of the batch, or None."
    )


def check_rows(num_reqs: object, largest: int) -> None:
    """Raise :class:`InvalidBatchError` unless ``num_reqs`` is a number of requests, 0..largest."""
    _check_range("num_reqs", num_reqs, largest, "max_num_reqs", "Split the batch, or compile a larger speculator.")


def _check_range(name: str, number: object, largest: int, bound: str, todo: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= largest:
        raise InvalidBatchError(f"{name} is out of range", repr(number), f"0..{bound}={largest}", todo)


def are_counts(*numbers: object) -> bool:
    """Whether each is a plain int or None, so that they may be looked up: True would pass for 1."""
    return all(number is None or type(number) is int for number in numbers)


def check_dummy(spec: Any, num_reqs: int, num_tokens: int) -> None:
    """Raise :class:`InvalidBatchError` unless a dummy run can have ``num_reqs`` rows of ``num_tokens`` in all."""
    check_rows(num_reqs, spec.max_num_reqs)
    room = spec.inputs.positions.shape[0]
    if not isinstance(num_tokens, int) or not 1 <= num_reqs <= num_tokens <= room:
        came, expected = f"{num_tokens} tokens in {num_reqs} rows", f"1 <= num_reqs <= num_tokens <= {room}"
        raise InvalidBatchError("a dummy run of these sizes cannot be", came, expected, "Correct them.")


def check_sizes(num_reqs: int, num_tokens: object, max_query_len: object) -> None:
    """Raise :class:`InvalidBatchError` unless ``num_tokens`` and ``max_query_len`` can be those of ``num_reqs``."""
    todo = "Correct the sizes; DraftBatch documents them."
    if type(num_tokens) is not int or num_tokens < num_reqs:
        raise InvalidBatchError("num_tokens is out of range", repr(num_tokens), f"an int >= {num_reqs}", todo)
    if not _is_longest(max_query_len, num_reqs, num_tokens):
        expected = f"what fits num_reqs={num_reqs}, num_tokens={num_tokens}"
        raise InvalidBatchError("max_query_len cannot be", repr(max_query_len), expected, todo)


def check_batch(spec: Any, batch: DraftBatch) -> None:
    """Raise :class:`InvalidBatchError` unless the sizes of ``batch`` fit the persistent inputs of ``spec``.

    Reads host metadata only and is on the path of every call. What stands in the tensors is looked at by
    :func:`check_values`, where they are on the host.
    """
    try:
        sound = _fits(spec, batch)
    except (AttributeError, TypeError, RuntimeError):  # a field is no tensor, or a sparse one: named below
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
        and isinstance(hidden, Tensor)
        and hidden.dim() == 2
        and hidden.size(1) == inputs.hidden_states.size(1)
        and hidden.size(0) >= tokens
        and hidden.is_contiguous()
        and _is_long(batch.query_start_loc, rows + 1)
        and all(_is_long(t, rows) for t in _per_row(batch))
        and all(_is_long(t, tokens) for t in _per_token(batch))
    )


def _is_long(tensor: Tensor, length: int) -> bool:
    return isinstance(tensor, Tensor) and tensor.dim() == 1 and tensor.size(0) >= length and tensor.is_contiguous()


def _is_longest(longest: object, rows: int, tokens: int) -> bool:
    """Whether ``longest`` can be the most tokens of a request where ``rows`` requests have ``tokens`` in all."""
    if type(longest) is not int:
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
        if tensor.layout != torch.strided:
            fail(f"batch.{name} has a wrong layout", tensor.layout, torch.strided)
        if not tensor.is_contiguous():
            fail(f"batch.{name} is not contiguous", tensor.stride(), "a contiguous tensor")
    raise AssertionError(f"a batch that does not fit for no known reason: {batch}")


def check_values(batch: DraftBatch) -> None:
    """Raise :class:`InvalidBatchError` unless the tensors of ``batch`` say the same as its host values.

    For tensors on the host, whose fields :func:`check_batch` has seen; on a device it would wait for the device.
    """
    rows, tokens = batch.num_reqs, batch.num_tokens
    starts = batch.query_start_loc[: rows + 1].tolist()
    queries = [end - begin for begin, end in pairwise(starts)]
    if starts[0] != 0 or starts[-1] != tokens or min(queries) < 1:
        _refuse_values("query_start_loc does not fit num_tokens", starts, f"ascending from 0 to num_tokens={tokens}")
    longest = batch.max_query_len
    if longest is not None and max(queries) > longest:
        _refuse_values(
            "query_start_loc does not fit max_query_len", max(queries), f"at most {longest} tokens a request"
        )
    lengths, rejected = batch.seq_lens[:rows].tolist(), batch.num_rejected[:rows].tolist()
    if min(lengths) < 0 or max(lengths) > batch.max_seq_len:
        _refuse_values("seq_lens does not fit max_seq_len", lengths, f"0..{batch.max_seq_len}")
    if not all(0 <= drop < query for drop, query in zip(rejected, queries, strict=True)):
        _refuse_values("num_rejected does not fit query_start_loc", rejected, f"at least 0 and below {queries}")
    temperatures = batch.temperature[:rows].tolist()
    if not all(temperature >= 0 for temperature in temperatures):  # NaN is not
        _refuse_values("temperature has no meaning", temperatures, "0 (greedy) or more")


def _refuse_values(what: str, came: object, expected: object) -> NoReturn:
    raise InvalidBatchError(f"batch.{what}", came, expected, "Correct the batch; DraftBatch documents its fields.")
