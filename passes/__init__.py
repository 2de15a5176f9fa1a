"""See the package docstring below once loaded as ``draftfuse.passes``."""

if not __name__.startswith("draftfuse."):
    raise ImportError("import draftfuse.passes, not passes: a second copy of its operators would shadow the first")
