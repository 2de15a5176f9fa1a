"""Run many fuzzed programs, several at once, and keep a log.

    python -m tests.fuzz.run --count 1000 --jobs 2 --log fuzz.log
    python -m tests.fuzz.run --count 300 --compiler inductor --device cuda --jobs 8 --seconds 500 --log fuzz_cuda.log

A job takes every ``jobs``-th seed until the count or the time is used up, and writes a line a program into
``LOG.<job>`` until all have ended. The log has one line a failing program, and a last line with what was run on what.
``tests/fuzz/runs.jsonl`` keeps the runs so far.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.fuzz.programs import Program, draw, shrink
from tests.fuzz.speculators import mismatch


def outcome(program: Program, compiler: str, device: str) -> str | None:
    """What is wrong with a program, None if nothing."""
    try:
        return mismatch(program, compiler, device)
    except Exception as error:  # every error of a generated program is a finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error).splitlines()[0]} ({Path(where.filename).name}:{where.lineno})"


def program_of(seed: int, compiler: str) -> Program:
    """The program of a seed; with Inductor a shorter loop, which compiles in half the time."""
    drawn = draw(seed)
    return drawn if compiler == "none" else replace(drawn, k=2, ks=(2,), uniform=False)


def run_job(given: argparse.Namespace) -> None:
    """Print one line a program, as JSON, and the shrunk program of a failing one."""
    torch.set_num_threads(1)
    begin = time.time()
    for seed in range(given.start + given.job, given.start + given.count, given.jobs):
        if time.time() - begin > given.seconds:
            break
        program = program_of(seed, given.compiler)
        found = outcome(program, given.compiler, given.device)
        line = {"seed": seed, "fault": found, "program": str(program) if found else ""}
        if found and given.shrink:
            small = shrink(program, lambda p: outcome(p, given.compiler, given.device) is not None)
            line |= {"shrunk": str(small), "shrunk_fault": outcome(small, given.compiler, given.device)}
        print(json.dumps(line), flush=True)


def part_of(given: argparse.Namespace, job: int) -> Path:
    """Where a job writes its lines: they stay if the run is cut."""
    return Path(f"{given.log}.{job}")


def jobs_of(given: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Start the jobs."""
    passed = [f"--{n}={getattr(given, n)}" for n in ("start", "count", "jobs", "compiler", "device", "seconds")]
    command = [sys.executable, "-m", "tests.fuzz.run", *passed, *(["--shrink"] if given.shrink else [])]
    started = []
    for i in range(given.jobs):
        with part_of(given, i).open("w", encoding="utf-8") as part:
            started.append(subprocess.Popen([*command, f"--job={i}"], stdout=part))
    return started


def run(given: argparse.Namespace) -> bool:
    """Run all jobs and write the log; whether every program passed and every job ended well."""
    begin, lines, crashed = time.time(), [], 0
    for index, job in enumerate(jobs_of(given)):
        crashed += job.wait() != 0
        part = part_of(given, index)
        lines += [json.loads(line) for line in part.read_text(encoding="utf-8").splitlines()]
        part.unlink()
    faults = sorted((line for line in lines if line["fault"]), key=lambda line: int(line["seed"]))
    kinds = Counter(len(draw(int(line["seed"])).builders) for line in lines)
    device = torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or "cpu"
    with given.log.open("a", encoding="utf-8") as log:
        log.writelines(json.dumps(line) + "\n" for line in faults)
        seeds = sorted(int(line["seed"]) for line in lines)
        total = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "programs": len(lines),
            "failed": len(faults),
            "jobs_that_crashed": crashed,
            "seeds": [seeds[0], seeds[-1]] if seeds else [],
            "compiler": given.compiler,
            "device": device,
            "torch": torch.__version__,
            "groups_per_program": dict(sorted(kinds.items())),
            "jobs": given.jobs,
            "seconds": round(time.time() - begin),
        }
        log.write(json.dumps(total) + "\n")
    print(json.dumps(total))
    return not faults and not crashed


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("start", 0), ("count", 200), ("jobs", 1), ("job", -1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compiler", default="none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--shrink", action="store_true", help="make failing programs smaller, which takes minutes")
    parser.add_argument("--log", type=Path, default=Path("fuzz.log"))
    given = parser.parse_args()
    if given.job >= 0:
        run_job(given)
        return 0
    return 0 if run(given) else 1


if __name__ == "__main__":
    sys.exit(main())
