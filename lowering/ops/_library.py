"""The one ``torch.library`` namespace of draftfuse, and the checks that its operators share.

Checks read host metadata only (dtype, dim, device, and sizes where these are plain integers), so they cost no sync and
add no guard: under fake tensors an op checks dtypes and dims, and its device implementation checks sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from draftfuse.errors import MissingExtraError, OpArgumentError

# Kept alive here: the registrations die with it.
LIBRARY: Any = torch.library.Library("draftfuse", "FRAGMENT")


def define(schema: str) -> None:
    """Define ``draftfuse::<schema>``, without the namespace in ``schema``."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def implement(name: str, function: Callable[..., Any], *dispatch_keys: str) -> None:
    """Register ``function`` as the implementation of op ``name`` under each dispatch key."""
    for key in dispatch_keys:
        LIBRARY.impl(name, function, key)


def fake(name: str, function: Callable[..., Any]) -> None:
    """Register the fake (shapes, dtypes and checks, no data) of op ``name``."""
    torch.library.register_fake(f"draftfuse::{name}", function, lib=LIBRARY)


def require_triton(name: str) -> None:
    """Raise :class:`MissingExtraError` where op ``name`` meets a CUDA tensor and Triton is not installed."""
    if find_spec("triton") is None:
        todo = "Install triton (CUDA builds of PyTorch bring it)."
        raise MissingExtraError(f"draftfuse.ops.{name} on CUDA needs Triton", "no module triton", "triton", todo)


def fail(op: str, what: str, came: object, expected: object, todo: str) -> None:
    """Raise :class:`OpArgumentError` for op ``op``."""
    raise OpArgumentError(f"draftfuse.ops.{op}: {what}", came, expected, todo)


def check_tensor(op: str, name: str, tensor: Tensor, shape: str, *dtypes: torch.dtype) -> None:
    """Check dim (the number of letters in ``shape``, as in ``"R, B"``) and dtype (any, if none is given)."""
    if tensor.dim() != shape.count(",") + 1:
        fail(op, f"{name} has {tensor.dim()} dims", tuple(tensor.shape), f"[{shape}]", f"Reshape {name}.")
    if dtypes and tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        fail(op, f"{name} has a wrong dtype", tensor.dtype, expected, f"Convert {name}, or allocate it so.")


def check_floating(op: str, name: str, tensor: Tensor, shape: str) -> None:
    """Check dim, and that the dtype is a floating one."""
    check_tensor(op, name, tensor, shape)
    if not tensor.is_floating_point():
        fail(op, f"{name} has a wrong dtype", tensor.dtype, "a floating dtype", f"Convert {name}.")


def check_same_dtype(op: str, name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Check that two tensors have one dtype."""
    if tensor.dtype != other.dtype:
        what = f"{name} and {other_name} differ in dtype"
        fail(op, what, tensor.dtype, other.dtype, f"Convert {name} to the dtype of {other_name}.")


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    """Check that all tensors are on the device of the first one."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(present.values())).device
    for name, tensor in present.items():
        if tensor.device != first:
            fail(op, f"{name} is on another device", tensor.device, first, f"Move {name} to {first}.")


def check_size(op: str, what: str, came: object, expected: object, todo: str) -> None:
    """Check that ``came == expected`` where both are known on the host; never while a compiler traces."""
    if not torch.compiler.is_compiling() and known(came) and known(expected) and came != expected:
        fail(op, what, came, expected, todo)


def known(size: object) -> bool:
    """Whether a size, or a tuple of sizes, is made of plain integers and not of symbols."""
    return all(map(known, size)) if isinstance(size, tuple) else isinstance(size, int)
