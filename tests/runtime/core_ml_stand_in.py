"""Stands in for Core ML where there is none: the framework's own calls, computed by the portable engine, and everything it is given recorded.

`Machine` is the machine that runs compiled packages. `install_framework` makes it answer as PyObjC's modules CoreML, Foundation and objc do;
`install_proxy` puts it below coremltools' own Python code, in place of its native part. Selectors, argument order and the (result, error)
pairs are those of PyObjC's metadata for CoreML 12.2.2. Nothing here says how Core ML itself behaves.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import KVError
from runtime.bundle.digests import DigestCache
from runtime.coreml import CompiledPackages, CoreMLEngine, Edge, Units, UnitsPolicy
from runtime.coreml.through_coremltools import CoremltoolsEdge
from runtime.coreml.through_pyobjc import PyObjCEdge
from runtime.portable import PortableEngine

Array = NDArray[Any]
SOURCE = "source.txt"


@dataclass(frozen=True)
class Given:
    """An array as the framework sees it."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    """In elements."""


@dataclass(frozen=True)
class Prediction:
    package: str
    function: str | None
    inputs: Mapping[str, Given]
    backings: Mapping[str, Given]
    dictionary: object
    """What held the inputs."""


@dataclass
class Machine:
    """What was asked of Core ML. ``use_backings`` False: outputs go elsewhere, with padded rows. ``change(package, outputs)`` may break one."""

    compiled: list[str] = field(default_factory=list)
    loaded: list[tuple[str, str | None, str]] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    use_backings: bool = True
    change: Callable[[str, dict[str, Array]], None] = lambda package, outputs: None
    _engines: dict[Path, PortableEngine] = field(default_factory=dict)

    def compile(self, package: Path) -> Path:
        """A folder that holds where it came from, and a copy of the package's files: it changes when they do."""
        if not (package / "Manifest.json").is_file():
            raise ValueError("not a package")
        target = Path(tempfile.mkdtemp()) / f"{package.stem}.mlmodelc"
        shutil.copytree(package, target)
        (target / SOURCE).write_text(str(package))
        self.compiled.append(package.name)
        return target

    def load(self, path: Path, function: str | None, units: str) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        package = Path((path / SOURCE).read_text()) if (path / SOURCE).exists() else path
        engine = self._engines.setdefault(package.parent, PortableEngine(package.parent))
        computes = engine.function(package.name, function)
        self.loaded.append((package.name, function, units))

        def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
            outputs = computes(inputs)
            self.change(package.name, outputs)
            return outputs

        return run


class _Allocated:
    """``Class.alloc().init…``"""

    @classmethod
    def alloc(cls) -> Any:
        return cls.__new__(cls)

    def init(self) -> Any:
        return self


class Number:
    def __init__(self, value: int) -> None:
        self.value = value

    def __int__(self) -> int:
        return self.value

    @classmethod
    def numberWithLongLong_(cls, value: int) -> Number:
        assert type(value) is int
        return cls(value)


class String(str):
    @classmethod
    def stringWithUTF8String_(cls, value: bytes) -> String:
        return cls(value.decode())


class MutableArray:
    def __init__(self) -> None:
        self.items: list[Number] = []

    @classmethod
    def array(cls) -> MutableArray:
        return cls()

    def addObject_(self, number: Number) -> None:
        assert isinstance(number, Number), "a Python int would call back into the interpreter"
        self.items.append(number)

    def __iter__(self) -> Iterator[Number]:
        return iter(self.items)


class MutableDictionary:
    def __init__(self) -> None:
        self.items: dict[str, Any] = {}

    @classmethod
    def dictionary(cls) -> MutableDictionary:
        return cls()

    def setObject_forKey_(self, value: Any, key: String) -> None:
        assert isinstance(key, String), "a Python str would call back into the interpreter"
        self.items[key] = value


class URL:
    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def fileURLWithPath_(cls, path: str) -> URL:
        return cls(path)

    def path(self) -> str:
        return self._path


_TYPES = {65552: np.float16, 65568: np.float32, 131104: np.int32}


class VarList:
    """What PyObjC gives for a pointer of unknown length."""

    def __init__(self, address: int) -> None:
        self._address = address

    def as_buffer(self, count: int) -> memoryview:
        return memoryview((ctypes.c_char * count).from_address(self._address))


