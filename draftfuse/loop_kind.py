"""Loops of another kind than one token a request a draft step are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftfuse.errors import SourceLine, UnsafeLoopError
from draftfuse.speculator import Speculator
from draftfuse.validate import source_of


@contextmanager
def checked_kind(spec: Any, rows: int) -> Iterator[Any]:
    """``spec`` whose ``forward``, ``prefill`` and ``sample`` results are looked at."""
    yield _Checked(spec, rows)


class _Checked:
    """Everything of a speculator, the results of its steps checked."""

    def __init__(self, spec: Any, rows: int) -> None:
        self._spec, self._rows = spec, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)

    def forward(self, inputs: Any, metadata: Any) -> tuple[Tensor, Tensor]:
        """The user's forward; both results must have one row a token, which is one a request in a decode step."""
        return self._checked(self._spec.forward, inputs, metadata)

    def prefill(self, inputs: Any, metadata: Any) -> tuple[Tensor, Tensor]:
        """The user's prefill, or forward where there is none."""
        return self._checked(getattr(self._spec, "prefill", self._spec.forward), inputs, metadata)

    def _checked(self, method: Any, inputs: Any, metadata: Any) -> tuple[Tensor, Tensor]:
        hidden, feedback = two_tensors(method(inputs, metadata), method)
        tokens = inputs.positions.shape[0]
        for result in (hidden, feedback):
            if result.shape[0] != tokens:
                what = f"{name_of(method)} returns several positions a request: parallel heads or a tree in one step"
                refuse(what, tuple(result.shape), f"{tokens} rows, one a token", method)
        return hidden, feedback

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """The user's sample; it must draw one token a request."""
        tokens = one_tensor(self._spec.sample(hidden, step), self._spec.sample)
        if tokens.dim() != 1:
            what = "sample returns several tokens a request: a tree of drafts, or parallel heads"
            refuse(what, tuple(tokens.shape), f"int64[{self._rows}]", self._spec.sample)
        if tokens.shape[0] != self._rows or tokens.dtype != torch.int64:
            came = f"{tokens.dtype}{list(tokens.shape)}"
            raise wrong_return(came, self._spec.sample, "one token a request", f"int64[{self._rows}]")
        return tokens


def two_tensors(result: Any, method: Any) -> tuple[Tensor, Tensor]:
    """What a forward or prefill returned, if that is two tensors."""
    if isinstance(result, (tuple, list)) and len(result) == 2:
        hidden, feedback = result
        if isinstance(hidden, Tensor) and isinstance(feedback, Tensor):
            return hidden, feedback
    parts = [type(part).__name__ for part in result] if isinstance(result, (tuple, list)) else []
    came = f"({', '.join(parts)})" if parts else type_of(result)
    raise wrong_return(came, method, "two tensors", "(hidden for logits, hidden to feed back)")


def one_tensor(result: Any, method: Any) -> Tensor:
    """What a sample returned, if that is a tensor."""
    if isinstance(result, Tensor):
        return result
    raise wrong_return(type_of(result), method, "a tensor", "int64, one token a request")


def type_of(result: Any) -> str:
    """A value's type in words."""
    return "None" if result is None else type(result).__name__


def wrong_return(came: str, method: Any, what: str, expected: str) -> UnsafeLoopError:
    """The error for a method of the speculator that returns something of another type."""
    todo = f"Return {expected}; a function without return gives None."
    error = UnsafeLoopError(f"{name_of(method)} does not return {what}", came, expected, todo, line_of(method))
    error.name = "loop-kind"
    return error


def name_of(method: Any) -> str:
    """How a user calls a method."""
    return str(getattr(users_method(method), "__name__", "forward"))


def line_of(method: Any) -> SourceLine | None:
    """Where a method was written."""
    method = users_method(method)
    return source_of(getattr(method, "__func__", method))


def users_method(method: Any) -> Any:
    """The method itself; the user's forward where it is the prefill that only calls that."""
    inherited = getattr(method, "__func__", None) is Speculator.prefill
    return method.__self__.forward if inherited else method


def refuse(what: str, came: object, expected: object, method: Any) -> None:
    """Raise :class:`UnsafeLoopError` for a loop that draftfuse does not compile."""
    todo = (
        "draftfuse compiles loops that draft one token a request a step. Draft a chain (the best token of each head "
        "fed to the next step), or keep this drafter out of draftfuse."
    )
    raise UnsafeLoopError(what, came, expected, todo, line_of(method))
