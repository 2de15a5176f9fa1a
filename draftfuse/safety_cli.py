"""What the commands ``lint``, ``audit`` and ``bisect`` print and return."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from draftfuse.bisect import bisect, write_reproduction
from draftfuse.compiler import compile
from draftfuse.errors import InvalidOptionError
from draftfuse.lint import lint
from draftfuse.loading import dummy_batch, load


def run_lint(target: str, as_json: bool = False) -> int:
    """Print the findings of ``module:factory``; 1 where there is an error, else 0."""
    findings = lint(load(target))
    if as_json:
        print(json.dumps([asdict(f) for f in findings], default=str))
    else:
        print("\n".join(map(str, findings)) or "nothing found")
    return int(any(f.is_error for f in findings))


def run_audit(target: str, steps: int | None = None, compiler: str = "inductor", as_json: bool = False) -> int:
    """Print the audit of ``module:factory`` on a dummy batch; 1 where it diverges, else 0."""
    fused = compile(spec := load(target), compiler=compiler)
    report = fused.audit(dummy_batch(spec), steps)
    if as_json:
        print(report.to_json())
    else:
        Console().print(report.table() if report.divergences else report.headline())
        print("\n".join(report.lines()))
    return int(not report.ok)


def run_bisect(
    target: str, out: Path, steps: int | None = None, compiler: str = "inductor", as_json: bool = False
) -> int:
    """Print what makes ``module:factory`` differ and write a reproduction; 1 where it differs, else 0.

    Raises:
        InvalidOptionError: ``out`` cannot be written.
    """
    require_file(out)
    verdict = bisect(lambda: load(target), compiler, steps)
    written = None if verdict.culprit is None else str(out)
    if written is not None:
        write_reproduction(out, target, verdict, steps)
    if as_json:
        trials = [{"name": trial.name, "equal": trial.report.ok} for trial in verdict.trials]
        print(json.dumps({"culprit": verdict.culprit, "trials": trials, "reproduction": written}))
    else:
        print("\n".join([str(verdict), *([f"reproduction: {out}"] if written else [])]))
    return int(written is not None)


def require_file(out: Path) -> None:
    """Raise :class:`InvalidOptionError` unless ``out`` can be a file: that shows before minutes of compiling."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        todo = "Name a file in a folder that is there."
        raise InvalidOptionError("the reproduction has no place", out, "a file name", todo)
