"""What the plug-in replaces in vLLM's autoregressive speculator, on vLLM's own graph manager.

Up to 0.26 vLLM captures one step and replays it K-1 times: there the function that it captures is the whole loop, one
replay takes the place of K-1, and for a uniform batch another graph that of all of ``propose``. From 0.28 on vLLM
captures a loop where every builder has an in-place update: there the decision and the body of that loop are
draftfuse's. Each replacement hands on to vLLM's method where draftfuse was not asked for or declines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from draftfuse.vllm.asked import is_asked
from draftfuse.vllm.mark import mark_draft
from draftfuse.vllm.plan import Plan, make_plan, plan_of
from draftfuse.vllm.proposal import make_proposal, recorded, remember
from draftfuse.vllm.record import run_loop
from draftfuse.vllm.steps import draft, is_full, reset_rows, worst_case_length
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
        if hasattr(cls, "propose"):
            replace(cls, "propose", _propose)


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
    """vLLM's capture, with the whole loop in place of the single step that it captures for decode; then proposals."""
    plan = active(self)
    if plan is None:
        return original(self, *args, **kwargs)
    with worst_case_length(self), recorded(getattr(self, "prefill_cudagraph_manager", None)) as given:
        reset_rows(self)
        self._generate_draft = functools.partial(_whole_loop, self, plan)
        try:
            result = original(self, *args, **kwargs)
        finally:
            del self._generate_draft
            note_graphs(self, plan)
        plan.proposal = make_proposal(self, plan, given)
    return result


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


def _propose(
    original: Any,
    self: Any,
    input_batch: Any,
    attn_metadata: Any,
    slot_mappings: Any,
    last_hidden_states: Any,
    aux_hidden_states: Any,
    num_sampled: Any,
    num_rejected: Any,
    last_sampled: Any,
    next_prefill_tokens: Any,
    temperature: Any,
    seeds: Any,
    num_tokens_across_dp: Any = None,
    dummy_run: bool = False,
    skip_attn_for_dummy_run: bool = False,
    mm_inputs: Any = None,
    is_profile: bool = False,
) -> Any:
    plan = active(self)
    read = (num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds)
    if plan is None or plan.proposal is None:
        remember(self, aux_hidden_states)
    elif not (dummy_run or is_profile or mm_inputs is not None or num_tokens_across_dp is not None):
        drafts = plan.proposal.run(input_batch, last_hidden_states, aux_hidden_states, read)
        if drafts is not None:
            return drafts
    given = (input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, *read)
    switches = (num_tokens_across_dp, dummy_run, skip_attn_for_dummy_run, mm_inputs, is_profile)
    return original(self, *given, *switches)


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


def replay(spec: Any, plan: Plan, batch_desc: Any) -> None:
    """All steps and their refreshes: one launch."""
    plan.counters["graph replays"] += 1
    spec.decode_cudagraph_manager.run_fullgraph(batch_desc)


def note_graphs(spec: Any, plan: Plan) -> None:
    """Remember for ``explain`` which decode graphs vLLM holds."""
    graphs = getattr(spec.decode_cudagraph_manager, "graphs", {})
    rows = sorted(desc.num_reqs or desc.num_tokens for desc in graphs)
    plan.captured = [f"{count} requests, {plan.steps - 1} draft steps" for count in rows]
