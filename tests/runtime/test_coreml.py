"""What Core ML is given, by both routes: functions, units, shapes, types, and memory that stays where it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from core_ml_stand_in import Machine, engine_over, install_framework, install_proxy
from feeding import Feeder, decode_each
from mil_printer import compiled_bundle

from runtime.bundle import Bundle
from runtime.bundle.digests import DigestCache
from runtime.coreml import CompiledPackages, CoreMLEngine, CoreMLFailed, Edge, UnitsPolicy
from runtime.coreml.routes import missing, open_edge
from runtime.engine import EngineUnavailable, Fp16Overflow
from runtime.hostkv import HostKV
from runtime.portable import PortableEngine
from runtime.session import Session

INSTALL = {"pyobjc": install_framework, "coremltools": install_proxy}
both = pytest.mark.parametrize("route", ["pyobjc", "coremltools"])


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def through(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Edge]:
    return lambda route: INSTALL[route](machine, monkeypatch)


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((8, 64)).astype(np.float16)


@both
def test_functions_are_named_and_heads_are_not(
    route: str, through: Callable[[str], Edge], machine: Machine, tiny_bundle: Path, tmp_path: Path
) -> None:
    engine = engine_over(tiny_bundle, through(route), tmp_path, "cpuAndGPU")
    engine.function("chunk_0.mlpackage", "decode")
    engine.function("lmhead.mlpackage", None)
    engine.function("chunk_0.mlpackage", "prefill_4")
    assert machine.loaded == [
        ("chunk_0.mlpackage", "decode", "cpuAndGPU"),
        ("lmhead.mlpackage", None, "cpuAndGPU"),
        ("chunk_0.mlpackage", "prefill_4", "cpuAndGPU"),
    ]
    assert machine.compiled == ["chunk_0.mlpackage", "lmhead.mlpackage"], "a package is compiled once for all functions"


@both
@pytest.mark.parametrize(
    ("units", "asked", "head"),
    [
        ("all", None, "cpuOnly"),
        ("cpuAndNeuralEngine", None, "cpuOnly"),
        ("cpuAndGPU", None, "cpuAndGPU"),
        ("cpuOnly", None, "cpuOnly"),
        ("all", "ane", "cpuAndNeuralEngine"),
        ("cpuOnly", "all", "all"),
    ],
)
def test_only_the_verify_head_has_units_of_its_own(
    route: str, units: str, asked: str | None, head: str, through: Callable[[str], Edge], machine: Machine,
    tiny_bundle: Path, tmp_path: Path,
) -> None:  # fmt: skip
    engine = engine_over(tiny_bundle, through(route), tmp_path, units, asked)  # type: ignore[arg-type]
    for package, function in (
        ("chunk_1.mlpackage", "decode"),
        ("lmhead.mlpackage", None),
        ("lmhead_v4.mlpackage", None),
    ):
        engine.function(package, function)
    assert [place[2] for place in machine.loaded] == [units, units, head]
    assert engine.describe()["compute_units"] == units and engine.describe()["route"] == route


def test_the_host_cache_is_read_in_place_and_everything_else_at_one_place(
    through: Callable[[str], Edge], machine: Machine, bundle: Bundle, tmp_path: Path
) -> None:
    engine = engine_over(bundle.root, through("pyobjc"), tmp_path)
    session = Session.open(bundle, engine)
    session.feed([2, *range(300, 320)])
    session.generate(8)
    host = {
        f"{part}_{layer}_in": array.__array_interface__["data"][0]
        for layer in session.kv.layers
        for part, array in zip("kv", session.kv.inputs(layer), strict=True)
    }
    assert len(host) == 12 and not any(address % 4096 for address in host.values())
    decodes = [p for p in machine.predictions if p.function == "decode" and p.package == "chunk_0.mlpackage"]
    prefills = [p for p in machine.predictions if p.function == "prefill_8"]
    assert len(decodes) >= 8 and prefills
    for prediction in decodes + prefills:
        for name, given in prediction.inputs.items():
            assert given.dtype == "float16"
            if name in host:
                assert given.address == host[name] and given.shape == (1, 2048, 32) and given.strides == (65536, 32, 1)
            else:
                assert given.address not in host.values()
    assert decodes[0].inputs["onehot"].shape == (2048,) and decodes[0].inputs["hidden_in"].shape == (64,)
    for prediction in decodes[1:]:
        assert dict(prediction.inputs) == dict(decodes[0].inputs), "the same memory in every call"
        assert prediction.backings == decodes[0].backings
        assert prediction.dictionary is decodes[0].dictionary, "nothing changed, so nothing is made anew"
    backings = decodes[0].backings
    assert backings["k_0_out"].shape == (1, 2048, 32) and backings["hidden"].shape == (64,)
    assert not {given.address for given in backings.values()} & {*host.values()}
    assert len({given.address for given in (*backings.values(), *decodes[0].inputs.values())}) == len(backings) + len(
        decodes[0].inputs
    )


def test_another_hosts_cache_is_read_where_it_lies(
    through: Callable[[str], Edge], machine: Machine, bundle: Bundle, tmp_path: Path
) -> None:
    """The engine outlives a session: nothing of the first one's memory may be read for the second."""
    engine = engine_over(bundle.root, through("pyobjc"), tmp_path)
    first, second = Session.open(bundle, engine), Session.open(bundle, engine)
    tokens = list(range(300, 306))
    first.feed(tokens)
    first.feed([7])
    want = first.generate(6).tokens
    del first
    second.feed(tokens)
    second.feed([7])
    assert second.generate(6).tokens == want
    k = second.kv.inputs(0)[0].__array_interface__["data"][0]
    last = [p for p in machine.predictions if p.function == "decode" and p.package == "chunk_0.mlpackage"][-1]
    assert last.inputs["k_0_in"].address == k


