"""Bad surroundings: no CUDA, no Triton, an untested torch, an old driver, no memory, an interrupt, a lost device."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import draftfuse
from draftfuse import build, doctor, environment, graphs, python_state, runners, variables
from draftfuse.bisect import pass_names
from draftfuse.cli import app
from draftfuse.errors import (
    CaptureError,
    ClosedError,
    DeviceLostError,
    InvalidBatchError,
    InvalidOptionError,
    MissingExtraError,
    OutOfGraphMemoryError,
    UnsafeLoopError,
    UntestedVersionWarning,
)
from draftfuse.lint import lint
from draftfuse.lowering.ops._library import require_triton
from draftfuse.passes import switch
from draftfuse.passes.findings import CLASSES
from tests.draftfuse.test_lint import Appended, Tree
from tests.failures.small import Small, three_rows

ROOT = Path(__file__).resolve().parents[2]
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver."
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"


def compiled(spec: Any, **options: Any) -> draftfuse.FusedDraft:
    return draftfuse.compile(spec, **{"compiler": "none", "request_capacities": [4], **options})


def expected(k: int = 2) -> Tensor:
    spec = Small(k=k)
    return compiled(spec, mode="eager").propose(three_rows(spec), copy=True)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def no_cuda(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"torch.cuda.{name} was asked for")

    return refuse


def test_without_cuda_nothing_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_lazy_init", "init", "synchronize", "Stream", "Event", "current_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, no_cuda(name))
    spec = Small(k=2)
    fused = compiled(spec)
    fused.capture(progress=False)
    assert torch.equal(fused.propose(three_rows(spec), copy=True), expected())
    assert fused.batch_consumed is fused.outputs_ready is None
    fused.wait()
    assert not fused.cudagraph
    assert "device cpu" in fused.explain()
    assert lint(Small(k=2)) == []


NO_TRITON = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
sys.meta_path.insert(0, Blocked())
import importlib.util
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else plain(name, package)
import draftfuse
from tests.failures.small import Small, three_rows
drafts = []
for mode in ("auto", "eager"):
    spec = Small(k=2)
    drafts.append(draftfuse.compile(spec, compiler="none", mode=mode).propose(three_rows(spec)).tolist())
assert drafts[0] == drafts[1]
assert not [name for name in sys.modules if name.split(".")[0] == "triton"]
try:
    sys.modules["draftfuse.lowering.ops.load_rows"]._cuda([], [], 0, 0, 1, 1)
except draftfuse.errors.MissingExtraError as error:
    print(error)
"""


