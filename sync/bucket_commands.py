"""The commands about buckets."""

from __future__ import annotations

from datetime import timedelta

import click

from kvstore.cli import Number, Settings, Text, common_options, progress
from kvstore.errors import InputInvalid

SAFE = 1.0
"""Hours of grace below which it has to be said that nobody pushes."""


@click.group()
def bucket() -> None:
    """Look after a bucket that snapshots were pushed to."""


@bucket.command("gc")
@click.argument("url", type=Text(), metavar="URL")
@click.option("--grace", type=Number(0.0, 87600.0), default=24.0, show_default=True, metavar="HOURS",
              help="What is younger stays. Twice as long as any push may take; the same for everybody who uses the bucket.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the plan; delete nothing.")
@click.option("--yes", is_flag=True, help="With a grace under an hour: nobody pushes at the moment.")
@common_options
def gc(settings: Settings, url: str, grace: float, dry_run: bool, yes: bool) -> None:
    """Delete from the bucket URL what no name needs. There is no trash."""
    from .blobs import Blobs
    from .bucket import Bucket
    from .bucket_gc import apply, plan
    from .remotes import BUCKETS

    if url.partition("://")[0] not in BUCKETS:
        raise InputInvalid(
            f"URL: expected s3://BUCKET/PREFIX, gs://… or az://…, found {url!r:.80}. `kvferry gc` collects in a store."
        )
    if grace < SAFE and not dry_run and not yes:
        raise InputInvalid(
            f"--grace {grace:g}: expected at least {SAFE:g} hours, because what pushes under way rely on may be younger, and a bucket has no trash. If nobody "
            f"pushes at the moment, say --yes."
        )
    with Bucket.open(Blobs.open(url), grace=timedelta(hours=grace)) as opened:
        planned = plan(opened)
        if dry_run:
            settings.emit({"dry_run": True, "plan": planned.value()}, f"would delete {planned}")
            return
        with progress("Deleting", max(1, planned.bytes), "bytes") as advance:
            done = apply(opened, planned, advance)
    collected = {"snapshots": done.snapshots, "objects": done.objects, "bytes": done.bytes}
    settings.emit(
        {"dry_run": False, "plan": planned.value(), "deleted": collected},
        f"deleted {done.snapshots} snapshots and {done.objects} objects, {done.bytes:,} bytes",
    )


def commands() -> dict[str, click.Command]:
    """The group by verb."""
    return {"bucket": bucket}
