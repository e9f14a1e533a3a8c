"""What a machine says of itself for a record: kind, memory, battery. What it doesn't say is None."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runtime.ledgers import measure

from .records import MEBIBYTE


def timestamp() -> str:
    """Now, as the app's ISO8601DateFormatter writes it: ``2026-11-30T19:47:35Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def app_build() -> str:
    """``kvferry 0.0.1``."""
    try:
        return f"kvferry {version('kvferry')}"
    except PackageNotFoundError:  # run from a folder that nobody installed
        return "kvferry"


def device_model(root: Path = Path("/")) -> str:
    """``Mac14,2`` on a Mac; on Linux what the board's maker calls it, else the processor's architecture."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "hw.model"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        return run.stdout.strip() or platform.machine()
    return _text(root / "sys/class/dmi/id/product_name") or platform.machine() or "unknown"


def os_version() -> str:
    """``Linux 6.8``, ``macOS 15.6``."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"


def footprint_mb() -> float | None:
    """MiB of this process that no file backs, as `ledgers.measure` counts them; None where the system doesn't say."""
    found = measure().footprint_bytes
    return None if found is None else found / MEBIBYTE


def available_memory_mb() -> float:
    """MiB that new work can have before the system swaps. Imports psutil."""
    import psutil

    return psutil.virtual_memory().available / MEBIBYTE


def battery() -> tuple[float | None, str | None]:
    """Charge, 0 to 1, and its state as the app calls it; None where there is no battery. Imports psutil."""
    import psutil

    found = psutil.sensors_battery()
    return (None, None) if found is None else (found.percent / 100, battery_state(found.percent, found.power_plugged))


def battery_state(percent: float, plugged: bool | None) -> str:
    """``charging``, ``full``, ``unplugged`` or ``unknown``."""
    if plugged is None:
        return "unknown"
    return "unplugged" if not plugged else "full" if percent >= 100 else "charging"


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", errors="replace").strip() or None
    except OSError:
        return None
