"""The command line: ``draftfuse <command>``. Each command imports what it needs when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, help="The compiler for draft loops of speculative decoding.")


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """The compiler for draft loops of speculative decoding."""
    if version:
        from draftfuse import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command()
def demo(
    text: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Take prompts from this file.")] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Draft tokens a step.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    compiler: Annotated[str, typer.Option(help="inductor, or none for the eager kernels.")] = "inductor",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each request.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 4,
    device: Annotated[str, typer.Option(help="cpu or cuda; cuda where there is one.")] = "",
) -> None:
    """Complete real text with the packaged model in three modes, and compare drafts and cost."""
    import torch
    from rich.console import Console

    from draftfuse import demo as module

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = text.read_text(encoding="utf-8", errors="replace") if text else None
    result = module.demo(module.Options(source, k, tokens, requests, compiler, place))
    if as_json:
        typer.echo(json.dumps(result))
    else:
        module.show(result, Console())
    raise typer.Exit(0 if result["tokens_match"] else 1)


@app.command()
def backends(as_json: Annotated[bool, typer.Option("--json", help="Print every field, as JSON.")] = False) -> None:
    """List the attention backends: how each refreshes its metadata, and whether it runs here."""
    from draftfuse.backends_cli import render_backends

    typer.echo(render_backends(as_json))
