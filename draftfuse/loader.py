"""Load batches into the persistent inputs on the path of every call: as little host time as that takes."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor

from draftfuse import validate
from draftfuse.batches import check_values
from draftfuse.errors import InvalidBatchError
from draftfuse.lowering.ops.load_rows import READ, WRITTEN, load_rows
from draftfuse.speculator import DraftBatch

MAX_LAUNCHES = 256
FLOATING = ("temperature", "hidden_states")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_read, _write = attrgetter(*READ), attrgetter(*WRITTEN)
_data_ptr = Tensor.data_ptr
_dtype = attrgetter("dtype")


class Loader:
    """Loads batches of one speculator; see :func:`draftfuse.state.load_batch` for what that is.

    On CUDA a batch at the addresses of an earlier one, as an engine's persistent buffers give it, takes its launch from
    a table: arguments are neither looked at nor specialised again.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.launches: dict[tuple[object, ...], Callable[[], None]] = {}
        self.checked: set[tuple[object, ...]] = set()
        self._look()

    def _look(self) -> None:
        """Take the inputs as they are now."""
        self.written: tuple[Tensor, ...] = _write(self.spec.inputs)
        self.on_cuda = self.written[0].is_cuda
        tables = [t for g in self.spec.attn_groups for t in (g.slot_mapping, g.block_table)]
        self.owned = [*self.spec.inputs.named_tensors().values(), *tables]  # held, so that their addresses stay theirs
        self.launches.clear()
        self.checked.clear()

    def load(self, batch: DraftBatch, capacity: int, query_len: int) -> None:
        """Copy a batch into the inputs, and make rows up to ``capacity`` dead.

        Raises:
            InvalidBatchError: a tensor of the batch has a wrong dtype or device, or lies in the speculator's inputs, or
                (on the CPU) holds what does not fit the batch's host values; nothing was written.
        """
        read = _read(batch) if batch.num_reqs else ()
        self._run(read, batch.num_reqs, batch.num_tokens, capacity, query_len, batch)

    def pad(self, num_reqs: int, capacity: int) -> None:
        """Make rows ``num_reqs..capacity`` dead, with one token each."""
        if num_reqs < capacity:
            self._run((), num_reqs, 0, capacity, 1)

    def _run(
        self,
        read: tuple[Tensor, ...],
        rows: int,
        tokens: int,
        capacity: int,
        query_len: int,
        batch: DraftBatch | None = None,
    ) -> None:
        if any(map(is_not, self.written, _write(self.spec.inputs))):
            validate.check_inputs(self.spec)
            self._look()
        key = (rows, tokens, capacity, query_len, *map(_data_ptr, read), *map(_dtype, read))
        if (launch := self.launches.get(key)) is not None:
            launch()
            return
        if key not in self.checked:
            self._check(read)
            if len(self.checked) >= MAX_LAUNCHES:
                self.checked.clear()
            self.checked.add(key)
        if not self.on_cuda:
            if read and batch is not None:
                check_values(batch)
            load_rows(self.written, read, rows, tokens, capacity, query_len)
            return
        from draftfuse.lowering.ops._load_rows_triton import launch as launch_rows

        bound = launch_rows(self.written, read, rows, tokens, capacity, query_len)
        if bound is not None:
            if len(self.launches) >= MAX_LAUNCHES:
                self.launches.clear()
            self.launches[key] = bound

    def _check(self, read: tuple[Tensor, ...]) -> None:
        """What holds for an address and dtype once and for all: it is not looked at again."""
        device, extents = self.written[0].device, list(map(extent, self.owned))
        for name, tensor in zip(READ, read, strict=False):
            if tensor.device != device:
                _fail(f"batch.{name} is on another device", tensor.device, device)
            if name in FLOATING and not tensor.is_floating_point():
                _fail(f"batch.{name} has a wrong dtype", tensor.dtype, "a floating dtype")
            if name not in FLOATING and tensor.dtype not in INTEGERS:
                _fail(f"batch.{name} has a wrong dtype", tensor.dtype, "an integer dtype")
            start, end = extent(tensor)
            if any(start < last and first < end for first, last in extents):
                _fail(f"batch.{name} lies in the speculator's inputs", "the same memory", "memory of its own")


def extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of ``tensor`` and behind its last one."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()


def _fail(what: str, came: object, expected: object) -> None:
    raise InvalidBatchError(what, came, expected, "Hand over another tensor; DraftBatch documents them.")
