"""What a user's code raises while a draft loop runs in Python: one error that names draft step, phase and line."""

from __future__ import annotations

import torch

from draftfuse import loop
from draftfuse.errors import DraftfuseError, FailedLoopError, OpArgumentError, SourceLine
from draftfuse.passes import ir
from draftfuse.places import Frames, frames_of

_STEPS = (loop.run_step.__code__, loop.prepare_decode.__code__)
ABSENT = "Set it before the loop runs, or correct its name."
NONE = "Return it, or set it, where it is made: a function without return gives None, as does a field left out."
FAULTY = "Correct the statement; the original exception is the cause of this one."
PADDED = "Padded rows (seq_len 0, slot -1, idx_mapping -1) reach every statement of the loop: let them pass."


def failed_loop(error: BaseException) -> DraftfuseError | None:
    """The error for what the user's part of a loop raised; None for anything else."""
    if isinstance(error, OpArgumentError):
        return placed(error)
    if isinstance(error, (DraftfuseError, torch.OutOfMemoryError)) or not isinstance(error, Exception):
        return None
    place = place_in_loop(error)
    if place is None:
        return None
    step, phase, source = place
    what, expected, todo = in_words(error) or ("the draft loop fails", "a step that runs through", FAULTY)
    made = FailedLoopError(f"{what} at {name_of(step, phase)}", first_words(error), expected, todo, source)
    made.step, made.phase = step, phase
    return made


def placed(error: OpArgumentError) -> OpArgumentError:
    """The error of an operator, with the draft step, the phase and the user's line where a loop called it."""
    frames = frames_of(error)
    inside = _step_of(frames)
    if inside is None or error.phase:
        return error
    index, step, phase = inside
    what = f"{error.what} at {name_of(step, phase)}"
    made = OpArgumentError(what, error.came, error.expected, error.todo, _users_line(frames[index:]))
    made.step, made.phase = step, phase
    return made


def in_words(error: BaseException) -> tuple[str, str, str] | None:
    """What is wrong, what was expected and what to do, of an attribute that is missing or a None in its place."""
    if isinstance(error, AttributeError) and error.name is not None and error.obj is None:
        return f"None stands where an object with .{error.name} is read", "an object", NONE
    if (name := missing_attribute(error)) is not None:
        return f"{name} is missing", "an attribute of that name", ABSENT
    if isinstance(error, TypeError) and "NoneType" in str(error):
        return "a statement computes with None", "a tensor or a number", NONE
    return None


def missing_attribute(error: BaseException) -> str | None:
    """``Type.name`` of an attribute that an object does not have."""
    if not isinstance(error, AttributeError) or error.name is None:
        return None
    owner = error.obj
    return f"attribute {getattr(owner, '__name__', type(owner).__qualname__)}.{error.name}"


def first_words(error: BaseException) -> str:
    """Type and first line of an exception."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def name_of(step: int | None, phase: str) -> str:
    """``draft step 2, sample``; the phase alone where there is no step."""
    return phase if step is None else f"draft step {step}, {phase}"


def place_in_loop(error: BaseException) -> tuple[int | None, str, SourceLine] | None:
    """Draft step, phase and innermost line of the user's; None where an exception is not from the user's loop."""
    frames = frames_of(error)
    inside = _step_of(frames)
    if inside is None:
        return None
    index, step, phase = inside
    source = _users_line(frames[index:])
    return (step, phase, source) if source is not None else None


def _users_line(frames: Frames) -> SourceLine | None:
    users = [(f.f_code.co_filename, line) for f, line in frames if _is_of_users(f.f_code.co_filename)]
    return SourceLine.of(*users[-1]) if users else None


def _is_of_users(file: str) -> bool:
    return not ir.is_own_file(file) and not file.startswith("<frozen")


def _step_of(frames: Frames) -> tuple[int, int | None, str] | None:
    """The innermost function of the loop among ``frames``: which it is, its step, and the phase."""
    for index in reversed(range(len(frames) - 1)):
        frame, called = frames[index][0], frames[index + 1][0].f_code.co_name
        if frame.f_code in _STEPS:
            return index + 1, frame.f_locals.get("step", 0), called
        if frame.f_code is loop.build_metadata.__code__:
            return index + 1, frame.f_locals["step"], "refresh"
        if frame.f_code is loop.run_hook.__code__:
            return index + 1, None, str(frame.f_locals["name"])
        if frame.f_code is loop.prefill.__code__:
            return index + 1, 0, "prefill"
    return None
