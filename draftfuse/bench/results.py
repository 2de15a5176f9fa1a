"""Result files: what was measured, on what, when; written after every cell."""

from __future__ import annotations

import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch

FOLDER = Path("benchmarks") / "results"


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions and date."""
    import draftfuse

    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "draftfuse": draftfuse.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "triton": _version("triton"),
    }
    if device.type != "cuda":
        return found | {"device": f"CPU, {torch.get_num_threads()} threads"}
    return found | {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "driver": _driver()}


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


class Results:
    """A JSON file that is complete after every :meth:`put`."""

    def __init__(self, path: Path | None, device: torch.device, settings: dict[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"environment": environment(device), "settings": settings}

    def put(self, section: str, value: Any) -> None:
        """Set a section and write the file."""
        self.data[section] = value
        self.save()

    def append(self, section: str, value: Any) -> None:
        """Add to a list and write the file."""
        self.data.setdefault(section, []).append(value)
        self.save()

    def save(self) -> None:
        """Write the file in one piece."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.path)


def device_slug(device: torch.device) -> str:
    """The device's name as part of a file name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return "-".join(name.lower().split())