def test_without_triton_the_cpu_drafts_and_cuda_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    done = python(NO_TRITON)
    assert done.returncode == 0, done.stderr
    assert "load_rows on CUDA needs Triton: got no module triton" in done.stdout
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    environment.require_triton_on(torch.device("cpu"))
    with pytest.raises(MissingExtraError, match="Install triton"):
        environment.require_triton_on(torch.device("cuda"))
    monkeypatch.setattr("draftfuse.lowering.ops._library.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="write_kv on CUDA needs Triton"):
        require_triton("write_kv")


@pytest.mark.parametrize("version", ["2.10.3", "2.14.0+cu130", "3.0.0a0+git1234", "unknown"])
def test_an_untested_torch_is_named_once(version: str) -> None:
    environment.warn_untested.cache_clear()
    with pytest.warns(UntestedVersionWarning, match=rf"got {version[:4]}.*expected torch >= 2.11, < 2.14.*audit"):
        environment.warn_untested(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.warn_untested(version)
        for tested in ("2.11.0", "2.12.1+cpu", "2.13.0+cu130"):
            environment.warn_untested(tested)


OTHER_TORCH = """
import torch
torch.__version__ = "2.14.1"
import draftfuse
from tests.failures.small import Small, three_rows
spec = Small(k=2)
print(draftfuse.compile(spec, compiler="none").propose(three_rows(spec)))
"""


def test_an_import_under_an_untested_torch_warns_once_and_goes_on() -> None:
    done = python(OTHER_TORCH)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("UntestedVersionWarning: draftfuse has not been tested with this torch: got 2.14.1") == 1
    assert "tensor" in done.stdout


def old_driver() -> None:
    raise RuntimeError(f"{OLD_DRIVER}\nmore")


def test_an_old_driver_is_named_and_the_loop_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", old_driver)
    device = next(f for f in doctor.doctor() if f.name == "device")
    assert device.found == f"cpu ({OLD_DRIVER})"
    assert "the same calls compile for the CPU" in device.todo
    for command in (["demo"], ["bench", "--cells", "tiny"]):
        result = CliRunner().invoke(app, [*command, "--device", "cuda"])
        assert result.exit_code == 2
        assert f"InvalidOptionError: CUDA does not work here: got {OLD_DRIVER}" in result.output
    spec = Small(k=2)
    assert torch.equal(compiled(spec).propose(three_rows(spec)), expected())


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InvalidOptionError, match="got no CUDA device is visible"):
        environment.check_device("cuda")
    assert environment.check_device("cpu") == "cpu"
    with pytest.raises(InvalidOptionError, match="unknown device: got cudda"):
        environment.check_device("cudda")


def found_by_doctor(name: str) -> tuple[str, str]:
    ((found, todo),) = [(f.found, f.todo) for f in doctor.doctor() if f.name == name]
    return found, todo


@pytest.mark.parametrize("name", [variables.DISABLE, variables.TRACE_CACHE, variables.CHECK])
def test_a_variable_without_meaning_is_refused_and_an_empty_one_is_unset(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "yes")
    with pytest.raises(InvalidOptionError, match=rf"{name} has no such value: got 'yes', expected 0 or 1 \(0 if unset"):
        compiled(Small(k=2))
    assert found_by_doctor(name) == ("yes", "no such value: 0 or 1 (unset: 0)")
    monkeypatch.setenv(name, "")
    assert not switch.is_on(name)
    assert compiled(Small(k=2)).mode == "auto"
    assert found_by_doctor(name) == ("empty, as if unset", "")


@pytest.mark.parametrize("name", variables.CACHE_FOLDERS)
def test_a_cache_folder_that_is_a_file_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for given in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv(name, str(given))
        with pytest.raises(InvalidOptionError, match=f"{name} names no folder"):
            draftfuse.compile(Small(k=2))
        draftfuse.compile(Small(k=2), compiler="none")
    monkeypatch.setenv(name, str(tmp_path / "new" / "folder"))
    draftfuse.compile(Small(k=2))


def test_doctor_names_the_state_of_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variables.VLLM, raising=False)
    found = found_by_doctor("plug-in")[0]
    assert "off, except by the pass hook (draftfuse.post_grad_pass in" in found
    monkeypatch.setattr(doctor, "version_of", lambda *names: "0.25.1" if "vllm" in names else "")
    monkeypatch.setattr(doctor.metadata, "files", lambda name: [])
    assert found_by_doctor("plug-in") == (found, "set DRAFTFUSE_VLLM=1 to turn it on for every engine")
    monkeypatch.setenv(variables.VLLM, "0")
    assert found_by_doctor("plug-in") == ("off (DRAFTFUSE_VLLM=0), the pass hook too", "")
    monkeypatch.setenv(variables.VLLM, "1")
    assert found_by_doctor("plug-in") == ("on (DRAFTFUSE_VLLM=1)", "")
    monkeypatch.setattr(doctor, "version_of", lambda *names: "")
    assert found_by_doctor("plug-in")[1] == "vLLM is not installed: unset DRAFTFUSE_VLLM, or install it"
    monkeypatch.setenv("DRAFTFUSE_VLMM", "1")
    assert found_by_doctor("DRAFTFUSE_VLMM")[1].startswith("draftfuse reads no such variable; it reads DRAFTFUSE_DIS")


def test_doctor_sees_that_vllm_may_not_load_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    point = SimpleNamespace(name="draftfuse")
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [point])
    assert doctor._plugin_todo() == ""
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert doctor._plugin_todo().startswith("VLLM_PLUGINS=other keeps vLLM from loading it")


def test_doctor_names_an_untested_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    found = next(f for f in doctor.doctor() if f.name == "torch")
    assert found.todo == "not tested with draftfuse (tested: torch >= 2.11, < 2.14)"


class Replayed:
    """Stands for a captured graph on the CPU: runs the code again."""

    num_bytes = 0

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """Loops of the CPU take graphs here; each error in the list fails one capture."""
    failures: list[BaseException] = []

    def capture(run: Callable[[], None], prepare: Callable[[], None], *args: Any) -> Any:
        prepare()
        run()
        if failures:
            raise failures.pop()
        return Replayed(run)

    monkeypatch.setattr(runners, "capture", capture)
    for name in ("synchronize", "Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, object)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return failures


def capturing(spec: Any, **options: Any) -> draftfuse.FusedDraft:
    fused = compiled(spec, **options)
    fused.cudagraph = fused.runners.cudagraph = True
    return fused


def state_of(spec: Any) -> tuple[list[Tensor], Any]:
    tensors = [*spec.inputs.named_tensors().values(), spec.attn_groups[0].slot_mapping, spec.key, spec.value]
    return [t.clone() for t in tensors], python_state.of_speculator(spec).leaves


@contextmanager
def unchanged(spec: Any) -> Iterator[None]:
    before = state_of(spec)
    yield
    after = state_of(spec)
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]


