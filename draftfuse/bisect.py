"""Find the pass, or the emission, that makes a loop differ from the eager one, and write a script that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftfuse.audit_report import AuditReport
from draftfuse.loading import dummy_batch
from draftfuse.lowering.effects import hidden_reads
from draftfuse.lowering.generated import register_refresh
from draftfuse.passes import name_of, pipeline


@dataclass(frozen=True)
class Trial:
    """One way to compile the loop, and what its audit said."""

    name: str
    options: dict[str, Any]
    report: AuditReport


@dataclass(frozen=True)
class Verdict:
    """What makes the loop differ; None where it does not differ, ``"every build"`` where nothing helps."""

    culprit: str | None
    trials: list[Trial]

    def __str__(self) -> str:
        lines = [f"{t.name}: {'equal' if t.report.ok else 'differs'}" for t in self.trials]
        return "\n".join([*lines, f"culprit: {self.culprit or 'none, the loop equals eager'}"])


def bisect(factory: Callable[[], Any], compiler: str = "inductor", k: int | None = None) -> Verdict:
    """Compile and audit ``factory()`` whole, then with less and less of the compiler, until it equals eager."""
    trials: list[Trial] = []
    for name, options in _attempts(compiler):
        trials.append(Trial(name, options, _audited(factory, options, k)))
        if trials[-1].report.ok:
            return Verdict(None if len(trials) == 1 else _culprit(name), trials)
    return Verdict("every build", trials)


def _attempts(compiler: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "everything", {"compiler": compiler}
    if compiler != "none":
        yield "without the compiler", {"compiler": "none"}
    names = pass_names()
    for name in names:
        yield f"without {name}", {"compiler": compiler, "disable": (name,)}
    yield "without any pass", {"compiler": "none", "disable": names}


def pass_names() -> tuple[str, ...]:
    """Every pass of the pipeline, in order."""
    return ("explicit_metadata", *map(name_of, pipeline(register=register_refresh, hidden_reads=hidden_reads)))


def _culprit(name: str) -> str:
    return "the emission (compiler='inductor')" if name == "without the compiler" else name.removeprefix("without ")


def _audited(factory: Callable[[], Any], options: dict[str, Any], k: int | None) -> AuditReport:
    from draftfuse.compiler import compile

    spec = factory()
    return compile(spec, **options).audit(dummy_batch(spec), k)


def reproduction(target: str, verdict: Verdict, k: int | None = None) -> str:
    """A script that audits the loop as it is and without the culprit."""
    module, _, factory = target.partition(":")
    helped = [t.options for t in verdict.trials if t.report.ok]
    options = [verdict.trials[0].options, *helped]
    return _SCRIPT.format(target=target, module=module, factory=factory, culprit=verdict.culprit, options=options, k=k)


def write_reproduction(path: Path, target: str, verdict: Verdict, k: int | None = None) -> None:
    """Write :func:`reproduction` to ``path``."""
    path.write_text(reproduction(target, verdict, k), encoding="utf-8")


_SCRIPT = '''"""Shows that {target} differs from the eager loop. Culprit: {culprit}."""

import draftfuse
from draftfuse.loading import dummy_batch, load

for options in {options!r}:
    spec = load({target!r})
    report = draftfuse.compile(spec, **options).audit(dummy_batch(spec), k={k!r})
    print(options)
    print(report)
'''
