"""Makes `data/corellm-1`: a checkpoint as kvferry writes it, and what reading it has to give. Run once per format version, never again.

    python tests/formats/make_golden_corellm.py tests/formats/data/corellm-1

``bundle`` holds the two JSON files of its bundle; `golden_bundle` makes the rest, which no checkpoint depends on.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import bundle_folder
import corellm_independent as independent
from corellm_models import app, export, some_rows, take

from kvstore import SoftToken, Store

TOKENS = [2, 258880, 258881, 300, 7, 7]


def golden_bundle(golden: Path, root: Path) -> Path:
    """A bundle whose JSON files are the golden ones, to the byte. ``root`` ends in the folder's golden name."""
    convert, head = ((golden / "bundle" / name).read_bytes() for name in ("convert_config.json", "manifest.json"))
    bundle_folder.write_bundle(root, convert=json.loads(convert), head=json.loads(head))
    (root / "convert_config.json").write_bytes(convert)
    (root / "manifest.json").write_bytes(head)
    return root


def main(golden: Path) -> None:
    (golden / "bundle").mkdir(parents=True)
    bundle_folder.write_json(golden / "bundle" / "convert_config.json", bundle_folder.convert_config())
    bundle_folder.write_json(golden / "bundle" / "manifest.json", bundle_folder.manifest())
    scratch = Path(tempfile.mkdtemp())
    root = golden_bundle(golden, scratch / "golden-bundle")
    independent.write(scratch / "kv", root, TOKENS, some_rows(root, len(TOKENS)), pending=9)
    with Store.open(scratch / "store") as store:
        snapshot = take(store, scratch / "kv", root).saved.snapshot
        assert snapshot is not None
        export(store, "taken", golden / "checkpoint", app(root))
    soft = {str(i): item.row.hex() for i, item in enumerate(snapshot.items) if isinstance(item, SoftToken)}
    value = {"tokens": TOKENS, "pending": 9, "soft": soft, "blocks": [[d.hex for d in b] for b in snapshot.blocks]}
    (golden / "expected.json").write_text(json.dumps(value, indent=1) + "\n")
    shutil.rmtree(scratch)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
