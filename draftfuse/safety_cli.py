"""What the commands ``lint``, ``audit`` and ``bisect`` print and return."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from draftfuse.bisect import bisect, write_reproduction
from draftfuse.compiler import compile
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
    spec = load(target)
    report = compile(spec, compiler=compiler).audit(dummy_batch(spec), steps)
    if as_json:
        print(report.to_json())
    else:
        Console().print(report.table() if report.divergences else report.headline())
        print("\n".join(report.notes))
    return int(not report.ok)


def run_bisect(target: str, out: Path, steps: int | None = None, compiler: str = "inductor") -> int:
    """Print what makes ``module:factory`` differ and write a reproduction; 1 where it differs, else 0."""
    verdict = bisect(lambda: load(target), compiler, steps)
    print(verdict)
    if verdict.culprit is None:
        return 0
    write_reproduction(out, target, verdict, steps)
    print(f"reproduction: {out}")
    return 1
