"""Empties the GPU code in a shared library that one GPU architecture does not need, so that it packs smaller.

Usage: prune_fatbins.py IN OUT 90

The file keeps its size and all headers; only payloads become zeros. In each fat binary the native code of the wanted
architecture stays; where there is none, the intermediate code (PTX) of the newest older one stays, which the driver
compiles. The result runs on that architecture only.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
PTX, NATIVE = 1, 2


class Entry(NamedTuple):
    """One image of a fat binary."""

    kind: int
    arch: int
    start: int
    size: int


def fatbins(data: bytearray) -> Iterator[list[Entry]]:
    """The images of every fat binary in ``data``."""
    at = data.find(MAGIC)
    while at >= 0:
        (size,) = struct.unpack_from("<Q", data, at + 8)
        yield list(entries(data, at + len(MAGIC) + 8, at + len(MAGIC) + 8 + size))
        at = data.find(MAGIC, at + len(MAGIC) + 8 + size)


def entries(data: bytearray, at: int, end: int) -> Iterator[Entry]:
    """The images between ``at`` and ``end``."""
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        yield Entry(kind, arch, at + header, size)
        at += header + size


def needed(images: list[Entry], arch: int) -> set[Entry]:
    """What a GPU of ``arch`` may load from one fat binary."""
    native = {image for image in images if image.kind == NATIVE and image.arch == arch}
    if native:
        return native
    older = [image.arch for image in images if image.kind == PTX and image.arch <= arch]
    return {image for image in images if image.kind == PTX and image.arch == max(older, default=0)}


def main(source: str, target: str, arch: int) -> None:
    data = bytearray(Path(source).read_bytes())
    emptied = 0
    for images in fatbins(data):
        for image in set(images) - needed(images, arch):
            data[image.start : image.start + image.size] = bytes(image.size)
            emptied += image.size
    Path(target).write_bytes(data)
    print(f"{source}: emptied {emptied >> 20} MiB of {len(data) >> 20} MiB")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
