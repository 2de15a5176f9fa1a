"""vLLM's part of one draft step as registered operators, which no compiler looks into.

They read and write the speculator's own buffers through ``engine``, a number that stands for it. Nobody says what they
touch, so every pending store is done before they run.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Engine(Protocol):
    """What stands behind the number ``engine``."""

    def forward(self, rows: int, step: int) -> tuple[Tensor, Tensor]:
        """Refresh the metadata, run the draft model: hidden states for the logits, and to feed back."""

    def logits(self, hidden: Tensor) -> Tensor:
        """What vLLM computes from hidden states."""

    def sample(self, hidden: Tensor, rows: int, step: int) -> Tensor:
        """vLLM's own draw."""


ENGINES: dict[int, Engine] = {}
_LIBRARY: Any = torch.library.Library("draftfuse_vllm", "FRAGMENT")


def add(engine: Engine) -> int:
    """Give ``engine`` a number."""
    ENGINES[len(ENGINES)] = engine
    return len(ENGINES) - 1


def _logits(like: Tensor, hidden: Tensor, engine: int, rows: int, step: int, width: int) -> tuple[Tensor, Tensor]:
    last, feedback = ENGINES[engine].forward(rows, step)
    return ENGINES[engine].logits(last[:rows]), feedback[:rows]


def _tokens(hidden: Tensor, engine: int, rows: int, step: int, width: int) -> tuple[Tensor, Tensor]:
    last, feedback = ENGINES[engine].forward(rows, step)
    return ENGINES[engine].sample(last[:rows], rows, step), feedback[:rows]


def _hidden(hidden: Tensor, engine: int, rows: int, step: int, width: int) -> tuple[Tensor, Tensor]:
    last, feedback = ENGINES[engine].forward(rows, step)
    apart = last.clone() if last.data_ptr() == feedback.data_ptr() else last  # results of an operator share no memory
    return apart[:rows], feedback[:rows]


def _fake_hidden(hidden: Tensor, engine: int, rows: int, step: int, width: int) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(rows, width), hidden.new_empty(rows, width)


def _fake_logits(like: Tensor, hidden: Tensor, engine: int, rows: int, step: int, width: int) -> tuple[Tensor, Tensor]:
    return like.new_empty(rows, like.shape[0]), hidden.new_empty(rows, width)


def _fake_tokens(hidden: Tensor, engine: int, rows: int, step: int, width: int) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(rows, dtype=torch.int64), hidden.new_empty(rows, width)


def _define(name: str, arguments: str, function: Any, fake: Any) -> None:
    _LIBRARY.define(f"{name}({arguments}) -> (Tensor, Tensor)")
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, function, key)
    torch.library.register_fake(f"draftfuse_vllm::{name}", fake, lib=_LIBRARY)
    torch.fx.node.has_side_effect(getattr(torch.ops.draftfuse_vllm, name).default)


# ``like`` and ``hidden`` only say dtype, width and device of the results.
_define(
    "step_logits", "Tensor like, Tensor hidden, int engine, SymInt rows, int step, int width", _logits, _fake_logits
)
_define("step_tokens", "Tensor hidden, int engine, SymInt rows, int step, int width", _tokens, _fake_tokens)
_define("step_hidden", "Tensor hidden, int engine, SymInt rows, int step, int width", _hidden, _fake_hidden)
