"""What a store was asked, counted in a table of its index: one row for each model and namespace, and not more of them than a bound."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass

from .digest import IdentityDigest

MOST_COUNTED = 1024
"""Models and namespaces whose questions are counted apart; those of any further ones are counted together."""

SCHEMA = """
CREATE TABLE asked(identity BLOB NOT NULL, namespace TEXT NOT NULL, finds INTEGER NOT NULL, hits INTEGER NOT NULL,
                   tokens INTEGER NOT NULL, reused INTEGER NOT NULL, since REAL NOT NULL,
                   PRIMARY KEY(identity, namespace)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """What `Store.find` was asked and answered, of one model and namespace. ``tokens`` asked for; ``reused``: how many of them it found.

    ``identity`` None: of all models beyond the `MOST_COUNTED` first. ``since``: Unix seconds.
    """

    identity: IdentityDigest | None
    namespace: str
    finds: int
    hits: int
    tokens: int
    reused: int
    since: float


def count(db: sqlite3.Connection, identity: IdentityDigest, namespace: str, asked: int, reused: int) -> None:
    """Adds one question for ``asked`` tokens of which ``reused`` were found. Inside a transaction."""
    update = (
        "UPDATE asked SET finds = finds + 1, tokens = tokens + ?, hits = hits + ?, reused = reused + ? "
        "WHERE identity = ? AND namespace = ?"
    )
    numbers, key = (asked, int(reused > 0), reused), (identity.raw, namespace)
    if db.execute(update, (*numbers, *key)).rowcount:
        return
    if db.execute("SELECT count(*) FROM asked").fetchone()[0] >= MOST_COUNTED:
        key = (b"", "")
        if db.execute(update, (*numbers, *key)).rowcount:
            return
    db.execute(
        "INSERT INTO asked(tokens, hits, reused, identity, namespace, finds, since) VALUES (?, ?, ?, ?, ?, 1, ?)",
        (*numbers, *key, time.time()),
    )