def test_coremltools_gets_a_fresh_dictionary_of_arrays_that_stay(
    through: Callable[[str], Edge], machine: Machine, tiny_bundle: Path, tmp_path: Path, rows: np.ndarray
) -> None:
    feeder = Feeder(tiny_bundle, engine_over(tiny_bundle, through("coremltools"), tmp_path))
    decode_each(feeder, rows[:4], 0)
    calls = [p for p in machine.predictions if p.package == "chunk_0.mlpackage"]
    assert len({id(p.dictionary) for p in calls}) == len(calls) == 4
    assert all(given.dtype == "float32" for given in calls[0].inputs.values()), "coremltools would copy fp16"
    assert all(p.inputs == calls[0].inputs for p in calls), "the same memory in every call"


def test_outputs_that_core_ml_puts_elsewhere_are_read_there(
    through: Callable[[str], Edge], machine: Machine, tiny_bundle: Path, tmp_path: Path, rows: np.ndarray
) -> None:
    edge = through("pyobjc")
    found = []
    for machine.use_backings in (True, False):
        feeder = Feeder(tiny_bundle, engine_over(tiny_bundle, edge, tmp_path))
        decode_each(feeder, rows[:3], 0)
        hidden = feeder.feed("prefill_4", rows[3:7], 3)
        found.append((hidden.tobytes(), feeder.rows_of(0, 7)))
    assert found[0] == found[1]


def test_rows_that_are_not_finite_are_refused_by_name(
    through: Callable[[str], Edge], machine: Machine, tiny_bundle: Path, tmp_path: Path, rows: np.ndarray
) -> None:
    feeder = Feeder(tiny_bundle, engine_over(tiny_bundle, through("pyobjc"), tmp_path))

    def overflow(package: str, outputs: dict[str, np.ndarray]) -> None:
        if package == "chunk_1.mlpackage":
            outputs["v_4_out"][0, 2, 5] = np.inf

    decode_each(feeder, rows[:2], 0)
    machine.change = overflow
    with pytest.raises(Fp16Overflow, match=r"chunk_1\.mlpackage:decode: v_4_out: expected finite"):
        feeder.feed("decode", rows[2:3], 2)


def test_an_output_of_another_size_is_not_taken(
    through: Callable[[str], Edge], machine: Machine, tiny_bundle: Path, tmp_path: Path
) -> None:
    head = engine_over(tiny_bundle, through("coremltools"), tmp_path).function("lmhead.mlpackage", None)
    machine.change = lambda package, outputs: outputs.update(token=np.zeros(3, np.int32))
    with pytest.raises(CoreMLFailed, match=r"lmhead\.mlpackage: output token: int32\[1\].* found: int32\[3\]"):
        head({"hidden": np.zeros(64, np.float16)})


