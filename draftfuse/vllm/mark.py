"""Places draftfuse's marker in the draft model's forward, so that ``post_grad_pass`` recognises the draft's graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftfuse.lowering import hook
from draftfuse.lowering.ops.marker import marker
from draftfuse.vllm.asked import by_hook, is_asked


def mark_draft(model: Any, vllm_config: Any) -> int:
    """Mark every module of ``model`` that vLLM compiles; returns how many were marked.

    Only where the pass that takes the marker out is in the configuration, so no graph keeps it.
    """
    if not (is_asked(vllm_config) and by_hook(vllm_config)):
        return 0
    found = [m for m in model.modules() if hasattr(m, "do_not_compile") and not m.do_not_compile]
    places = [place for m in found if (place := first_block(m)) is not None]
    for place in places:
        place.register_forward_pre_hook(mark_inputs, with_kwargs=True)
    if hook.may_choose_kernels():
        for mlp in [mlp for m in found for mlp in mlps(m)]:
            mlp.register_forward_pre_hook(mark_inputs, with_kwargs=True)
    return len(places)


def first_block(module: Any) -> nn.Module | None:
    """The first decoder layer, which is inside every compiled draft model."""
    layers = getattr(module, "layers", None)
    if isinstance(layers, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and len(layers) > 0:
        first: nn.Module = next(iter(layers.children()))
        return first
    return None


def mlps(module: Any) -> list[nn.Module]:
    """The feed-forward part of each layer: vLLM cuts the graph at attention, so each piece behind one has another."""
    layers = getattr(module, "layers", None)
    blocks = layers.children() if isinstance(layers, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) else ()
    return [mlp for block in blocks if isinstance(mlp := getattr(block, "mlp", None), nn.Module)]


def mark_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Pass the first activation among the arguments through the marker."""
    for index, value in enumerate(args):
        if is_activation(value):
            return (*args[:index], marker(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if is_activation(value):
            return args, {**kwargs, name: marker(value)}
    return args, kwargs


def is_activation(value: Any) -> bool:
    """A floating tensor; positions and ids are integers."""
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16, torch.float32)
