"""What surrounds every call: one at a time, without autograd; and events for other streams."""

from __future__ import annotations

import threading
from typing import Any

import torch

from draftfuse.errors import ClosedError, ConcurrentUseError


def event_of_now() -> Any:
    """An event behind all work so far, on whatever stream that is: the first look may come from another one."""
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    event.record()
    return event


class Exclusive:
    """One call at a time, on an open loop, without autograd. A plain class: this is on the path of every replay."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self.grad = False

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            todo = "Use one compiled loop a thread, or a lock of your own."
            raise ConcurrentUseError("two threads use one compiled loop", "a second call", "one call at a time", todo)
        if self.closed:
            self.lock.release()
            todo = "Compile the speculator again."
            raise ClosedError("the compiled loop is closed", "a call after close()", "no further call", todo)
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *exception: object) -> None:
        torch._C._set_grad_enabled(self.grad)
        self.lock.release()