@both
def test_what_core_ml_says_is_passed_on(
    route: str, through: Callable[[str], Edge], machine: Machine, tiny_bundle: Path, tmp_path: Path
) -> None:
    edge = through(route)
    engine = engine_over(tiny_bundle, edge, tmp_path)
    engine.function("lmhead.mlpackage", None)
    with pytest.raises(CoreMLFailed, match=r"loading lmhead.mlmodelc, function other, for all: .*other") as caught:
        edge.load(next((tmp_path / "compiled").glob("*/*.mlmodelc")), "other", "all")
    assert "other" in caught.value.said
    empty = tmp_path / "chunk_0.mlpackage"
    empty.mkdir()
    with pytest.raises(CoreMLFailed, match=r"compiling chunk_0.mlpackage: .*not a package"):
        edge.compile(empty, tmp_path / "chunk_0.mlmodelc")


def compiled_with(tmp_path: Path, system: str = "test") -> CompiledPackages:
    return CompiledPackages(tmp_path / "compiled", DigestCache.open(None), system)


@both
def test_a_package_is_compiled_once_until_it_or_the_system_changes(
    route: str, through: Callable[[str], Edge], machine: Machine, tiny_bundle: Path, tmp_path: Path
) -> None:
    edge = through(route)
    package = tmp_path / "lmhead.mlpackage"
    shutil.copytree(tiny_bundle / package.name, package)
    first = compiled_with(tmp_path).path(package, edge.compile)
    assert first.name == "lmhead.mlmodelc" and (first / "Manifest.json").is_file()
    (package / ".DS_Store").write_bytes(b"Finder")
    assert compiled_with(tmp_path).path(package, edge.compile) == first and len(machine.compiled) == 1
    assert compiled_with(tmp_path, "newer").path(package, edge.compile) != first and len(machine.compiled) == 2
    weights = next(package.rglob("weight.bin"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    changed = compiled_with(tmp_path).path(package, edge.compile)
    assert changed != first and len(machine.compiled) == 3
    assert (changed / weights.relative_to(package)).read_bytes() == data
    assert compiled_with(tmp_path).path(changed, edge.compile) == changed, "what is compiled is used as it is"
    twin = package.rename(tmp_path / "twin.mlpackage")
    assert compiled_with(tmp_path).path(twin, edge.compile).name == "twin.mlmodelc", "the same under another name"
    assert machine.compiled.pop() == "twin.mlpackage"
    assert len(machine.compiled) == 3


def test_a_compilation_that_fails_leaves_nothing(tiny_bundle: Path, tmp_path: Path) -> None:
    def fail(package: Path, target: Path) -> None:
        target.mkdir()
        (target / "half").write_bytes(b"half")
        raise CoreMLFailed("no")

    with pytest.raises(CoreMLFailed):
        compiled_with(tmp_path).path(tiny_bundle / "lmhead.mlpackage", fail)
    assert not list((tmp_path / "compiled").iterdir())


def test_two_processes_that_compile_at_once_share_the_first_ones(
    through: Callable[[str], Edge], tiny_bundle: Path, tmp_path: Path
) -> None:
    edge, package = through("pyobjc"), tiny_bundle / "lmhead.mlpackage"

    def late(given: Path, target: Path) -> None:
        compiled_with(tmp_path).path(package, edge.compile)  # the other process, meanwhile
        edge.compile(given, target)

    found = compiled_with(tmp_path).path(package, late)
    assert (found / "Manifest.json").is_file()
    assert list((tmp_path / "compiled").iterdir()) == [found.parent]


def test_units_are_the_users_then_the_bundles_then_all() -> None:
    assert UnitsPolicy.choose("cpuOnly", "cpuAndGPU", None) == UnitsPolicy("cpuOnly", "cpuOnly")
    assert UnitsPolicy.choose(None, "cpuAndGPU", None) == UnitsPolicy("cpuAndGPU", "cpuAndGPU")
    assert UnitsPolicy.choose(None, None, None) == UnitsPolicy("all", "cpuOnly")
    assert UnitsPolicy.choose(None, "cpuOnly", "gpu") == UnitsPolicy("cpuOnly", "cpuAndGPU")
    with pytest.raises(ValueError, match="expected one of cpu, gpu, ane, all, found 'CPU'"):
        UnitsPolicy.choose(None, None, "CPU")


def test_what_the_engine_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.coreml import routes

    class System:
        platform = "linux"

    monkeypatch.setattr(routes, "sys", System)
    with pytest.raises(EngineUnavailable, match=r"expected macOS 15 or newer, found .*--engine portable"):
        open_edge()
    System.platform = "darwin"
    monkeypatch.setattr(routes.platform, "mac_ver", lambda: ("14.7", ("", "", ""), "arm64"))
    assert "found macOS 14.7" in (missing() or "")
    monkeypatch.setattr(routes.platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(routes.util, "find_spec", lambda name: None)
    with pytest.raises(EngineUnavailable, match=r"found neither: pip install 'kvferry\[runtime\]'"):
        open_edge()
    monkeypatch.setattr(routes.util, "find_spec", lambda name: name == "coremltools" or None)
    assert missing() is None and open_edge().name == "coremltools"


def test_pyobjc_is_taken_first(through: Callable[[str], Edge], monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.coreml import routes

    through("pyobjc")
    monkeypatch.setattr(routes, "missing", lambda: None)
    monkeypatch.setattr(routes.util, "find_spec", lambda name: True)
    assert open_edge().name == "pyobjc"


def test_a_bundle_that_is_compiled_already_is_loaded_as_it_is(
    through: Callable[[str], Edge], machine: Machine, bundle: Bundle, tmp_path: Path
) -> None:
    """As the published ones are: there is no package to compile, and the declared inputs come from the compiled program."""
    edge = through("pyobjc")
    opened = Bundle.open(compiled_bundle(bundle.root, tmp_path / "tiny"))
    engine = CoreMLEngine(edge, opened.package_path, compiled_with(tmp_path), UnitsPolicy.choose(None, None, None), [])
    session, plain = Session.open(opened, engine), Session.open(bundle, PortableEngine(bundle.root))
    for one in (session, plain):
        one.feed([2, 300, 301])
    assert session.generate(5).tokens == plain.generate(5).tokens
    assert machine.compiled == [] and not (tmp_path / "compiled").exists()
    assert machine.loaded[0] == ("chunk_0.mlmodelc", "decode", "all")
    assert engine.ledger.names() == ["chunk_0.mlpackage:decode", "chunk_1.mlpackage:decode", "lmhead.mlpackage"]


def test_a_hostkv_lies_at_page_boundaries(bundle: Bundle) -> None:
    """What Core ML borrows; also where pages are 16 KiB."""
    import mmap

    kv = HostKV(bundle.layout(), bundle.config.ctx)
    addresses = [a.__array_interface__["data"][0] for layer in kv.layers for a in kv.inputs(layer)]
    assert not any(address % mmap.PAGESIZE for address in addresses)


@pytest.mark.parametrize("bundle", ["tiny-gemma4"], indirect=True)
def test_rows_of_store_layers_are_read_in_place_too(
    through: Callable[[str], Edge], machine: Machine, bundle: Bundle, ids: list[int], tmp_path: Path
) -> None:
    """The published shape: chunks of shared layers read another layer's rows, in a plain step the first ones of them."""
    config = bundle.config
    assert config.store_layers is not None and config.plain_width is not None
    session = Session.open(bundle, engine_over(bundle.root, through("pyobjc"), tmp_path))
    plain = Session.open(bundle, PortableEngine(bundle.root))
    for one in (session, plain):
        one.feed(ids[: config.plain_width + 5])
    assert session.generate(4).tokens == plain.generate(4).tokens
    k, v = session.kv.inputs(config.store_layers.full)
    places = [
        (prediction.function, prediction.inputs["skf"], prediction.inputs["svf"])
        for prediction in machine.predictions
        if "skf" in prediction.inputs
    ]
    assert {function for function, _, _ in places} >= {
        config.decode_function,
        config.prefill_functions[config.plain_width],
    }
    for function, keys, values in places:
        assert keys.address == k.__array_interface__["data"][0] and values.address == v.__array_interface__["data"][0]
        assert keys.shape[1] == (
            config.plain_width if function == config.prefill_functions[config.plain_width] else config.ctx
        )
