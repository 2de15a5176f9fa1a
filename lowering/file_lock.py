"""One process at a time, on one machine."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold ``file`` alone; others wait. It is made where it is missing; where it cannot be made, nobody waits."""
    with ExitStack() as stack:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(file.open("a")), fcntl.LOCK_EX)
        yield
