"""Environment variables that a draft loop reads while it runs in Python: a trace keeps what they held, unguarded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftfuse.errors import SourceLine
from draftfuse.step_log import INSTALLED, is_watched

_BETWEEN = (os.__file__, "<frozen os>", "<frozen _collections_abc>")  # os.getenv, and what os.environ.get is made of


@contextmanager
def watched_environment() -> Iterator[dict[SourceLine, str]]:
    """Inside, reads of ``os.environ`` are noted; yields the user's line of each, with the variable's name."""
    kind: Any = type(os.environ)
    plain = kind.__getitem__
    found: dict[SourceLine, str] = {}

    def read(environment: Any, key: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
            frame = frame.f_back
        file = frame.f_code.co_filename if frame is not None else ""
        if file and is_watched(file) and not any(part in file for part in INSTALLED):
            found[SourceLine.of(file, frame.f_lineno)] = str(key)
        return plain(environment, key)

    try:
        kind.__getitem__ = read
        yield found
    finally:
        kind.__getitem__ = plain
