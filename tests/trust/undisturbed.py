"""Every operation with nothing going wrong: what a mutant of our safety code must still do."""

from __future__ import annotations

from battery import scratch_folder  # first: it finds what `world` needs

import world  # isort: skip

if __name__ == "__main__":
    with scratch_folder() as scratch:
        world.make(scratch / "made")
        for operation in world.OPERATIONS.values():
            at = world.copied(scratch / "made", scratch / "at")
            operation.run(at)
            world.judge(at, operation, returned=True)
