"""``python -m draftfuse.bench``: the command, or, with one JSON argument, a child process of it."""

from __future__ import annotations

import json
import sys

import typer

from draftfuse.bench.command import bench, work
from draftfuse.cli import Command

if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work(json.loads(sys.argv[1]))
    else:
        app = typer.Typer(add_completion=False)
        app.command(cls=Command)(bench)
        app()
