"""Load batches into the persistent inputs on the path of every call: as little host time as that takes."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, is_not
from typing import Any

from torch import Tensor

from draftfuse.errors import InvalidBatchError
from draftfuse.lowering.ops.load_rows import READ, WRITTEN, load_rows
from draftfuse.speculator import DraftBatch

MAX_LAUNCHES = 256
FLOATING = ("temperature", "hidden_states")

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
        self._look()

    def _look(self) -> None:
        """Take the inputs as they are now."""
        self.written: tuple[Tensor, ...] = _write(self.spec.inputs)
        self.on_cuda = self.written[0].is_cuda
        self.storages = {t.untyped_storage().data_ptr() for t in self.written}
        self.launches.clear()

    def load(self, batch: DraftBatch, capacity: int, query_len: int) -> None:
        """Copy a batch into the inputs, and make rows up to ``capacity`` dead.

        Raises:
            InvalidBatchError: a tensor of the batch has a wrong dtype or device, or lies in the speculator's inputs.
        """
        read = _read(batch) if batch.num_reqs else ()
        self._run(read, batch.num_reqs, batch.num_tokens, capacity, query_len)

    def pad(self, num_reqs: int, capacity: int) -> None:
        """Make rows ``num_reqs..capacity`` dead, with one token each."""
        if num_reqs < capacity:
            self._run((), num_reqs, 0, capacity, 1)

    def _run(self, read: tuple[Tensor, ...], rows: int, tokens: int, capacity: int, query_len: int) -> None:
        if any(map(is_not, self.written, _write(self.spec.inputs))):
            self._look()
        key = (rows, tokens, capacity, query_len, *map(_data_ptr, read), *map(_dtype, read))
        if (launch := self.launches.get(key)) is not None:
            launch()
            return
        self._check(read)
        if not self.on_cuda:
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
        device = self.written[0].device
        for name, tensor in zip(READ, read, strict=False):
            if tensor.device != device:
                _fail(f"batch.{name} is on another device", tensor.device, device)
            if tensor.is_floating_point() is not (name in FLOATING):
                kind = "a floating dtype" if name in FLOATING else "an integer dtype"
                _fail(f"batch.{name} has a wrong dtype", tensor.dtype, kind)
            if tensor.untyped_storage().data_ptr() in self.storages:
                _fail(f"batch.{name} lies in the speculator's inputs", "the same memory", "memory of its own")


def _fail(what: str, came: object, expected: object) -> None:
    raise InvalidBatchError(what, came, expected, "Hand over another tensor; DraftBatch documents them.")
