"""The cells of the benchmark: which speculator, how many requests, k, and context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from draftfuse.bench.attention import Backend, backend_named
from draftfuse.bench.layers import Widths
from draftfuse.bench.speculators import BenchSpeculator, EagleHead, Sizes, StandaloneDraft
from draftfuse.errors import InvalidOptionError

REQUESTS, KS, CONTEXTS = (1, 4, 16, 64), (4, 8), (1024, 8192)
SMALL_REQUESTS, SMALL_CONTEXTS = (1, 4), (64,)
ROOM = 64  # tokens that a request may still draft


@dataclass(frozen=True)
class Kind:
    """A measured speculator: its class, its widths on CUDA, and small ones for the CPU."""

    make: Callable[..., BenchSpeculator]
    widths: Widths
    small: Widths
    words: str

    def widths_on(self, device: torch.device) -> Widths:
        """Full widths on CUDA, small ones elsewhere."""
        return self.widths if device.type == "cuda" else self.small


SPECULATORS: dict[str, Kind] = {
    "eagle-a": Kind(
        EagleHead,
        Widths(hidden=4096, heads=32, kv_heads=8, head_size=128, mlp=14336, vocab=32000),
        Widths(hidden=128, heads=4, kv_heads=2, head_size=32, mlp=256, vocab=512),
        "EAGLE head, widths A",
    ),
    "eagle-b": Kind(
        EagleHead,
        Widths(hidden=2048, heads=32, kv_heads=8, head_size=64, mlp=8192, vocab=32000),
        Widths(hidden=64, heads=4, kv_heads=2, head_size=16, mlp=128, vocab=256),
        "EAGLE head, widths B",
    ),
    "draft-28": Kind(
        StandaloneDraft,
        Widths(hidden=1024, heads=16, kv_heads=8, head_size=128, mlp=3072, vocab=151936, layers=28),
        Widths(hidden=64, heads=4, kv_heads=2, head_size=16, mlp=128, vocab=256, layers=3),
        "stand-alone draft, 28 layers, 0.6 B parameters, vocabulary 151,936",
    ),
}


@dataclass(frozen=True)
class Cell:
    """One measured configuration."""

    speculator: str
    requests: int
    k: int
    context: int

    @property
    def name(self) -> str:
        """``eagle-a/r1/k8/c1024``."""
        return f"{self.speculator}/r{self.requests}/k{self.k}/c{self.context}"


def all_cells(device: torch.device) -> list[Cell]:
    """Every cell of ``device``: the full grid on CUDA, a small one elsewhere."""
    full = device.type == "cuda"
    requests, contexts = (REQUESTS, CONTEXTS) if full else (SMALL_REQUESTS, SMALL_CONTEXTS)
    return [Cell(s, r, k, c) for s in SPECULATORS for r in requests for k in KS for c in contexts]


def select(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Cells whose name matches one of ``patterns`` (shell style; ``eagle-a`` alone means ``eagle-a/*``).

    Raises:
        InvalidOptionError: a pattern matches no cell.
    """
    wanted = {p: p if "/" in p else f"{p}/*" for p in patterns}
    for given, pattern in wanted.items():
        if not any(fnmatchcase(c.name, pattern) for c in cells):
            names = [cells[0].name, cells[-1].name] if cells else []
            todo = "Write speculator/r<requests>/k<k>/c<context>, with * for any."
            raise InvalidOptionError("no cell has this name", repr(given), f"names from {names}", todo)
    return [c for c in cells if not wanted or any(fnmatchcase(c.name, p) for p in wanted.values())]


def speculator_for(
    cells: Sequence[Cell], device: torch.device, attention: str, max_model_len: int | None = None
) -> BenchSpeculator:
    """One speculator, large enough for all of ``cells`` (which share its kind)."""
    kind = SPECULATORS[cells[0].speculator]
    widths = kind.widths_on(device)
    sizes = Sizes(
        max_num_reqs=max(c.requests for c in cells),
        num_speculative_tokens=max(c.k for c in cells),
        max_model_len=max_model_len or max(c.context for c in cells) + ROOM,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    backend: Backend = backend_named(attention, widths.heads, widths.kv_heads, widths.head_size)
    return kind.make(widths, sizes, backend)


def step_bytes(spec: BenchSpeculator, cell: Cell) -> tuple[list[float], float]:
    """Bytes that each decode step of ``cell`` must read, and the share of KV in their sum."""
    weights = spec.weight_bytes(cell.requests)
    kv = [cell.requests * (cell.context + i) * spec.kv_bytes_per_token() for i in range(cell.k - 1)]
    each = [weights + step for step in kv]
    return each, sum(kv) / sum(each)
