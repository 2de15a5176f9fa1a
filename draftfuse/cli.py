"""The command line: ``draftfuse <command>``. Each command imports what it needs when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from draftfuse.bench.command import bench
from draftfuse.errors import DraftfuseError


class Command(TyperCommand):
    """A user's mistake ends with its message and exit code 2, not with a traceback; under ``--json`` also as JSON."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DraftfuseError as error:
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            if ctx.params.get("as_json"):
                typer.echo(json.dumps({"error": error.as_dict()}))
            raise typer.Exit(2) from error


MOST_DRAFTS = 32  # the packaged head was trained for a few; more only compile longer
HELP = (
    "Compiler of draft loops for speculative decoding. Exit codes: 0 all is well, 1 something was found, "
    "2 the command was refused."
)
app = typer.Typer(no_args_is_help=True, add_completion=False, help=HELP)
app.command(cls=Command)(bench)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """The compiler for draft loops of speculative decoding."""
    if version:
        from draftfuse import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command(cls=Command)
def demo(
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Take prompts from this file.")] = None,
    k: Annotated[int, typer.Option("--k", min=2, max=MOST_DRAFTS, help="Draft tokens a step.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    compiler: Annotated[str, typer.Option(help="inductor, or none for the eager kernels.")] = "inductor",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each request.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda; cuda where there is one.")] = "",
) -> None:
    """Complete real text in three modes, and compare drafts and cost; exit code 1 where drafts differ."""
    import torch
    from rich.console import Console

    from draftfuse import demo as module
    from draftfuse.environment import check_device
    from draftfuse.validate import COMPILERS, check_option

    check_option("compiler", compiler, COMPILERS)
    place = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    source = text.read_text(encoding="utf-8", errors="replace") if text else None
    result = module.demo(module.Options(source, k, tokens, requests, compiler, place))
    if as_json:
        typer.echo(json.dumps(result))
    else:
        module.show(result, Console())
    raise typer.Exit(0 if result["tokens_match"] else 1)


@app.command(cls=Command)
def backends(as_json: Annotated[bool, typer.Option("--json", help="Print every field, as JSON.")] = False) -> None:
    """List the attention backends: how each refreshes its metadata, and whether it runs here."""
    from draftfuse.backends_cli import render_backends

    typer.echo(render_backends(as_json))


@app.command(cls=Command)
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False) -> None:
    """Say what is installed, which integration applies, and what would be missing."""
    from dataclasses import asdict

    from draftfuse import doctor as module

    findings = module.doctor()
    typer.echo(json.dumps([asdict(f) for f in findings]) if as_json else module.render(findings))


Target = Annotated[str, typer.Argument(help="module:factory, or path/to/file.py:factory; it returns the speculator.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Draft tokens; all that the speculator has by default.")]
Compiler = Annotated[str, typer.Option(help="inductor, or none for the eager kernels.")]


@app.command(cls=Command)
def lint(target: Target, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Find what a captured draft loop would freeze, lose or get wrong; exit code 1 where there is an error."""
    from draftfuse.safety_cli import run_lint

    raise typer.Exit(run_lint(target, as_json))


@app.command(cls=Command)
def audit(
    target: Target,
    steps: Steps = None,
    compiler: Compiler = "inductor",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the compiled loop with the eager one, value by value; exit code 1 where they diverge."""
    from draftfuse.safety_cli import run_audit

    raise typer.Exit(run_audit(target, steps, compiler, as_json))


@app.command(cls=Command)
def bisect(
    target: Target,
    out: Annotated[Path, typer.Option(help="Where to write the reproduction.")] = Path("reproduction.py"),
    steps: Steps = None,
    compiler: Compiler = "inductor",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the pass or emission that makes the loop differ, and write a script that shows it; then exit code 1."""
    from draftfuse.safety_cli import run_bisect

    raise typer.Exit(run_bisect(target, out, steps, compiler, as_json))
