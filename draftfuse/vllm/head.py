"""vLLM's output head where it is a plain product: then logits, their argmax and the store between them are one kernel.

``H`` hidden, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SCALES = (1.0, 64.0)  # of hidden states that are tried: a soft cap shows in large logits


def plain_head(spec: Any, logits: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The weight of the head, [V, H], where ``logits`` is the product with it, bit for bit, and our kernel faster.

    Anything else (a cap, a scale, a bias, a vocabulary of its own, quantised or sharded weights) gives other numbers
    for some of the hidden states that are tried, and None.

    Args:
        logits: vLLM's own, of hidden states [1, H]; may sync with the host.
    """
    weight = getattr(getattr(spec.model, "lm_head", None), "weight", None)
    hidden = spec.hidden_states
    if not isinstance(weight, Tensor) or not _fits(weight, hidden):
        return None
    for seed, scale in enumerate(SCALES):
        generator = torch.Generator(hidden.device).manual_seed(seed)
        x = torch.randn(1, hidden.shape[1], dtype=torch.float32, device=hidden.device, generator=generator)
        x = (x * scale).to(hidden.dtype)
        found = logits(x)
        if found.dim() != 2 or found.shape[1] > weight.shape[0]:
            return None
        weight = weight[: found.shape[1]]
        if not torch.equal(found, F.linear(x, weight)):
            return None
    return weight if pays(weight) else None


def _fits(weight: Tensor, hidden: Tensor) -> bool:
    if weight.dim() != 2 or not weight.is_contiguous() or weight.shape[1] != hidden.shape[1]:
        return False
    return weight.dtype == hidden.dtype and weight.device == hidden.device


def pays(weight: Tensor) -> bool:
    """Whether the kernel is made for this device, and measures faster than the vendor's product of one row."""
    from draftfuse.lowering.small import is_faster

    return is_faster(weight[:1], weight.shape[0])  # hidden states are of the shape and dtype of one of its rows
