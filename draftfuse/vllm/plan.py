"""The decision for one speculator: fused or not, why, and what has been done since."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from draftfuse.vllm.asked import compiler
from draftfuse.vllm.contract import Kind, kind_of
from draftfuse.vllm.record import build_group
from draftfuse.vllm.versions import Release

PLAN = "_draftfuse_plan"  # the attribute of a speculator that holds its plan
logger = logging.getLogger("vllm.draftfuse")  # below vLLM's own logger, so that its settings apply


@dataclass
class Plan:
    """What draftfuse does with one speculator."""

    release: Release
    speculator: str
    steps: int
    fused: bool = False
    reason: str = ""
    compiler: str = "none"
    kinds: list[Kind] = field(default_factory=list)
    captured: list[str] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    upper_bound: Any = None  # host upper bound of the lengths of the batch that is being drafted
    program: Any = None  # the compiled loop, once there is one
    proposal: Any = None  # the graphs of whole proposals, where there are some

    def rebuilds(self) -> bool:
        """Whether some group is refreshed by its recorded build rather than by vLLM's update."""
        return not self.release.fuses or any(k.kind not in ("registered", "static") for k in self.kinds)

    def note(self, text: str) -> None:
        """Keep and log one line."""
        self.notes.append(text)
        logger.info("draftfuse: %s", text)

    def explain(self) -> str:
        """The decision and its consequences as text."""
        why = f", because {self.reason}" if self.reason else ""
        how = f"fused, compiler {self.compiler}" if self.fused else f"as vLLM ships it{why}"
        lines = [f"{self.speculator}, {self.steps} speculative tokens, vLLM {self.release}: {how}"]
        lines += [f"  backend {kind}" for kind in self.kinds]
        lines += [f"  graph {text}" for text in self.captured]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  {name}: {count}" for name, count in sorted(self.counters.items())]
        return "\n".join(lines)


def make_plan(spec: Any, release: Release) -> Plan:
    """Decide for ``spec``, keep the plan on it, and log one line."""
    plan = Plan(release, type(spec).__name__, spec.num_speculative_steps, compiler=compiler())
    plan.reason = refusal(spec)
    if not plan.reason:
        plan.kinds = [judge(spec, release, index, group) for index, group in groups_of(spec)]
        plan.reason = "; ".join(str(kind) for kind in plan.kinds if not kind.fused)
    plan.fused = not plan.reason
    setattr(spec, PLAN, plan)
    logger.info("draftfuse: %s", plan.explain().replace("\n", ";"))
    return plan


def plan_of(spec: Any) -> Plan | None:
    """The plan of a speculator, None where draftfuse was not asked for."""
    found: Plan | None = getattr(spec, PLAN, None)
    return found


def groups_of(spec: Any) -> list[tuple[int, Any]]:
    """All attention groups of the draft, with the index of their KV cache group."""
    return [(index, group) for index, groups in enumerate(spec.attn_groups) for group in groups]


def judge(spec: Any, release: Release, index: int, group: Any) -> Kind:
    """The kind of one group's builder."""
    return kind_of(
        group.get_metadata_builder(0),
        advances=spec.advance_draft_positions,
        updates=release.fuses and hasattr(group, "update_draft_decode_metadata"),
        build=lambda: build_group(spec, index, group, release),
    )


def refusal(spec: Any) -> str:
    """Why the loop of ``spec`` is left to vLLM whatever its backends are; empty if nothing stands against fusion."""
    parallel = spec.vllm_config.parallel_config
    checks = (
        (spec.num_speculative_steps < 2, "one speculative token has no decode steps"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallelism is on"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "decode context parallelism is on"),
        (getattr(spec, "pcp_manager", None) is not None, "prefill context parallelism is on"),
        (getattr(spec, "eplb_state", None) is not None, "experts are balanced between steps"),
        (getattr(spec, "supports_mm_inputs", False), "the draft takes multimodal inputs"),
        # After a sleep vLLM makes the tensor of the tables' addresses anew; a captured loop would read the old one.
        (getattr(spec.vllm_config.model_config, "enable_sleep_mode", False), "sleep mode moves the block tables"),
    )
    return next((reason for applies, reason in checks if applies), "")
