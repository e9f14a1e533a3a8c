"""Faults put into our own safety code, each with what must catch it. Each is one replacement of text that stands in its file exactly once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """``caught_by``: rows of the battery by number, at their smallest size with some seeds, and tests by their place. One must fail."""

    name: str
    file: str
    old: str
    new: str
    caught_by: tuple[int | str, ...]


MUTANTS = (
    Mutant(
        "no fsync of new files",
        "kvstore/files.py",
        "            sync(self._fds)\n        finally:\n            self.close()\n",
        "            pass\n        finally:\n            self.close()\n",
        (2,),
    ),
    Mutant(
        "no sync of the folder of records",
        "kvstore/files.py",
        "        self.sync_all(folders)\n\n    def create(",
        "        pass\n\n    def create(",
        (2,),
    ),
    Mutant(
        "no sync of the folders of objects",
        "kvstore/files.py",
        "            folders[to_folder] = None\n        self.sync_all(folders)\n",
        "            folders[to_folder] = None\n",
        (2,),
    ),
    Mutant(
        "a removed name is not made durable",
        "kvstore/files.py",
        "            os.fsync(dst)\n            os.fsync(src)\n",
        "",
        (2,),
    ),
    Mutant(
        "an fsync that failed is tried again",
        "kvstore/files.py",
        "            sync(self._fds)\n        finally:\n            self.close()\n",
        "            try:\n                sync(self._fds)\n            except OSError:\n                sync(self._fds)\n        finally:\n            self.close()\n",
        (3,),
    ),
    Mutant(
        "an fsync that failed is passed over",
        "kvstore/files.py",
        "            sync(self._fds)\n        finally:\n            self.close()\n",
        "            with contextlib.suppress(OSError):\n                sync(self._fds)\n        finally:\n            self.close()\n",
        (3,),
    ),
    Mutant(
        "a short write is taken for a whole one",
        "kvstore/files.py",
        "    while left:\n        left = _after(left, os.writev(",
        "    if left:\n        left = _after(left, os.writev(",
        (3,),
    ),
    Mutant(
        "a short read is taken for the end",
        "kvstore/files.py",
        "    while left and (count := os.preadv(",
        "    if left and (count := os.preadv(",
        (3,),
    ),
    Mutant(
        "files are written in place",
        "kvstore/files.py",
        '        with self.folder("tmp") as tmp:\n            try:\n                with Unsettled() as unsettled:\n',
        "        for pending in batch:\n            parent, final = _split(pending.path)\n            with self.folder(parent) as fd:\n"
        "                with contextlib.suppress(FileNotFoundError):\n                    os.unlink(final, dir_fd=fd)\n"
        "                _write(fd, final, pending.parts)\n                os.fsync(fd)\n        return\n"
        '        with self.folder("tmp") as tmp:\n            try:\n                with Unsettled() as unsettled:\n',
        (2, 1),
    ),
    Mutant(
        "links are followed",
        "kvstore/files.py",
        "fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)\n            except OSError as error:\n"
        "                if error.errno in (errno.ELOOP, errno.ENXIO):  # a symlink",
        "fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)\n            except OSError as error:\n"
        "                if error.errno in (errno.ELOOP, errno.ENXIO):  # a symlink",
        ("tests/kvstore/test_damage.py", "tests/kvstore/test_hostile.py"),
    ),
    Mutant(
        "the manifest is published before its objects",
        "kvstore/store.py",
        "                count, written = staging.publish({content for block in snapshot.blocks for content in block})\n"
        "                healed = self._heal(snapshot, rows, hits)\n"
        "                coverage = self._publish(snapshot, coverage)\n",
        "                coverage = self._publish(snapshot, coverage)\n"
        "                count, written = staging.publish({content for block in snapshot.blocks for content in block})\n"
        "                healed = self._heal(snapshot, rows, hits)\n",
        (2, 1),
    ),
    Mutant(
        "the objects of a killed saver are taken for durable",
        "kvstore/store.py",
        "                self.shelf.root.sync_all(self._unsettled(snapshot, hits))\n",
        "",
        (2,),
    ),
    Mutant(
        "the objects of a killed pull are taken for durable",
        "sync/incoming.py",
        '        self._root.sync_all(sorted({Objects.path(name).rpartition("/")[0] for name in unsure}))\n',
        "        del unsure\n",
        (2,),
    ),
    Mutant(
        "a found object's size is not looked at",
        "kvstore/objects.py",
        "        if size is None or size == HEADER + length:\n            return size is not None\n",
        "        return size is not None\n",
        (5, "tests/kvstore/test_planes.py"),
    ),
    Mutant(
        "content is not verified when it is read",
        "kvstore/objects.py",
        '            check_object(decode_header(head, FrameKind.OBJECT, f"object {name}"), parts, name)\n',
        '            decode_header(head, FrameKind.OBJECT, f"object {name}")\n',
        (4,),
    ),
    Mutant(
        "trailing bytes of an object are accepted",
        "kvstore/objects.py",
        "            if size != HEADER + length:  # planes",
        "            if size < HEADER + length:  # planes",
        (5, "tests/kvstore/test_hostile.py", "tests/kvstore/test_damage.py"),
    ),
    Mutant(
        "what arrives is not verified",
        "sync/frames.py",
        "    elif content.digest() != name.raw:\n",
        "    elif False:\n",
        ("tests/sync/test_hostile_remote.py", "tests/sync/test_frames_and_plan.py"),
    ),
    Mutant(
        "what a dead pull left is taken over unverified",
        "sync/incoming.py",
        '                self._verify(f"{folder}/{file}", name, wanted[name])\n',
        "                pass\n",
        (2, 1, "tests/sync/test_transfer_crashes.py"),
    ),
    Mutant(
        "the collector waits for nobody",
        "kvstore/shelf.py",
        '                        held.enter_context(self.root.lock("lock", exclusive=True, seconds=turn))\n',
        '                        held.enter_context(self.root.lock("lock", exclusive=False, seconds=turn))\n',
        ("tests/kvstore/test_prune.py", "tests/kvstore/test_lock_turns.py"),
    ),
    Mutant(
        "the collector does not look again",
        "kvstore/prune.py",
        "        self.named = self._names()\n        doomed.difference_update(self.named)\n",
        "        doomed.difference_update(self.named)\n",
        ("tests/kvstore/test_prune.py",),
    ),
    Mutant(
        "objects are collected before their manifest's end is durable",
        "kvstore/prune.py",
        '            self._root.sync_all(["trash", "snapshots"])\n',
        "            pass\n",
        (2,),
    ),
    Mutant(
        "a name moves whatever it stood for",
        "kvstore/records.py",
        "            if now != expect and (target is None or now != target):\n",
        "            if False:\n",
        ("tests/kvstore/test_names.py",),
    ),
    Mutant(
        "tokens are not compared",
        "kvstore/match.py",
        "    common = common_prefix(snapshot.items, items)\n",
        "    common = min(len(snapshot.items), len(items))\n",
        ("tests/kvstore/test_find.py",),
    ),
    Mutant(
        "another model's KV is found",
        "kvstore/digest.py",
        '    return PrefixKey(_derive("prefix root", [identity.raw, layout.raw, namespace.encode()]))\n',
        '    return PrefixKey(_derive("prefix root", [layout.raw, namespace.encode()]))\n',
        ("tests/kvstore/test_chains.py", "tests/kvstore/test_roundtrip.py", "tests/kvstore/test_find.py"),
    ),
    Mutant(
        "a newer format is read as if it were ours",
        "kvstore/shelf.py",
        "        if version > FORMAT:  # what else stands there is for its own version to judge\n",
        "        if False:\n",
        ("tests/kvstore/test_hostile.py", "tests/kvstore/test_damage.py"),
    ),
)
