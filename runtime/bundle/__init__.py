"""Bundles: a language model on disk as Core ML packages, embedding tables and a tokenizer, with its KV on the host.

Order inside the package: errors, fields, config, parse, paths, sidecar, digests, record, identity, folder. The format
is described in `docs/bundle.md`.
"""

from .config import FULL, OURS, PUBLISHED, SLIDING, BundleConfig, SidecarSpec, StoreLayers
from .errors import BundleDamaged, BundleError, BundleFieldError, BundleFileMissing, TokenOutOfRange
from .folder import Bundle
from .parse import parse_config
from .sidecar import Sidecar

__all__ = [
    "FULL",
    "OURS",
    "PUBLISHED",
    "SLIDING",
    "Bundle",
    "BundleConfig",
    "BundleDamaged",
    "BundleError",
    "BundleFieldError",
    "BundleFileMissing",
    "Sidecar",
    "SidecarSpec",
    "StoreLayers",
    "TokenOutOfRange",
    "parse_config",
]
