"""The one place that touches Inductor's private entry point (``compile_fx_inner``) and its configuration.

The graph given is functional, apart from trailing stores into its inputs, so none of Inductor's re-inplacing (and with
it none of the clones and stale reads that it makes of mutated buffers) takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
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


def compile_graph(
    module: fx.GraphModule, fakes: Sequence[Any], static: Sequence[int], check: SchedulerCheck, options: dict[str, Any]
) -> tuple[Callable[[list[Any]], Sequence[Any]], list[str]]:
    """Compile a decomposed graph; returns a callable that takes a list, and what the check of its code found."""
    hooks = {"post_grad_custom_post_pass": post_grad_pass, "_pre_fusion_custom_pass": check}
    on_cpu = all(fake.device.type == "cpu" for fake in fakes if isinstance(fake, Tensor))
    patches = {**DEFAULT_OPTIONS, **(CPU_OPTIONS if on_cpu else {}), **hooks, **options}
    compiled = _compile(module, fakes, static, patches)
    findings = check.verdict()
    if findings is None:  # cached code that nobody checked: make it again, under the check
        compiled = _compile(module, fakes, static, {**patches, "force_disable_caches": True})
        findings = check.verdict()
    assert findings is not None, "the check runs on every compile"
    return compiled, findings


def _compile(module: fx.GraphModule, fakes: Sequence[Any], static: Sequence[int], patches: dict[str, Any]) -> Any:
    with inductor_config.patch(patches):
        return compile_fx_inner(
            module, list(fakes), static_input_idxs=tuple(static), cudagraphs=BoxedBool(False), is_inference=True
        )
