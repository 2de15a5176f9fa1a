"""Run many fuzzed programs and keep a log: ``python -m tests.fuzz.run --count 1000 --log fuzz.log``."""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path

import torch

from tests.fuzz.programs import Program, draw, shrink
from tests.fuzz.speculators import mismatch


def outcome(program: Program, compiler: str) -> str | None:
    """What is wrong with a program, None if nothing."""
    try:
        return mismatch(program, compiler)
    except Exception as error:  # every error of a generated program is a finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error).splitlines()[0]} ({Path(where.filename).name}:{where.lineno})"


def main() -> None:
    """Write one line a failing program, and a last line with the totals."""
    parser = argparse.ArgumentParser()
    for name, value in (("start", 0), ("count", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compiler", default="none")
    parser.add_argument("--log", type=Path, default=Path("fuzz.log"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    begin, failed, done = time.time(), 0, 0
    with given.log.open("a") as log:
        for seed in range(given.start, given.start + given.count):
            found = outcome(draw(seed), given.compiler)
            done += 1
            if found is not None:
                failed += 1
                small = shrink(draw(seed), lambda p: outcome(p, given.compiler) is not None)
                print(
                    f"seed {seed}: {found}\n  shrunk: {small}\n  shrunk fault: {outcome(small, given.compiler)}",
                    file=log,
                    flush=True,
                )
            if done % 50 == 0 or done == given.count:
                rate = (time.time() - begin) / done
                print(
                    f"{done} programs from seed {given.start}, {failed} failed, {rate:.2f} s each", file=log, flush=True
                )


if __name__ == "__main__":
    main()
