"""What a proposal of vLLM 0.25 and 0.26 writes by itself: the inputs of the draft prefill, and of the decode steps.

In one graph no number of live rows can be a launch's grid, so it stands in memory, and the draft's own buffers are read
where vLLM reads the batch. On CUDA each is one kernel; elsewhere the functions named ``reference`` run.

``R`` requests (capacity), ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_LAUNCHES = 256
# Tensors of a batch, in the order of the kernel's arguments.
READ = (
    "input_ids",
    "positions",
    "idx_mapping",
    "last_sampled",
    "next_prefill_tokens",
    "num_sampled",
    "num_rejected",
    "query_start_loc",
    "seq_lens",
    "temperature",
    "seeds",
)
FLOATING = "temperature"
_data_ptr = Tensor.data_ptr


class Loader:
    """Writes a batch into a speculator's buffers: vLLM's ``_copy_request_inputs`` and ``prepare_prefill_inputs``.

    On CUDA a batch at addresses that came before takes its launch from a table; nothing is specialised again.
    """

    def __init__(self, spec: Any) -> None:
        inputs = spec.input_buffers
        self.rejected = torch.zeros_like(spec.last_token_indices, dtype=torch.int32)
        self.live = torch.zeros(1, dtype=torch.int32, device=spec.device)
        self.written: tuple[Tensor, ...] = (
            spec.last_token_indices,
            spec.current_draft_step,
            inputs.input_ids,
            inputs.positions,
            inputs.query_start_loc,
            inputs.seq_lens,
            spec.idx_mapping,
            spec.temperature,
            spec.seeds,
            self.rejected,
            self.live,
        )
        self.pads = spec.draft_logits is not None  # vLLM marks padded rows only where they would store logits
        self.on_cuda = spec.device.type == "cuda"
        self.launches: dict[tuple[object, ...], Callable[[], None]] = {}

    def __call__(self, read: tuple[Tensor, ...], rows: int) -> bool:
        """Load ``rows`` rows of the tensors of :data:`READ`; False, and nothing is done, where they do not fit."""
        fresh = (read[2].dtype, read[5].dtype, read[6].dtype)  # the others are vLLM's persistent buffers
        key = (rows, fresh, *map(_data_ptr, read))
        if (launch := self.launches.get(key)) is not None:
            launch()
            return True
        return self._first(read, rows, key)

    def _first(self, read: tuple[Tensor, ...], rows: int, key: tuple[object, ...]) -> bool:
        if not self.fits(read):
            return False
        if not self.on_cuda:
            reference(self.written, read, rows, self.pads)
            return True
        from draftfuse.vllm._load_triton import launch_load

        bound = launch_load(self.written, read, rows, self.pads)
        if bound is not None:
            if len(self.launches) >= MAX_LAUNCHES:
                self.launches.clear()
            self.launches[key] = bound
        return True

    def warm_up(self) -> None:
        """Compile the kernel before a batch needs it: load one row of the buffers into themselves."""
        _, _, ids, positions, starts, lens, idx, temperature, seeds, rejected, _ = self.written
        if self.on_cuda:
            from draftfuse.vllm._load_triton import launch_load

            batch = (ids, positions, idx, seeds, lens, rejected, rejected)
            launch_load(self.written, (*batch, starts, lens, temperature, seeds), 1, self.pads)

    def fits(self, read: tuple[Tensor, ...]) -> bool:
        """What holds for an address once and for all: rows next to each other, and a value for each state row."""
        device, whole = self.live.device, self.written[7].numel()
        near = all(tensor.device == device and tensor.is_contiguous() for tensor in read)
        floating = [name for name, tensor in zip(READ, read, strict=True) if tensor.is_floating_point()]
        return near and floating == [FLOATING] and read[9].numel() == read[10].numel() == whole


def reference(written: tuple[Tensor, ...], read: tuple[Tensor, ...], rows: int, pads: bool) -> None:
    """The meaning in plain PyTorch: ids move left by one in a row, the newest verified token behind the last accepted.

    Tokens behind it keep what they were; padded rows have no tokens and no length.
    """
    last, step, ids, positions, starts, lens, idx, temperature, seeds, rejected_rows, live = written
    source = dict(zip(READ, read, strict=True))
    temperature.copy_(source["temperature"])
    seeds.copy_(source["seeds"])
    for row in range(rows):
        begin, end = (int(source["query_start_loc"][row + at]) for at in (0, 1))
        state, rejected = int(source["idx_mapping"][row]), int(source["num_rejected"][row])
        at = end - rejected - 1
        newest = "last_sampled" if source["num_sampled"][row] > 0 else "next_prefill_tokens"
        ids[begin:at] = source["input_ids"][begin + 1 : at + 1]
        ids[at] = source[newest].flatten()[state]
        positions[begin : at + 1] = source["positions"][begin : at + 1]
        last[row], starts[row], lens[row] = at, begin, source["seq_lens"][row]
        idx[row], rejected_rows[row] = state, rejected
    starts[rows:] = source["query_start_loc"][rows]
    lens[rows:], last[rows:] = 0, 0
    step.zero_()
    live.fill_(rows)
    if pads:
        idx[rows:] = -1


class Turn:
    """From the prefill to the decode steps inside a graph: vLLM's ``prepare_decode_inputs`` on the live rows."""

    def __init__(self, spec: Any, loader: Loader) -> None:
        inputs = spec.input_buffers
        self.tensors: tuple[Tensor, ...] = (
            spec.draft_tokens,
            loader.rejected,
            loader.live,
            inputs.input_ids,
            inputs.positions,
            inputs.query_start_loc,
            inputs.seq_lens,
        )
        self.max_model_len = int(spec.max_model_len)
        self.advances = bool(spec.advance_draft_positions)
        self.on_cuda = loader.on_cuda

    def __call__(self) -> None:
        """Launch it."""
        if not self.on_cuda:
            turn_reference(self.tensors, self.max_model_len, self.advances)
            return
        from draftfuse.vllm._load_triton import launch_turn

        launch_turn(self.tensors, self.max_model_len, self.advances)


def turn_reference(tensors: tuple[Tensor, ...], max_model_len: int, advances: bool) -> None:
    """One token a row: the first draft, one position on; lengths without what was rejected; padded rows have none."""
    drafts, rejected, live, ids, positions, starts, lens = tensors
    rows = torch.arange(len(lens), dtype=torch.int32, device=lens.device)
    alive = rows < live
    ids[: len(lens)].copy_(torch.where(alive, drafts[:, 0].to(ids.dtype), ids[: len(lens)]))
    after = lens
    if advances:
        first = positions[: len(lens)]
        first.copy_(torch.where(alive, (first + 1).clamp(max=max_model_len - 1), first))
        after = (lens - rejected + 1).clamp(max=max_model_len)
    lens.copy_(torch.where(alive, after, 0))
    starts.copy_(torch.arange(len(starts), dtype=starts.dtype, device=starts.device).minimum(live))
