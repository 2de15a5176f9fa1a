"""Where in the draft loop an exception comes from, read off its traceback: nothing is noted while the loop runs."""

from __future__ import annotations

import os
import types
from dataclasses import dataclass
from itertools import pairwise
from traceback import walk_tb

import torch.distributed
from torch import fx

from draftfuse import loop
from draftfuse.collectives import collective_at
from draftfuse.errors import SourceLine
from draftfuse.lowering.emit import EMISSION_FILE, PLACES
from draftfuse.passes import ir
from draftfuse.passes.collectives import waited_for

Frames = list[tuple[types.FrameType, int]]
DISTRIBUTED = os.path.dirname(torch.distributed.__file__) + os.sep


@dataclass(frozen=True)
class Place:
    """A collective of the loop."""

    step: int | None
    phase: str
    what: str
    source: SourceLine | None = None

    def __str__(self) -> str:
        where = f"draft step {self.step}, {self.phase}" if self.phase else "the draft loop"
        return f"{where}: {self.what}"


def place_of(error: BaseException) -> Place | None:
    """The collective that raised ``error``; None where none did."""
    frames = frames_of(error)
    for frame, line in frames:
        if frame.f_code.co_filename == EMISSION_FILE:
            node = frame.f_locals.get(PLACES, {}).get(line)
            return None if node is None else of_node(waited_for(node))
    if not any(frame.f_code.co_filename.startswith(DISTRIBUTED) for frame, _ in frames):
        return None
    return _of_frames([frame for frame, _ in frames], _user_line(frames))


def of_node(node: fx.Node) -> Place:
    """The place of a collective of a traced loop."""
    return Place(ir.draft_step(node), ir.phase(node), collective_at(node).operation, ir.source_line(node))


def frames_of(error: BaseException) -> Frames:
    """The frames that an exception went through, outermost first, and the line of each."""
    return list(walk_tb(error.__traceback__))


def _of_frames(frames: list[types.FrameType], source: SourceLine | None) -> Place:
    """The step and phase of a loop that ran in Python: the phase is the method of the speculator."""
    for outer, inner in pairwise(frames):
        if outer.f_code in (loop.run_step.__code__, loop.prepare_decode.__code__):
            return Place(outer.f_locals.get("step", 0), inner.f_code.co_name, _operation(frames), source)
    inside = any(frame.f_code is loop.prefill.__code__ for frame in frames)
    return Place(0 if inside else None, "prefill" if inside else "", _operation(frames), source)


def _operation(frames: list[types.FrameType]) -> str:
    names = [f.f_code.co_name for f in frames if f.f_code.co_filename.startswith(DISTRIBUTED)]
    return next((name for name in names if name != "wrapper"), "a collective")


def _user_line(frames: list[tuple[types.FrameType, int]]) -> SourceLine | None:
    users = [(f.f_code.co_filename, line) for f, line in frames if not ir.is_own_file(f.f_code.co_filename)]
    return SourceLine.of(*users[-1]) if users else None
