"""The variants of one engine's draft loop, the switch between them, and what is watched while they run.

Variants: *shipped*, vLLM's own loop; *none* and *inductor*, the plug-in's decode steps with that compiler behind
vLLM's own prefill; *inductor_own_draw*, the latter with vLLM's own argmax; *one_graph* and *inductor_one_graph*, whole
proposals as one graph, which is what the plug-in does by itself; *no refresh*, the control: whole proposals, or decode
steps, with the metadata of step 1, so its drafts must differ.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SPANS = {"multi_step": "_multi_step_decode", "propose": "propose"}


def fused_plan(spec: Any) -> Any:
    """The plan of a speculator that drafts through the plug-in."""
    from draftfuse.vllm.plan import plan_of

    plan = plan_of(spec)
    assert plan is not None, "the plug-in is not active"
    assert plan.fused, plan.reason
    return plan


class Switched:
    """The same where there are no graphs, in vLLM 0.32 on a CPU: for trying the scripts."""

    def __init__(self, spec: Any) -> None:
        self.spec, self.plan = spec, fused_plan(spec)

    def use(self, name: str) -> None:
        self.plan.fused = self.spec.supports_decode_metadata_update = name != "shipped"
        self.plan.compiler = "inductor" if name.startswith("inductor") else "none"


class Variants:
    """The graphs of each variant, and the switch between them."""

    def __init__(self, spec: Any, names: list[str]) -> None:
        self.spec, self.plan = spec, fused_plan(spec)
        self.managers = {"none": spec.decode_cudagraph_manager}
        self.proposals = {"one_graph": self.plan.proposal}
        for name in names:
            if base(name) not in self.managers:
                self.managers[base(name)] = self._captured(base(name))
            if name == "no refresh" or (name.endswith("one_graph") and name not in self.proposals):
                self.proposals[name] = self._proposal(base(name))

    def use(self, name: str) -> None:
        self.spec.decode_cudagraph_manager = self.managers[base(name)]
        self.plan.fused = name != "shipped"
        self.plan.proposal = self.proposals.get(name)

    def _proposal(self, name: str) -> Any:
        """Whole proposals around the decode steps of variant ``name``; None where the plug-in captured none."""
        import torch
        from vllm.config import set_current_vllm_config

        from draftfuse.vllm.proposal import Proposal

        first = self.proposals["one_graph"]
        if first is None:
            return None
        self.spec.decode_cudagraph_manager = self.managers[name]
        with set_current_vllm_config(self.spec.vllm_config), self._function(name), torch.inference_mode():
            proposal = Proposal(self.spec, self.plan)
            proposal.capture(first.given)
        return proposal

    def _captured(self, name: str) -> Any:
        from vllm.config import set_current_vllm_config
        from vllm.config.compilation import CUDAGraphMode

        spec, first = self.spec, self.managers["none"]
        manager = type(first)(spec.vllm_config, spec.device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1)
        with set_current_vllm_config(spec.vllm_config), self._function(name) as function:
            manager.capture(
                function,
                spec.model_state,
                spec.input_buffers,
                spec.block_tables,
                spec.attn_groups,
                spec.kv_cache_config,
                progress_bar_desc=f"{name}",
            )
        return manager

    @contextmanager
    def _function(self, name: str) -> Iterator[Callable[..., None]]:
        from functools import partial

        from draftfuse.vllm import patch

        if name == "shipped":
            yield self.spec._generate_draft
            return
        from draftfuse.vllm import compiled

        before, self.plan.compiler = self.plan.compiler, "inductor" if name.startswith("inductor") else "none"
        self.plan.program, compiled.FUSE_DRAW = None, name != "inductor_own_draw"
        patch.reset_rows(self.spec)
        with patch.worst_case_length(self.spec), refresh_off(name == "no refresh"):
            yield partial(patch._whole_loop, self.spec, self.plan)
        self.plan.compiler, compiled.FUSE_DRAW = before, True


def base(name: str) -> str:
    """The variant whose decode steps ``name`` runs."""
    return "none" if name == "one_graph" else name.removesuffix("_one_graph")


@contextmanager
def refresh_off(off: bool) -> Iterator[None]:
    """While this holds, a recorded loop keeps the slots and metadata of step 1: the control."""
    from draftfuse.vllm import record

    before = record.update_slots, record.build
    held: dict[str, Any] = {}

    def update_slots(spec: Any, rows: int, tokens: int) -> Any:
        if "slots" not in held:
            held["slots"] = before[0](spec, rows, tokens)
        return held["slots"]

    def build(spec: Any, release: Any, rows: int, tokens: int, step: int, bound: Any = None) -> Any:
        if "metadata" not in held:
            held["metadata"] = before[1](spec, release, rows, tokens, step, bound)
        metadata = held["metadata"]
        if step == spec.num_speculative_steps - 1:
            held.clear()  # the next loop starts with metadata of its own
        return metadata

    if off:
        record.update_slots, record.build = update_slots, build
    try:
        yield
    finally:
        record.update_slots, record.build = before


class Watch:
    """CPU spans of the draft's methods and of the engine's step, and on demand all drafted tokens."""

    def __init__(self, llm: Any, spec: Any) -> None:
        self.spans: dict[str, list[float]] = {name: [] for name in (*SPANS, "step")}
        self.starts: list[float] = []
        self.drafts: list[Any] | None = None
        for name, method in SPANS.items():
            setattr(spec, method, self._timed(name, getattr(spec, method)))
        llm.llm_engine.step = self._timed("step", llm.llm_engine.step)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.spans[name].append(time.perf_counter() - start)
            if name == "propose":
                self.starts.append(start)
                if self.drafts is not None:
                    self.drafts.append(result.clone())
            return result

        return timed

    def clear(self) -> None:
        for values in self.spans.values():
            values.clear()
        self.starts.clear()

    def medians(self) -> dict[str, float]:
        """Milliseconds: each span, and from one proposal to the next."""
        gaps = [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]
        found = {**self.spans, "wall": gaps}
        return {name: statistics.median(v[4:] or v) * 1e3 for name, v in found.items() if v}


def select(variants: Any, name: str) -> None:
    if variants is not None:
        variants.use(name)


def sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def different(rows: list[Any], expected: list[Any]) -> dict[str, Any]:
    """How many drafted tokens differ, by draft step, and the first few places: (proposal, row, draft step)."""
    places = [
        (i, j, step)
        for i, (a, b) in enumerate(zip(rows, expected, strict=False))
        for j, (x, y) in enumerate(zip(a, b, strict=False))
        for step, (p, q) in enumerate(zip(x, y, strict=False))
        if p != q
    ]
    by_step = {str(s): sum(place[2] == s for place in places) for s in sorted({place[2] for place in places})}
    tokens = sum(len(row) for batch in expected for row in batch)
    return {"tokens": tokens, "count": len(places), "by_step": by_step, "first": places[:8]}
