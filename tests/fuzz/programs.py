"""Whole speculators from a seed: what a program is, how one is drawn, and how a failing one is made smaller.

R requests, V vocabulary, H hidden, P page size, L max_model_len.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

BUILDERS = ("aliased", "window", "filled", "ragged", "held", "owned", "chained", "nested", "by_step", "planned")
SAMPLERS = ("greedy", "gumbel", "logits")
FEEDBACKS = ("hidden", "other", "constant")
ADVANCES = ("default", "reordered", "static", "late_ids")
MEMORIES = ("none", "decayed", "indexed", "counted", "opaque")


@dataclass(frozen=True)
class Program:
    """One speculator and the batches that it is run on."""

    k: int = 2
    rows: int = 2
    page: int = 4
    context: int = 16  # max_model_len
    builders: tuple[str, ...] = ("aliased",)
    windows: tuple[int, ...] = (3,)
    layers: int = 1
    sampler: str = "greedy"
    feedback: str = "hidden"
    advance: str = "default"
    memory: str = "none"
    local_writes: bool = False
    weights: int = 0
    batches: tuple[tuple[int, ...], ...] = ((3,),)  # lengths of the rows of each call
    rejected: tuple[int, ...] = (0,)  # of row i % len
    ks: tuple[int, ...] = (2,)  # of call i % len
    uniform: bool = False  # every row brings k + 1 tokens


def draw(seed: int) -> Program:
    """The program of ``seed``."""
    r = random.Random(seed)
    k, rows = r.choice((2, 2, 3, 3, 4, 7)), r.randint(1, 5)  # above 4 steps are copied, not traced
    context = r.choice((12, 16, 23, 40))
    groups = r.choice((1, 1, 2, 3))
    uniform = r.random() < 0.25
    least = k + 1 if uniform else 1
    return Program(
        k=k,
        rows=rows,
        page=r.choice((1, 2, 4, 8)),
        context=context,
        builders=tuple(r.choice(BUILDERS) for _ in range(groups)),
        windows=tuple(r.randint(1, 6) for _ in range(groups)),
        layers=r.randint(0, 2),
        sampler=r.choice(SAMPLERS),
        feedback=r.choice(FEEDBACKS),
        advance=r.choice(ADVANCES),
        memory=r.choice(MEMORIES),
        local_writes=r.random() < 0.3,
        weights=r.randint(0, 1000),
        batches=tuple(
            tuple(_length(r, least, context) for _ in range(r.randint(1, rows))) for _ in range(r.randint(1, 3))
        ),
        rejected=tuple(r.randint(0, min(2, k)) for _ in range(r.randint(1, 3))),
        ks=tuple(r.randint(1, k) for _ in range(r.randint(1, 2))),
        uniform=uniform,
    )


def _length(r: random.Random, least: int, context: int) -> int:
    """Mostly anywhere, often near the limit."""
    return r.randint(max(least, context - 3), context) if r.random() < 0.3 else r.randint(least, context)


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that still fails: one field at a time, until nothing more can go."""
    changed = True
    while changed:
        changed = False
        for candidate in smaller(program):
            if fails(candidate):
                program, changed = candidate, True
                break
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one field simpler, the boldest first."""
    plain = Program()
    for field in fields(Program):
        value, simplest = getattr(program, field.name), getattr(plain, field.name)
        if field.name in ("batches", "builders", "rejected", "ks") and len(value) > 1:
            yield from (_changed(program, field.name, value[:i] + value[i + 1 :]) for i in range(len(value)))
        if field.name == "batches":
            rows = [b for b in value if len(b) > 1]
            yield from (_changed(program, "batches", tuple(b[:-1] if b is c else b for b in value)) for c in rows)
            plain_lengths = tuple((simplest[0][0],) * len(b) for b in value)
            if not program.uniform and plain_lengths != value:
                yield _changed(program, "batches", plain_lengths)
        elif value != simplest:
            yield _changed(program, field.name, simplest)
            if isinstance(value, int) and not isinstance(value, bool) and value - 1 > simplest:
                yield _changed(program, field.name, value - 1)


def _changed(program: Program, name: str, value: Any) -> Program:
    """``program`` with one field changed, and the others made to fit."""
    new = replace(program, **{name: value})
    rows = max(new.rows, *(len(b) for b in new.batches))
    least = new.k + 1 if new.uniform else 1
    context = max(new.context, least)
    batches = tuple(tuple(min(max(n, least), context) for n in b) for b in new.batches)
    windows = (new.windows * len(new.builders))[: len(new.builders)]
    return replace(
        new,
        rows=rows,
        context=context,
        batches=batches,
        windows=windows,
        ks=tuple(min(k, new.k) for k in new.ks),
        rejected=tuple(min(n, new.k) for n in new.rejected),
    )
