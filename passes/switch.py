"""Environment variables that switch something: one of a few values each, and anything else is an error."""

from __future__ import annotations

import os
from collections.abc import Sequence

from draftfuse.errors import InvalidOptionError

OFF, ON = "0", "1"
VLLM_COMPILER = "DRAFTFUSE_VLLM_COMPILER"
CHECK = "DRAFTFUSE_CHECK"  # the IR is verified after every pass


def choice(name: str, values: Sequence[str] = (OFF, ON), default: str = OFF) -> str:
    """The value of the variable ``name``, ``default`` where it is unset or empty.

    Raises:
        InvalidOptionError: it is set to something else.
    """
    value = os.environ.get(name) or default
    if value not in values:
        expected = f"{' or '.join(values)} ({default} if unset)"
        raise InvalidOptionError(f"{name} has no such value", repr(value), expected, "Correct or unset the variable.")
    return value


def is_on(name: str) -> bool:
    """Whether the variable ``name`` is 1 rather than 0; unset is 0."""
    return choice(name) == ON
