"""What a trimmed pull leaves in another store, made from the parts of a store."""

from __future__ import annotations

from kvstore import Store
from kvstore.snapshot import trimmed
from kvstore.staging import Rows, Staging


def copy_trimmed(source: Store, name: str, target: Store) -> None:
    """Publish the snapshot ``name`` in ``target`` with only the objects that continuing from its end reads."""
    digest = source.resolve(name)
    snapshot = source.shelf.records.snapshot(digest)
    coverage = trimmed(digest, snapshot)
    with target.shelf.shared(), Staging(target.shelf.root) as staging:
        for group in range(len(coverage.runs)):
            for block in coverage.blocks(group):
                content = snapshot.blocks[block][group]
                data = source.shelf.objects.read(content, snapshot.object_bytes(block, group))
                staging.publish(set(staging.add([Rows([data], content)])))
        target.publish(snapshot, coverage)
        target.shelf.records.move_ref(name, None, digest)
