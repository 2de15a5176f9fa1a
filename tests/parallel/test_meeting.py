"""What ranks tell each other, without other processes: signatures compared, refusals, the wait for a captured loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftfuse import meeting
from draftfuse.collectives import Collective, compare, from_text, to_text
from draftfuse.errors import ClosedError, LostRankError, RankMismatchError, UnsafeLoopError
from draftfuse.exclusive import Exclusive
from draftfuse.meeting import Ranks, lost, wait_for
from draftfuse.places import DISTRIBUTED, Place


def one(step: int, operation: str = "all_reduce(reduce_op=sum)", line: int = 7) -> Collective:
    return Collective(operation, ("float32[n, 8]",), "0", step, "forward", f"model.py:{line}: reduce(x)")


def test_lines_may_differ_and_all_else_may_not() -> None:
    compare({0: (one(1),), 1: (one(1, line=9),)})
    for other in ((one(2),), (one(1, "broadcast(src=0)"),), (one(1), one(1)), ()):
        with pytest.raises(RankMismatchError):
            compare({0: (one(1),), 1: other})


@pytest.mark.parametrize("odd", [0, 2, 3])
def test_the_rank_that_is_not_like_most_is_named_with_step_and_both_lines(odd: int) -> None:
    usual = (one(1), one(2), one(3))
    signatures = dict.fromkeys(range(4), usual) | {odd: (one(1), one(2, "all_gather()", line=9), one(3))}
    with pytest.raises(RankMismatchError) as caught:
        compare(signatures)
    assert (caught.value.rank, caught.value.step) == (odd, 2)
    assert "on rank " + str(odd) + " all_gather()" in str(caught.value)
    assert "model.py:7: reduce(x)" in str(caught.value)
    assert str(caught.value.source) == "model.py:9: reduce(x)"


def test_a_loop_that_ends_early_is_named_at_the_first_collective_that_it_lacks() -> None:
    with pytest.raises(RankMismatchError, match="no further collective") as caught:
        compare({0: (one(1), one(2)), 1: (one(1), one(2)), 2: (one(1),)})
    assert (caught.value.rank, caught.value.step) == (2, 2)


def test_a_signature_survives_its_way_to_other_ranks() -> None:
    assert from_text(to_text((one(1), one(2)))) == (one(1), one(2))


class Lossy(Ranks):
    """Takes every RuntimeError for a lost rank."""

    def explain(self, error: BaseException) -> LostRankError | None:
        place = Place(2, "sample", "all_reduce")
        return lost([3], place, "rank 3 is late or dead", "timed out", "all") if type(error) is RuntimeError else None


def test_a_loop_refuses_calls_after_a_lost_rank_until_it_is_reopened() -> None:
    guard = Exclusive(Lossy())
    with pytest.raises(ValueError, match="mine"), guard:
        raise ValueError("mine")
    with pytest.raises(LostRankError) as caught, guard:
        raise RuntimeError("gloo")
    assert (caught.value.ranks, caught.value.step, caught.value.phase) == ((3,), 2, "sample")
    with pytest.raises(ClosedError, match="has lost a rank: got a call after: rank 3 is late or dead"), guard:
        pass
    guard.reopen()
    with guard:
        assert guard.lost is None


def test_an_error_outside_a_collective_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "is_parallel", lambda: True)
    guard = Exclusive(Ranks())
    with pytest.raises(RuntimeError, match="of the user"), guard:
        raise RuntimeError("of the user")
    with guard:
        pass


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_error_of_a_collective_that_ran_in_python_is_explained(
    monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    monkeypatch.setattr(meeting, "is_parallel", lambda: True)
    ranks, scope = Ranks(), dict[str, Any]()
    monkeypatch.setattr(ranks, "missing", lambda place, cause: lost([1], place, f"late or dead: {cause}", "", ""))
    exec(compile("def all_reduce():\n    raise RuntimeError('reset')", f"{DISTRIBUTED}fake.py", "exec"), scope)

    def probe() -> None:
        try:
            scope["all_reduce"]()
        except RuntimeError as error:
            raise UnsafeLoopError("the loop fails on dummy rows", "reset", "no error", "") from error

    call = probe if wrapped else scope["all_reduce"]
    with pytest.raises(LostRankError, match="late or dead: reset"), Exclusive(ranks):
        call()


def on_cuda(ready_after: int, ranks: Any) -> Any:
    """A compiled loop whose drafts are ready at the look of that number."""
    looks = iter(range(1_000_000))
    event = SimpleNamespace(query=lambda: next(looks) >= ready_after)
    runners = SimpleNamespace(inspector=SimpleNamespace(ranks=ranks))
    return SimpleNamespace(device=SimpleNamespace(type="cuda"), _outputs_ready=event, runners=runners)


def test_the_wait_for_a_captured_loop_ends_in_an_error_that_names_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    error = lost([1], Place(1, "forward", "one of 6 collectives"), "rank 1 is late or dead", "nothing", "all")
    monkeypatch.setattr(ranks, "missing", lambda place, cause: error)
    wait_for(on_cuda(3, ranks), timeout=30.0)
    with pytest.raises(LostRankError, match="rank 1 is late or dead"):
        wait_for(on_cuda(1_000_000, ranks), timeout=0.05)