@pytest.mark.parametrize("mode", ["auto", "split"])
def test_out_of_memory_in_a_capture_leaves_nothing_half_built(captures: list[BaseException], mode: str) -> None:
    spec = Small(k=2)
    fused = capturing(spec, mode=mode)
    captures.append(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    with unchanged(spec), pytest.raises(OutOfGraphMemoryError, match=r"got CUDA out of memory.*call again"):
        fused.propose(three_rows(spec))
    assert fused.runners.made == {}
    assert torch.equal(fused.propose(three_rows(spec), copy=True), expected())
    assert fused.report.counters["graph replays"] == 1
    assert isinstance(OutOfGraphMemoryError("", 0, 0, ""), CaptureError)


def test_a_pool_that_a_capture_failed_in_is_given_up(captures: list[BaseException]) -> None:
    """Torch goes on recording into it: only a pool of the caller's is kept."""
    given = (0, 7)
    for pool in (None, given):
        spec = Small(k=2)
        fused = capturing(spec, pool=pool)
        captures.append(CaptureError("the loop cannot be captured", "a host sync", "capturable work", "Remove it."))
        with pytest.raises(CaptureError, match="a host sync"):
            fused.decode(2)
        assert fused.runners.pool is pool
        fused.decode(2)
        assert (fused.runners.pool is given) == (pool is given)


def test_the_first_cause_of_a_capture_that_failed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def graph(*args: Any, **kwargs: Any) -> Iterator[None]:
        try:
            yield
        finally:  # as torch does: ending the capture raises once more
            raise RuntimeError("operation failed due to a previous error during capture")

    def run() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    abandoned: list[Any] = []

    for name, value in {"graph": graph, "CUDAGraph": object, "synchronize": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "outside")
    monkeypatch.setattr(graphs, "abandon", lambda *given: abandoned.append(given))
    monkeypatch.setattr(graphs, "warm_up", lambda *args: None)
    monkeypatch.setattr(graphs, "pool_bytes", lambda pool: 0)
    with pytest.raises(CaptureError, match="got operation not permitted when stream is capturing"):
        graphs.capture(run, run, [], "pool", "side")
    assert abandoned == [("pool", "side", "outside")]


def interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["probe", "trace", "passes", "emit", "baked", "bind", "capture"])
def test_an_interrupt_leaves_the_state_and_the_next_call_works(
    where: str, captures: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Small(k=2)
    fused = capturing(spec)
    if where == "capture":
        captures.append(KeyboardInterrupt())
    with monkeypatch.context() as patched:
        if where == "probe":
            patched.setattr("draftfuse.inspector.probe", interrupt)
        if where == "trace":
            patched.setattr("draftfuse.trace.normalise", interrupt)
        if where == "passes":
            patched.setattr(build.passes, "run", interrupt)
        if where == "emit":
            patched.setattr(build, "emit", interrupt)
        if where == "baked":
            patched.setattr(runners.Runners, "_bake", interrupt)
        if where == "bind":
            patched.setattr("draftfuse.lowering.emit.Emission.bind", interrupt)
        with unchanged(spec), pytest.raises(KeyboardInterrupt):
            fused.propose(three_rows(spec))
    assert fused.runners.made == {}
    assert torch.is_grad_enabled()
    assert torch.equal(fused.propose(three_rows(spec), copy=True), expected())
    assert fused.runners.inspector.probed


def test_an_interrupt_inside_the_users_code_is_put_back() -> None:
    spec = Small(k=2)
    fused = compiled(spec)

    def enter(inputs: Any) -> Any:
        spec.inputs.seq_lens.add_(1)
        raise KeyboardInterrupt("in enter")

    spec.enter = enter  # type: ignore[method-assign]
    with unchanged(spec), pytest.raises(KeyboardInterrupt, match="in enter"):
        fused.decode(2)
    del spec.enter
    assert torch.equal(fused.propose(three_rows(spec), copy=True), expected())


@pytest.mark.parametrize("klass", [Tree, Appended])
def test_a_loop_that_was_refused_is_refused_again(klass: type[Small]) -> None:
    fused = compiled(klass(), request_capacities=[2])
    messages = []
    for _ in range(2):
        with pytest.raises(UnsafeLoopError) as caught:
            fused.decode(2)
        messages.append(str(caught.value).split(" at 0x")[0])
    assert messages[0] == messages[1]


LOST = [
    RuntimeError(ILLEGAL),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
]


@pytest.mark.parametrize("error", LOST, ids=["text", "class", "triton"])
def test_after_a_sticky_error_nothing_is_launched(error: RuntimeError) -> None:
    spec = Small(k=2)
    fused = compiled(spec)
    fused.propose(three_rows(spec))
    launches: list[str] = []

    def broken() -> None:
        launches.append("launch")
        raise error

    for runner in fused.runners.made.values():
        runner.launch = broken
    with pytest.raises(DeviceLostError, match=r"the CUDA context is lost.*Start a new process") as caught:
        fused.decode(3)
    assert caught.value.__cause__ is error
    fused._loader._run = lambda *args: launches.append("load")  # type: ignore[method-assign]
    calls = (
        lambda: fused.decode(3),
        lambda: fused.propose(three_rows(spec)),
        lambda: fused.capture(progress=False),
        lambda: fused.dummy_run(2),
        lambda: fused.audit(three_rows(spec)),
        fused.recapture,
    )
    for call in calls:
        with pytest.raises(DeviceLostError, match=str(error).splitlines()[0].split("]")[-1].strip()):
            call()
    assert launches == ["launch"]
    fused.close()  # drops graphs, launches nothing
    assert fused.runners.made == {}
    with pytest.raises(DeviceLostError, match="device that is lost"):
        fused.decode(3)


ADVICE = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
ALIVE = [
    "CUDA error: invalid argument",
    f"CUDA error: operation not permitted when stream is capturing\n{ADVICE}",
    "my",
]


@pytest.mark.parametrize("text", ALIVE)
def test_errors_that_leave_the_device_alive_leave_the_loop_open(text: str) -> None:
    spec = Small(k=2)
    fused = compiled(spec)
    fused.propose(three_rows(spec))
    (runner,) = [r for d, r in fused.runners.made.items() if d.kind == "decode"]
    good = runner.launch

    def failing() -> None:
        raise RuntimeError(text)

    runner.launch = failing
    with pytest.raises(RuntimeError, match=text):
        fused.decode(3)
    runner.launch = good
    assert torch.equal(fused.propose(three_rows(spec)), expected())
    fused.close()
    with pytest.raises(ClosedError):
        fused.decode(3)


def test_a_device_lost_in_the_probe_is_no_fault_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Small(k=2)
    fused = compiled(spec)

    def enter(inputs: Any) -> Any:
        raise RuntimeError(ILLEGAL)

    spec.enter = enter  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="illegal memory access"):
            fused.decode(3)


WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "device": (lambda b: setattr(b, "positions", b.positions.to("meta")), "positions is on another device: got meta"),
    "dtype": (lambda b: setattr(b, "seeds", b.seeds.double()), "seeds has a wrong dtype: got torch.float64"),
    "rows": (lambda b: setattr(b, "seq_lens", b.seq_lens[:2]), "seq_lens is too short: got 2"),
    "tokens": (lambda b: setattr(b, "input_ids", b.input_ids[:3]), "input_ids is too short: got 3"),
    "stride": (lambda b: setattr(b, "seeds", torch.zeros(8, dtype=torch.int64)[::2]), "seeds is not contiguous"),
    "length": (lambda b: setattr(b, "max_seq_len", 33), "max_seq_len is out of range: got 33"),
    "count": (lambda b: setattr(b, "num_reqs", 5), "num_reqs is out of range: got 5"),
    "total": (lambda b: setattr(b, "num_tokens", 99), "num_tokens is out of range: got 99"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_would_kill_the_context_is_refused_before_anything_is_written(name: str) -> None:
    spec = Small(k=2)
    fused = compiled(spec)
    fused.propose(three_rows(spec))
    batch = three_rows(spec)
    spoil, words = WRONG[name]
    spoil(batch)
    with unchanged(spec), pytest.raises(InvalidBatchError, match=words):
        fused.propose(batch)
    assert torch.equal(fused.propose(three_rows(spec)), expected())


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["lost_device", "no_memory", "interrupt", "host_sync"])
def test_on_a_real_device(name: str) -> None:
    command = [sys.executable, "-m", "tests.draftfuse.cuda_scenarios", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("ok\n"), done.stdout + done.stderr


def rows_of(title: str) -> dict[str, list[str]]:
    """The rows of the tables behind a heading of docs/reference.md, by the name in their first cell."""
    text = (ROOT / "docs" / "reference.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_reference_has_every_variable_with_its_values() -> None:
    rows = rows_of("Environment variables")
    for variable in variables.VARIABLES:
        assert rows.pop(variable.name)[:2] == [", ".join(variable.values), variable.default]
    assert list(rows) == ["FA3_LIBRARY", "TORCHINDUCTOR_CACHE_DIR", "VLLM_PLUGINS"]
    sources = [p.read_text() for name in ("draftfuse", "passes", "lowering") for p in (ROOT / name).rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"\"(DRAFTFUSE_\w+)\"", text)}
    assert read - {variables.PREFIX} == {variable.name for variable in variables.VARIABLES}


def test_the_reference_has_every_finding_and_every_pass() -> None:
    assert {name: row[0] for name, row in rows_of("Names of findings").items()} == CLASSES
    text = (ROOT / "docs" / "reference.md").read_text()
    assert [name for name in pass_names() if f"`{name}`" not in text] == []
