"""Lint of collectives and of branches on the rank, in one process."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import get_rank

from draftfuse import DraftInputs
from draftfuse.lint import lint
from draftfuse.passes.capture_safety import Surroundings, capture_safety
from draftfuse.passes.findings import Finding
from draftfuse.safety_cli import run_lint
from tests.failures.small import Small
from tests.parallel.speculators import ParallelSmall


@pytest.fixture(scope="module", autouse=True)
def group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("one") / "meet"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Branches(ParallelSmall):
    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs) + get_rank() * 17  # a baked number
        if get_rank() == 0:  # here
            x = x + 1
        x = x * 2 if self.group.rank() else x  # here
        assert 0 <= dist.get_rank(self.group) % 2 < 2  # here
        return x * (dist.get_rank() == 0)  # a number again


class TwoGroups(ParallelSmall):
    other: Any = None

    def reduced(self, part: Tensor) -> Tensor:
        part = super().reduced(part)
        dist.all_reduce(part, group=self.other)  # here
        return part


class InPlace(ParallelSmall):
    def reduced(self, part: Tensor) -> Tensor:
        torch.ops._c10d_functional.all_reduce_(part, "sum", self.group.group_name)  # here
        return torch.ops._c10d_functional.wait_tensor(part)


def lines(klass: type) -> list[int]:
    text, start = inspect.getsourcelines(klass)
    return [start + i for i, line in enumerate(text) if "# here" in line]


def located(found: list[Finding], name: str) -> list[int]:
    return [f.source.line for f in found if f.name == name and f.source is not None]


def test_branches_on_the_rank_are_reported_at_their_lines_and_numbers_are_not() -> None:
    found = lint(Branches())
    assert sorted({*located(found, "rank-branch")}) == lines(Branches)
    assert all(f.is_error for f in found)


def test_get_rank_is_itself_again_afterwards() -> None:
    assert type(get_rank()) is type(dist.get_rank()) is type(dist.group.WORLD.rank()) is int


def test_collectives_on_a_second_group_are_refused() -> None:
    spec = TwoGroups()
    spec.other = dist.new_group([0])
    (found,) = lint(spec)
    assert (found.name, located([found], "collective")) == ("collective", lines(TwoGroups))
    assert "one process group" in found.todo


def test_collectives_in_place_are_refused() -> None:
    assert located(lint(InPlace()), "collective") == lines(InPlace)


def test_a_right_parallel_loop_is_clean() -> None:
    assert lint(ParallelSmall()) == []


def branching() -> Small:
    return Branches()


def test_the_command_prints_file_line_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_lint(f"{Path(__file__)}:branching") == 1
    assert f"test_rank_lint.py:{lines(Branches)[0]}: if get_rank() == 0:" in capsys.readouterr().out


@pytest.mark.parametrize(("device", "backend", "count"), [("cuda", "gloo", 1), ("cuda", "nccl", 0), ("cpu", "gloo", 0)])
def test_cuda_tensors_need_nccl(device: str, backend: str, count: int) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "7"))
    graph.output(())
    with FakeTensorMode():
        x.meta["val"], y.meta["val"] = torch.empty(4, device=device), torch.empty(4, device=device)
    y.meta["stack_trace"] = 'File "model.py", line 31, in forward\n    dist.all_reduce(x)\n'
    found = capture_safety(graph, Surroundings(owned=["x"], backends={"7": backend}))
    assert [str(f.source) for f in found] == ["model.py:31: dist.all_reduce(x)"] * count
    assert all("gloo, which a CUDA graph cannot hold" in f.text for f in found)
