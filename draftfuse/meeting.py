"""Where ranks meet beside their collectives: on torch.distributed's store, with a timeout, so that nobody is waited
for without a name.

A loop with collectives meets after each trace, to compare them, and after each build, before the first of them runs.
When a collective fails or takes too long, every rank posts where it stands; the ranks that post nothing are lost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from draftfuse.collectives import compare, from_text, signature_of, to_text
from draftfuse.environment import first_line
from draftfuse.errors import InvalidOptionError, LostRankError
from draftfuse.groups import default_store, group_named, is_parallel, timeout_of
from draftfuse.places import Place, place_of
from draftfuse.trace import Trace

POLL_SECONDS, GRACE_SECONDS = 0.02, 1.0
FAILED = "failed: "
ADVICE = "Look at the log of that rank. Then call recapture() on all ranks, or close the loop."
_LOOPS: Counter[str] = Counter()  # compiled loops of this process by group: ranks compile theirs in one order


class Board:
    """Texts that the ranks of one process group post for each other."""

    def __init__(self, group_name: str = "") -> None:
        self.group = group_named(group_name)
        self.ranks: list[int] = dist.get_process_group_ranks(self.group)
        self.rank, self.store = dist.get_rank(), default_store()

    @property
    def timeout(self) -> float:
        """Seconds after which the group gives up."""
        return timeout_of(self.group)

    def post(self, place: str, text: str) -> None:
        """Leave ``text`` at ``place``."""
        self.store.set(f"draftfuse/{place}/{self.rank}", text)

    def read(self, place: str, seconds: float) -> dict[int, str]:
        """What each rank has left at ``place``, by rank; waits for all, ``seconds`` at most."""
        end, found = time.monotonic() + seconds, dict[int, str]()
        while True:
            for rank in self.ranks:
                key = f"draftfuse/{place}/{rank}"
                if rank not in found and self.store.check([key]):
                    found[rank] = self.store.get(key).decode()
            if len(found) == len(self.ranks) or time.monotonic() >= end:
                return dict(sorted(found.items()))
            time.sleep(POLL_SECONDS)


class Ranks:
    """The ranks that one compiled loop runs on, as this one of them sees the others."""

    def __init__(self) -> None:
        self.board: Board | None = None
        self.name = ""
        self.span = Place(None, "", "a collective of the loop")  # of the whole loop
        self._meetings: Counter[str] = Counter()

    @contextmanager
    def comparing(self, traced: Trace) -> Iterator[None]:
        """Around what looks at a trace: the ranks go on only if all of them trace the same collectives.

        Raises:
            RankMismatchError: they do not.
            LostRankError: a rank failed, or came to nothing within the timeout of the group.
        """
        signature = signature_of(traced)
        if not signature or not is_parallel():
            yield
            return
        self._open(signature[0].group)
        self.span = Place(signature[0].step, signature[0].phase, f"one of {len(signature)} collectives")
        with self.together("trace", to_text(signature)) as found:
            yield
        compare({rank: from_text(text) for rank, text in found.items()})

    @contextmanager
    def together(self, what: str, text: str = "") -> Iterator[dict[int, str]]:
        """Around what all ranks must get through: a failure is told to the others, who raise :class:`LostRankError`.

        The yielded table has the texts of all ranks once the block has ended.
        """
        found: dict[int, str] = {}
        try:
            yield found
            self._post(what, text)
            if self.board is not None:
                found.update(self._read(what, self.board.timeout))
        except Exception as error:
            with suppress(RuntimeError):  # the store may be gone with its rank
                self._post(what, f"{FAILED}{type(error).__name__}: {' '.join(str(error).split())}")
            raise
        finally:
            self._meetings[what] += 1

    def _open(self, group: str) -> None:
        if self.board is None:
            self.board = Board(group)
            self.name = f"{group}/{_LOOPS[group]}"
            _LOOPS[group] += 1

    def _place(self, what: str) -> str:
        return f"{self.name}/{what}{self._meetings[what]}"

    def _post(self, what: str, text: str) -> None:
        if self.board is not None:
            self.board.post(self._place(what), text)

    def _read(self, what: str, seconds: float) -> dict[int, str]:
        assert self.board is not None
        found = self.board.read(self._place(what), seconds)
        missing = [rank for rank in self.board.ranks if rank not in found]
        failed = {rank: text.removeprefix(FAILED) for rank, text in found.items() if text.startswith(FAILED)}
        if failed:
            rank, text = next(iter(failed.items()))
            what = f"{names([rank])} could not build the draft loop"
            raise lost([rank], self.span, what, text, "a build on each rank")
        if missing:
            came = f"nothing from {names(missing)} within {seconds:g} s"
            what = f"{names(missing)} did not come to build the draft loop (or built one without collectives)"
            raise lost(missing, self.span, what, came, f"all of ranks {self.board.ranks}")
        return found

    def explain(self, error: BaseException) -> LostRankError | None:
        """What to raise instead of ``error``: who is missing, if a collective failed; None where none did."""
        if isinstance(error, LostRankError):
            return error
        cause = error if isinstance(error, RuntimeError) else error.__cause__  # the lint wraps what its probe raises
        if not isinstance(cause, RuntimeError) or not is_parallel():
            return None
        place = place_of(cause)
        return None if place is None else self.missing(place, first_line(cause))

    def missing(self, place: Place, cause: str) -> LostRankError:
        """Post where this rank stands, see who else does, and name the others."""
        try:
            board = self.board or Board()
            spot = f"{self.name or 'eager'}/lost{self._meetings['lost']}"
            earlier = [rank for rank in board.read(spot, 0) if rank != board.rank]
            board.post(spot, str(place))
            found = board.read(spot, self._patience(board, cause))
        except Exception as error:  # the store went down with the rank that held it
            return lost([], place, "a rank is dead, and with it the store", f"{cause}; {error}", "a store that answers")
        self._meetings["lost"] += 1
        absent = [rank for rank in board.ranks if rank not in found]
        if not absent and earlier:
            what = f"{names(earlier)} gave up before this rank came to {place}"
            came = f"{names(earlier[:1])} at {found[earlier[0]]} ({cause})"
            return lost(earlier, place, what, came, "all ranks there at one time")
        what = f"late or dead: {names(absent)}" if absent else "a collective failed on all ranks"
        expected = f"ranks {board.ranks} at {place} within {board.timeout:g} s"
        return lost(absent, place, what, f"{cause}, with {names(list(found))} waiting", expected)

    @staticmethod
    def _patience(board: Board, cause: str) -> float:
        """How long others may take to fail as well: those that no connection to the dead rank breaks must time out."""
        is_timeout = "timed out" in cause.lower() or "timeout" in cause.lower() or "not ready" in cause
        return GRACE_SECONDS if is_timeout else board.timeout + GRACE_SECONDS


def names(ranks: Sequence[int]) -> str:
    """``rank 1`` or ``ranks 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def lost(ranks: Sequence[int], place: Place, what: str, came: str, expected: str) -> LostRankError:
    """The error for ranks that did not come to ``place``."""
    error = LostRankError(what, came, expected, ADVICE, place.source)
    error.ranks, error.step, error.phase = tuple(ranks), place.step, place.phase
    return error


def wait_for(fused: Any, timeout: float | None) -> None:
    """See :meth:`draftfuse.FusedDraft.wait`; called with the loop locked."""
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0):
        todo = "Pass seconds, or None."
        raise InvalidOptionError("the timeout is no time", repr(timeout), "a number of seconds >= 0", todo)
    event = fused._outputs_ready
    if fused.device.type != "cuda":
        return
    if event is None:  # no synchronize here: that would be the wait without an end
        event = fused._outputs_ready = event_of_stream()
    ranks: Ranks = fused.runners.inspector.ranks
    seconds = timeout if timeout is not None else ranks.board.timeout if ranks.board is not None else float("inf")
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() >= end:
            raise ranks.missing(ranks.span, f"the drafts are not ready after {seconds:g} s")
        time.sleep(POLL_SECONDS / 100)


def event_of_stream() -> torch.cuda.Event:
    """An event behind the work of the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event
