"""Compile time of the packaged EAGLE head on this machine: cold, a second capacity, and warm, for several k.

    python benchmarks/compile_time.py --out benchmarks/results/compile_time.json

Every cold run is a process with empty caches; the warm run is a second process with the caches of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def one(k: int) -> dict[str, float]:
    """Seconds until a first decode at 4 rows, and at 3 rows after it, in this process."""
    import draftfuse
    from draftfuse.reference import EagleSpeculator, Limits

    limits = Limits(num_speculative_tokens=k, max_num_reqs=4, max_model_len=256)
    fused = draftfuse.compile(EagleSpeculator.from_packaged(limits), request_capacities=[3, 4])
    start = time.perf_counter()
    fused.decode(4, k)
    first = time.perf_counter() - start
    fused.decode(3, k)
    build = fused.report.builds[0]
    return {
        "first_s": first,
        "second_capacity_s": time.perf_counter() - start - first,
        "trace_s": build.trace_seconds,
        "compile_s": build.compile_seconds,
        "segments": build.segments,
        "distinct": build.unique_segments,
    }


def child(k: int, cache: str) -> dict[str, Any]:
    """:func:`one` in a process of its own, with the time of the whole process."""
    start = time.perf_counter()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, __file__, "--one", str(k)], env=environment, capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"process_s": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=int)
    parser.add_argument("--ks", type=int, nargs="*", default=[4, 16, 2, 8])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one(options.one)))
        return
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "device": "cpu",
        "k": {},
    }
    for k in options.ks:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = child(k, cache), child(k, cache)
        results["k"][str(k)] = {"cold": cold, "warm": warm}
        print(f"k={k}: cold {cold['first_s']:.1f} s, second capacity {cold['second_capacity_s']:.2f} s", end=", ")
        print(f"warm {warm['first_s']:.1f} s, {cold['distinct']} distinct of {cold['segments']} segments", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
