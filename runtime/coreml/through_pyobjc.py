"""Core ML through PyObjC: arrays over our own memory, outputs in ours too, no conversion.

An ``MLMultiArray`` over memory of ours borrows it, so whoever gives it keeps it (``edge.Model``). What Core ML reads during a
prediction is made of Foundation's own objects: a Python list or int handed over would call back into the interpreter.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.coreml.edge import failed
from runtime.coreml.units import Units

Array = NDArray[Any]

_UNITS = {
    "cpuOnly": "MLComputeUnitsCPUOnly",
    "cpuAndGPU": "MLComputeUnitsCPUAndGPU",
    "all": "MLComputeUnitsAll",
    "cpuAndNeuralEngine": "MLComputeUnitsCPUAndNeuralEngine",
}
_TYPES = {
    "float16": "MLMultiArrayDataTypeFloat16",
    "float32": "MLMultiArrayDataTypeFloat32",
    "int32": "MLMultiArrayDataTypeInt32",
}


class PyObjCEdge:
    """An ``Edge``. Needs ``pyobjc-framework-CoreML`` and macOS 15 for packages of several functions."""

    name = "pyobjc"

    def __init__(self) -> None:
        import CoreML
        import Foundation
        import objc

        self._coreml: Any = CoreML
        self._foundation: Any = Foundation
        self._objc: Any = objc

    def versions(self) -> dict[str, str]:
        return {"pyobjc": str(self._objc.__version__)}

    def compile(self, package: Path, target: Path) -> None:
        with self._objc.autorelease_pool():
            made, error = self._coreml.MLModel.compileModelAtURL_error_(self._url(package), None)
            if made is None:
                raise failed(f"compiling {package.name}", error, "Build the bundle again, or update macOS.")
            shutil.move(str(made.path()), target)  # Core ML leaves it in a temporary folder

    def load(self, compiled: Path, function: str | None, units: Units) -> PyObjCModel:
        with self._objc.autorelease_pool():
            configuration = self._coreml.MLModelConfiguration.alloc().init()
            configuration.setComputeUnits_(getattr(self._coreml, _UNITS[units]))
            if function is not None:
                configuration.setFunctionName_(function)
            model, error = self._coreml.MLModel.modelWithContentsOfURL_configuration_error_(
                self._url(compiled), configuration, None
            )
        doing = f"loading {compiled.name}{'' if function is None else f', function {function}'}, for {units}"
        if model is None:
            raise failed(doing, error, f"Try other --compute-units, or delete {compiled} if kvferry compiled it.")
        return PyObjCModel(self._coreml, self._foundation, self._objc, model, doing.removeprefix("loading "))

    def _url(self, path: Path) -> Any:
        return self._foundation.NSURL.fileURLWithPath_(str(path))


class PyObjCModel:
    """A ``Model``: one ``MLModel`` and the framework's objects over the arrays that it was last given."""

    def __init__(self, coreml: Any, foundation: Any, objc: Any, model: Any, label: str) -> None:
        self._coreml = coreml
        self._foundation = foundation
        self._objc = objc
        self._model = model
        self._label = label
        self._values: dict[str, tuple[Array, Any]] = {}
        self._provider: Any = None
        self._outputs: dict[str, tuple[Array, Any]] = {}
        self._options: Any = None

    def predict(self, inputs: Mapping[str, Array], backings: Mapping[str, Array]) -> dict[str, Array]:
        with self._objc.autorelease_pool():
            self._bind_inputs(inputs)
            self._bind_outputs(backings)
            made, error = self._model.predictionFromFeatures_options_error_(self._provider, self._options, None)
            if made is None:
                raise failed(f"running {self._label}", error, "Try other --compute-units, or --engine portable.")
            names = (str(name) for name in made.featureNames())
            return {name: self._output(name, made.featureValueForName_(name).multiArrayValue()) for name in names}

    def _bind_inputs(self, inputs: Mapping[str, Array]) -> None:
        """A feature value for each array, made anew only for an array that isn't the one of the last call."""
        new = [name for name, array in inputs.items() if self._values.get(name, (None,))[0] is not array]
        for name in new:
            value = self._coreml.MLFeatureValue.featureValueWithMultiArray_(self._borrowed(inputs[name]))
            self._values[name] = (inputs[name], value)
        if new or self._provider is None:
            features = self._dictionary((name, self._values[name][1]) for name in inputs)
            provider = self._coreml.MLDictionaryFeatureProvider.alloc()
            self._provider, error = provider.initWithDictionary_error_(features, None)
            if self._provider is None:
                raise failed(f"inputs of {self._label}", error, "Report this: the inputs are those of the package.")

    def _bind_outputs(self, backings: Mapping[str, Array]) -> None:
        new = [name for name, array in backings.items() if self._outputs.get(name, (None,))[0] is not array]
        for name in new:
            self._outputs[name] = (backings[name], self._borrowed(backings[name]))
        if new or self._options is None:
            self._options = self._coreml.MLPredictionOptions.alloc().init()
            self._options.setOutputBackings_(self._dictionary((name, self._outputs[name][1]) for name in backings))

    def _output(self, name: str, array: Any) -> Array:
        """The backing, where Core ML used it; else a copy of what it returned instead."""
        backing = self._outputs.get(name)
        if backing is not None and self._objc.pyobjc_id(array) == self._objc.pyobjc_id(backing[1]):
            return backing[0]
        kinds = {getattr(self._coreml, constant): np.dtype(kind) for kind, constant in _TYPES.items()}
        dtype = kinds[int(array.dataType())]
        shape = tuple(int(n) for n in array.shape())
        strides = tuple(int(n) * dtype.itemsize for n in array.strides())  # rows may be padded
        span = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        flat = np.frombuffer(array.dataPointer().as_buffer(span), np.uint8, span)
        return np.ndarray(shape, dtype, flat, 0, strides).copy()

    def _borrowed(self, array: Array) -> Any:
        """An ``MLMultiArray`` over ``array``'s memory, without a deallocator: it stays ours."""
        assert array.flags.c_contiguous
        steps = [prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
        memory = (ctypes.c_char * array.nbytes).from_address(array.__array_interface__["data"][0])
        kind = getattr(self._coreml, _TYPES[array.dtype.name])
        made, error = self._coreml.MLMultiArray.alloc().initWithDataPointer_shape_dataType_strides_deallocator_error_(
            memory, self._numbers(array.shape), kind, self._numbers(steps), None, None
        )
        if made is None:
            raise failed(f"an array of {self._label}", error, "Report this: the memory is the caller's own.")
        return made

    def _numbers(self, numbers: Iterable[int]) -> Any:
        made = self._foundation.NSMutableArray.array()
        for number in numbers:
            made.addObject_(self._foundation.NSNumber.numberWithLongLong_(number))
        return made

    def _dictionary(self, items: Iterable[tuple[str, Any]]) -> Any:
        made = self._foundation.NSMutableDictionary.dictionary()
        for name, value in items:
            made.setObject_forKey_(value, self._foundation.NSString.stringWithUTF8String_(name.encode()))
        return made
