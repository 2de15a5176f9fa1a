"""The cells of the benchmark: which speculator, how many requests, k, and context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from draftfuse.bench.attention import backend_named
from draftfuse.bench.speculators import BenchSpeculator, EagleHead, MtpBlock, SmallMtpBlock, StandaloneDraft
from draftfuse.errors import InvalidOptionError
from draftfuse.models import ModelConfig
from draftfuse.reference.llama import Limits

REQUESTS, KS, CONTEXTS = (1, 4, 16, 64), (4, 8), (1024, 8192)
SMALL_REQUESTS, SMALL_CONTEXTS = (1, 4), (64,)
ROOM = 64  # tokens that a request may still draft


@dataclass(frozen=True)
class Kind:
    """A measured speculator: what makes it, its sizes on CUDA, and small ones for the CPU."""

    words: str
    make: Callable[..., BenchSpeculator]
    config: ModelConfig
    make_small: Callable[..., BenchSpeculator]
    small: ModelConfig
    left_out: Mapping[str, str] = field(default_factory=dict)  # modes that are not measured, and why


def sizes(vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, head_size: int, mlp: int) -> ModelConfig:
    """A model's sizes."""
    return ModelConfig(vocab, hidden, layers, heads, kv_heads, head_size, mlp, 1 << 17, 1e-5, 500_000.0)


SMALL = sizes(256, 64, 1, 4, 2, 16, 128)
SPECULATORS: dict[str, Kind] = {
    "eagle-a": Kind("EAGLE head, widths A", EagleHead, sizes(32000, 4096, 1, 32, 8, 128, 14336), EagleHead, SMALL),
    "eagle-b": Kind("EAGLE head, widths B", EagleHead, sizes(32000, 2048, 1, 32, 8, 64, 8192), EagleHead, SMALL),
    "draft-28": Kind(
        "stand-alone draft, 28 layers, 0.6 B parameters, vocabulary 151,936",
        StandaloneDraft,
        sizes(151936, 1024, 28, 16, 8, 128, 3072),
        StandaloneDraft,
        sizes(256, 64, 3, 4, 2, 16, 128),
        {"whole": "left out: 28 layers by K-1 steps unrolled are minutes of compile time a cell"},
    ),
    "mtp": Kind(
        "MTP block, hidden 2048, 64 routed experts of 1408, 6 active, a shared one of 2816, vocabulary 32,000",
        MtpBlock,
        sizes(32000, 2048, 1, 16, 8, 128, 2816),
        SmallMtpBlock,
        SMALL,
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
    kind, full = SPECULATORS[cells[0].speculator], device.type == "cuda"
    config, make = (kind.config, kind.make) if full else (kind.small, kind.make_small)
    dtype = torch.bfloat16 if full else torch.float32
    limits = Limits(
        num_speculative_tokens=max(c.k for c in cells),
        max_num_reqs=max(c.requests for c in cells),
        max_model_len=max_model_len or max(c.context for c in cells) + ROOM,
    )
    backend = backend_named(attention, config, limits.max_num_reqs, device, dtype)
    return make(config, limits, backend, device, dtype)


def step_bytes(spec: BenchSpeculator, cell: Cell) -> tuple[list[float], float]:
    """Bytes that each decode step of ``cell`` must read, and the share of KV in their sum."""
    weights = spec.weight_bytes(cell.requests)
    kv = [cell.requests * (cell.context + i) * spec.kv_bytes_per_token() for i in range(cell.k - 1)]
    each = [weights + step for step in kv]
    return each, sum(kv) / sum(each)
