"""Equal paths through Python are equal logs, and others are not."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from draftfuse import path_log
from draftfuse.path_log import PathLog, Traced

KINDS: list[type[PathLog]] = [path_log.Monitored if sys.version_info >= (3, 12) else Traced]
MINE = __file__


def log_of(kind: type[PathLog], run: Callable[[], object]) -> list[Any]:
    log = kind(lambda file: file == MINE)
    with log:
        run()
    return log.places


def ternary(step: int) -> int:
    return 1 if step > 2 else step - step


def short_circuit(step: int) -> bool:
    return step > 2 or step < 99


def chosen(step: int) -> int:
    return (ternary, lambda value: 1)[step > 2](0)


def items(step: int) -> Iterator[int]:
    yield from range(step)


def consumed(step: int) -> int:
    return sum(1 for _ in items(step)) and 0


def raised(step: int) -> None:
    try:
        {3: 1}[step]
    except KeyError:
        return


def matched(step: int) -> int:
    match step:
        case 3:
            return 0
        case _:
            return 0


def left_early(step: int) -> int:
    for i in range(5):
        if i == step:
            break
    return 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "function", [ternary, short_circuit, chosen, consumed, raised, matched, left_early], ids=lambda f: f.__name__
)
def test_another_decision_is_another_path(kind: type[PathLog], function: Callable[[int], object]) -> None:
    log = kind(lambda file: file == MINE)
    marks = []
    with log:
        for step in (2, 2, 3):
            function(step)
            marks.append(len(log.places))
    first, second, third = log.places[: marks[0]], log.places[marks[0] : marks[1]], log.places[marks[1] :]
    assert first == second
    assert third != second


@pytest.mark.parametrize("kind", KINDS)
def test_code_of_others_is_not_logged(kind: type[PathLog]) -> None:
    assert log_of(kind, lambda: None)
    log = kind(lambda file: False)
    with log:
        ternary(2)
    assert log.places == []


@pytest.mark.parametrize("kind", KINDS)
def test_other_threads_are_not_logged(kind: type[PathLog]) -> None:
    def threaded() -> None:
        thread = threading.Thread(target=ternary, args=(2,))
        thread.start()
        thread.join()

    codes = {place[0] for place in log_of(kind, threaded)}
    assert id(ternary.__code__) not in codes
    assert id(ternary.__code__) in {place[0] for place in log_of(kind, lambda: ternary(2))}


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_put_back(kind: type[PathLog]) -> None:
    with pytest.raises(ZeroDivisionError):
        log_of(kind, lambda: 1 / 0)
    assert gc.isenabled()
    assert sys.gettrace() is None or kind is not Traced
    again = [log_of(kind, lambda: ternary(2)) for _ in range(2)]
    assert [len(a) for a in again] == [len(again[0])] * 2
    assert all(again)


def test_the_log_of_this_interpreter() -> None:
    assert type(path_log.path_log(lambda file: True)) is KINDS[0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 has no sys.monitoring")
def test_without_a_free_number_nothing_is_logged() -> None:
    if sys.version_info >= (3, 12):
        taken = [tool for tool in path_log.TOOLS if sys.monitoring.get_tool(tool) is None]
        for tool in taken:
            sys.monitoring.use_tool_id(tool, "another")
        with pytest.raises(path_log.NoPathLog, match="hold every number"):
            log_of(path_log.Monitored, lambda: ternary(2))
        assert gc.isenabled()
        for tool in taken:
            sys.monitoring.free_tool_id(tool)
        assert log_of(path_log.Monitored, lambda: ternary(2))
