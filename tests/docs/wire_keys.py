"""The JSON keys of the verbs about servers, buckets and devices."""

from __future__ import annotations

_TOKEN = {
    "scopes[]": "what it may do: `read`, `push`, `admin`",
    "namespaces[]": "what it may see; null: everything",
}
_SERVER = {
    "address": "for `pull`, `push` and the like",
    "name": "the server's own, for people",
    "fingerprint": "SHA-256 of its certificate",
    "scopes": "what this machine may do there",
    "namespaces": "what it may see there; null: everything",
}

WIRE = {
    "serve": {
        "address": "where it listens",
        "store": "the store's folder",
        "from": "--from: what it is a gateway of; null: of nothing",
        "allow": "what it grants, to tokens that may",
        "fingerprint": "SHA-256 of its certificate; null by plain HTTP",
    },
    "pair": {
        **_SERVER,
        "url": "without an argument, as the next five: what the other device is given",
        "code": "the same, to type",
        "host": "the address in it",
        "port": "the port in it",
        "minutes": "how long it is open",
    },
    "peers": {
        "[].name": "as it announces itself",
        "[].addresses": "where it is reached",
        "[].port": "at which port",
        "[].fingerprint": "what it says its certificate's is; null: plain HTTP",
        "[].paired": "whether this machine was paired with that certificate",
    },
    "tokens ls": {
        "[].id": "its id, also in the server's log",
        "[].device": "who has it, for people",
        "[].scopes": "what it may do",
        "[].namespaces": "what it may see; null: everything",
        "[].created": "Unix seconds",
    },
    "tokens add": {
        "id": "its id",
        "token": "the token itself, which is nowhere kept",
        "device": "as given",
        "scopes": "what it may do",
    },
    "tokens revoke": {"id": "its id", "device": "who had it"},
    "servers ls": {f"[].{key}": text for key, text in _SERVER.items()},
    "servers forget": {"address": "of the server"},
    "watch": {
        "time": "Unix seconds; one object a line",
        "event": "`pushed`, `imported`, `refused` (waits until it changes), `incomplete` (a file that is cut or damaged) or `failed` (is tried again)",
        "name": "the snapshot's",
        "snapshot": "its digest",
        "tokens": "its length",
        "remote": "where it was pushed, or was to be",
        "path": "of what arrived",
        "error": "its class, where something failed",
        "message": "what was expected, what was found, and what to do",
        "again_in": "seconds until the next try",
    },
    "keys new": {"name": "for people", "key": "the public key, for those who shall trust it"},
    "keys ls": {
        "[].name": "for people",
        "[].key": "the public key",
        "[].own": "whether this machine can sign with it",
        "[].trusted": "whether what it signed passes `--require-signed`",
    },
    "keys trust": {"name": "for people", "key": "the public key"},
    "keys untrust": {"name": "its name was", "key": "the public key"},
    "sign": {
        "signed[].name": "as given",
        "signed[].snapshot": "its digest",
        "signed[].key": "the public key of the key that signed",
    },
    "bucket gc": {
        "dry_run": "as given",
        "plan.snapshots": "digests of snapshots to delete",
        "plan.objects": "objects to delete",
        "plan.bytes": "their files",
        "deleted.snapshots": "not with --dry-run: how many were",
        "deleted.objects": "how many were",
        "deleted.bytes": "their files",
    },
    "send": {
        "name": "as given",
        "snapshot": "its digest",
        "device": "as given",
        "bundle_id": "as given",
        "path": "the folder in the app's container",
        "tokens": "its length",
        "bytes": "of the checkpoint's files",
        "seconds": "of exporting and copying",
    },
}

EXPORTED_FILE = {
    "kept": "FILE.kvferry: what of the snapshot it holds: `whole`, `trimmed` or `part`",
    "objects": "FILE.kvferry: objects in it",
}
"""Of `export` and `import`, beside those about folders."""
