"""Whether draftfuse was asked for: by the environment, or by its pass in vLLM's compilation configuration."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

from draftfuse import variables
from draftfuse.lowering.hook import PostGradPass

SWITCH, COMPILER, ONE_GRAPH = variables.VLLM, variables.VLLM_COMPILER, variables.VLLM_ONE_GRAPH
COMPILERS = variables.VLLM_COMPILERS


def by_environment() -> bool:
    """Whether ``DRAFTFUSE_VLLM=1`` is set."""
    return setting(SWITCH, ("0", "1"), "") == "1"


@cache
def warn(text: str) -> None:
    """Log a warning once; the logger is below vLLM's own, so that its settings apply."""
    logging.getLogger("vllm.draftfuse").warning("draftfuse: %s", text)


def setting(name: str, values: tuple[str, ...], default: str) -> str:
    """The variable ``name``; what has no meaning is a warning and the default, because an engine is starting."""
    value = os.environ.get(name) or default
    if value in (*values, default):
        return value
    warn(f"{name}={value} has no meaning, as if it were unset: expected {' or '.join(values)}")
    return default


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
    return setting(SWITCH, ("0", "1"), "") != "0" and (by_environment() or by_hook(vllm_config))


def compiler() -> str:
    """``"none"`` (vLLM's own kernels, the default) or ``"inductor"``, from ``DRAFTFUSE_VLLM_COMPILER``."""
    return setting(COMPILER, COMPILERS, COMPILERS[0])


def one_graph() -> bool:
    """Whether a uniform batch is proposed in one graph, prefill and all; ``DRAFTFUSE_VLLM_ONE_GRAPH=0`` says no."""
    return setting(ONE_GRAPH, ("0", "1"), "1") == "1"
