"""Carries snapshots between stores.

    with Store.open(here) as store, Folder.open(stick, create=True) as remote:
        push(store, remote, ["book"])
    with Store.open(there) as store, Folder.open(stick) as remote:
        pull(store, remote, ["book"], trimmed=True)

Order: frames · plan · reach · remote · vouching · incoming · folder · carry · pulling · pushing · bodies · streams · tokens · pairing · certificate · catalogue ·
served · metering · throttle · guard · listening · openapi · asked · replies · receiving · server · connection · fetching · client · known · prefixes · blobs · bucket · bucket_gc · reuse · remotes · recent · gateway · onefile · watch · discovery · cli · onefile_commands ·
bucket_commands · pair_commands · watch_command · serve_command
"""

from .carry import Carried, Moved
from .folder import Folder, folder_path
from .plan import Plan
from .pulling import plan_pull, pull
from .pushing import plan_push, push
from .remote import Remote, Source, Target

__all__ = [
    "Carried",
    "Folder",
    "Moved",
    "Plan",
    "Remote",
    "Source",
    "Target",
    "folder_path",
    "plan_pull",
    "plan_push",
    "pull",
    "push",
]
