"""The OpenAPI document: every route is in it and nothing else, and (in the tier `reference`) what the server does is what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from ferries import save
from live import ALL, serving
from optional import require
from raw_http import ask, routes

from kvstore import Store
from sync.bodies import FRAMES_TYPE, MAP_TYPE, encode
from sync.openapi import ROUTES, description
from sync.server import Settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "served") as store:
        save(store, "book", 130)
    return tmp_path / "served"


def test_every_route_is_described_and_no_other(folder: Path) -> None:
    there = {(method, path) for method, path in routes(folder) if path.startswith("/v1/")}
    described = {(route.method.upper(), route.path) for route in ROUTES}
    # Whoever answers GET may be asked with HEAD; it is only told of where clients do.
    assert described - there == set()
    assert {(method, path) for method, path in there - described if method != "HEAD"} == set()


def test_it_is_served_as_it_is(folder: Path) -> None:
    with serving(folder, Settings(allow=ALL)) as peer:
        said = ask(peer, "GET", "/v1/openapi.json")
    assert said.headers["Content-Type"].startswith("application/json")
    assert json.loads(said.body) == json.loads(json.dumps(description()))


def test_its_references_lead_somewhere() -> None:
    document = description()
    names = set(document["components"]["schemas"])
    found = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert found <= names and {"Info", "Signatures", "Error"} <= found


@pytest.mark.reference
def test_the_server_does_what_it_says(folder: Path) -> None:
    """Requests made up from the document, valid and invalid: no fault, and no status, media type or shape that isn't in it."""
    require("schemathesis")
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    shapes = {f"{route.method.upper()} {route.path}": route.body for route in ROUTES}

    @schemathesis.serializer(MAP_TYPE)
    def as_map(context: Any, value: Any) -> bytes:
        operation = context.case.operation
        try:
            return encode(msgspec.convert(value, shapes[operation.label], builtin_types=()))
        except (msgspec.ValidationError, UnicodeEncodeError, OverflowError):  # it is to be wrong
            return bytes(msgpack.packb(json.dumps(value)))

    @schemathesis.serializer(FRAMES_TYPE)
    def as_frames(_: Any, value: Any) -> bytes:
        return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")

    @schemathesis.deserializer(MAP_TYPE)
    def unpacked(_: Any, response: Any) -> Any:
        return json.loads(msgspec.json.encode(msgpack.unpackb(response.content)))

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    answered: set[tuple[str, int]] = set()
    with serving(folder, Settings(allow=ALL)) as peer:
        for result in schemathesis.openapi.from_dict(description()).get_all_operations():
            operation = result.ok()
            if operation.path == "/v1/pair":
                continue  # only with tokens; tests/sync/test_pairing.py

            @settings(
                max_examples=60,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def conforms(case: Any) -> None:
                response = case.call_and_validate(base_url=peer.where, checks=checks, timeout=30)
                answered.add((case.operation.label, response.status_code))

            conforms()
    assert len({label for label, _ in answered}) == len(ROUTES) - 1
    assert {status for _, status in answered} >= {200, 400, 404}
