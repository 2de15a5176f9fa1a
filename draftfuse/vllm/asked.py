"""Whether draftfuse was asked for: by the environment, or by its pass in vLLM's compilation configuration."""

from __future__ import annotations

import os
from typing import Any

from draftfuse.errors import InvalidOptionError
from draftfuse.lowering.hook import PostGradPass

SWITCH = "DRAFTFUSE_VLLM"
COMPILER = "DRAFTFUSE_VLLM_COMPILER"
COMPILERS = ("none", "inductor")
ONE_GRAPH = "DRAFTFUSE_VLLM_ONE_GRAPH"


def by_environment() -> bool:
    """Whether ``DRAFTFUSE_VLLM=1`` is set."""
    return os.environ.get(SWITCH) == "1"


def by_hook(vllm_config: Any) -> bool:
    """Whether ``draftfuse.post_grad_pass`` is one of the passes of ``vllm_config``."""
    compilation = getattr(vllm_config, "compilation_config", None)
    options = getattr(compilation, "inductor_compile_config", None) or {}
    return any(isinstance(unwrapped(value), PostGradPass) for value in options.values())


def unwrapped(value: Any) -> Any:
    """The pass inside vLLM's wrapper for plain callables, or ``value`` itself."""
    return getattr(value, "callable", value)


def is_asked(vllm_config: Any) -> bool:
    """Whether the speculator of ``vllm_config`` shall draft through draftfuse; ``DRAFTFUSE_VLLM=0`` says no to both."""
    return os.environ.get(SWITCH) != "0" and (by_environment() or by_hook(vllm_config))


def compiler() -> str:
    """``"none"`` (vLLM's own kernels, the default) or ``"inductor"``, from ``DRAFTFUSE_VLLM_COMPILER``.

    Raises:
        InvalidOptionError: it is set to anything else.
    """
    name = os.environ.get(COMPILER, "none")
    if name not in COMPILERS:
        raise InvalidOptionError(
            f"unknown {COMPILER}", repr(name), f"one of {list(COMPILERS)}", "Correct the variable."
        )
    return name


def one_graph() -> bool:
    """Whether a uniform batch is proposed in one graph, prefill and all; ``DRAFTFUSE_VLLM_ONE_GRAPH=0`` says no.

    Raises:
        InvalidOptionError: it is set to anything but 0 or 1.
    """
    value = os.environ.get(ONE_GRAPH, "1")
    if value not in ("0", "1"):
        raise InvalidOptionError(f"unknown {ONE_GRAPH}", repr(value), "0 or 1", "Correct the variable.")
    return value == "1"
