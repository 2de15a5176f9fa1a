"""``draftfuse.compile``: check what came, and make the object that compiles on first use."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftfuse import validate
from draftfuse.build import Settings
from draftfuse.dispatch import Ladder
from draftfuse.environment import require_triton_on
from draftfuse.errors import InvalidOptionError
from draftfuse.fused import FusedDraft


def compile(
    speculator: Any,
    *,
    num_speculative_tokens: int | None = None,
    request_capacities: str | Sequence[int] = "pow2",
    mode: str = "auto",
    compiler: str = "inductor",
    cudagraph: bool = True,
    pool: Any = None,
    disable: Collection[str] = (),
    dump: str | Path | None = None,
    emission: str = "segments",
    one_launch: bool = True,
    k_by_num_reqs: Mapping[int, int] | None = None,
    graph_memory_budget: int | None = None,
) -> FusedDraft:
    """Compile the draft loop of ``speculator`` into one callable (and, on CUDA, one graph a request capacity).

    Args:
        speculator: an object with the names that :class:`draftfuse.Speculator` documents.
        num_speculative_tokens: the largest k of a call; the speculator's own by default.
        request_capacities: ``"pow2"`` (1, 2, 4, ..., max_num_reqs) or an explicit list of batch sizes to pad to.
        mode: ``"auto"`` fuses where that is safe and falls back with a reason; ``"fused"`` raises where the loop cannot
            be fused (a call that breaks a guard runs split in both); ``"split"`` and ``"eager"`` force those.
        compiler: ``"inductor"``, or ``"none"`` for the eager kernels, bit-exact with them at the same capacity.
        cudagraph: False leaves capturing to the caller.
        pool: a CUDA graph memory pool to share.
        disable: names of passes to leave out.
        dump: a folder for the graph after each pass.
        emission: ``"segments"`` compiles equal pieces once; ``"whole"`` gives Inductor the whole graph, which takes
            compile time linear in k, and is replaced by segments where its check finds a fault.
        one_launch: prefill and decode of a uniform batch in one graph; False keeps two.
        k_by_num_reqs: how many tokens to draft by batch size (largest batch size -> k) where a call names no k.
        graph_memory_budget: bytes that captured graphs may take; capacities that do not fit are left out.

    Returns:
        A :class:`FusedDraft`. Tracing and code generation happen in ``capture()`` or in the first call.

    Raises:
        InvalidSpeculatorError: an attribute is missing or has a wrong type, dtype or shape.
        InvalidOptionError: an option has no meaning.
        MissingExtraError: the speculator is on a CUDA device, and Triton is not installed.
    """
    validate.check_option("mode", mode, validate.MODES)
    validate.check_option("compiler", compiler, validate.COMPILERS)
    validate.check_option("emission", emission, ("segments", "whole"))
    validate.check_speculator(speculator)
    require_triton_on(speculator.inputs.positions.device)
    _check_passes(disable)
    if dump is not None and Path(dump).exists() and not Path(dump).is_dir():
        raise InvalidOptionError("dump is no folder", str(dump), "a folder, or a name that is free", "Pass another.")
    largest = speculator.num_speculative_tokens
    if num_speculative_tokens is not None:
        largest = validate.check_k(num_speculative_tokens, largest)
    table = validate.check_table(k_by_num_reqs or {}, largest)
    capacities = validate.check_capacities(request_capacities, speculator.max_num_reqs)
    validate.check_budget(graph_memory_budget)
    mode, disabled = ("eager", True) if os.environ.get("DRAFTFUSE_DISABLE") == "1" else (mode, False)
    ladder = Ladder(capacities, largest, one_launch and mode in ("auto", "fused"), table)
    settings = Settings(compiler=compiler, emission=emission, disable=frozenset(disable), dump=dump)
    fused = FusedDraft(speculator, ladder, mode, cudagraph, pool, settings)
    fused.graph_memory_budget = graph_memory_budget
    if disabled:
        fused.report.fall_back("everything", "eager", "DRAFTFUSE_DISABLE=1 is set")
    return fused


def _check_passes(disable: Collection[str]) -> None:
    from draftfuse.lowering.effects import hidden_reads
    from draftfuse.lowering.generated import register_refresh
    from draftfuse.passes import name_of, pipeline

    if isinstance(disable, str):
        raise InvalidOptionError("disable is one text", repr(disable), "a list of names", f"Pass [{disable!r}].")
    known = ["explicit_metadata", *(name_of(p) for p in pipeline(register=register_refresh, hidden_reads=hidden_reads))]
    unknown = sorted(set(disable) - set(known))
    if unknown:
        raise InvalidOptionError("disable names unknown passes", unknown, f"names among {known}", "Correct the names.")
