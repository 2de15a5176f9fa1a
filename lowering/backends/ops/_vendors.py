"""Finds the operators of FlashAttention libraries, and calls whatever version is there by argument names."""

from __future__ import annotations

import importlib
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch._ops import OpOverload

from draftfuse.errors import InvalidOptionError, MissingExtraError

LIBRARY_VARIABLE = "FA3_LIBRARY"
_FA3 = (
    ("_vllm_fa3_C", "vllm", "vllm.vllm_flash_attn"),
    ("flash_attn_3", "flash_attn_interface", "flash_attn_interface"),
)
_FA2 = (("_vllm_fa2_C", "vllm", "vllm.vllm_flash_attn"),)


def load_library(path: str) -> None:
    """Load a FlashAttention library by path; its operators appear in ``torch.ops``."""
    _load(path)
    find_namespace.cache_clear()


def _load(path: str) -> None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        todo = f"Give the path of a FlashAttention 3 library built for this torch, or unset {LIBRARY_VARIABLE}."
        raise InvalidOptionError("the library cannot be loaded", f"{path} ({error})", "a library", todo) from error


def has_op(namespace: str, name: str) -> bool:
    """Whether ``torch.ops.<namespace>.<name>`` exists."""
    return hasattr(getattr(torch.ops, namespace), name)


@cache
def find_namespace(version: int) -> str | None:
    """The namespace with FlashAttention ``version`` operators, loading what is installed; None if there is none."""
    path = os.environ.get(LIBRARY_VARIABLE)
    if version == 3 and path:
        _load(path)
    name = "get_scheduler_metadata" if version == 3 else "varlen_fwd"
    candidates = _FA3 if version == 3 else _FA2
    for namespace, package, module in candidates:
        if not has_op(namespace, name) and find_spec(package) is not None:
            _import(module)
        if has_op(namespace, name):
            return namespace
    return None


def _import(module: str) -> None:
    """Import a library that may be there for another platform or CUDA version."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return


def require_fa3() -> str:
    """The namespace of FlashAttention 3.

    Raises:
        MissingExtraError: none of the three ways to it leads anywhere.
    """
    namespace = find_namespace(3)
    if namespace is None:
        todo = f"Install vllm or a flash-attn 3 build, or set {LIBRARY_VARIABLE} to the path of the library."
        raise MissingExtraError("FlashAttention 3 on CUDA needs its library", "none found", "one of three", todo)
    return namespace


def call(operator: OpOverload, given: dict[str, Any]) -> Any:
    """Call a vendor's operator by argument name: what this version does not know is left out, the rest is neutral."""
    return operator(*(_value(argument, given) for argument in operator._schema.arguments))


def _value(argument: Any, given: dict[str, Any]) -> Any:
    if argument.name in given:
        return given[argument.name]
    if argument.has_default_value():
        return argument.default_value
    return _NEUTRAL.get(argument.name)


_NEUTRAL: dict[str, Any] = {
    "sm_margin": 0,
    "attention_chunk": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "softcap": 0.0,
    "has_softcap": False,
    "is_rotary_interleaved": True,
    "rotary_interleaved": True,
    "max_seqlen_k_new": 0,
    "p_dropout": 0.0,
    "zero_tensors": False,
    "return_softmax": False,
    "num_splits": 0,
}
