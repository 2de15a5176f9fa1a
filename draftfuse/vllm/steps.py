"""The decode steps of one speculator, as vLLM's capture or its eager path runs them, and what a capture needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from draftfuse.vllm.plan import Plan
from draftfuse.vllm.record import run_loop


def draft(
    spec: Any, plan: Plan, rows: int, tokens: int, metadata: Any, slots: Any, rest: tuple[Any, ...], steps: int
) -> None:
    """Draft steps 1..steps-1, compiled where that was asked for and a graph is about to hold it."""
    bound = None if plan.upper_bound is None else plan.upper_bound[:rows]
    recorded = bound is None or spec.device.type == "cpu"
    if plan.compiler == "inductor" and recorded and metadata is not None and rows == tokens:
        program = compiled_loop(spec, plan)
        if program is not None:
            program.run(rows, steps, metadata, slots, rest, bound)
            return
    rebuild = plan.rebuilds()
    run_loop(spec, plan.release, rows, tokens, metadata, slots, rest, steps=steps, rebuild=rebuild, upper_bound=bound)


def compiled_loop(spec: Any, plan: Plan) -> Any:
    """The compiled loop of a speculator, made once; None, with a note, where it cannot stand for vLLM's."""
    if plan.program is None:
        from draftfuse.vllm.compiled import CompiledLoop, objection

        reason = objection(spec)
        if reason:
            plan.compiler = "none"
            plan.note(f"compiler none, because {reason}")
            return None
        plan.program = CompiledLoop(spec, plan.release, plan.rebuilds(), plan.note)
    return plan.program


def is_full(batch_desc: Any) -> bool:
    """Whether the batch replays a captured graph."""
    return bool(batch_desc.cg_mode.name == "FULL")


@torch.inference_mode()
def reset_rows(spec: Any) -> None:
    """Let every row of a dummy batch be state row 0, which is all null blocks before the first request: the warm-up
    computes slots from it."""
    spec.idx_mapping.zero_()


@contextmanager
def worst_case_length(spec: Any) -> Iterator[None]:
    """While a graph is recorded, host code sees the largest length: the graph has to hold for every later batch."""
    before = spec.draft_max_seq_len
    spec.draft_max_seq_len = spec.max_model_len
    try:
        yield
    finally:
        spec.draft_max_seq_len = before
