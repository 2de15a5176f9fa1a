"""Fake values as plain data: sizes as expressions of the one symbol, and which values lie in one storage.

Evaluating an operator for its fake value costs a millisecond where sizes are symbolic. Here a value is made from what
it is: another storage of a layout that was made before, or a view of a storage that exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from draftfuse.passes import ir
from draftfuse.passes.expressions import NotPlain, from_plain, to_plain
from draftfuse.trace_facts import NotCacheable

_BATCH = 16


class Writer:
    """Fake values to plain data; equal storages get equal numbers."""

    def __init__(self, symbol: Any) -> None:
        self.symbol = symbol
        self.layouts: list[Any] = []
        self._layouts: dict[str, int] = {}
        self._storages: dict[int, int] = {}

    def value(self, value: Any) -> Any:
        """One value, a list of several, or a number."""
        if isinstance(value, Tensor):
            return {"tensor": [self._layout(value), self._storage(value)]}
        if isinstance(value, torch.SymInt):
            return {"size": self.expression(value.node.expr)}
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [*map(self.value, value)]}
        if value is None or type(value) in (bool, int, float):
            return {"plain": value}
        raise NotCacheable(f"a value of class {type(value).__name__}")

    def expression(self, expr: Any) -> Any:
        """A sympy expression: the symbol, a number, or a function of such."""
        try:
            return to_plain(expr, self.symbol)
        except NotPlain as reason:
            raise NotCacheable(str(reason)) from reason

    def _layout(self, value: Tensor) -> int:
        constant = getattr(value, "constant", None) is not None
        if constant or value.is_conj() or value.is_neg() or value.layout is not torch.strided:
            raise NotCacheable(f"a tensor that is no plain memory: {value}")
        numbers = [*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes()]
        place = [str(value.dtype).removeprefix("torch."), str(value.device), value.dim()]
        layout = [*place, *(self.expression(ir.expression(n)) for n in numbers)]
        found = self._layouts.setdefault(repr(layout), len(self.layouts))
        if found == len(self.layouts):
            self.layouts.append(layout)
        return found

    def _storage(self, value: Tensor) -> int:
        return self._storages.setdefault(value.untyped_storage()._cdata, len(self._storages))


class Reader:
    """Plain data to fake values of one fake mode."""

    def __init__(self, mode: FakeTensorMode, layouts: list[Any], symbol: torch.SymInt | None) -> None:
        self.mode, self.layouts, self.symbol = mode, layouts, symbol
        self._numbers: dict[str, Any] = {}
        self._first: dict[int, Tensor] = {}  # of each layout a value that fills a storage of its own
        self._spare: dict[int, list[Tensor]] = {}  # of each layout memory that no value has yet
        self._bases: dict[int, Tensor] = {}  # of each storage a value
        self._memories: dict[int, int] = {}  # of each storage from outside its identity, and the other way round
        self._numbered: dict[int, int] = {}
        self._made: dict[tuple[int, int], Tensor] = {}

    def adopt(self, data: Any, value: Tensor) -> None:
        """Take ``value``, made elsewhere, for what ``data`` describes.

        Raises:
            NotCacheable: it is of another layout, or lies in one memory with others than it did.
        """
        layout, storage = data["tensor"]
        memory = value.untyped_storage()._cdata
        alone = self._memories.setdefault(storage, memory) == memory
        if not alone or self._numbered.setdefault(memory, storage) != storage:
            raise NotCacheable("other tensors lie in one memory")
        writer = Writer(None)
        writer.value(value)
        if writer.layouts != [self.layouts[layout]]:
            raise NotCacheable(f"a tensor lies in memory as {writer.layouts[0]}, and lay as {self.layouts[layout]}")
        self._made[layout, storage] = value
        self._bases.setdefault(storage, value)

    def value(self, data: Any) -> Any:
        """The value behind :meth:`Writer.value`."""
        ((kind, given),) = data.items()
        if kind == "tensor":
            return self._tensor(*given)
        if kind == "size":
            return self.number(given)
        if kind == "plain":
            return given
        return {"list": list, "tuple": tuple}[kind](map(self.value, given))

    def number(self, data: Any) -> Any:
        """A size: an int, or a SymInt."""
        if isinstance(data, int):
            return data
        if (key := repr(data)) not in self._numbers:
            assert self.symbol is not None
            node = self.symbol.node
            expr = from_plain(data, node.expr)
            hint = int(expr.subs(node.expr, node.hint))
            self._numbers[key] = self.symbol if data == "n" else node.shape_env.create_symintnode(expr, hint=hint)
        return self._numbers[key]

    def _tensor(self, layout: int, storage: int) -> Tensor:
        if (layout, storage) not in self._made:
            base = self._bases.get(storage)
            made = self._fresh(layout) if base is None else self._view(layout, base)
            self._made[layout, storage] = made
            self._bases.setdefault(storage, made)
        return self._made[layout, storage]

    def _fresh(self, layout: int) -> Tensor:
        """A value with a storage of its own; the second of a layout is a copy of the first."""
        if layout in self._first:
            first, spare = self._first[layout], self._spare.setdefault(layout, [])
            if not spare:
                with in_kernel_invocation_manager(self.mode):  # entering costs as much as a few clones
                    spare += [torch._lazy_clone(first) for _ in range(_BATCH)]  # the same sizes, another storage
            return FakeTensor(self.mode, spare.pop(), first.device)
        dtype, device, dims, *numbers = self.layouts[layout]
        sizes, strides, offset, nbytes = _parts(dims, [*map(self.number, numbers)])
        options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
        with self.mode:
            made = torch.empty_strided(sizes, strides, **options)
            if ir.expression(offset) != 0 or _size(made) != ir.expression(nbytes):
                return torch.empty(nbytes // made.element_size(), **options).as_strided(sizes, strides, offset)
        self._first[layout] = made
        return made

    def _view(self, layout: int, base: Tensor) -> Tensor:
        dtype, _, dims, *numbers = self.layouts[layout]
        sizes, strides, offset, _ = _parts(dims, [*map(self.number, numbers)])
        if base.dtype != getattr(torch, dtype):
            with self.mode:
                base = base.as_strided((0,), (1,), 0).view(getattr(torch, dtype))
        with in_kernel_invocation_manager(self.mode):
            memory = torch.as_strided(base, sizes, strides, offset)
        return FakeTensor(self.mode, memory, base.device)


def _parts(dims: int, numbers: list[Any]) -> tuple[list[Any], list[Any], Any, Any]:
    return numbers[:dims], numbers[dims : 2 * dims], numbers[-2], numbers[-1]


def _size(value: Tensor) -> Any:
    return ir.expression(value.untyped_storage().nbytes())


def new_symbol(name: str, source: str, hint: int, guards: Iterable[Any]) -> tuple[FakeTensorMode, torch.SymInt]:
    """A fake mode with one symbol, about which the environment knows what ``guards`` say.

    It notes those alone that do not follow from others.
    """
    env = ShapeEnv()
    number = env.create_unspecified_symint_and_symbol(hint, LocalSource(source), DimDynamic.DYNAMIC)
    assert isinstance(number, torch.SymInt)
    if str(symbol := number.node.expr) != name:
        raise NotCacheable(f"the symbol {name} would be {symbol}")
    for guard in guards:
        if not env.evaluate_expr(from_plain(guard, symbol)):
            raise NotCacheable(f"the guard {guard} does not hold at {hint}")
    return FakeTensorMode(shape_env=env), number
