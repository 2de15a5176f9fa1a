"""The draft loop itself, written once: the eager reference runs it, the compiler traces it, the audit records it.

R requests, T tokens, K speculative tokens. Rows are padded to a request capacity before the loop starts; every
function here works on the padded views, and padded rows are dead (``seq_lens == 0``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from draftfuse.loop_kind import check_hidden, check_tokens
from draftfuse.ops import advance_positions, compute_slot_mapping
from draftfuse.speculator import AttentionGroup, CommonMetadata, DraftInputs, Speculator

Tap = Callable[[str, int, Tensor], None]  # (name, draft step, value)
PHASES = ("prefill", "slot_mapping", "refresh", "forward", "sample", "advance", "store")


def no_tap(name: str, step: int, value: Tensor) -> None:
    """The tap of the eager loop: nothing is recorded."""


def graph_tap(name: str, step: int, value: Tensor) -> None:
    """The tap of a traced loop: leaves a ``draftfuse::tap`` node that names ``value``."""
    torch.ops.draftfuse.tap(value, name, step)


def metadata_tensors(metadata: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensor fields of a metadata object (dataclass, mapping, sequence; nested), by dotted path."""
    if metadata is None or isinstance(metadata, (bool, int, float, str)):
        return
    if isinstance(metadata, Tensor):
        yield prefix, metadata
    elif dataclasses.is_dataclass(metadata) and not isinstance(metadata, type):
        for f in dataclasses.fields(metadata):
            yield from metadata_tensors(getattr(metadata, f.name), f"{prefix}.{f.name}" if prefix else f.name)
    elif isinstance(metadata, dict):
        for key, value in metadata.items():
            yield from metadata_tensors(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(metadata, (list, tuple)):
        for i, value in enumerate(metadata):
            yield from metadata_tensors(value, f"{prefix}.{i}" if prefix else str(i))


def common_metadata(
    spec: Any, group: AttentionGroup, inputs: DraftInputs, step: int, max_query_len: int, max_seq_len: int
) -> CommonMetadata:
    """The view of the persistent inputs that ``group``'s builder reads at draft step ``step``."""
    rows, tokens = inputs.seq_lens.shape[0], inputs.positions.shape[0]
    return CommonMetadata(
        positions=inputs.positions,
        seq_lens=inputs.seq_lens,
        query_start_loc=inputs.query_start_loc,
        idx_mapping=inputs.idx_mapping,
        block_table=group.block_table[:rows],
        slot_mapping=group.slot_mapping[:tokens],
        num_reqs=rows,
        num_tokens=tokens,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        page_size=group.page_size,
        draft_step=step,
    )


def update_slot_mapping(group: AttentionGroup, inputs: DraftInputs, ragged: bool) -> None:
    """Write this step's slots of ``group`` into its persistent slot mapping."""
    rows, tokens = inputs.seq_lens.shape[0], inputs.positions.shape[0]
    slots = compute_slot_mapping(
        inputs.positions,
        inputs.seq_lens,
        group.block_table[:rows],
        group.page_size,
        inputs.query_start_loc if ragged else None,
    )
    group.slot_mapping[:tokens].copy_(slots)


def build_metadata(
    spec: Any, inputs: DraftInputs, step: int, held: dict[int, Any], tap: Tap = no_tap
) -> dict[str, Any]:
    """Slot mapping and metadata of every group at one decode step, by layer name.

    ``held`` keeps one object a group from step to step for builders that offer ``refresh``: those are built once
    and refreshed in place at every step, the first included.
    """
    by_layer: dict[str, Any] = {}
    for index, group in enumerate(spec.attn_groups):
        if slots_change(spec, group, step):
            with annotate({"phase": "slot_mapping", "draft_step": step}):
                update_slot_mapping(group, inputs, ragged=False)
                tap(f"group{index}.slot_mapping", step, group.slot_mapping[: inputs.positions.shape[0]])
        with annotate({"phase": "refresh", "draft_step": step}):
            common = common_metadata(spec, group, inputs, step, 1, spec.max_model_len)
            metadata = build_or_refresh(group.builder, common, held, index)
            for name, value in metadata_tensors(metadata):
                tap(f"group{index}.metadata.{name}", step, value)
        for layer in group.layer_names:
            by_layer[layer] = metadata
    return by_layer


def slots_change(spec: Any, group: AttentionGroup, step: int) -> bool:
    """Whether ``group`` has new slots at ``step``; a static group writes no KV, so its slots stay as they came."""
    static = getattr(group.builder, "refresh_kind", None) == "static"
    return bool(spec.advance_positions or (step == 1 and not static))


def build_or_refresh(builder: Any, common: CommonMetadata, held: dict[int, Any], index: int) -> Any:
    """Build anew, or refresh the held object where the builder offers ``refresh``."""
    if not hasattr(builder, "refresh"):
        return builder.build(common)
    if index not in held:
        held[index] = builder.build(common)
    builder.refresh(held[index], common)
    if hasattr(builder, "invalidate"):
        builder.invalidate(held[index])
    return held[index]


def run_step(
    spec: Any, inputs: DraftInputs, metadata: dict[str, Any], step: int, last: bool, tap: Tap = no_tap
) -> Tensor:
    """Forward, sample and (unless it is the last step) advance; returns the tokens, int64[R]."""
    with annotate({"phase": "forward", "draft_step": step}):
        result = spec.forward(inputs, metadata)
        if not torch.compiler.is_compiling():
            check_hidden(result, inputs.positions.shape[0], spec.forward)
        hidden, feedback = result
        tap("hidden", step, hidden)
    with annotate({"phase": "sample", "draft_step": step}):
        tokens = sample(spec, hidden, step, inputs.seq_lens.shape[0])
        tap("tokens", step, tokens)
    if not last:
        with annotate({"phase": "advance", "draft_step": step}):
            spec.advance(tokens, feedback, step)
            for name, value in inputs.named_tensors().items():
                tap(f"inputs.{name}", step, value)
    return tokens


def sample(spec: Any, hidden: Tensor, step: int, rows: int) -> Tensor:
    """The user's sample; where Python runs it, one token a request is asked for."""
    tokens: Tensor = spec.sample(hidden, step)
    if not torch.compiler.is_compiling():
        check_tokens(tokens, rows, spec.sample)
    return tokens


def store_tokens(inputs: DraftInputs, tokens: list[Tensor], k: int) -> None:
    """Write drafts 1..k-1 beside draft 0, whole rows at once (a column alone is not 16-byte aligned)."""
    with annotate({"phase": "store", "draft_step": k - 1}):
        rows = inputs.draft_tokens[:, :k]
        rows.copy_(torch.cat([rows[:, :1], torch.stack(tokens, dim=1)], dim=1))


def decode_loop(spec: Any, num_reqs: int, k: int, tap: Tap = no_tap, is_open: bool = False) -> None:
    """Draft steps 1..k-1 on the persistent inputs, metadata rebuilt at every step. ``num_reqs`` is the padded count.

    ``is_open``: the last step advances as well, as the same step of a longer loop would.
    """
    run_hook(spec, "on_multi_step_decode_begin")
    inputs = spec.inputs.view(num_reqs, num_reqs)
    held: dict[int, Any] = {}
    tokens: list[Tensor] = []
    for step in range(1, k):
        metadata = build_metadata(spec, inputs, step, held, tap)
        tokens.append(run_step(spec, inputs, metadata, step, step == k - 1 and not is_open, tap))
    store_tokens(inputs, tokens, k)
    # Nothing behind it reads what it leaves: traced, it would only make a guard of each count that it keeps.
    if not torch.compiler.is_compiling():
        run_hook(spec, "on_multi_step_decode_end")


def run_hook(spec: Any, name: str) -> None:
    """Call a lifecycle hook of the speculator if it has one: at capture here, at replay by the runtime."""
    hook = getattr(spec, name, None)
    if hook is not None:
        hook()


def prefill(spec: Any, num_reqs: int, num_tokens: int, max_query_len: int, max_seq_len: int) -> None:
    """Draft step 0: metadata over ragged queries, forward, token 0, and the inputs of draft step 1."""
    run_hook(spec, "on_prefill_begin")
    inputs = spec.inputs.view(num_reqs, num_tokens)
    by_layer: dict[str, Any] = {}
    with annotate({"phase": "prefill", "draft_step": 0}):
        for group in spec.attn_groups:
            update_slot_mapping(group, inputs, ragged=True)
            metadata = group.builder.build(common_metadata(spec, group, inputs, 0, max_query_len, max_seq_len))
            for layer in group.layer_names:
                by_layer[layer] = metadata
        run = spec.prefill if hasattr(spec, "prefill") else spec.forward
        result = run(inputs, by_layer)
        if not torch.compiler.is_compiling():
            is_default = getattr(run, "__func__", None) is Speculator.prefill
            check_hidden(result, num_tokens, spec.forward if is_default else run)
        hidden, feedback = result
    prepare_decode(spec, inputs, hidden, feedback)
    run_hook(spec, "on_prefill_end")


def dummy_prefill(spec: Any, num_reqs: int, num_tokens: int, skip_attn: bool) -> None:
    """Draft step 0 on dead rows; with ``skip_attn`` the forward alone, without metadata."""
    if skip_attn:
        layers = [name for group in spec.attn_groups for name in group.layer_names]
        spec.forward(spec.inputs.view(num_reqs, num_tokens), dict.fromkeys(layers))
    else:
        prefill(spec, num_reqs, num_tokens, num_tokens, spec.max_model_len)


def propose_loop(spec: Any, num_reqs: int, query_len: int, k: int, tap: Tap = no_tap, is_open: bool = False) -> None:
    """All of a uniform batch: draft step 0 over ``query_len`` tokens a row, then draft steps 1..k-1."""
    prefill(spec, num_reqs, num_reqs * query_len, query_len, spec.max_model_len)
    if k > 1:
        decode_loop(spec, num_reqs, k, tap, is_open)


def prefill_loop(spec: Any, num_reqs: int, query_len: int) -> None:
    """Draft step 0 of a uniform batch alone."""
    prefill(spec, num_reqs, num_reqs * query_len, query_len, spec.max_model_len)


def prepare_decode(spec: Any, inputs: DraftInputs, hidden: Tensor, feedback: Tensor) -> None:
    """Draw token 0 from the last verified position of each row and lay out one token a row."""
    last = inputs.last_token_indices
    with annotate({"phase": "advance", "draft_step": 0}):
        lay_out_rows(spec, inputs, last)
    with annotate({"phase": "sample", "draft_step": 0}):
        tokens = sample(spec, hidden[last], 0, last.shape[0])
        inputs.draft_tokens[:, :1].copy_(tokens.unsqueeze(1))
    with annotate({"phase": "advance", "draft_step": 0}):
        spec.advance(tokens, feedback[last], 0)


def lay_out_rows(spec: Any, inputs: DraftInputs, last: Tensor) -> None:
    """Positions and lengths as of the last accepted token, one token a row; dead rows stay dead."""
    rows, live = inputs.seq_lens.shape[0], inputs.seq_lens > 0
    positions = inputs.positions[last]
    rejected = inputs.query_start_loc[1 : rows + 1] - 1 - last
    spec.inputs.positions[:rows].copy_(torch.where(live, positions, 0))
    inputs.seq_lens.copy_(torch.where(live, inputs.seq_lens - rejected, 0))
    inputs.query_start_loc.copy_(torch.arange(rows + 1, device=last.device))


__all__ = ["PHASES", "Tap", "advance_positions", "decode_loop", "metadata_tensors", "prefill"]
