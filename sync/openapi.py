"""The routes below ``/v1/`` as an OpenAPI 3.1 document, for tools. `docs/protocol.md` is the description for people.

Maps travel as msgpack, which JSON Schema doesn't know: they are described as what they unpack to, with ``bin`` as base64 text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvstore.layout import MAX_OBJECT

from .bodies import (
    FRAME_TYPE,
    FRAMES_TYPE,
    MAP_TYPE,
    MAX_FRAMES,
    MAX_MAP,
    MAX_REFS,
    PROTOCOL,
    Fetch,
    Find,
    Found,
    Had,
    Have,
    Info,
    Landed,
    Pair,
    Paired,
    Publish,
    Published,
    Refs,
    Shape,
    Signatures,
)
from .remote import MAX_ASKED

_HEX = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_QUOTED = {"type": "string", "pattern": '^"[0-9a-f]{64}"$'}
_BYTES = {"type": "string", "format": "binary"}
_PARAMETERS: Mapping[str, dict[str, Any]] = {
    "label": {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1, "maxLength": 200}},
    "digest": {"in": "path", "required": True, "schema": _HEX},
    "name": {"in": "path", "required": True, "schema": _HEX},
    "after": {"in": "query", "schema": {"type": "string", "maxLength": 200}},
    "limit": {"in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_REFS}},
    "Range": {"in": "header", "schema": {"type": "string"}},
    "If-Range": {"in": "header", "schema": {"type": "string"}},
    "If-Match": {"in": "header", "schema": _QUOTED},
    "If-None-Match": {"in": "header", "schema": {"type": "string", "enum": ["*"]}},
}
_ERRORS: Mapping[int, str] = {
    400: "A body or parameter that docs/protocol.md doesn't allow.",
    401: "No token, or one that is not known (any more).",
    403: "The token, or the server, doesn't allow it.",
    404: "Not there, for this token.",
    409: "An object that is promised isn't there.",
    412: "The name stands elsewhere, or another one differs by case only.",
    413: "A body that is too large.",
    416: "A range outside the object.",
    429: "Too many requests, connections or failures; Retry-After says when.",
    500: "Damage, or a fault, on the server.",
    503: "Stopping, or its store is locked; Retry-After says when.",
    507: "The disk, its quota, or what a token may leave unpublished, is full.",
}
_EVERYWHERE = (400, 429, 500, 503)
_Content = type[Shape] | str
"""A map's shape, or a media type of bytes."""


@dataclass(frozen=True, slots=True)
class _Route:
    method: str
    path: str
    summary: str
    scope: str | None
    """None: no token is asked for; "any": a token with any scope."""
    answers: Mapping[int, _Content | None]
    parameters: tuple[str, ...] = ()
    body: _Content | None = None
    errors: tuple[int, ...] = ()


