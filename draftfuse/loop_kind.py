"""Loops of another kind than one token a request a draft step are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftfuse.errors import UnsafeLoopError
from draftfuse.validate import source_of


@contextmanager
def checked_kind(spec: Any, rows: int) -> Iterator[Any]:
    """``spec`` whose ``forward`` and ``sample`` results are looked at."""
    yield _Checked(spec, rows)


class _Checked:
    """Everything of a speculator, two of its results checked."""

    def __init__(self, spec: Any, rows: int) -> None:
        self._spec, self._rows = spec, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec, name)

    def forward(self, inputs: Any, metadata: Any) -> tuple[Tensor, Tensor]:
        """The user's forward; both results must have one row a request."""
        result = self._spec.forward(inputs, metadata)
        if not isinstance(result, tuple) or len(result) != 2:
            refuse(
                "forward does not return two tensors",
                type(result).__name__,
                "(hidden for logits, hidden to feed back)",
                self._spec.forward,
            )
        for hidden in result:
            if hidden.shape[0] != self._rows:
                what = "forward returns several positions a request: parallel heads or a tree in one step"
                refuse(what, tuple(hidden.shape), f"{self._rows} rows, one a request", self._spec.forward)
        hidden, feedback = result
        return hidden, feedback

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """The user's sample; it must draw one token a request."""
        tokens: Tensor = self._spec.sample(hidden, step)
        if tokens.dim() != 1:
            what = "sample returns several tokens a request: a tree of drafts, or parallel heads"
            refuse(what, tuple(tokens.shape), f"int64[{self._rows}]", self._spec.sample)
        if tokens.shape[0] != self._rows or tokens.dtype != torch.int64:
            came = f"{tokens.dtype}{list(tokens.shape)}"
            refuse("sample does not return one token a request", came, f"int64[{self._rows}]", self._spec.sample)
        return tokens


def refuse(what: str, came: object, expected: object, method: Any) -> None:
    """Raise :class:`UnsafeLoopError` for a loop that draftfuse does not compile."""
    todo = (
        "draftfuse compiles loops that draft one token a request a step. Draft a chain (the best token of each head "
        "fed to the next step), or keep this drafter out of draftfuse."
    )
    raise UnsafeLoopError(what, came, expected, todo, source_of(getattr(method, "__func__", method)))
