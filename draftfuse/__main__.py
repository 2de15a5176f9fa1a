"""``python -m draftfuse`` is ``draftfuse``."""

from draftfuse.cli import app

if __name__ == "__main__":
    app()
