"""``draftfuse.compile``: check what came, and make the object that compiles on first use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftfuse import validate
from draftfuse.build import Settings
from draftfuse.dispatch import Ladder
from draftfuse.environment import require_triton_on
from draftfuse.fused import FusedDraft
from draftfuse.passes.switch import is_on
from draftfuse.variables import DISABLE, check_folders, check_variables


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
        InvalidOptionError: an option, or an environment variable of draftfuse, has no meaning.
        MissingExtraError: the speculator is on a CUDA device, and Triton is not installed.
    """
    validate.check_option("mode", mode, validate.MODES)
    validate.check_option("compiler", compiler, validate.COMPILERS)
    validate.check_option("emission", emission, ("segments", "whole"))
    validate.check_speculator(speculator)
    require_triton_on(speculator.inputs.positions.device)
    for name, value in {"cudagraph": cudagraph, "one_launch": one_launch}.items():
        validate.check_flag(name, value)
    left_out = validate.check_disable(disable, _passes())
    validate.check_dump(dump)
    validate.check_pool(pool)
    largest = speculator.num_speculative_tokens
    if num_speculative_tokens is not None:
        largest = validate.check_largest(num_speculative_tokens, largest)
    table = validate.check_table({} if k_by_num_reqs is None else k_by_num_reqs, largest)
    capacities = validate.check_capacities(request_capacities, speculator.max_num_reqs)
    validate.check_budget(graph_memory_budget)
    check_variables()
    if compiler == "inductor" and mode != "eager":
        check_folders()
    mode, disabled = ("eager", True) if is_on(DISABLE) else (mode, False)
    ladder = Ladder(capacities, largest, one_launch and mode in ("auto", "fused"), table)
    settings = Settings(compiler=compiler, emission=emission, disable=left_out, dump=dump)
    fused = FusedDraft(speculator, ladder, mode, cudagraph, pool, settings)
    fused.graph_memory_budget = graph_memory_budget
    if disabled:
        fused.report.fall_back("everything", "eager", f"{DISABLE}=1 is set")
    return fused


def _passes() -> list[str]:
    """The names that ``disable`` takes."""
    from draftfuse.lowering.effects import hidden_reads
    from draftfuse.lowering.generated import register_refresh
    from draftfuse.passes import name_of, pipeline

    return ["explicit_metadata", *map(name_of, pipeline(register=register_refresh, hidden_reads=hidden_reads))]
