"""The one place that touches Inductor's private entry point (``compile_fx_inner``), cache and configuration.

The graph given is functional, apart from trailing stores into its inputs, so none of Inductor's re-inplacing (and with
it none of the clones and stale reads that it makes of mutated buffers) takes part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.codecache import FxGraphCache, FxGraphCachePickler, FxGraphHashDetails
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.output_code import CompiledFxGraphConstants
from torch._inductor.utils import BoxedBool

from draftfuse.lowering.check import SchedulerCheck
from draftfuse.lowering.hook import post_grad_pass

DEFAULT_OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": False,
    "triton.cudagraph_trees": False,
    # Its patterns turn a residual sum into addmm, which copies the residual first wherever a segment returns the sum.
    "pattern_matcher": False,
}
# Inductor inlines a value into each of its readers until it has that many operators. In the hash of gumbel_sample each
# line reads the last one twice, so bodies double from line to line: at the default of 30 a sampling segment takes more
# than twice as long to compile as at 10, to code of the same speed.
CPU_OPTIONS: dict[str, Any] = {"realize_opcount_threshold": 10}
_NAME = re.compile("[0-9a-z]{20,80}")  # of an entry of Inductor's cache, which is a folder


def compile_graph(
    module: fx.GraphModule, fakes: Sequence[Any], static: Sequence[int], check: SchedulerCheck, options: dict[str, Any]
) -> tuple[Callable[[list[Any]], Sequence[Any]], list[str]]:
    """Compile a decomposed graph; returns a callable that takes a list, and what the check of its code found."""
    patches = _patches(fakes, check, options)
    compiled = _compile(module, fakes, static, patches)
    findings = check.verdict()
    if findings is None:  # cached code that nobody checked: make it again, under the check
        compiled = _compile(module, fakes, static, {**patches, "force_disable_caches": True})
        findings = check.verdict()
    assert findings is not None, "the check runs on every compile"
    return compiled, findings


def _patches(fakes: Sequence[Any], check: SchedulerCheck, options: dict[str, Any]) -> dict[str, Any]:
    hooks = {"post_grad_custom_post_pass": post_grad_pass, "_pre_fusion_custom_pass": check}
    on_cpu = all(fake.device.type == "cpu" for fake in fakes if isinstance(fake, Tensor))
    return {**DEFAULT_OPTIONS, **(CPU_OPTIONS if on_cpu else {}), **hooks, **options}


def _compile(module: fx.GraphModule, fakes: Sequence[Any], static: Sequence[int], patches: dict[str, Any]) -> Any:
    with inductor_config.patch(patches):
        return compile_fx_inner(module, list(fakes), static_input_idxs=tuple(static), **_kwargs())


def _kwargs() -> dict[str, Any]:
    return {"cudagraphs": BoxedBool(False), "is_inference": True}


def decomposition_table() -> Any:
    """Inductor's decompositions."""
    return select_decomp_table()


def name_of(compiled: Any) -> str | None:
    """Under which name Inductor keeps the code of :func:`compile_graph`; None where it does not keep it."""
    name: str | None = getattr(compiled, "_fx_graph_cache_key", None)
    return name


def load_graph(name: str, fakes: Sequence[Any], options: dict[str, Any]) -> Callable[[list[Any]], Sequence[Any]] | None:
    """The code that Inductor keeps under ``name``, made ready as :func:`compile_graph` does; None if it is gone."""
    if not _NAME.fullmatch(name):
        return None
    constants = CompiledFxGraphConstants()
    kwargs: Any = {**_kwargs(), "is_backward": False}
    with inductor_config.patch(_patches(fakes, SchedulerCheck(""), options)):
        if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache:
            return None
        CompiledTritonKernels.cache_clear()  # as compile_fx_inner does before and after each graph
        compiled, _ = FxGraphCache.load_with_key(name, [], fakes, True, None, False, constants)
        if compiled is None or compiled.frozen_param_names:
            return None
        compiled._fx_graph_cache_key = name
        compiled.post_compile(fakes, constants, kwargs)
        CompiledTritonKernels.cache_clear()
    return compiled


def surroundings(fakes: Sequence[Any], options: dict[str, Any]) -> str:
    """What Inductor's names cover beside the graph and its inputs: versions, device, settings, passes."""
    with inductor_config.patch(_patches(fakes, SchedulerCheck(""), options)):
        no_graph = fx.GraphModule(torch.nn.Module(), fx.Graph())
        details = FxGraphHashDetails(no_graph, [], _kwargs(), [])  # type: ignore[arg-type]
        return FxGraphCachePickler(no_graph).get_hash(details)
