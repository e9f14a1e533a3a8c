"""runtime.build: makes bundles on any machine that coremltools installs on: weights in, a folder of Core ML packages out.

    built = build_bundle("gemma3-270m", Path("gemma3-270m"))
    built = build_bundle(None, Path("mine"), source=Path("gemma-3-1b.gguf"))

Order: errors · spec · vocabulary · source · config · digests · durable · staging · sidecar · emitter · graph · authoring · packages ·
gguf_file · gemma3 · tiny · assembly · models
"""

from runtime.build.assembly import BuiltBundle, Progress
from runtime.build.errors import (
    ArchitectureUnsupported,
    BuildError,
    BuildInProgress,
    DiskFull,
    ModelUnknown,
    SourceDamaged,
    SourceFieldError,
    SourceMissing,
    TargetExists,
    ToolMissing,
)
from runtime.build.models import MODELS, Estimate, build_bundle, estimate_build

__all__ = [
    "MODELS",
    "ArchitectureUnsupported",
    "BuildError",
    "BuildInProgress",
    "BuiltBundle",
    "DiskFull",
    "Estimate",
    "ModelUnknown",
    "Progress",
    "SourceDamaged",
    "SourceFieldError",
    "SourceMissing",
    "TargetExists",
    "ToolMissing",
    "build_bundle",
    "estimate_build",
]
