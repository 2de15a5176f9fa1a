"""Number the values of a run by how they were computed: two runs with equal numbers ran one program.

Global value numbering of an executed program. The number of a fresh memory stands for the operator and for the numbers
of what it read; a write gives a memory a new number; a view has no number of its own, but the geometry of one on
memory. So neither dead operators nor the order of independent ones count, and nothing depends on what memory holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftfuse.errors import SourceLine
from draftfuse.journal import is_opaque, user_frame, written_by

aten = torch.ops.aten
TAP = torch.ops.draftfuse.tap.default
_CONSTANTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)  # Python's numbers become a tensor
Table = dict[Any, int]
LARGEST = 1 << 24  # bytes: the values of larger tensors are not looked at


@dataclass
class Call:
    """One operator of a run: its number, the user's line, and what its results held."""

    number: int
    name: str
    source: SourceLine | None
    values: list[Any]


class Numbering(TorchDispatchMode):
    """Use as a context around a run; :attr:`taps` and :attr:`memory` are the numbers of what it left.

    Args:
        table: what numbers stand for, shared by the runs that are compared.
        calls: note each operator with the user's line and its results, which costs far more than the number.
    """

    def __init__(self, table: Table, calls: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.taps: dict[tuple[str, int], int] = {}
        self.memory: dict[int, int] = {}  # by storage: what was written, or is fresh
        self.effects = 0  # the number of all calls so far that may have hidden state
        self.calls: list[Call] = []
        self._table, self._notes_calls = table, calls

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is TAP:
            self.taps[args[1], args[2]] = self._of_tensor(args[0])
            return None
        number = self._number("call", func, self._words(args), self._words(tuple(kwargs.items())))
        if is_opaque(func):  # it may read and write what it is not given: its place among its kind counts
            self.effects = number = self._number("call", number, ("written", self.effects))
        given = {storage_of(t) for t in _tensors((args, tuple(kwargs.values())))}
        result = func(*args, **kwargs)
        if self._notes_calls:
            self.calls.append(Call(number, str(func), user_frame(), [*map(value_of, _tensors(result))]))
        for index, tensor in enumerate(written_by(func, args, kwargs)):
            self.memory[storage_of(tensor)] = self._number("written", number, index)
        for slot, tensor in enumerate(_tensors(result)):
            if func in _CONSTANTS:
                self.memory[storage_of(tensor)] = self._number(*_contents(tensor))
            elif storage_of(tensor) not in given:
                self.memory[storage_of(tensor)] = self._number("made", number, slot)
        return result

    def left(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Numbers of what the run wrote of the memory behind ``tensors``, by storage."""
        keys = map(storage_of, tensors)
        return {key: self.memory[key] for key in keys if key in self.memory}

    def _number(self, *parts: Any) -> int:
        return self._table.setdefault(parts, len(self._table))

    def _words(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return "tensor", self._of_tensor(arg)
        if isinstance(arg, (list, tuple)):
            return tuple([self._words(item) for item in arg])
        return arg if type(arg) is int or type(arg) is str else repr(arg)  # 0.0 is not -0.0, nor is True 1

    def _of_tensor(self, tensor: Tensor) -> int:
        key = storage_of(tensor)
        layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        return self._number("view", self.memory.get(key, ("memory", key)), layout)


def storage_of(tensor: Tensor) -> int:
    """What :attr:`Numbering.memory` calls the memory behind ``tensor``."""
    return int(tensor.untyped_storage()._cdata)


def reachable(table: Table, roots: Iterable[int]) -> set[int]:
    """The numbers that ``roots`` were computed from, and they themselves."""
    parts = list(table)
    found: set[int] = set()
    pending = list(roots)
    while pending:
        number = pending.pop()
        if number not in found:
            found.add(number)
            pending += _numbers_in(parts[number])
    return found


def _numbers_in(part: Any) -> Iterator[int]:
    """The numbers in what a number stands for: they stand behind one of four words, anything else is a constant."""
    if isinstance(part, tuple) and part:
        if part[0] in ("made", "written", "view", "tensor") and isinstance(part[1], int):
            yield part[1]
        else:
            for item in part:
                yield from _numbers_in(item)


def value_of(tensor: Tensor) -> Any:
    """Dtype, shape and a hash of the bytes of a tensor."""
    if tensor.nbytes > LARGEST:
        return tensor.dtype, tensor.shape
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return tensor.dtype, tensor.shape, hash(flat.numpy().tobytes())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _contents(tensor: Tensor) -> tuple[Any, ...]:
    """The value of a tensor that Python just made of numbers, whose memory is another each time."""
    return "constant", tensor.dtype, tensor.shape, repr(tensor.tolist())
