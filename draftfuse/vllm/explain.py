"""``draftfuse.vllm.explain(llm)``: what was fused, which backend refreshes how, and what fell back."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from draftfuse.errors import InvalidOptionError
from draftfuse.vllm.plan import plan_of

METHOD = "draftfuse_explain"  # what the plug-in adds to vLLM's worker, so that a call by name reaches other processes


def explain(llm: Any) -> str:
    """What draftfuse did in each worker of ``llm``, as text; prints nothing.

    Args:
        llm: a ``vllm.LLM``, or anything with ``collective_rpc``.

    Raises:
        InvalidOptionError: it is neither.
    """
    if not callable(getattr(llm, "collective_rpc", None)):
        todo = "Pass the engine that drafts."
        raise InvalidOptionError("this is no engine", type(llm).__name__, "a vllm.LLM, which has collective_rpc", todo)
    texts = llm.collective_rpc(METHOD)
    if len(set(texts)) == 1:
        return str(texts[0])
    return "\n".join(f"worker {rank}: {text}" for rank, text in enumerate(texts))


def add_to_worker(module: ModuleType) -> None:
    """Give vLLM's worker class the method that :func:`explain` calls."""
    setattr(module.WorkerBase, METHOD, explain_worker)


def explain_worker(worker: Any) -> str:
    """The text of one worker."""
    speculator = getattr(getattr(worker, "model_runner", None), "speculator", None)
    if speculator is None:
        return "draftfuse: this engine has no speculator of the second model runner; nothing is changed"
    plan = plan_of(speculator)
    if plan is None:
        name = type(speculator).__name__
        return f"draftfuse: {name} runs as vLLM ships it (not asked for, or a speculator that draftfuse does not know)"
    return f"draftfuse: {plan.explain()}"
