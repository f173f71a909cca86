"""docs/gateway.md held against the code."""

from __future__ import annotations

import argparse
import re

from shapeshift.cli import gateway
from shapeshift.gateway.app import make_app
from shapeshift.gateway.settings import GatewaySettings
from tests.docs.docs_pages import PROJECT, code, section, table

PAGE = PROJECT / "docs" / "gateway.md"


def test_defaults_are_those_of_the_settings() -> None:
    parser = argparse.ArgumentParser()
    gateway.add_arguments(parser)
    settings = gateway.settings_of(parser.parse_args(["--triton", "localhost:8001"]))
    assert settings == GatewaySettings()


def test_routes_are_those_of_the_code() -> None:
    documented = {pair for row in table(PAGE, "Routes") for pair in re.findall(r"`(GET|POST) ([^`]+)`", row[0])}
    described = make_app(GatewaySettings()).openapi()["paths"]
    declared = {(method.upper(), path) for path, methods in described.items() for method in methods}
    hidden = {("POST", "/v2/rerank"), ("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json")}
    assert documented == declared | hidden


def test_error_codes_are_those_of_the_code() -> None:
    documented = {code(row[1]) for row in table(PAGE, "Errors")}
    sources = "".join(file.read_text() for file in (PROJECT / "shapeshift" / "gateway").rglob("*.py"))
    declared = {
        *re.findall(r'(?:code=|TOO_LONG = )"(\w+)"', sources),
        *re.findall(r'"(missing_parameter|invalid_value)"\)', sources),
    }
    # A request that was cancelled has nobody who reads the answer.
    assert documented == (declared | {"invalid_value", "unsupported_parameter"}) - {"cancelled"}


def test_files_of_a_requests_way_are_there() -> None:
    files = re.findall(r"`([a-z_/]+\.py)`", section(PAGE, "Inside"))
    assert len(files) > 7
    assert [file for file in files if not (PROJECT / "shapeshift" / "gateway" / file).is_file()] == []
