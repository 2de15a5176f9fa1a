"""See the package docstring below once loaded as ``draftfuse.lowering``."""

if not __name__.startswith("draftfuse."):
    raise ImportError("import draftfuse.lowering, not lowering: a second copy of its operators would shadow the first")
