"""The command send: a snapshot's checkpoint folder into an app's Documents on a connected device, through Apple's devicectl. macOS only."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from time import perf_counter

import click

from kvstore.cli import Label, Settings, Text, common_options, note, progress, waiting
from kvstore.errors import Refused, Unreachable
from kvstore.formats.corellm_store import export_snapshot
from kvstore.plaintext import size_text
from kvstore.store import Store

from .checkpoint_commands import app_bundle
from .opening import BundleName, open_bundle

_TAIL = 2000
"""Characters of devicectl's own words that an error repeats."""


@click.command()
@click.argument("name", type=Label())
@click.option(
    "--device",
    required=True,
    metavar="DEVICE",
    type=Text(),
    help="Name, UDID or ECID, as `xcrun devicectl list devices` has it.",
)
@click.option(
    "--bundle-id",
    required=True,
    metavar="ID",
    type=Text(),
    help="The app's bundle identifier, such as com.example.app.",
)
@click.option(
    "--to", "target", default="Documents", show_default=True, type=Text(), help="The folder in the app's container."
)
@click.option(
    "--bundle",
    "given",
    metavar="DIR",
    type=BundleName(),
    help="The app's model bundle. Needed where the snapshot doesn't say it.",
)
@common_options
def send(settings: Settings, name: str, device: str, bundle_id: str, target: str, given: str | None) -> None:
    """Copy the snapshot NAME, as the app's checkpoint folder, to a device that is connected to this Mac.

    It was tried through a stand-in for devicectl only; no device was at hand.
    """
    xcrun = shutil.which("xcrun")
    if xcrun is None:
        raise Refused(
            "xcrun: expected Apple's developer tools, found none on this machine's PATH. Run this on a Mac with Xcode 15 or later; elsewhere "
            "`kvferry export` with --as corellm writes the same folder, to be copied by other means."
        )
    started = perf_counter()
    bundle = None if given is None else app_bundle(open_bundle(given))
    with tempfile.TemporaryDirectory(prefix="kvferry-send-") as scratch:
        folder = Path(scratch) / _folder_name(name)
        with Store.open(settings.store, create=False) as store:
            snapshot = store.shelf.records.snapshot(store.resolve(name))
            with progress("Exporting", snapshot.tokens * snapshot.layout.bytes_per_token, "bytes") as advance:
                made = export_snapshot(
                    store,
                    name,
                    folder,
                    bundle=bundle,
                    created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    progress=advance,
                )
        for line in made.notes:
            note(line)
        destination = f"{target.rstrip('/')}/{folder.name}"
        with waiting(f"Copying {size_text(made.bytes)} to {device}"):
            _copy(xcrun, folder, destination, device, bundle_id, Path(scratch) / "devicectl.json")
    value = {
        "name": name,
        "snapshot": made.snapshot.hex,
        "device": device,
        "bundle_id": bundle_id,
        "path": destination,
        "tokens": made.tokens,
        "bytes": made.bytes,
        "seconds": round(perf_counter() - started, 3),
    }
    settings.emit(
        value,
        f"{name}: {made.tokens:,} tokens, {size_text(made.bytes)}, copied to {destination} of {bundle_id} on {device}",
    )


def _copy(xcrun: str, folder: Path, destination: str, device: str, bundle_id: str, told: Path) -> None:
    command = [
        xcrun, "devicectl", "device", "copy", "to", "--device", device, "--domain-type", "appDataContainer",
        "--domain-identifier", bundle_id, "--source", str(folder), "--destination", destination, "--json-output", str(told),
    ]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode == 0 and _succeeded(told):
        return
    words = (done.stderr or done.stdout).strip()[-_TAIL:] or f"exit code {done.returncode}, and nothing said"
    raise Unreachable(
        f"device {device!r}: expected devicectl to copy the folder, found: {words}. See that the device is unlocked, trusted and listed by "
        f"`xcrun devicectl list devices`, and that the app {bundle_id} is installed as a development build.",
        device=device,
        exit_code=done.returncode,
    )


def _succeeded(told: Path) -> bool:
    """Whether devicectl's own report says so; without a report its exit code counts."""
    try:
        value = json.loads(told.read_bytes())
    except FileNotFoundError:
        return True
    except (ValueError, RecursionError):
        return False
    return bool(
        isinstance(value, dict) and isinstance(value.get("info"), dict) and value["info"].get("outcome") == "success"
    )


def _folder_name(label: str) -> str:
    """The label as a plain file name."""
    plain = "".join(c if c.isalnum() or c in "-_. " else "-" for c in label).strip(". ")
    return plain[:100] or "snapshot"


def commands() -> dict[str, click.Command]:
    """The command by verb."""
    return {"send": send}
