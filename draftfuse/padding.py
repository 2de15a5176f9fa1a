"""What padded rows hold, and one eager draft step that shows whether a loop relies on more.

The contract, of rows at and past the live ones: ``seq_lens``, ``positions``, ``input_ids`` and ``temperature`` are 0,
``idx_mapping`` and slots are -1, ``query_start_loc`` goes on counting, and *rows of the block table hold anything*: an
engine leaves there what was there before, or -1. A builder (and a forward) may compute with such rows, as every tensor
operator on a padded batch does; what comes of them must never be an index, and never reach a live row.

:func:`check` fills the tables of padded rows with integers that no table has, on every device alike. Operators of ATen
see them, and each index is looked at before it is used. Any other operator sees block 0 there, and is not run on
what was computed from them: it would end a CUDA context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from draftfuse import loop
from draftfuse.errors import UnsafeLoopError
from draftfuse.journal import Journal
from draftfuse.probe import named_failures
from draftfuse.state import pad

HUGE = 0x2AAAAAAA  # no block is as large, nor is what int32 makes of it times a page size
LARGE = 1 << 28


class _OutOfReach(Exception):
    """An operator would run on what was computed from a padded row's table: nothing more can be shown."""


class _Shielded(Journal):
    """A journal in which only operators of ATen see what the tables of padded rows hold."""

    def __init__(self, tables: Sequence[Tensor]) -> None:
        super().__init__()
        self.tables = tables
        self.storages = {t.untyped_storage().data_ptr() for t in tables}

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload) or func.namespace in ("aten", "prims"):
            return super().__torch_dispatch__(func, classes, args, kwargs)
        if any(map(self.is_derived, tree_leaves((args, kwargs)))):
            raise _OutOfReach
        with holding(self.tables, 0):
            return super().__torch_dispatch__(func, classes, args, kwargs)

    def is_derived(self, leaf: Any) -> bool:
        """Whether an argument holds what only a padded row's table can have brought there."""
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.dtype == torch.bool or leaf.numel() == 0:
            return False
        return leaf.untyped_storage().data_ptr() not in self.storages and int(leaf.abs().max()) >= LARGE


@contextmanager
def holding(tables: Sequence[Tensor], value: int) -> Iterator[None]:
    """``tables`` filled with ``value`` for a while."""
    kept = [t.clone() for t in tables]
    try:
        for table in tables:
            table.fill_(value)
        yield
    finally:
        for table, copy in zip(tables, kept, strict=True):
            table.copy_(copy)


def tables(spec: Any, live: int) -> list[Tensor]:
    """The block-table rows behind the live ones, of every group."""
    return [group.block_table[live:] for group in spec.attn_groups]


def check(spec: Any, live: int, capacity: int) -> UnsafeLoopError | None:
    """Draft step 1 with ``live`` rows of ``capacity``; what goes wrong once padded rows have any block table.

    Leaves the inputs padded, and everything else as it was.
    """
    pad(spec.inputs, live, capacity)
    padded = tables(spec, live)
    journal = _Shielded(padded)
    try:
        with holding(padded, HUGE), named_failures(), suppress(_OutOfReach), journal:
            inputs = spec.inputs.view(capacity, capacity)
            metadata = loop.build_metadata(spec, inputs, 1, {})
            loop.run_step(spec, inputs, metadata, 1, last=False)
    except UnsafeLoopError as error:
        return error
    finally:
        journal.restore()
    return None
