"""A consumer in a process of its own: restores, decode-only, and says what it then has. Run by test_restore_matrix.

Arguments: bundle, store. Standard input: a JSON list of snapshot names. Standard output: a JSON list of what `describe` gives.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvstore import Store
from runtime.bundle import Bundle
from runtime.portable import PortableEngine
from runtime.session import Session


def rows_digest(session: Session, firsts: tuple[int, ...]) -> str:
    """Of rows ``[firsts[g], position)`` of each group."""
    digest = sha256()
    for group, first in enumerate(firsts):
        for span in session.kv.spans(group, first, session.position):
            digest.update(span)
    return digest.hexdigest()


def nonzero_outside(session: Session) -> int:
    """Bytes that are not zero below the covered rows or from the position on."""
    count = 0
    for group, first in enumerate(session.kv.covered):
        for start, stop in ((0, first), (session.position, session.kv.ctx)):
            count += sum(len(s) - bytes(s).count(0) for s in session.kv.spans(group, start, stop))
    return count


def describe(session: Session, name: str) -> dict[str, Any]:
    restored = session.restore(name)
    before = rows_digest(session, session.kv.covered)
    made = session.generate(32)
    return {
        "reused": restored.reused_tokens,
        "tokens": made.tokens,
        "finish": made.finish,
        "position": session.position,
        "covered": session.kv.covered,
        "restored_rows": before,
        "rows": rows_digest(session, session.kv.covered),
        "nonzero_outside": nonzero_outside(session),
        "functions": session.engine.ledger.names(),
    }


def main() -> None:
    bundle_path, store_path = map(Path, sys.argv[1:])
    names = json.load(sys.stdin)
    with Store.open(store_path, create=False) as store:
        session = Session.open(Bundle.open(bundle_path), PortableEngine(bundle_path), store=store, decode_only=True)
        json.dump([describe(session, name) for name in names], sys.stdout)


if __name__ == "__main__":
    main()
