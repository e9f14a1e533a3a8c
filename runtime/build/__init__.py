"""runtime.build: makes bundles on any machine that coremltools installs on: weights in, a folder of Core ML packages out.

    built = build_bundle("gemma3-270m", Path("gemma3-270m"))
    built = build_bundle(None, Path("mine"), source=Path("gemma-3-1b.gguf"))
    built = build_bundle(None, Path("e2b"), source=Path("gemma-4-E2B-it"))

Order: errors · regular · spec · vocabulary · byte_pairs · source · config · digests · durable · staging · sidecar · kmeans · compress · authoring ·
emitter · plan · graph · packages · source_parts · gguf_file · gguf_fields · gemma3 · llama · tiny · smollm2 · safetensors_file ·
gemma4 · assembly · models
"""

from runtime.build.assembly import BuiltBundle
from runtime.build.errors import (
    ArchitectureUnsupported,
    BuildError,
    BuildInProgress,
    DiskFull,
    ModelUnknown,
    PackingUnsupported,
    SourceDamaged,
    SourceFieldError,
    SourceMissing,
    TargetExists,
    ToolMissing,
)
from runtime.build.gemma4.model import Packing
from runtime.build.models import MODELS, Estimate, build_bundle, estimate_build
from runtime.build.plan import Progress

__all__ = [
    "MODELS",
    "ArchitectureUnsupported",
    "BuildError",
    "BuildInProgress",
    "BuiltBundle",
    "DiskFull",
    "Estimate",
    "ModelUnknown",
    "Packing",
    "PackingUnsupported",
    "Progress",
    "SourceDamaged",
    "SourceFieldError",
    "SourceMissing",
    "TargetExists",
    "ToolMissing",
    "build_bundle",
    "estimate_build",
]
