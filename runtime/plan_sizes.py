"""What a model's functions and tables take, in bytes: what a plan is made of. Read from a bundle's files, or worked out before there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.layout import Layout

from .bundle import Bundle, BundleConfig
from .bundle.identity import kv_layout
from .engine import is_host_cache
from .mil import open_model
from .mlpackage import Blob, Function, TensorSpec
from .mlpackage.ir import BITS


@dataclass(frozen=True, slots=True)
class FunctionSize:
    """``weights``: what the function reads of weight files, each blob once, as stored. ``buffers``: its inputs and outputs without the
    cache inputs, which are the host's own rows. Bytes."""

    weights: int
    buffers: int


@dataclass(frozen=True, slots=True)
class TableSize:
    """A mapped file of ``rows`` rows, of which a token reads one."""

    name: str
    rows: int
    row_bytes: int

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    def touched(self, rows: int, page: int) -> int:
        """Bytes of pages that ``rows`` different rows lie in, if no two share one: a row begins anywhere in its page."""
        return min(-(-self.bytes // page) * page, rows * (page + self.row_bytes - 1))


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """``functions`` by package and name, None for a head's only one."""

    config: BundleConfig
    functions: Mapping[tuple[str, str | None], FunctionSize]

    @property
    def layout(self) -> Layout:
        return kv_layout(self.config)

    def tables(self) -> tuple[TableSize, ...]:
        """The files of the embedding tables."""
        made: list[TableSize] = []
        for spec in (self.config.embed, self.config.ple):
            if spec is not None:
                made.append(TableSize(spec.file, spec.rows, spec.cols * (2 if spec.scale_file is None else 1)))
                if spec.scale_file is not None:
                    made.append(TableSize(spec.scale_file, spec.rows, 4))
        return tuple(made)


def bundle_sizes(bundle: Bundle) -> ModelSizes:
    """Of every function that the bundle names. Parses its programs; reads no weight. Raises `PackageError`."""
    config = bundle.config
    names = dict.fromkeys(
        [config.decode_function, *config.prefill_functions.values(), *config.verify_functions.values()]
    )
    sizes: dict[tuple[str, str | None], FunctionSize] = {}
    for package in config.chunks:
        model = open_model(bundle.root, package)
        sizes |= {(package, name): function_size(model.function(name)) for name in names}
    for package in config.heads:
        sizes[package, None] = function_size(open_model(bundle.root, package).function(None))
    return ModelSizes(config, sizes)


def function_size(function: Function) -> FunctionSize:
    """Of one function of a program."""
    blobs: dict[tuple[str, int], int] = {}
    for op in function.ops:
        for value in (*(value for values in op.inputs.values() for value in values), *op.attributes.values()):
            if isinstance(value, Blob):
                blobs[value.file, value.offset] = spec_bytes(value.spec)
    given = sum(spec_bytes(spec) for name, spec in function.inputs.items() if not is_host_cache(name))
    return FunctionSize(sum(blobs.values()), given + sum(map(spec_bytes, function.outputs.values())))


def spec_bytes(spec: TensorSpec) -> int:
    """What a value takes as stored."""
    return -(-spec.size * BITS[spec.dtype] // 8)