class MultiArray(_Allocated):
    def initWithDataPointer_shape_dataType_strides_deallocator_error_(
        self, memory: Any, shape: MutableArray, kind: int, strides: MutableArray, deallocator: None, error: None
    ) -> tuple[MultiArray, None]:
        assert isinstance(shape, MutableArray) and isinstance(strides, MutableArray)
        # only the address: Core ML does not know whose memory it is
        return self.over(ctypes.addressof(memory), [int(n) for n in shape], kind, [int(n) for n in strides]), None

    def over(self, address: int, shape: list[int], kind: int, strides: list[int]) -> MultiArray:
        self.address, self._shape, self._kind, self._strides = address, shape, kind, strides
        self.kept: object = None
        return self

    def shape(self) -> list[Number]:
        return [Number(n) for n in self._shape]

    def strides(self) -> list[Number]:
        return [Number(n) for n in self._strides]

    def dataType(self) -> int:
        return self._kind

    def dataPointer(self) -> VarList:
        return VarList(self.address)

    def view(self) -> Array:
        dtype = np.dtype(_TYPES[self._kind])
        span = 1 + sum((n - 1) * s for n, s in zip(self._shape, self._strides, strict=True))
        memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(self.address)
        return np.ndarray(self._shape, dtype, memory, 0, [s * dtype.itemsize for s in self._strides])

    def given(self) -> Given:
        return Given(self.address, tuple(self._shape), np.dtype(_TYPES[self._kind]).name, tuple(self._strides))


class FeatureValue:
    def __init__(self, array: MultiArray) -> None:
        self._array = array

    @classmethod
    def featureValueWithMultiArray_(cls, array: MultiArray) -> FeatureValue:
        return cls(array)

    def multiArrayValue(self) -> MultiArray:
        return self._array


class FeatureProvider(_Allocated):
    def initWithDictionary_error_(self, items: MutableDictionary, error: None) -> tuple[FeatureProvider, None]:
        assert isinstance(items, MutableDictionary)
        self.values: dict[str, FeatureValue] = dict(items.items)
        return self, None

    def featureNames(self) -> set[str]:
        return set(self.values)

    def featureValueForName_(self, name: str) -> FeatureValue:
        return self.values[name]


class PredictionOptions(_Allocated):
    def setOutputBackings_(self, backings: MutableDictionary) -> None:
        self.backings: dict[str, MultiArray] = dict(backings.items)


class ModelConfiguration(_Allocated):
    function: str | None = None

    def setComputeUnits_(self, units: int) -> None:
        self.units = units

    def setFunctionName_(self, name: str) -> None:
        assert isinstance(name, str)
        self.function = name


def _framework_model(machine: Machine) -> type[Any]:
    class Model:
        def __init__(self, path: Path, function: str | None, units: str) -> None:
            self._place = (path.with_suffix(".mlpackage").name, function)
            self._run = machine.load(path, function, units)

        @classmethod
        def compileModelAtURL_error_(cls, url: URL, error: None) -> tuple[URL | None, object]:
            try:
                return URL(str(machine.compile(Path(url.path())))), None
            except ValueError as refused:
                return None, refused

        @classmethod
        def modelWithContentsOfURL_configuration_error_(
            cls, url: URL, configuration: ModelConfiguration, error: None
        ) -> tuple[Any, object]:
            units = {0: "cpuOnly", 1: "cpuAndGPU", 2: "all", 3: "cpuAndNeuralEngine"}[configuration.units]
            try:
                return cls(Path(url.path()), configuration.function, units), None
            except (OSError, KVError) as refused:
                return None, refused

        def predictionFromFeatures_options_error_(
            self, provider: FeatureProvider, options: PredictionOptions, error: None
        ) -> tuple[FeatureProvider, None]:
            arrays = {name: value.multiArrayValue() for name, value in provider.values.items()}
            machine.predictions.append(
                Prediction(
                    *self._place,
                    {name: array.given() for name, array in arrays.items()},
                    {name: array.given() for name, array in options.backings.items()},
                    provider,
                )
            )
            inputs = {name: array.view() for name, array in arrays.items()}
            for backing in options.backings.values():
                if backing.dataType() != 131104:
                    backing.view()[...] = np.nan  # what was there is gone, also for whoever still looks at it
            result = FeatureProvider()
            result.values = {}
            for name, value in self._run(inputs).items():
                backing = options.backings[name]
                if machine.use_backings:
                    assert backing.given().shape == value.shape
                    backing.view()[...] = value
                else:
                    backing = _padded(value, backing.dataType())
                result.values[name] = FeatureValue(backing)
            return result, None

    return Model


def _padded(value: Array, kind: int) -> MultiArray:
    """A copy whose rows are 3 elements apart more than they are long."""
    wide = np.zeros((*value.shape[:-1], value.shape[-1] + 3), value.dtype)
    view = wide[..., : value.shape[-1]]
    view[...] = value
    strides = [s // value.itemsize for s in view.strides]
    made = MultiArray().over(wide.__array_interface__["data"][0], list(value.shape), kind, strides)
    made.kept = wide
    return made


@contextmanager
def _pool() -> Iterator[None]:
    yield


def install_framework(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Edge:
    """PyObjC's modules, answered by ``machine``, for this test."""
    core_ml, foundation, objc = (ModuleType(name) for name in ("CoreML", "Foundation", "objc"))
    vars(core_ml).update(
        MLComputeUnitsCPUOnly=0, MLComputeUnitsCPUAndGPU=1, MLComputeUnitsAll=2, MLComputeUnitsCPUAndNeuralEngine=3,
        MLMultiArrayDataTypeFloat16=65552, MLMultiArrayDataTypeFloat32=65568, MLMultiArrayDataTypeInt32=131104,
        MLModel=_framework_model(machine), MLModelConfiguration=ModelConfiguration, MLMultiArray=MultiArray,
        MLFeatureValue=FeatureValue, MLDictionaryFeatureProvider=FeatureProvider, MLPredictionOptions=PredictionOptions,
    )  # fmt: skip
    vars(foundation).update(
        NSURL=URL, NSNumber=Number, NSString=String, NSMutableArray=MutableArray, NSMutableDictionary=MutableDictionary
    )
    vars(objc).update(__version__="12.2.2", autorelease_pool=_pool, pyobjc_id=id)
    for module in (core_ml, foundation, objc):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return PyObjCEdge()


def install_proxy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Edge:
    """coremltools as it is, but for its native part, which there is on macOS only."""
    from coremltools.models import _compiled_model, utils

    names = {"CPU_ONLY": "cpuOnly", "CPU_AND_GPU": "cpuAndGPU", "ALL": "all", "CPU_AND_NE": "cpuAndNeuralEngine"}

    class Proxy:
        def __init__(self, path: str, units: str, function: str, hints: object, asset: object) -> None:
            self._place = (Path(path).with_suffix(".mlpackage").name, function or None)
            self._run = machine.load(Path(path), function or None, names[units])

        @staticmethod
        def compileModel(path: str) -> str:
            return str(machine.compile(Path(path)))

        def predict(self, data: dict[str, Array], state: None) -> dict[str, Array]:
            given = {
                name: Given(a.__array_interface__["data"][0], a.shape, a.dtype.name, a.strides)
                for name, a in data.items()
            }
            machine.predictions.append(Prediction(*self._place, given, {}, data))
            outputs = self._run({name: a.astype(np.float16) for name, a in data.items()})
            return {n: a.astype(np.float32) if a.dtype == np.float16 else a for n, a in outputs.items()}

    native = ModuleType("coremltools.libcoremlpython")
    native._MLModelProxy = Proxy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, native.__name__, native)
    monkeypatch.setattr(_compiled_model, "_MLModelProxy", Proxy)
    for module in (_compiled_model, utils):
        monkeypatch.setattr(module, "_macos_version", lambda: (15, 0))
    return CoremltoolsEdge()


def engine_over(
    root: Path, edge: Edge, cache: Path, units: Units = "all", verify_head: str | None = None
) -> CoreMLEngine:
    """A Core ML engine over the packages in ``root``, compiled below ``cache``."""
    compiled = CompiledPackages(cache / "compiled", DigestCache.open(None), "test")
    policy = UnitsPolicy.choose(units, None, verify_head)
    return CoreMLEngine(edge, lambda name: root / name, compiled, policy, ["lmhead_v4.mlpackage"])
