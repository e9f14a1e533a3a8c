"""The part of Core ML's protobuf schema that an ML Program needs, declared here so that coremltools is not.

Messages live in a descriptor pool of our own: with coremltools in the same process its generated messages
stay untouched. Fields that we don't read are kept out; protobuf skips them on the wire.
A map is declared as what it is on the wire, a repeated (key, value) message, which keeps file order and
shows duplicate keys instead of dropping them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_PACKAGE = "kvferry.mil"
_SCALARS = {
    "double": 1,
    "float": 2,
    "int64": 3,
    "uint64": 4,
    "int32": 5,
    "bool": 8,
    "string": 9,
    "bytes": 12,
}
# "name number type", a trailing "*" means repeated. Enums are read as int32 (equal on the wire).
_MESSAGES = {
    "Model": "specificationVersion 1 int32, description 2 Description, mlProgram 502 Program",
    "Description": "functions 20 FunctionDescription*, defaultFunctionName 21 string",
    "FunctionDescription": "name 1 string",
    "Program": "functions 2 FunctionEntry*",
    "FunctionEntry": "key 1 string, value 2 Function",
    "Function": "inputs 1 NamedType*, opset 2 string, blocks 3 BlockEntry*",
    "BlockEntry": "key 1 string, value 2 Block",
    "Block": "outputs 2 string*, operations 3 Operation*",
    "Operation": "type 1 string, inputs 2 InputEntry*, outputs 3 NamedType*, blocks 4 Block*, attributes 5 ValueEntry*",
    "InputEntry": "key 1 string, value 2 Argument",
    "Argument": "arguments 1 Binding*",
    "Binding": "name 1 string, value 2 Value",
    "ValueEntry": "key 1 string, value 2 Value",
    "NamedType": "name 1 string, type 2 ValueType",
    "ValueType": "tensorType 1 TensorType, listType 2 Opaque, tupleType 3 Opaque, dictionaryType 4 Opaque, stateType 5 Opaque",
    "Opaque": "",
    "TensorType": "dataType 1 int32, rank 2 int64, dimensions 3 Dimension*",
    "Dimension": "constant 1 Constant, unknown 2 Opaque",
    "Constant": "size 1 uint64",
    "Value": "type 2 ValueType, immediateValue 3 Immediate, blobFileValue 5 BlobFile",
    "BlobFile": "fileName 1 string, offset 2 uint64",
    "Immediate": "tensor 1 Tensor, list 3 Opaque, tuple 2 Opaque, dictionary 4 Opaque",
    "Tensor": "floats 1 Floats, ints 2 Ints, bools 3 Bools, strings 4 Strings, longInts 5 Longs, doubles 6 Doubles, bytes 7 Bytes",
    "Floats": "values 1 float*",
    "Ints": "values 1 int32*",
    "Bools": "values 1 bool*",
    "Strings": "values 1 string*",
    "Longs": "values 1 int64*",
    "Doubles": "values 1 double*",
    "Bytes": "values 1 bytes",
}


@cache
def _model_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="kvferry_mil.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for declaration in filter(None, fields.split(", ")):
            field_name, number, kind = declaration.split(" ")
            field = message.field.add(name=field_name, number=int(number))
            repeated = kind.endswith("*")
            kind = kind.removesuffix("*")
            field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if kind in _SCALARS:
                field.type = cast(Any, _SCALARS[kind])
            else:
                field.type = field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))


def parse_model(data: bytes) -> Any:
    """The Model message in ``data`` (the whole of ``model.mlmodel``).

    Raises ``ValueError`` when the bytes are not such a message. The result is dynamically typed and must
    not leave this package: ``program`` turns it into the typed IR.
    """
    message = _model_class()()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(str(error)) from error
    return message
