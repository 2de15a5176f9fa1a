"""Class 13: weights or KV re-mapped under a captured graph. The next call raises and says how to capture again."""

from __future__ import annotations

import pytest
import torch

from draftfuse.errors import StaleAddressError
from tests.failures.small import Small, both, three_rows


def test_a_replaced_kv_pool_is_named() -> None:
    pair = both(lambda: Small(k=2), three_rows)
    spec = pair.fused.spec
    spec.key = spec.key.clone()
    with pytest.raises(StaleAddressError, match=r"spec.*key.*recapture"):
        pair.fused.propose(three_rows(spec))
    pair.fused.recapture()
    pair.draft(three_rows)


def test_a_moved_storage_is_found() -> None:
    pair = both(lambda: Small(k=2), three_rows)
    spec = pair.fused.spec
    with torch.no_grad():
        spec.embed.set_(spec.embed.clone())
    with pytest.raises(StaleAddressError, match="recapture"):
        pair.fused.propose(three_rows(spec))
