"""What the plug-in replaces in vLLM's autoregressive speculator, on vLLM's own graph manager.

Up to 0.26 vLLM captures one step and replays it K-1 times: there the function that it captures is the whole loop, and
one replay takes the place of K-1. From 0.28 on vLLM captures a loop where every builder has an in-place update: there
the decision and the body of that loop are draftfuse's. Each replacement hands on to vLLM's method where draftfuse was
not asked for or declines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from draftfuse.vllm.asked import is_asked
from draftfuse.vllm.mark import mark_draft
from draftfuse.vllm.plan import Plan, make_plan, plan_of
from draftfuse.vllm.record import run_loop
from draftfuse.vllm.versions import Release

DONE = "_draftfuse_original"


def patch_speculator(module: ModuleType, release: Release) -> None:
    """Replace the methods of the speculator class in ``module``; a second call changes nothing."""
    cls = getattr(module, release.class_name)
    replace(cls, "load_model", _load_model)
    if release.fuses:
        replace(cls, release.configure, functools.partial(_configure, release=release))
        replace(cls, "_generate_fused_drafts", _generate_fused_drafts)
        replace(cls, "_fused_multi_step_decode", _fused_multi_step_decode)
        replace(cls, "capture", _capture_fused)
    else:
        replace(cls, "set_attn", functools.partial(_set_attn, release=release))
        replace(cls, "capture", _capture_split)
        replace(cls, "_multi_step_decode", _multi_step_decode)


def replace(cls: type, name: str, new: Callable[..., Any]) -> None:
    """Set ``cls.name`` to a method that calls ``new(original, self, ...)``, once."""
    original = getattr(cls, name)
    if hasattr(original, DONE):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return new(original, self, *args, **kwargs)

    setattr(method, DONE, original)
    setattr(cls, name, method)


def active(spec: Any) -> Plan | None:
    """The plan of a speculator whose loop is fused."""
    plan = plan_of(spec)
    return plan if plan is not None and plan.fused else None


def _load_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    mark_draft(self.model, self.vllm_config)
    return result


# From here to the next line of this kind: 0.25 and 0.26, which capture single steps.


def _set_attn(original: Any, self: Any, *args: Any, release: Release, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if is_asked(self.vllm_config):
        make_plan(self, release)
    return result


def _capture_split(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM's capture, with the whole loop in place of the single step that it captures for decode."""
    plan = active(self)
    if plan is None:
        return original(self, *args, **kwargs)
    with worst_case_length(self):
        reset_rows(self)
        self._generate_draft = functools.partial(_whole_loop, self, plan)
        try:
            return original(self, *args, **kwargs)
        finally:
            del self._generate_draft
            note_graphs(self, plan)


def _whole_loop(
    self: Any, plan: Plan, num_reqs: int, num_tokens: int, metadata: Any, slots: Any, across: Any, mode: Any
) -> None:
    draft(self, plan, num_reqs, num_tokens, metadata, slots, (across, mode), self.num_speculative_steps)


def _multi_step_decode(original: Any, self: Any, num_reqs: int, skip_attn: bool, batch_desc: Any, across: Any) -> Any:
    plan = active(self)
    if plan is None or not is_full(batch_desc):
        return original(self, num_reqs, skip_attn, batch_desc, across)
    if skip_attn:  # a dummy run without attention: the graph would write slots
        plan.counters["dummy runs without attention, eager"] += 1
        rest = (across, type(batch_desc.cg_mode).NONE)
        run_loop(self, plan.release, num_reqs, num_reqs, None, None, rest, steps=plan.steps, rebuild=True)
        return None
    return replay(self, plan, batch_desc)


# From here on: 0.28 and later, which capture a loop of their own.


def _configure(original: Any, self: Any, *, release: Release) -> Any:
    result = original(self)
    if not is_asked(self.vllm_config):
        return result
    shipped = bool(getattr(self, release.flag))
    plan = make_plan(self, release)
    if plan.fused:
        setattr(self, release.flag, True)
    elif shipped:
        plan.notes.append("vLLM's own fused loop runs")
    return result


def _capture_fused(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    plan = active(self)
    if plan is None:
        return original(self, *args, **kwargs)
    with worst_case_length(self):
        result = original(self, *args, **kwargs)
    note_graphs(self, plan)
    return result


def _generate_fused_drafts(
    original: Any,
    self: Any,
    num_reqs: int,
    num_tokens: int,
    metadata: Any,
    slots: Any,
    across: Any,
    mode: Any = None,
    num_speculative_steps: int | None = None,
) -> Any:
    given = tuple(value for value in (mode, num_speculative_steps) if value is not None)
    plan = active(self)
    if plan is None:
        return original(self, num_reqs, num_tokens, metadata, slots, across, *given)
    plan.counters["loops run by Python (eager, warm-up or capture)"] += 1
    steps = num_speculative_steps or self.num_speculative_steps
    draft(self, plan, num_reqs, num_tokens, metadata, slots, (across, *given), steps)
    return None


def _fused_multi_step_decode(
    original: Any, self: Any, num_reqs: int, skip_attn: bool, batch_desc: Any, across: Any, bound: Any, *steps: int
) -> Any:
    plan = active(self)
    if plan is None:
        return original(self, num_reqs, skip_attn, batch_desc, across, bound, *steps)
    if is_full(batch_desc) and not skip_attn:
        map_block_tables(self)
        return replay(self, plan, batch_desc)
    plan.upper_bound = bound
    try:
        return original(self, num_reqs, skip_attn, batch_desc, across, bound, *steps)
    finally:
        plan.upper_bound = None


def map_block_tables(spec: Any) -> None:
    """Refill the block tables of groups whose kernels use smaller blocks than the cache manager; before the replay."""
    for groups in spec.attn_groups:
        for group in groups:
            if hasattr(group, "map_to_kernel_block_table"):
                group.map_to_kernel_block_table(spec.block_tables.input_block_tables[group.kv_cache_group_id])


# Both.


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


def replay(spec: Any, plan: Plan, batch_desc: Any) -> None:
    """All steps and their refreshes: one launch."""
    plan.counters["graph replays"] += 1
    spec.decode_cudagraph_manager.run_fullgraph(batch_desc)


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


def note_graphs(spec: Any, plan: Plan) -> None:
    """Remember for ``explain`` which decode graphs vLLM holds."""
    graphs = getattr(spec.decode_cudagraph_manager, "graphs", {})
    rows = sorted(desc.num_reqs or desc.num_tokens for desc in graphs)
    plan.captured = [f"{count} requests, {plan.steps - 1} draft steps" for count in rows]
