"""What draftfuse stands on: the release of torch, Triton, the CUDA driver, and errors after which a device is lost."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from draftfuse.errors import (
    DeviceLostError,
    InvalidOptionError,
    MissingExtraError,
    OutOfGraphMemoryError,
    UntestedVersionWarning,
)

TESTED = ((2, 11), (2, 14))  # releases of torch: from the first, below the second
TESTED_RANGE = "torch >= {}.{}, < {}.{}".format(*TESTED[0], *TESTED[1])
_SPEAKERS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
_LOST = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "illegal instruction",
    "illegal address",
    "invalid program counter",
    "unspecified launch failure",
    "uncorrectable",
    "hardware stack error",
    "launch timed out",
    "unknown error",
    "device unavailable",
    "context is destroyed",
)


def is_tested(version: str) -> bool:
    """Whether draftfuse has been tested with a release of torch."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and TESTED[0] <= (int(found[1]), int(found[2])) < TESTED[1]


@cache
def warn_untested(version: str) -> None:
    """Warn, once, where draftfuse has not been tested with this release of torch; it goes on all the same."""
    if not is_tested(version):
        todo = "Install one of these, or run draftfuse audit on your loop before you trust it."
        text = f"draftfuse has not been tested with this torch: got {version}, expected {TESTED_RANGE}. {todo}"
        warnings.warn(UntestedVersionWarning(text), stacklevel=2)


def why_no_cuda() -> str:
    """What keeps torch from using CUDA, in its own words; empty where it works."""
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.cuda.init()
            return "" if torch.cuda.device_count() > 0 else "no CUDA device is visible"
    except (RuntimeError, AssertionError) as error:  # no driver, an older one than the runtime, a build for the CPU
        return first_line(error)


def check_device(name: str) -> str:
    """``name``, a device that a command was asked for.

    Raises:
        InvalidOptionError: there is no such device, or CUDA does not work here.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidOptionError("unknown device", name, "cpu or cuda", "Name one of these.") from error
    if device.type == "cuda" and (reason := why_no_cuda()):
        todo = "Update the driver or install a torch built for it (draftfuse doctor looks), or use the CPU."
        raise InvalidOptionError("CUDA does not work here", reason, "a CUDA device that torch can use", todo)
    return name


def require_triton_on(device: torch.device) -> None:
    """Raise :class:`MissingExtraError` for a loop on a CUDA device where Triton is not installed."""
    from importlib.util import find_spec

    if device.type == "cuda" and find_spec("triton") is None:
        todo = "Install triton (CUDA builds of PyTorch bring it), or keep the speculator on the CPU."
        raise MissingExtraError("a draft loop on CUDA needs Triton", "no module triton", "triton", todo)


def causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from; not what a caller was handling besides."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def device_lost(error: BaseException) -> DeviceLostError | None:
    """What to raise instead of an error after which no kernel runs on the device any more; None for other errors."""
    for cause in causes(error):
        if isinstance(cause, DeviceLostError):
            return cause
        if isinstance(cause, RuntimeError) and _is_sticky(first_line(cause)):
            todo = (
                "Start a new process. CUDA_LAUNCH_BLOCKING=1 finds the kernel, draftfuse lint and audit look for why."
            )
            return DeviceLostError("the CUDA context is lost", first_line(cause), "a device that answers", todo)
    return None


def _is_sticky(text: str) -> bool:
    """Judges the first line only: the lines of advice behind it name assertions after every error."""
    return any(name in text for name in _SPEAKERS) and any(part in text for part in _LOST)


@contextmanager
def named_memory() -> Iterator[None]:
    """Inside, running out of device memory ends in :class:`OutOfGraphMemoryError`."""
    try:
        yield
    except Exception as error:
        for cause in causes(error):
            if isinstance(cause, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(cause):
                todo = "Free memory, or compile with smaller request_capacities or a graph_memory_budget; call again."
                what = "device memory ran out while the loop was built or captured"
                raise OutOfGraphMemoryError(what, first_line(cause), "room for one graph", todo) from error
        raise


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]


warn_untested(torch.__version__)
