"""The draft loop on vLLM's own objects: every step with its refresh, run eagerly or recorded in vLLM's own graph.

``R`` requests (padded), ``K`` speculative tokens. Nothing here opens a graph, and every kernel is vLLM's, so drafts
are equal bit for bit to those of the loop that vLLM ships.
"""

from __future__ import annotations

from typing import Any

import torch

from draftfuse.vllm.versions import Release


def run_loop(
    spec: Any,
    release: Release,
    num_reqs: int,
    num_tokens: int,
    metadata: Any,
    slots: Any,
    rest: tuple[Any, ...],
    *,
    steps: int,
    rebuild: bool,
    upper_bound: Any = None,
) -> None:
    """Draft steps 1..steps-1.

    Args:
        metadata: by layer, None for a dummy run without attention.
        slots: slot mappings by layer.
        rest: what follows in ``_generate_draft``: tokens across ranks, graph mode, and later the number of steps.
        rebuild: refresh by ``build`` rather than by vLLM's in-place update.
        upper_bound: host upper bounds of the lengths; the model's maximum where a graph is recorded.
    """
    generate = type(spec)._generate_draft
    for step in range(1, steps):
        if metadata is not None and (spec.advance_draft_positions or step == 1):
            slots = update_slots(spec, num_reqs, num_tokens)
            if rebuild:
                metadata = build(spec, release, num_reqs, num_tokens, step, upper_bound)
            else:
                update(spec, metadata, num_reqs)
        spec.current_draft_step.fill_(step)
        generate(spec, num_reqs, num_tokens, metadata, slots, *rest)


def update_slots(spec: Any, num_reqs: int, num_tokens: int) -> Any:
    """Write this step's slots into vLLM's buffer; returns its rows by layer."""
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

    inputs = spec.input_buffers
    starts, positions = inputs.query_start_loc[: num_reqs + 1], inputs.positions[:num_reqs]
    slots = spec.block_tables.compute_slot_mappings(spec.idx_mapping[:num_reqs], starts, positions, num_tokens)
    return build_slot_mappings_by_layer(slots, spec.kv_cache_config)


def build(spec: Any, release: Release, num_reqs: int, num_tokens: int, step: int, upper_bound: Any = None) -> Any:
    """Metadata of one step by layer, from the builders that vLLM made."""
    if not release.fuses:
        return spec._build_draft_attn_metadata(
            num_reqs=num_reqs, num_reqs_padded=num_reqs, num_tokens_padded=num_tokens
        )
    bound = longest(spec, num_reqs) if upper_bound is None else upper_bound
    if release.build == "_build_draft_attn_metadata":
        return spec._build_draft_attn_metadata(
            num_reqs=num_reqs,
            num_reqs_padded=num_reqs,
            num_tokens_padded=num_tokens,
            seq_lens_cpu_upper_bound=bound,
            step=step,
        )
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    shape = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs)
    return spec._build_uniform_attn_metadata(
        batch_desc=shape, num_reqs=num_reqs, num_query_per_req=1, seq_lens_cpu_upper_bound=bound, step=step
    )


def build_group(spec: Any, index: int, group: Any, release: Release) -> Any:
    """Metadata of one group alone, for one request: what the contract watches."""
    groups = spec.attn_groups
    spec.attn_groups = [[group] if i == index else [] for i in range(len(groups))]
    try:
        return build(spec, release, 1, 1, 1)
    finally:
        spec.attn_groups = groups


def longest(spec: Any, num_reqs: int) -> Any:
    """Upper bounds of the lengths that hold for every replay."""
    return torch.full((num_reqs,), spec.max_model_len, dtype=torch.int32)


def update(spec: Any, metadata: Any, num_reqs: int) -> None:
    """vLLM's in-place refresh of every group."""
    if hasattr(spec, "_update_draft_decode_metadata"):
        spec._update_draft_decode_metadata(metadata, num_reqs)
        return
    for groups in spec.attn_groups:
        for group in groups:
            group.update_draft_decode_metadata(metadata)
