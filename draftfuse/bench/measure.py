"""How things are measured: device time between events, host span of the launch, launches and kernels, bandwidth.

A short wait is queued on the stream before each timed launch, so that device time holds no host latency as long as the
host is faster than the wait; a loop that is bound by its host shows that in its device time all the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch

Run = Callable[[], object]
REPEATS, WARMUPS = 60, 5
WAIT_CYCLES = 800_000  # about 400 us, more than the slowest launch
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
KERNEL_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
COPIES = ("Memcpy", "Memset")


@dataclass
class Timing:
    """Samples of one launch: device milliseconds and host microseconds."""

    device_ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    def add(self, other: Timing) -> None:
        """Take in another round."""
        self.device_ms += other.device_ms
        self.host_us += other.host_us

    def numbers(self) -> dict[str, float]:
        """Medians and quartiles."""
        low, _, high = quantiles(self.device_ms, n=4)
        return {
            "gpu_ms": median(self.device_ms),
            "gpu_ms_low": low,
            "gpu_ms_high": high,
            "cpu_us": median(self.host_us),
        }


def time_launch(
    launch: Run,
    reset: Run,
    device: torch.device,
    repeats: int = REPEATS,
    warmups: int = WARMUPS,
    align: Run = lambda: None,
) -> Timing:
    """Time ``launch``; ``reset`` puts the inputs back before each run, outside the timed region.

    ``align`` is queued right before the timed work: what the devices of several ranks wait for each other with.
    """
    for _ in range(warmups):
        reset()
        launch()
    one = _one_cuda if device.type == "cuda" else _one_cpu
    timing = Timing()
    for _ in range(repeats):
        reset()
        milliseconds, microseconds = one(launch, align)
        timing.device_ms.append(milliseconds)
        timing.host_us.append(microseconds)
    return timing


def timing_event() -> torch.cuda.Event:
    """An event that knows its time."""
    return torch.cuda.Event(enable_timing=True)


def _one_cuda(launch: Run, align: Run) -> tuple[float, float]:
    start, end = timing_event(), timing_event()
    torch.cuda.synchronize()
    torch.cuda._sleep(WAIT_CYCLES)
    align()
    start.record()
    before = time.perf_counter()
    launch()
    span = time.perf_counter() - before
    end.record()
    end.synchronize()
    return start.elapsed_time(end), span * 1e6


def _one_cpu(launch: Run, align: Run) -> tuple[float, float]:
    align()
    before = time.perf_counter()
    launch()
    span = time.perf_counter() - before
    return span * 1e3, span * 1e6


def host_span(launch: Run, reset: Run, device: torch.device, repeats: int = REPEATS) -> float:
    """Median host microseconds of ``launch`` on an idle device."""
    return median(time_launch(launch, reset, device, repeats).host_us)


@dataclass
class Profile:
    """What one launch did on the device."""

    graph_launches: int = 0
    kernel_launches: int = 0
    kernels: int = 0
    copies: int = 0
    busy_ms: float = 0.0  # kernels and copies, summed
    top: list[dict[str, Any]] = field(default_factory=list)  # kernels by name, the longest first

    @property
    def launches(self) -> int:
        """Launches of graphs and of single kernels by the host."""
        return self.graph_launches + self.kernel_launches


def profile(launch: Run, reset: Run, device: torch.device, top: int = 12) -> Profile | None:
    """Profile one launch; None without CUDA."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    reset()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        launch()
        torch.cuda.synchronize()
    return summarise(recorded.events(), top)


def summarise(events: Any, top: int = 12) -> Profile:
    """Count the events of a profile."""
    found, times, counts = Profile(), Counter[str](), Counter[str]()
    for event in events:
        if str(event.device_type) != "DeviceType.CUDA":
            found.graph_launches += event.name.startswith(GRAPH_LAUNCHES)
            found.kernel_launches += event.name.startswith(KERNEL_LAUNCHES)
            continue
        is_copy = event.name.startswith(COPIES)
        found.copies += is_copy
        found.kernels += not is_copy
        microseconds = event.time_range.elapsed_us()
        found.busy_ms += microseconds / 1e3
        times[event.name] += microseconds
        counts[event.name] += 1
    found.top = [{"kernel": n[:160], "count": counts[n], "us": round(t, 2)} for n, t in times.most_common(top)]
    return found


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read plus written, of a large copy on the device."""
    size = 1 << 31 if device.type == "cuda" else 1 << 26
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    timing = time_launch(lambda: target.copy_(source), lambda: None, device, repeats=20)
    return 2 * size / (median(timing.device_ms) / 1e3)


def floor_ms(step_bytes: list[float], bandwidth: float) -> float:
    """Milliseconds to read what every step must read."""
    return sum(step_bytes) / bandwidth * 1e3


class PeakMemory:
    """Peak bytes allocated on the device inside a ``with`` block, beyond those before it."""

    num_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.num_bytes = torch.cuda.max_memory_allocated() - self.before