_RECORD = "/v1/snapshots/{digest}"
ROUTES: tuple[_Route, ...] = (
    _Route("get", "/v1/info", "Who answers, and what the token may do.", "read", {200: Info}),
    _Route("get", "/v1/openapi.json", "This document.", "any", {200: "application/json"}),
    _Route("get", "/v1/refs", "A page of names.", "read", {200: Refs}, ("after", "limit")),
    _Route("get", "/v1/refs/{label}", "A name's frame.", "read", {200: FRAME_TYPE}, ("label",), None, (404,)),
    _Route(
        "put", "/v1/refs/{label}", "Publishes a snapshot, then moves the name.", "push", {200: Published},
        ("label", "If-Match", "If-None-Match"), Publish, (404, 409, 412, 413, 507),
    ),
    _Route(
        "delete", "/v1/refs/{label}", "Removes a name.", "admin", {204: None}, ("label", "If-Match"), None, (404, 412)
    ),
    _Route("get", _RECORD, "A manifest's frame.", "read", {200: FRAME_TYPE}, ("digest",), None, (404,)),
    _Route("get", f"{_RECORD}/coverage", "A coverage's frame.", "read", {200: FRAME_TYPE}, ("digest",), None, (404,)),
    _Route("get", f"{_RECORD}/signatures", "Who signed a manifest.", "read", {200: Signatures}, ("digest",), None, (404,)),
    _Route("put", f"{_RECORD}/signatures", "Adds signatures.", "push", {200: Signatures}, ("digest",), Signatures, (404, 413, 507)),
    _Route("post", "/v1/have", f"Which of at most {MAX_ASKED} objects are there.", "read", {200: Had}, (), Have, (413,)),
    _Route("post", "/v1/find", "Which snapshot serves these items best.", "read", {200: Found}, (), Find, (413,)),
    _Route(
        "get", "/v1/objects/{name}", "An object's frame, or a part of it.", "read", {200: FRAME_TYPE, 206: FRAME_TYPE},
        ("name", "Range", "If-Range"), None, (404, 416),
    ),
    _Route(
        "head", "/v1/objects/{name}", "As GET, without the body.", "read", {200: None, 206: None},
        ("name", "Range", "If-Range"), None, (404, 416),
    ),
    _Route("put", "/v1/objects", f"Takes in at most {MAX_FRAMES} object frames, out of sight.", "push", {200: Landed}, (), FRAMES_TYPE, (507,)),
    _Route("post", "/v1/fetch", f"At most {MAX_FRAMES} objects' frames.", "read", {200: FRAMES_TYPE}, (), Fetch, (404, 413)),
    _Route("post", "/v1/pair", "Trades a one-time secret for a token.", None, {200: Paired}, (), Pair, (401, 404, 413)),
)  # fmt: skip


def description() -> dict[str, Any]:
    """The document."""
    shapes = [
        content
        for route in ROUTES
        for content in (*route.answers.values(), route.body)
        if content is not None and not isinstance(content, str)
    ]
    _, schemas = msgspec.json.schema_components(shapes, ref_template="#/components/schemas/{name}")
    schemas["Error"] = {
        "type": "object",
        "required": ["error", "message", "details"],
        "additionalProperties": False,
        "properties": {"error": {"type": "string"}, "message": {"type": "string"}, "details": {"type": "object"}},
    }
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvferry",
            "version": str(PROTOCOL),
            "description": f"Maps are msgpack, at most {MAX_MAP} bytes but for manifests and finds; an object's payload is at most {MAX_OBJECT} bytes.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "bearerFormat": "kvf1.<id>.<secret>"}},
        },
    }


def _operation(route: _Route) -> dict[str, Any]:
    refused = {*_EVERYWHERE, *route.errors, *(() if route.scope is None else (401, 403))}
    made: dict[str, Any] = {
        "operationId": f"{route.method} {route.path}",
        "summary": route.summary,
        "security": [] if route.scope is None else [{"token": []}],
        "parameters": [{"name": name, **_PARAMETERS[name]} for name in route.parameters],
        "responses": {str(status): _answer(content) for status, content in route.answers.items()}
        | {str(status): _error(route, status) for status in sorted(refused)},
    }
    if route.scope is not None:
        made["x-kvferry-scope"] = route.scope
    if route.body is not None:
        made["requestBody"] = {"required": True, "content": _content(route.body)}
    return made


def _answer(content: _Content | None) -> dict[str, Any]:
    return {"description": "Done."} if content is None else {"description": "Done.", "content": _content(content)}


def _error(route: _Route, status: int) -> dict[str, Any]:
    told = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": _ERRORS[status], **({} if route.method == "head" else {"content": told})}


def _content(content: _Content) -> dict[str, Any]:
    if not isinstance(content, str):
        return {MAP_TYPE: {"schema": {"$ref": f"#/components/schemas/{content.__name__}"}}}
    return {content: {"schema": {"type": "object"} if content == "application/json" else _BYTES}}
