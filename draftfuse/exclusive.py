"""What surrounds every call: one at a time, without autograd; and events for other streams."""

from __future__ import annotations

import threading
from typing import Any

import torch

from draftfuse.environment import device_lost
from draftfuse.errors import ClosedError, ConcurrentUseError, DeviceLostError, DraftfuseError, LostRankError
from draftfuse.failures import failed_loop
from draftfuse.meeting import Ranks, event_of_stream


def event_of_now() -> Any:
    """An event behind all work so far, on whatever stream that is: the first look may come from another one."""
    torch.cuda.synchronize()
    return event_of_stream()


class Exclusive:
    """One call at a time, on an open loop, without autograd. A plain class: this is on the path of every replay.

    What the user's code raises in a step that runs in Python ends in :class:`FailedLoopError`.
    A call in which a collective fails ends in :class:`LostRankError`, and so does the loop until :meth:`reopen`.
    After a :class:`DeviceLostError` nothing is launched any more: the loop can only be closed.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.lock = threading.Lock()
        self.closed = False
        self.grad = False
        self.ranks = ranks
        self.lost: LostRankError | None = None
        self.device_lost: DeviceLostError | None = None

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            todo = "Use one compiled loop a thread, or a lock of your own."
            raise ConcurrentUseError("two threads use one compiled loop", "a second call", "one call at a time", todo)
        if self.closed:
            self.lock.release()
            raise self._refusal()
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        torch._C._set_grad_enabled(self.grad)
        try:
            if error is not None:
                self._failed(error)
        finally:
            self.lock.release()

    def _failed(self, error: BaseException) -> None:
        found: DraftfuseError | None = device_lost(error)
        if isinstance(found, DeviceLostError):
            self.device_lost, self.closed = found, True
        elif (found := self.ranks.explain(error)) is not None:
            self.lost, self.closed = found, True
        else:
            found = failed_loop(error)
        if found is not None and found is not error:
            raise found from error

    def _refusal(self) -> DraftfuseError:
        if (first := self.device_lost) is not None:
            return DeviceLostError("the compiled loop is on a device that is lost", first.came, "no call", first.todo)
        if self.lost is not None:
            todo = "Call recapture() on all ranks once they are back, or close()."
            return ClosedError("the compiled loop has lost a rank", f"a call after: {self.lost.what}", "none", todo)
        todo = "Compile the speculator again."
        return ClosedError("the compiled loop is closed", "a call after close()", "no further call", todo)

    @property
    def is_settled(self) -> bool:
        """Whether the loop was closed by its user, so that nothing is left to drop."""
        return self.closed and self.lost is None and self.device_lost is None

    def reopen(self, to_close: bool = False) -> None:
        """Admit calls again after a lost rank; after a lost device, only the one that drops everything."""
        if self.lost is not None or (to_close and self.device_lost is not None):
            self.lost, self.closed = None, False
