"""The embedding tables: memory-mapped, and turned into fp16 rows with exactly the published rounding."""

from __future__ import annotations

import math
import mmap
import operator
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .config import SidecarSpec
from .errors import TokenOutOfRange, damaged, file_missing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCALE_BYTES = 4


class Sidecar:
    """A table ``[rows, cols]`` whose rows come out as fp16.

    int8: ``factor = f32(f32(scale / 127) * f32(sqrt(scale_square)))``, the element ``fp16(f32(q * factor))``, every
    rounding to nearest even. fp16: the element as it stands. The files stay mapped, read-only, while this lives;
    whoever shortens one meanwhile kills the process (SIGBUS), so replace bundle files by renaming.
    """

    def __init__(self, spec: SidecarSpec, data: Path, scale: Path | None) -> None:
        """Raises `BundleFileMissing`, or `BundleDamaged` for a file of another size than ``spec`` says."""
        self.rows = spec.rows
        self.cols = spec.cols
        self._spec = spec
        width = 2 if scale is None else 1
        self._data = _mapped(data, spec.file, spec.rows * spec.cols * width, f"{spec.rows} x {spec.cols} x {width}")
        self._scale: mmap.mmap | None = None
        self._root = 0.0
        if scale is not None:
            assert spec.scale_file is not None and spec.scale_square is not None
            size = spec.rows * SCALE_BYTES
            self._scale = _mapped(scale, spec.scale_file, size, f"{spec.rows} x {SCALE_BYTES}")
            self._root = _f32(math.sqrt(spec.scale_square))

    def row(self, token: int) -> NDArray[np.float16]:
        """The row of one token, fp16 ``[cols]``, the caller's. Raises `TokenOutOfRange`."""
        row: NDArray[np.float16] = self.take((token,))[0]
        return row

    def take(self, tokens: Sequence[int]) -> NDArray[np.float16]:
        """The rows of ``tokens``, fp16 ``[len(tokens), cols]``, the caller's.

        Raises `TokenOutOfRange`, and `BundleDamaged` for an int8 row whose scale makes a value that is not finite.
        """
        import numpy as np

        index = np.array([self._checked(t) for t in tokens], dtype=np.int64)
        shape = (self.rows, self.cols)
        if self._scale is None:
            stored: NDArray[np.float16] = np.frombuffer(self._data, dtype="<f2").reshape(shape)
            return stored[index].astype(np.float16, copy=False)
        quantised = np.frombuffer(self._data, dtype=np.int8).reshape(shape)[index]
        scales = np.frombuffer(self._scale, dtype="<f4")[index]
        # One float32 operation a line: numpy rounds each to nearest even, which is the order the published app uses.
        with np.errstate(over="ignore", invalid="ignore"):
            factor = scales / np.float32(127)
            factor = factor * np.float32(self._root)
            wide = quantised.astype(np.float32)
            wide *= factor[:, None]
            made: NDArray[np.float16] = wide.astype(np.float16)
        if not np.isfinite(made).all():
            bad = int(np.argmin(np.isfinite(made).all(axis=1)))
            raise damaged(
                str(self._spec.scale_file),
                f"scales that give finite fp16 values in row {int(index[bad])}",
                f"scale {float(scales[bad])!r}",
            )
        return made

    def _checked(self, token: int) -> int:
        value = operator.index(token)
        if 0 <= value < self.rows:
            return value
        raise TokenOutOfRange(
            f"token {value}: expected an id from 0 to {self.rows - 1} (rows of {self._spec.file}), found {value}. "
            "Encode the text with this bundle's tokenizer.",
            token=value,
            rows=self.rows,
        )


def _mapped(path: Path, name: str, size: int, product: str) -> mmap.mmap:
    """The file mapped whole, if it has exactly ``size`` bytes."""
    try:
        with path.open("rb") as file:
            found = file.seek(0, 2)
            if found != size:
                raise damaged(name, f"{size} bytes ({product})", f"{found} bytes")
            made = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise file_missing(name, "a sidecar of this bundle") from error
    # Rows are read one here and one there: reading ahead would only fill a small device's memory.
    if hasattr(mmap, "MADV_RANDOM"):
        made.madvise(mmap.MADV_RANDOM)
    return made


def _f32(value: float) -> float:
    """``value`` rounded to float32."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded
