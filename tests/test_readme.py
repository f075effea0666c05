"""What the README says of the code is true of it."""

import json
import re
from pathlib import Path
from typing import cast

import pytest
from fastapi.routing import APIRoute

from serve_app.api import Api, TextTools
from serve_app.backend import Backend
from serve_app.config import AppConfig, ServeFile, load_file
from serve_app.protocol import ChatCompletionRequest, parse_request
from tests.readme_tables import README, TABLE_NAMES, render, table_names

ROOT = README.parent


@pytest.fixture(scope="module")
def readme() -> str:
    return README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def default_file() -> ServeFile:
    return load_file(ROOT / "configs" / "app.yaml")


def test_tables_are_those_of_the_code(readme: str) -> None:
    assert render(readme) == readme, "run `make docs`"


def test_every_table_is_there_once(readme: str) -> None:
    assert sorted(table_names(readme)) == sorted(TABLE_NAMES)


def test_a_stale_table_is_noticed(readme: str) -> None:
    stale = readme.replace("| `http_options.port` | `8000` |", "| `http_options.port` | `8001` |")
    assert stale != readme
    assert render(stale) == readme


def test_endpoints_are_those_of_the_application(readme: str, default_file: ServeFile) -> None:
    config: AppConfig = default_file.application.args
    app = Api(cast(Backend, None), cast(TextTools, None), config).app
    routes = {
        (method, route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    assert set(re.findall(r"^\| `(GET|POST) (\S+)` \|", readme, re.MULTILINE)) == routes


def test_curl_example_is_a_valid_request_for_the_default_model(readme: str, default_file: ServeFile) -> None:
    body = re.search(r"curl (\S+) .*?-d '(\{.*?\})'", readme, re.DOTALL)
    assert body is not None
    request = parse_request(ChatCompletionRequest, body[2].encode())
    http = default_file.http_options
    assert request.model == default_file.application.args.model.name
    assert body[1] == f"http://{http.host}:{http.port}/v1/chat/completions"
    assert json.loads(body[2])["max_tokens"] == request.limit


def test_commands_name_targets_and_modules_that_exist(readme: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))))
    modules = set(re.findall(r"python -m ([a-z_.]+)", readme))
    assert named
    assert named <= targets
    assert modules
    assert [name for name in modules if not _module_file(name)] == []


def test_links_lead_to_files(readme: str) -> None:
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", readme) if "://" not in target]
    assert links
    assert [target for target in links if not (ROOT / target).exists()] == []


def _module_file(name: str) -> Path | None:
    path = ROOT / name.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__main__.py") if file.exists()), None)
