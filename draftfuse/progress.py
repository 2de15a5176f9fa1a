"""A progress bar where somebody watches, silence where not."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


@contextmanager
def bar(items: Sequence[Item], name: str, shown: bool) -> Iterator[Iterator[Item]]:
    """Iterate over ``items`` under a bar; none where ``shown`` is false or stderr is no terminal."""
    with tqdm(total=len(items), desc=name, disable=not (shown and sys.stderr.isatty())) as progress:

        def each() -> Iterator[Item]:
            for item in items:
                progress.set_postfix_str(str(item))
                yield item
                progress.update()

        yield each()
