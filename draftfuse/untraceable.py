"""What Dynamo refuses, in one error: the user's line, what is wrong there, and advice that helps with just that.

Dynamo's own words are long; they stay in the exception that is the cause of this one.
"""

from __future__ import annotations

import re

from draftfuse.errors import SourceLine, UntraceableLoopError
from draftfuse.passes import ir

KEEP = "Keep the value in a tensor, and use torch.where instead of Python."
_CHANGE = "Write it with tensor operations, or decide it before the loop."
# The class of findings, and what helps, by a part of Dynamo's text; the first that is found.
_KINDS = (
    ("Data-dependent branching", "python-branch", KEEP),
    ("Could not guard on data-dependent", "python-branch", KEEP),
    ("ContextVar", "context-read", "Read it once, before the loop, into an attribute."),
    ("tolist", "host-sync", KEEP),
    ("item()", "host-sync", KEEP),
    ("numpy", "host-sync", "Use torch."),
    ("Generator", "baked-rng", "Draw with draftfuse.ops.gumbel_sample, from seeds and positions in tensors."),
    ("andom", "baked-rng", "Draw with draftfuse.ops.gumbel_sample, from seeds and positions in tensors."),
)
_WORDS = re.compile(r"^\s*(Explanation|Developer debug context): *(?P<text>\S[^\n]*)", re.MULTILINE)
_BRANCHES = re.compile("Data-dependent branching|Could not guard on data-dependent")
_EMPTY = ("Observed exception", "RuntimeError when making", "TypeError when making")  # say nothing of what it was
IN_BUILDER = "In a metadata builder it may stay with mode='auto' or 'split', which build metadata in Python."
IN_LOOP = "mode='eager' runs it as it is; split steps are traced too."


def untraceable(error: BaseException) -> UntraceableLoopError:
    """Turn Dynamo's refusal into one error with the user's file, line and text."""
    reason = str(error).split("\n\nfrom user code")[0].strip()
    in_builder = any(f.name == "build_or_refresh" for f in getattr(error, "real_stack", None) or ())
    name, advice = next(((n, todo) for part, n, todo in _KINDS if part in reason), ("untraceable", _CHANGE))
    fault = UntraceableLoopError(
        "the draft loop cannot be traced",
        _in_short(reason) or type(error).__name__,
        "a loop of tensor operations with control flow on Python values only",
        f"{advice} {IN_BUILDER if in_builder else IN_LOOP}",
        user_line(error),
    )
    fault.in_builder, fault.name = in_builder, name
    return fault


def _in_short(reason: str) -> str:
    """Dynamo's first line, without its advice to users of torch.compile; and its explanation where that says more."""
    first = reason.splitlines()[0] if reason else ""
    if _BRANCHES.search(first):
        return "a branch on the value of a tensor"
    words = [found["text"] for found in _WORDS.finditer(reason)]
    more = words[-1:] if first.startswith(_EMPTY) else words[:1]
    return (" ".join([f"{first}:", *more]) if more else first).rstrip(".")


def user_line(error: BaseException) -> SourceLine | None:
    """The innermost line of the user's code that an exception of Dynamo (or any exception) points at."""
    stack = getattr(error, "real_stack", None)
    found = [SourceLine.of(f.filename, f.lineno or 0) for f in stack or ()]
    cause: BaseException | None = error
    while cause is not None:
        tb = cause.__traceback__
        while tb is not None:
            found.append(SourceLine.of(tb.tb_frame.f_code.co_filename, tb.tb_lineno))
            tb = tb.tb_next
        cause = cause.__cause__
    users = [f for f in found if not ir.is_own_file(f.file) and not f.file.startswith("<")]
    stacked = users[: len(stack or ())]
    return next(iter(reversed(stacked or users)), None)
