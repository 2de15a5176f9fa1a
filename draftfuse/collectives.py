"""The collectives of a traced loop as ranks compare them: which, on what, at which draft step, written where."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx

from draftfuse.errors import RankMismatchError, SourceLine
from draftfuse.passes import ir
from draftfuse.passes.collectives import collectives_of, group_of, settings_of
from draftfuse.trace import Trace


@dataclass(frozen=True)
class Collective:
    """One collective of a draft loop."""

    operation: str  # with what it is given by value: all_reduce(reduce_op=sum)
    inputs: tuple[str, ...]  # dtype and shape of each tensor, the number of requests as n
    group: str
    step: int | None
    phase: str
    source: str  # the user's line; ranks may differ in it

    @property
    def what(self) -> tuple[Any, ...]:
        """What must be the same on all ranks."""
        return (self.operation, self.inputs, self.group, self.step, self.phase)

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        return f"{self.operation} of {', '.join(self.inputs)} in draft step {self.step}, {self.phase}{at}"


Signature = tuple[Collective, ...]


def signature_of(traced: Trace) -> Signature:
    """The collectives of a traced loop, in order."""
    symbol = str(traced.symbol) if traced.symbol is not None else ""
    return tuple(collective_at(node, symbol) for node in collectives_of(traced.graph))


def collective_at(node: fx.Node, symbol: str = "") -> Collective:
    """The collective that ``node`` is; ``symbol`` is what the number of requests is called in its graph."""
    given = ", ".join(settings_of(node))
    operation = f"{_name(node)}({given})" if given else _name(node)
    inputs = tuple(_shape(ir.value(a), symbol) for a in node.all_input_nodes if ir.is_tensor(a))
    step, phase, source = ir.draft_step(node), ir.phase(node), ir.source_line(node)
    return Collective(operation, inputs, group_of(node), step, phase, "" if source is None else str(source))


def _name(node: fx.Node) -> str:
    schema = ir.schema_of(node)
    assert schema is not None
    return schema.name.partition("::")[2]


def _shape(value: torch.Tensor, symbol: str) -> str:
    sizes = [str(ir.expression(size)) for size in value.shape]
    if symbol:
        sizes = [size.replace(symbol, "n") for size in sizes]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def to_text(signature: Signature) -> str:
    """A signature as it travels between ranks."""
    return json.dumps([asdict(one) for one in signature])


def from_text(text: str) -> Signature:
    """A signature that came from another rank."""
    return tuple(Collective(**{**one, "inputs": tuple(one["inputs"])}) for one in json.loads(text))


def compare(by_rank: Mapping[int, Signature]) -> None:
    """Raise :class:`RankMismatchError` for the first rank that is not like most, naming its first other collective."""
    if len({_what(signature) for signature in by_rank.values()}) <= 1:
        return
    usual = Counter(_what(signature) for signature in by_rank.values()).most_common(1)[0][0]
    like = next(rank for rank, signature in by_rank.items() if _what(signature) == usual)
    other = next(rank for rank, signature in by_rank.items() if _what(signature) != usual)
    raise _mismatch(like, by_rank[like], other, by_rank[other])


def _what(signature: Signature) -> tuple[Any, ...]:
    return tuple(one.what for one in signature)


def _mismatch(like: int, expected: Signature, rank: int, got: Signature) -> RankMismatchError:
    index = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a.what != b.what), None)
    index = min(len(expected), len(got)) if index is None else index
    wanted, came = _at(expected, index), _at(got, index)
    found = came if isinstance(came, Collective) else wanted
    assert isinstance(found, Collective)
    error = RankMismatchError(
        f"rank {rank} has another draft loop than rank {like}, from draft step {found.step}, {found.phase}, on",
        f"on rank {rank} {came}",
        f"as on rank {like} {wanted}",
        "Let no Python branch of the loop depend on the rank, and compile the same speculator on all ranks.",
        _source(found),
    )
    error.rank, error.step = rank, found.step
    return error


def _at(signature: Sequence[Collective], index: int) -> Collective | str:
    return signature[index] if index < len(signature) else "no further collective"


def _source(one: Collective) -> SourceLine | None:
    place, _, text = one.source.partition(": ")
    file, _, line = place.rpartition(":")
    return SourceLine(file, int(line), text) if line.isdigit() else None
