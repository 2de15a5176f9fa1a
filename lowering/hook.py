"""``draftfuse.post_grad_pass``: the object that goes into Inductor's (and vLLM's) pass hooks.

Its ``uuid()`` covers every source file of draftfuse's passes and lowering, so that no cache ever serves code of
another version. It changes a graph only where it finds draftfuse's marker operator, and has no side effect: a warm
cache does not call it.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from draftfuse.lowering.on_import import on_import
from draftfuse.lowering.ops import linear_by_rows as _linear_by_rows
from draftfuse.lowering.ops.marker import marker as _marker  # registers the operator
from draftfuse.lowering.small import may_have_own_kernel
from draftfuse.passes import Pass, run
from draftfuse.passes.drop_dead_refresh import drop_dead_refresh
from draftfuse.passes.erase_taps import erase_taps
from draftfuse.passes.hoist_invariants import hoist_invariants
from draftfuse.passes.linears_by_rows import linears_by_rows
from draftfuse.passes.switch import CHECK, VLLM_COMPILER, is_on

VLLM_BASE = "vllm.compilation.passes.inductor_pass"  # home of the class that vLLM asks its passes to be
MARKER = torch.ops.draftfuse.marker.default
assert (_marker.__name__, _linear_by_rows.__name__) == ("marker", "linear_by_rows")  # both are registered


@cache
def sources_hash() -> str:
    """A hash of all Python sources that decide what code is generated, and of the torch version."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in ("lowering", "passes"):
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


class PostGradPass(CustomGraphPass):
    """Inductor's post-grad pass of draftfuse; picklable, and equal by its settings."""

    def __call__(self, graph: fx.Graph) -> None:
        """Take the marker out of a draft's forward and run the passes on it; leave any other graph as it is."""
        if erase_markers(graph):
            run(graph, passes_for(graph))

    def uuid(self) -> Any:
        """What Inductor puts into its cache key."""
        return f"draftfuse-{sources_hash()}-check{is_on(CHECK)}-own{may_choose_kernels()}"

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Part of vLLM's interface: the pass applies to every range of sizes."""
        return True

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


def erase_markers(graph: fx.Graph) -> int:
    """Replace every marker by what went into it; returns how many there were."""
    found = list(graph.find_nodes(op="call_function", target=MARKER))
    for node in found:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return len(found)


def passes_for(graph: fx.Graph) -> tuple[Pass, ...]:
    """The passes that are right on one forward, after Inductor has made it functional.

    A higher-order operator (``auto_functionalized``) may hide a write, so values are merged and dropped only in a
    graph without one.
    """
    own = (partial(linears_by_rows, applies=may_have_own_kernel),) if may_choose_kernels() else ()
    hidden = any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.nodes)
    return (erase_taps, *own) if hidden else (erase_taps, hoist_invariants, drop_dead_refresh, *own)


def may_choose_kernels() -> bool:
    """Whether products may come to draftfuse's kernels: where vLLM's plug-in compiles, and not with ``none``."""
    return os.environ.get(VLLM_COMPILER) == "inductor"


def adopt(module: ModuleType) -> None:
    """Make the pass one of vLLM's own passes, which it insists on, without importing vLLM."""
    module.InductorPass.register(PostGradPass)


post_grad_pass = PostGradPass()
on_import(VLLM_BASE, adopt)
