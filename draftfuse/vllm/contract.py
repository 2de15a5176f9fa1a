"""How each attention backend of vLLM refreshes its metadata inside a captured loop, and which cannot.

vLLM says it by one boolean a builder, and from 0.28 on. draftfuse decides by what a builder does: *registered* (vLLM's
own in-place update), *aliased* (all that changes is a view of a persistent buffer), *derived* (``build`` launches
kernels and touches the host nowhere, so recording it in the graph refreshes the metadata), *static* (positions stay).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALIASED = ("TritonAttentionMetadataBuilder", "TritonMLAMetadataBuilder")
FLASH = "FlashAttentionMetadataBuilder"  # FA3 writes its schedule into a persistent buffer, FA2 changes nothing
HOST_PLANNED = ("FlashInferMetadataBuilder", "FlexAttentionMetadataBuilder", "TreeAttentionMetadataBuilder")


@dataclass(frozen=True)
class Kind:
    """How one builder refreshes; ``fused`` is False where it cannot, and ``note`` says why."""

    builder: str
    kind: str
    note: str
    fused: bool = True

    def __str__(self) -> str:
        return f"{self.builder}: {self.kind} ({self.note})"


def kind_of(builder: Any, *, advances: bool, updates: bool, build: Callable[[], Any]) -> Kind:
    """Judge one builder.

    Args:
        advances: whether positions move from step to step.
        updates: whether vLLM's loop of this release refreshes through ``update_draft_decode_metadata``.
        build: builds its metadata once, on dummy inputs, to be watched.
    """
    name = type(builder).__name__
    if not advances:
        return Kind(name, "static", "positions stay, built once before step 1")
    if updates and getattr(builder, "supports_draft_decode_metadata_update", False):
        return Kind(name, "registered", "vLLM's own in-place update")
    if getattr(builder, "rswa_window", None) is not None:
        return Kind(name, "host-planned", "prefix lengths of windowed attention are staged on the host", fused=False)
    if str(getattr(builder, "device", "cpu")).startswith("cpu"):
        return Kind(name, "rebuilt", "no graph on this device: build runs at every step")
    if name == FLASH:
        return flash(builder)
    if name in ALIASED:
        return Kind(name, "aliased", "views of persistent buffers")
    if name in HOST_PLANNED or name.startswith("FlashInfer"):
        return Kind(name, "host-planned", "plans every step on the host", fused=False)
    return watched(name, build)


def flash(builder: Any) -> Kind:
    """FlashAttention: with an ahead-of-time schedule (FA3) its recorded ``build`` writes it in place."""
    if getattr(builder, "aot_schedule", False):
        return Kind(FLASH, "registered", "FA3 schedule, written in place by the recorded build")
    return Kind(FLASH, "aliased", "no schedule, views of persistent buffers")


def watched(name: str, build: Callable[[], Any]) -> Kind:
    """Derived, if one build moves nothing between host and device."""
    watch = HostWatch()
    try:
        with watch:
            build()
    except Exception as error:  # whatever a foreign builder raises on dummy inputs: it cannot be judged
        return Kind(name, "unknown", f"its build fails on dummy inputs: {error}", fused=False)
    if watch.found:
        return Kind(name, "host-planned", f"its build touches the host: {', '.join(sorted(watch.found))}", fused=False)
    return Kind(name, "derived", "its build, recorded at every step")


class HostWatch(TorchDispatchMode):
    """Notes the operators that carry data between host and device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)}
        reads_back = func is torch.ops.aten._local_scalar_dense.default and devices != {"cpu"}
        if len(devices) > 1 or reads_back:
            self.found.add(str(func))
        return out
