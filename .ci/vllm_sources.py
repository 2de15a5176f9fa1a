"""Fetch the Python files of vLLM's model runner from released wheels: vllm_sources.py FOLDER VERSION...

A wheel has hundreds of megabytes, what is wanted one: pip's finder says where it lies, and pip's reader of remote
wheels (that of ``--use-feature=fast-deps``) asks for that part alone. Where the index serves no parts, the whole wheel
is downloaded. Writes FOLDER/VERSION/vllm/...; says what the index does not serve.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from zipfile import ZipFile

from pip._internal.cli.cmdoptions import make_target_python
from pip._internal.commands import create_command
from pip._internal.network.lazy_wheel import HTTPRangeRequestUnsupported, LazyZipOverHTTP
from pip._vendor.packaging.specifiers import SpecifierSet

WANTED = ("vllm/v1/worker/gpu/", "vllm/v1/worker/utils.py")
PLATFORMS = [f"--platform=manylinux_2_{n}_x86_64" for n in (35, 31, 28)] + ["--platform=manylinux1_x86_64"]
SELECTION = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *PLATFORMS]


def unpack(archive: ZipFile, folder: Path) -> int:
    """The wanted files lie one behind the other: what spans them is read at once, so that it is one request."""
    found = [info for info in archive.infolist() if info.filename.startswith(WANTED) and info.filename.endswith(".py")]
    assert archive.fp is not None
    archive.fp.seek(min(info.header_offset for info in found))
    archive.fp.read(max(info.header_offset + info.compress_size for info in found) - archive.fp.tell())
    archive.extractall(folder, [info.filename for info in found])
    return len(found)


def download(version: str, folder: Path) -> int:
    """The whole wheel, for as long as it takes to unpack it."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "-q", *SELECTION, "-d", place, f"vllm=={version}"]
        subprocess.run(command, check=True)
        with ZipFile(next(Path(place).glob("*.whl"))) as archive:
            return unpack(archive, folder)


def main(folder: Path, versions: list[str]) -> None:
    command = create_command("download")
    options, _ = command.parse_args([*SELECTION, "vllm"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session, target_python=make_target_python(options))
        for version in versions:
            best = finder.find_best_candidate("vllm", SpecifierSet(f"=={version}")).best_candidate
            if best is None:
                print(f"vllm: the package index does not serve vllm {version}")
                continue
            try:
                with closing(LazyZipOverHTTP(best.link.url_without_fragment, session)) as remote:
                    count = unpack(ZipFile(remote), folder / version)
            except HTTPRangeRequestUnsupported:
                count = download(version, folder / version)
            print(f"vllm: {count} files of {best.link.filename}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
