"""``draftfuse.compile``: check what came, and make the object that compiles on first use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from draftfuse import validate
from draftfuse.build import Settings
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
) -> FusedDraft:
    """Compile the draft loop of ``speculator`` into one callable (and, on CUDA, one graph a request capacity).

    Args:
        speculator: an object with the names that :class:`draftfuse.Speculator` documents.
        num_speculative_tokens: the largest k of a call; the speculator's own by default.
        request_capacities: ``"pow2"`` (1, 2, 4, ..., max_num_reqs) or an explicit list of batch sizes to pad to.
        mode: ``"auto"`` fuses where that is safe and falls back with a reason; ``"fused"`` raises where it would fall
            back; ``"split"`` and ``"eager"`` force those.
        compiler: ``"inductor"``, or ``"none"`` for the eager kernels, bit-exact with them at the same capacity.
        cudagraph: False leaves capturing to the caller.
        pool: a CUDA graph memory pool to share.
        disable: names of passes to leave out.
        dump: a folder for the graph after each pass.

    Returns:
        A :class:`FusedDraft`. Tracing and code generation happen in ``capture()`` or in the first call.

    Raises:
        InvalidSpeculatorError: an attribute is missing or has a wrong type, dtype or shape.
        InvalidOptionError: an option has no meaning.
    """
    validate.check_option("mode", mode, validate.MODES)
    validate.check_option("compiler", compiler, validate.COMPILERS)
    validate.check_speculator(speculator)
    _check_passes(disable)
    if num_speculative_tokens is not None:
        validate.check_k(num_speculative_tokens, speculator.num_speculative_tokens)
    capacities = validate.check_capacities(request_capacities, speculator.max_num_reqs)
    settings = Settings(compiler=compiler, disable=frozenset(disable), dump=dump)
    largest = speculator.num_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
    return FusedDraft(speculator, capacities, mode, cudagraph, pool, settings, largest)


def _check_passes(disable: Collection[str]) -> None:
    from draftfuse.lowering.effects import hidden_reads
    from draftfuse.lowering.generated import register_refresh
    from draftfuse.passes import name_of, pipeline

    known = [name_of(p) for p in pipeline(register=register_refresh, hidden_reads=hidden_reads)]
    unknown = sorted(set(disable) - set(known))
    if unknown:
        raise InvalidOptionError("disable names unknown passes", unknown, f"names among {known}", "Correct the names.")
