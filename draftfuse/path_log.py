"""Which way the user's Python goes while a loop runs: what it calls, and what it decides.

Two runs with equal logs ran the same bytecode of the same functions in the same order. Python 3.12 and later say so
themselves (:mod:`sys.monitoring`), at no cost to code that nobody watches; before, each bytecode is noted
(:func:`sys.settrace`). Code of draftfuse, torch and Python itself is in neither log, nor is that of other threads.
"""

from __future__ import annotations

import gc
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

Watched = Callable[[str], bool]  # whether code of a file is logged
Place = tuple[int, ...]  # a code object and a bytecode of it; where that decides, the next one


class NoPathLog(Exception):
    """This interpreter cannot log now; the message says why."""


class PathLog(ABC):
    """The path inside a ``with`` block, as :attr:`places`."""

    def __init__(self, is_watched: Watched) -> None:
        self.places: list[Place] = []
        self._is_watched = is_watched
        # By id: the code object, alive so that ids stay unique, and whether it is the user's.
        self._codes: dict[int, tuple[CodeType, bool]] = {}
        self._collects = True

    def __enter__(self) -> PathLog:
        self._collects = gc.isenabled()
        gc.disable()  # finalizers and callbacks of a collection would run anywhere
        try:
            self._begin()
        except NoPathLog:
            self._restore()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()
        self._restore()

    def _restore(self) -> None:
        if self._collects:
            gc.enable()

    @property
    def watched(self) -> list[CodeType]:
        """The user's code that ran."""
        return [code for code, is_users in self._codes.values() if is_users]

    def _watches(self, code: CodeType) -> bool:
        if id(code) not in self._codes:
            self._codes[id(code)] = code, self._is_watched(code.co_filename)
        return self._codes[id(code)][1]

    @abstractmethod
    def _begin(self) -> None:
        """Start to log."""

    @abstractmethod
    def _end(self) -> None:
        """Leave nothing behind."""


class Traced(PathLog):
    """Every bytecode, by a trace function."""

    _before: Any = None

    def _begin(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._call)

    def _end(self) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._watches(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.places.append((id(frame.f_code), frame.f_lasti))
        return self._opcode


if sys.version_info >= (3, 12):
    MONITORING = sys.monitoring
    EVENTS = MONITORING.events
    TOOLS = (4, 3, 5, 2, 1, 0)  # first the numbers that Python reserves for nobody
    CALLS = (EVENTS.PY_START, EVENTS.PY_RESUME)
    ERRORS = (EVENTS.PY_THROW, EVENTS.RAISE, EVENTS.EXCEPTION_HANDLED)
    DECISIONS = (EVENTS.BRANCH_LEFT, EVENTS.BRANCH_RIGHT) if sys.version_info >= (3, 14) else (EVENTS.BRANCH,)

    class Monitored(PathLog):
        """Starts, decisions and exceptions of the user's functions, as the interpreter reports them."""

        _tool, _thread = -1, 0

        def _begin(self) -> None:
            self._tool, self._thread = self._free(), threading.get_ident()
            MONITORING.use_tool_id(self._tool, "draftfuse")
            MONITORING.restart_events()
            for event in CALLS:
                MONITORING.register_callback(self._tool, event, self._start)
            for event in (*DECISIONS, *ERRORS):
                MONITORING.register_callback(self._tool, event, self._decide)
            MONITORING.set_events(self._tool, sum(CALLS) + sum(ERRORS))

        def _free(self) -> int:
            """A number under which nothing monitors."""
            found = next((tool for tool in TOOLS if MONITORING.get_tool(tool) is None), None)
            if found is None:
                raise NoPathLog("debuggers and profilers hold every number of sys.monitoring")
            return found

        def _end(self) -> None:
            MONITORING.set_events(self._tool, 0)
            for code, watched in self._codes.values():
                if watched:
                    MONITORING.set_local_events(self._tool, code, 0)
            for event in (*CALLS, *DECISIONS, *ERRORS):
                MONITORING.register_callback(self._tool, event, None)
            MONITORING.free_tool_id(self._tool)

        def _start(self, code: CodeType, offset: int) -> Any:
            is_new = id(code) not in self._codes
            if not self._watches(code):
                return MONITORING.DISABLE
            if is_new:
                MONITORING.set_local_events(self._tool, code, sum(DECISIONS))
            return self._decide(code, offset)

        def _decide(self, code: CodeType, offset: int, then: Any = 0) -> Any:
            if threading.get_ident() == self._thread and self._watches(code):
                self.places.append((id(code), offset, then if isinstance(then, int) else 0))
            return None


def path_log(is_watched: Watched) -> PathLog:
    """The log of this interpreter."""
    if sys.version_info >= (3, 12):
        return Monitored(is_watched)  # from 3.13 on a trace function misses bytecode of frames that just began
    return Traced(is_watched)
