"""Capture a whole ladder: largest first, one pool, within a budget of graph memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftfuse.dispatch import Descriptor
from draftfuse.errors import InvalidOptionError
from draftfuse.progress import bar
from draftfuse.state import persistent_tensors

if TYPE_CHECKING:
    from draftfuse.fused import FusedDraft


def capture_all(fused: FusedDraft, ks: list[int], progress: bool) -> None:
    """Make every runner of the ladder for ``ks``, and drop the capacities that the budget does not hold.

    Raises:
        InvalidOptionError: not even the smallest capacity fits the budget.
    """
    descriptors = list(fused.ladder.descriptors(ks))
    names = [f"{d.kind} k={d.num_steps} capacity={d.num_reqs} tokens={d.num_tokens}" for d in descriptors]
    with bar(list(zip(names, descriptors, strict=True)), "capture", progress) as items:
        for _, descriptor in items:
            if descriptor.num_reqs in fused.ladder.capacities:
                fused.runners.get(descriptor)
                _keep_within_budget(fused, descriptor)


def _keep_within_budget(fused: FusedDraft, newest: Descriptor) -> None:
    budget = fused.graph_memory_budget
    used = fused.memory()["pool"] + fused.memory()["rows"]
    if budget is None or used <= budget:
        return
    if newest.num_reqs == min(fused.ladder.capacities):
        todo = "Raise graph_memory_budget, or compile with smaller request_capacities."
        raise InvalidOptionError(
            "graph_memory_budget is too small for the smallest capacity", budget, f">= {used}", todo
        )
    fused.ladder.capacities.remove(newest.num_reqs)
    for descriptor in [d for d in fused.runners.made if d.num_reqs == newest.num_reqs]:
        del fused.runners.made[descriptor]
    fused.runners.workspace.shrink()
    reason = f"its graphs need {used} bytes of a budget of {budget}"
    fused.report.fall_back(f"capacity {newest.num_reqs}", "at another capacity", reason)


def memory_of(fused: FusedDraft) -> dict[str, int]:
    """See :meth:`draftfuse.FusedDraft.memory`."""
    runners = fused.runners
    inputs = sum(t.numel() * t.element_size() for t in persistent_tensors(fused.spec))
    graphs = {f"{d.kind} k={d.num_steps} capacity={d.num_reqs}": r.num_bytes for d, r in runners.made.items()}
    return {"inputs": inputs, "rows": runners.workspace.num_bytes, "pool": sum(graphs.values()), **graphs}
