"""A recorder of one eager run: keeps what is written, so that it can be put back, and checks every index.

An index past its table kills a CUDA context, so it is looked at before the operator runs, and the error names the
user's line. Of a paged KV pool only the slots that ``write_kv`` writes are kept.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftfuse.errors import SourceLine, UnsafeLoopError
from draftfuse.lowering.effects import declared
from draftfuse.passes import ir
from draftfuse.python_state import State

aten = torch.ops.aten
OnOpaque = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], None]


class Journal(TorchDispatchMode):
    """Use as a context around eager work; :meth:`restore` puts every written tensor back.

    Args:
        on_opaque: called with each operator that is neither ATen's nor draftfuse's, before it runs.
        check_indices: look at every index before it is used (a host sync each).
    """

    def __init__(self, on_opaque: OnOpaque | None = None, check_indices: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_opaque, self.check_indices = on_opaque, check_indices
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # storage -> (whole memory, copy)
        self.slots: list[tuple[Tensor, Tensor, Tensor]] = []  # (cache, slots, rows)
        self.written: dict[int, Tensor] = {}
        self.syncs: list[SourceLine] = []  # lines of the user's where the host read a value

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.check_indices:
            check_bounds(func, args)
        if func is aten._local_scalar_dense.default and (line := user_frame()) is not None:
            self.syncs.append(line)
        if func is torch.ops.draftfuse.write_kv.default:
            self.keep_slots(*args)
        else:
            hidden = declared(func) if is_opaque(func) else None
            for tensor in [*written_by(func, args, kwargs), *(hidden[1] if hidden is not None else ())]:
                self.keep(tensor)
        if self.on_opaque is not None and is_opaque(func):
            self.on_opaque(func, args, kwargs)
        return func(*args, **kwargs)

    def keep(self, tensor: Tensor) -> None:
        """Copy the memory behind ``tensor`` unless that was done already."""
        key = tensor.untyped_storage().data_ptr()
        self.written.setdefault(key, tensor)
        if key not in self.kept:
            whole = whole_memory(tensor)
            self.kept[key] = (whole, whole.clone())

    def keep_slots(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        """Copy the rows of both caches that ``slots`` names."""
        used = slots[slots >= 0]
        page = key_cache.shape[1]
        for cache in (key_cache, value_cache):
            self.written.setdefault(cache.untyped_storage().data_ptr(), cache)
            self.slots.append((cache, used, cache[used // page, used % page].clone()))

    def restore(self) -> None:
        """Put everything back, the newest change first."""
        for cache, used, rows in reversed(self.slots):
            page = cache.shape[1]
            cache.index_put_((used // page, used % page), rows)
        for whole, copy in self.kept.values():
            whole.copy_(copy)


@contextmanager
def all_kept(state: State) -> Iterator[None]:
    """Around eager work: afterwards memory is as before, and Python as it is in ``state``."""
    journal = Journal(check_indices=False)
    try:
        with journal:
            yield
    finally:
        journal.restore()
        state.restore()


def whole_memory(tensor: Tensor) -> Tensor:
    """All elements of the storage behind ``tensor``, as one flat tensor of its dtype."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() // tensor.element_size()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, 0, (size,), (1,))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors that a call mutates, by its schema; an eager collective may write all that it is given."""
    if isinstance(func, OpOverload) and func.namespace == "c10d":
        yield from (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    if not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return
    for index, arg in enumerate(func._schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(arg.name)
            yield from (t for t in tree_leaves(given) if isinstance(t, Tensor))


def is_opaque(func: Any) -> bool:
    """Whether an operator comes from neither ATen nor draftfuse."""
    return isinstance(func, OpOverload) and func.namespace not in ("aten", "prims", "draftfuse", "draftfuse_gen")


def check_bounds(func: Any, args: tuple[Any, ...]) -> None:
    """Raise :class:`UnsafeLoopError` where an indexed read or write would leave its table."""
    for table, dim, index in _lookups(func, args):
        if index.numel() == 0 or index.dtype in (torch.bool, torch.uint8):
            continue
        low, high = (int(bound) for bound in torch.aminmax(index))
        rows = table.shape[dim]
        negative = 0 if func in _STRICT else -rows
        if high >= rows or low < negative:
            came = high if high >= rows else low
            todo = (
                "Make the table as long as the largest position including the draft steps, or mask the rows past it; "
                "a padded row (seq_len 0) has any block table."
            )
            if func in (aten.index_copy.default, aten.index_copy_.default) and low < 0:
                todo = "Write with draftfuse.ops.write_kv, which skips the negative slots of padded rows."
            raise UnsafeLoopError(
                "an index leaves its table", came, f"{negative} <= index < {rows}", todo, user_frame()
            )


_ALONG = (  # (table, dim, index, ...)
    aten.gather.default,
    aten.index_select.default,
    aten.index_copy.default,
    aten.index_copy_.default,
    aten.index_add.default,
    aten.index_add_.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_.src,
    aten.scatter_.value,
    aten.scatter_add.default,
    aten.scatter_add_.default,
)
_STRICT = (aten.embedding.default, *_ALONG)


def _lookups(func: Any, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, int, Tensor]]:
    if func is aten.embedding.default:
        yield args[0], 0, args[1]
    elif func in _ALONG:
        yield args[0], args[1], args[2]
    elif func is aten.take.default:
        yield args[0].flatten(), 0, args[1]
    elif func in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default):
        yield from ((args[0], dim, index) for dim, index in enumerate(args[1]) if index is not None)


def user_frame() -> SourceLine | None:
    """The innermost frame of the running Python stack that is neither draftfuse's nor torch's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not ir.is_own_file(frame.f_code.co_filename):
            return SourceLine.of(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None
