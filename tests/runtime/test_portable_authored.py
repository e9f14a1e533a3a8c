"""A chunk that coremltools converted with its own passes, two KV heads, a context that no chunk divides."""

from __future__ import annotations

import numpy as np
import pytest
from authored import Geometry, chunk_function, save, weights
from numpy.typing import NDArray

from runtime.mlpackage import Package
from runtime.ops import WeightCache
from runtime.ops.widen import fastest
from runtime.portable.function import PortableFunction
from runtime.portable.plan import Planner

pytest.importorskip("coremltools")
GEOMETRY = Geometry(heads=4, kv_heads=2, head_dim=16, ctx=330, window=50)
WIDTHS = {"decode": 1, "prefill_4": 4, "prefill_8": 8, "prefill_32": 32, "prefill_64": 64}
Half = NDArray[np.float16]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    w = weights(GEOMETRY)
    functions = {
        name: chunk_function(GEOMETRY, w, None if name == "decode" else n, name == "prefill_64")
        for name, n in WIDTHS.items()
    }
    return Package.open(save(functions, tmp_path_factory.mktemp("chunk") / "chunk.mlpackage"))


@pytest.fixture(scope="module", params=[True, False], ids=["fused", "op by op"])
def functions(request: pytest.FixtureRequest, package: Package) -> dict[str, PortableFunction]:
    planner = Planner(WeightCache(package, fastest()), False, request.param)
    return {name: planner.plan(package.function(name), name) for name in package.functions}


class Host:
    """The host's arrays, and steps over them."""

    def __init__(self, functions: dict[str, PortableFunction]) -> None:
        self.functions = functions
        g = GEOMETRY
        self.kv = {f"{p}_{i}": np.zeros((1, g.ctx, g.kv), np.float16) for p in "kv" for i in range(g.layers)}

    def step(self, name: str, rows: Half, start: int) -> Half:
        g, function, n = GEOMETRY, self.functions[name], len(rows)
        slots = np.arange(n if name == "prefill_64" else g.ctx)[None]
        position = np.arange(start, start + n)[:, None]
        angle = position * 1e4 ** (-np.arange(g.head_dim // 2) / (g.head_dim // 2))
        made = {
            "hidden_in": rows,
            "onehot": slots == position,
            "mask_f": np.where(slots <= position, 0, -4e4),
            "mask_s": np.where((slots <= position) & (position - slots < g.window), 0, -4e4),
        }
        for kind in "fs":
            made |= {f"cos_{kind}": np.tile(np.cos(angle), 2), f"sin_{kind}": np.tile(np.sin(angle), 2)}
        made |= {f"{name}_in": array for name, array in self.kv.items()}
        given = {key: made[key].astype(np.float16).reshape(spec.shape) for key, spec in function.inputs.items()}
        found = function(given, kv_rows=(start, start + 1) if name == "decode" else None)
        for key, array in self.kv.items():
            array[0, start : start + n] = found[f"{key}_out"].reshape(n, g.kv)
        return found["hidden"].reshape(n, g.hidden)


@pytest.fixture(scope="module")
def rows() -> Half:
    return np.random.default_rng(4).standard_normal((GEOMETRY.ctx, GEOMETRY.hidden)).astype(np.float16)


@pytest.fixture(scope="module")
def decoded(functions: dict[str, PortableFunction], rows: Half) -> tuple[Half, dict[str, Half]]:
    host = Host(functions)
    return np.concatenate([host.step("decode", row[None], p) for p, row in enumerate(rows)]), host.kv


@pytest.mark.parametrize("name", ["prefill_4", "prefill_8"])
def test_narrow_steps_are_decode(
    functions: dict[str, PortableFunction], decoded: tuple[Half, dict[str, Half]], rows: Half, name: str
) -> None:
    host, n = Host(functions), WIDTHS[name]
    usable = len(rows) // n * n
    hidden = np.concatenate([host.step(name, rows[p : p + n], p) for p in range(0, usable, n)])
    assert hidden.tobytes() == decoded[0][:usable].tobytes()
    for key, array in host.kv.items():
        assert array[0, :usable].tobytes() == decoded[1][key][0, :usable].tobytes()


def test_wide_steps_agree_to_rounding(
    functions: dict[str, PortableFunction], decoded: tuple[Half, dict[str, Half]], rows: Half
) -> None:
    host = Host(functions)
    parts = [host.step("prefill_64", rows[:64], 0)]
    parts += [host.step("prefill_32", rows[p : p + 32], p) for p in range(64, 320, 32)]
    wide, one = np.concatenate(parts).astype(np.float32), decoded[0][:320].astype(np.float32)
    assert np.abs(wide - one).max() < 0.01 * np.abs(one).max()


def test_fused_and_op_by_op_agree_to_rounding(package: Package, rows: Half) -> None:
    cache = WeightCache(package, fastest())
    found = []
    for fuse in (True, False):
        planner = Planner(cache, False, fuse)
        host = Host({name: planner.plan(package.function(name), name) for name in package.functions})
        found.append(np.concatenate([host.step("prefill_8", rows[p : p + 8], p) for p in range(0, 80, 8)]))
    a, b = (x.astype(np.float32) for x in found)
    assert np.abs(a - b).max() < 0.01 * np.abs(b).max()


def test_functions_share_their_decoded_weights(package: Package) -> None:
    cache = WeightCache(package, fastest())
    planner = Planner(cache, False)
    planner.plan(package.function("decode"), "decode")
    once = cache.nbytes
    for name in package.functions:
        planner.plan(package.function(name), name)
    # scalars written into each function are its own
    assert once > 0 and cache.nbytes < once * 1.01
