"""What only a copied step reads: entries beside those that were traced are guarded, whatever Python names them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from draftfuse import siblings
from draftfuse.siblings import TooManyEntries, with_siblings
from draftfuse.step_log import LIBRARY, is_watched
from tests.failures.small import Small, batch_of, both

K = 8
TABLE = [1.0] * K


class Factor(Small):
    def __init__(self, read: Callable[[Any, int], float]) -> None:
        super().__init__(k=K)
        self.read = read
        self.long = [1.0] * 16
        self.nested = [[1.0] * K for _ in range(K)]
        self.layers = {f"model.layers.{i}": {"scale": 1.0} for i in range(60, 80)}
        self.kinds, self.by_kind = ["full"] * 6 + ["slide"] * 10, {"full": 1.0, "slide": 1.0}
        self.objects = [SimpleNamespace(inner=SimpleNamespace(factor=1.0)) for _ in range(16)]
        for step in range(K):
            setattr(self, f"q{step:02d}", 1.0)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(hidden * self.read(self, step), step)


Case = tuple[Callable[[Any, int], float], Callable[[Any], object]]
CASES: dict[str, Case] = {
    "from the end": (lambda s, step: s.long[-step], lambda s: s.long.__setitem__(-6, -1.0)),
    "above k": (lambda s, step: s.long[step + 8], lambda s: s.long.__setitem__(14, -1.0)),
    "two numbers": (lambda s, step: s.nested[step][step], lambda s: s.nested[6].__setitem__(6, -1.0)),
    "padded name": (lambda s, step: float(getattr(s, f"q{step:02d}")), lambda s: setattr(s, "q06", -1.0)),
    "named entry": (
        lambda s, step: s.layers[f"model.layers.{step + 61}"]["scale"],
        lambda s: s.layers["model.layers.67"].update(scale=-1.0),
    ),
    "name without a number": (
        lambda s, step: s.by_kind[s.kinds[step]],
        lambda s: s.by_kind.update(slide=-1.0),
    ),
    "global": (lambda s, step: TABLE[step], lambda s: TABLE.__setitem__(6, -1.0)),
    "object": (
        lambda s, step: s.objects[step + 8].inner.factor,
        lambda s: setattr(s.objects[14].inner, "factor", -1.0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_copied_step_reads_is_guarded(name: str) -> None:
    read, change = CASES[name]
    TABLE[:] = [1.0] * K
    pair = both(lambda: Factor(read), lambda spec: batch_of(spec, [5, 12, 3], [0, 1, 0]))
    assert pair.fused.report.builds[0].copied_steps
    for spec in (pair.fused.spec, pair.eager.spec):
        change(spec)
    pair.draft(lambda spec: batch_of(spec, [5, 12, 3], [0, 1, 0]))
    assert "now -1.0" in pair.fused.report.fallbacks[-1].reason


def test_a_table_that_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "LIMIT", 20)
    spec = SimpleNamespace(table=[[0] * 8 for _ in range(8)])
    with pytest.raises(TooManyEntries, match=r"more than 20 entries"):
        with_siblings({"L['spec'].table[1][2]": 0}, {"spec": spec})


def test_a_loop_with_a_large_table_is_traced_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "LIMIT", 10)
    pair = both(lambda: Factor(CASES["two numbers"][0]), lambda spec: batch_of(spec, [5, 12, 3], [0, 1, 0]))
    assert pair.fused.report.builds[0].copied_steps == 0
    assert "entries" in pair.fused.report.builds[0].irregular


def test_whose_code_is_watched() -> None:
    assert is_watched("<stdin>")
    assert is_watched("<ipython-input-1>")
    assert is_watched(f"{LIBRARY}site-packages/somebody/loop.py")
    assert not is_watched(f"{LIBRARY}functools.py")
    assert not is_watched("<frozen importlib._bootstrap>")
    assert not is_watched(siblings.__file__)
