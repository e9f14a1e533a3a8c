"""A bundle folder, opened: its configuration, tables, package paths and identity."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.identity import Identity
from kvstore.layout import Layout

from ..packaging import COMPILED, PACKAGE, stem
from ..tokenizer_digest import CONFIG as TOKENIZER_CONFIG
from ..tokenizer_digest import TOKENIZER, tokenizer_digest
from .config import BundleConfig, SidecarSpec
from .digests import DigestCache
from .errors import file_missing
from .fields import read_fields
from .identity import blobs_digest, kv_identity, kv_layout
from .parse import CONVERT_CONFIG, MANIFEST, parse_config, spare_tables
from .paths import WEIGHTS_FOLDER, disk_bytes, files_below, folder_of, inside, package_of
from .record import Record, read_record
from .sidecar import Sidecar

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

LIMIT = 8 << 20


class Bundle:
    """One model on disk, checked. Opening maps the embedding tables and loads no package; not for two threads at once.

    Where the folder has a `kvferry.json`, the files it records are hashed on opening (or taken from the digest cache
    while the file system says that they are untouched) and a difference is `BundleDamaged`. So is a compiled copy with other weights
    than the package that the record knows.
    """

    def __init__(
        self,
        root: Path,
        config: BundleConfig,
        config_sha256: str,
        record: Record | None,
        cache: DigestCache,
        spare_tables: frozenset[str],
    ) -> None:
        """Use `Bundle.open`."""
        self.root = root
        self.config = config
        self.config_sha256 = config_sha256
        self._record = record
        self._cache = cache
        self._packages = self._find_packages()
        self._tables = self._find_tables()
        if not (root / TOKENIZER).is_file():
            raise file_missing(TOKENIZER, "the tokenizer")
        if record is not None:
            record.verify(root, self._used(), self._spare(record) | spare_tables, cache)
            copies = [self._relative(path) for path in self._packages.values() if path.suffix == COMPILED]
            record.verify_compiled(root, copies, cache)
        self.embed = self._sidecar("embed", config.embed)
        self.ple = None if config.ple is None else self._sidecar("ple", config.ple)
        cache.save()

    @classmethod
    def open(cls, path: Path, *, digest_cache: Path | None = None) -> Bundle:
        """The bundle in the folder ``path``. ``digest_cache``: a file that may remember digests of bundle files.

        Raises `BundleFieldError`, `BundleFileMissing`, `BundleDamaged`.
        """
        root = Path(path).resolve()
        if not root.is_dir():
            raise file_missing(str(path), "a bundle folder")
        manifest, _ = read_fields(root, MANIFEST, limit=LIMIT, wanted_by="it makes a folder a bundle")
        convert, raw = read_fields(root, CONVERT_CONFIG, limit=LIMIT, wanted_by="the bundle's geometry")
        config = parse_config(manifest.values, convert.values)
        sha256 = hashlib.sha256(raw).hexdigest()
        cache = DigestCache.open(digest_cache)
        spare = frozenset(spare_tables(convert.values, config))
        return cls(root, config, sha256, read_record(root), cache, spare)

    def package_path(self, name: str) -> Path:
        """The folder to load for a package that the configuration names (a chunk or a head)."""
        return self._packages[name]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Loaded on first use; imports `tokenizers`."""
        from ..tokenizer import Tokenizer

        return Tokenizer.open(self.root)

    def disk_bytes(self) -> int:
        """What the folder takes on disk: packages that share a file by a hard link take it once."""
        return disk_bytes(self.root)

    def layout(self) -> Layout:
        """How the KV of this model lies in memory and in objects."""
        return self._layout

    def identity(self) -> Identity:
        """Whose KV it is. The first call may hash sidecars, the tokenizer and, without a record, the chunks."""
        return self._identity

    def head_digest(self) -> str:
        """Hex digest of the heads: what the pending token and a receipt depend on, beside the KV."""
        return self._head_digest

    @property
    def has_record(self) -> bool:
        """False: without `kvferry.json` the weight digest is that of this packaging; a compiled copy has another."""
        return self._record is not None

    @property
    def unverified(self) -> tuple[str, ...]:
        """Packages in use whose program nothing vouches for: compiled on this machine (the record vouches for the weights), or without
        a record."""
        record = self._record
        return tuple(n for n, p in self._packages.items() if record is None or not record.covers(self._relative(p)))

    @cached_property
    def _layout(self) -> Layout:
        return kv_layout(self.config)

    @cached_property
    def _identity(self) -> Identity:
        record = self._record
        made = kv_identity(
            self.config,
            weights=record.weights if record else self._weights("weights", self.config.chunks),
            sidecars=[
                (name, *(self._cache.digest(path).hex() for path in paths if path is not None))
                for name, paths in self._tables.items()
            ],
            tokenizer=self._tokenizer_digest().hex(),
        )
        self._cache.save()
        return made

    @cached_property
    def _head_digest(self) -> str:
        if self._record is not None:
            return self._record.heads
        made = self._weights("heads", self.config.heads)
        self._cache.save()
        return made

    def _tokenizer_digest(self) -> bytes:
        paths = [p for p in (self.root / TOKENIZER, self.root / TOKENIZER_CONFIG) if p.exists()]
        name = "tokenizer " + " ".join(self._cache.digest(p).hex() for p in paths)
        return self._cache.derived(name, lambda: tokenizer_digest(self.root))

    def _weights(self, meaning: str, packages: tuple[str, ...]) -> str:
        """The digest of the packages' weight blobs; programs and metadata are left out."""
        blobs: list[tuple[str, bytes]] = []
        for name in packages:
            folder = self._packages[name]
            files = [f for f in files_below(self.root, folder) if Path(f).parent.name == WEIGHTS_FOLDER]
            if not files:
                raise file_missing(f"{self._relative(folder)}/{WEIGHTS_FOLDER}", "the package's weights")
            for file in files:
                digest = self._cache.digest(inside(self.root, file, CONVERT_CONFIG, name))
                blobs.append((f"{stem(name)}/{Path(file).name}", digest))
        return blobs_digest(meaning, blobs)

    def _find_packages(self) -> dict[str, Path]:
        config = self.config
        named = {name: f"corellm.chunks[{i}]" for i, name in enumerate(config.chunks)}
        named[config.lmhead] = "corellm.lmhead"
        named |= {n: f"corellm.verify.lmhead_batched.{w}" for w, n in config.lmhead_batched.items()}
        return {name: package_of(self.root, name, CONVERT_CONFIG, place) for name, place in named.items()}

    def _find_tables(self) -> dict[str, tuple[Path, Path | None]]:
        found: dict[str, tuple[Path, Path | None]] = {}
        for name, spec in (("embed", self.config.embed), ("ple", self.config.ple)):
            if spec is not None:
                place = f"corellm.sidecars.{self.config.sidecar_stage}.{name}"
                scale = spec.scale_file
                found[name] = (
                    inside(self.root, spec.file, CONVERT_CONFIG, f"{place}.file"),
                    None if scale is None else inside(self.root, scale, CONVERT_CONFIG, f"{place}.scale"),
                )
        return found

    def _sidecar(self, name: str, spec: SidecarSpec) -> Sidecar:
        return Sidecar(spec, *self._tables[name])

    def _used(self) -> list[str]:
        """The files that a record has to cover: packages as built (not compiled copies), tables, the tokenizer."""
        used = [self._relative(p) for pair in self._tables.values() for p in pair if p is not None]
        for path in self._packages.values():
            if path.suffix == PACKAGE:
                used += files_below(self.root, path)
        return [*used, TOKENIZER]

    def _spare(self, record: Record) -> frozenset[str]:
        """The recorded files of packages that are not in use, because a compiled copy is."""
        folders = {self._relative(path) for path in self._packages.values()}
        return frozenset(name for name in record.files if (folder := folder_of(name)) and folder not in folders)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()
