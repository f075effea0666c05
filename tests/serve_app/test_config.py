"""The config file: every field documented and checked, every mistake named."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from engine.config import EngineConfig
from engine.errors import ConfigError
from serve_app.config import AppConfig, EngineSection, ServeFile, load_file, parse_app_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
MODEL = {"source": "somewhere/name"}


def models_of(model: type[BaseModel]) -> list[type[BaseModel]]:
    """The model and all that it is made of."""
    found = [model]
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                found += models_of(part)
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_file_is_in_order(path: Path) -> None:
    assert load_file(path).application.args.model.source


def test_the_default_file_shows_every_field_with_its_default() -> None:
    path = Path(__file__).parents[2] / "configs" / "app.yaml"
    shown = yaml.safe_load(path.read_text())
    shown["applications"][0]["runtime_env"] = {}
    args = shown["applications"][0]["args"]
    defaults = parse_app_config({"model": args["model"]})
    file = ServeFile.model_validate(
        {"applications": [{"import_path": "serve_app.app:build", "args": {"model": args["model"]}}]}
    )
    assert args.keys() == AppConfig.model_fields.keys()
    for name, value in args.items():
        if isinstance(value, dict):
            assert value.keys() == type(getattr(defaults, name)).model_fields.keys()
    assert load_file(path) == file


def test_every_field_has_a_description() -> None:
    for model in models_of(ServeFile):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_the_engine_section_is_the_engine_config() -> None:
    assert set(EngineSection.model_fields) == {field.name for field in fields(EngineConfig)}
    assert EngineSection().to_engine_config() == EngineConfig()
    changed = parse_app_config({"model": MODEL, "engine": {"num_slots": 3, "prefill_buckets": [16, 48]}})
    assert changed.engine.to_engine_config() == EngineConfig(num_slots=3, prefill_buckets=(16, 48))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "args: model: is missing"),
        ({"model": {}}, "model.source: is missing"),
        ({"model": {"sorce": "x", "source": "x"}}, 'model.sorce: unknown field; did you mean "source"?'),
        ({"modle": MODEL, "model": MODEL}, 'modle: unknown field; did you mean "model"?'),
        ({"model": MODEL, "engine": {"num_slot": 3}}, 'engine.num_slot: unknown field; did you mean "num_slots"?'),
        (
            {"model": MODEL, "engine": {"num_slots": "8"}},
            "engine.num_slots: Input should be a valid integer (given: '8')",
        ),
        ({"model": MODEL, "engine": {"num_slots": True}}, "engine.num_slots"),
        ({"model": MODEL, "engine": {"num_slots": 0}}, "engine.num_slots"),
        (
            {"model": MODEL, "engine": {"prefill_buckets": [64, 32]}},
            "engine.prefill_buckets is [64, 32]; expected ascending",
        ),
        ({"model": MODEL, "engine": {"weight_dtype": "int4"}}, "engine.weight_dtype"),
        ({"model": MODEL, "mesh": {"platform": "cuda"}}, "mesh.platform"),
        ({"model": MODEL, "mesh": {"memory_fraction": 1.5}}, "mesh.memory_fraction"),
        (
            {"model": MODEL, "limits": {"default_deadline_s": 9, "max_deadline_s": 8}},
            "default_deadline_s is 9; expected at most",
        ),
        ({"model": MODEL, "limits": {"max_body_bytes": float("nan")}}, "limits.max_body_bytes"),
        (
            {"model": MODEL, "serving": {"num_replicas": 2, "autoscaling": {"max_replicas": 3}}},
            "num_replicas and autoscaling",
        ),
        ({"model": MODEL, "log_level": "LOUD"}, "log_level"),
        (
            {"model": {**MODEL, "draft_source": "small"}},
            "model.draft_source is given and engine.num_draft_tokens and limits.max_rerank are 0; expected one of",
        ),
        (
            {"model": {**MODEL, "window": 0}},
            "model.window: expected a number of positions of at least 1, or full (given: 0)",
        ),
        ({"model": {**MODEL, "window": True}}, "or full (given: True)"),
        ({"model": {**MODEL, "window": "none"}}, "or full (given: 'none')"),
        ({"model": {**MODEL, "adaptive_window": {"least": 257}}}, "least is 257 and most 256; expected them in this"),
        ({"model": {**MODEL, "adaptive_window": {"divisor": 0}}}, "model.adaptive_window.divisor"),
        ({"model": MODEL, "limits": {"max_rerank": 1}}, "max_rerank is 1; expected 0 (off), or 2 to 16 candidates"),
        ({"model": MODEL, "limits": {"max_rerank": 17}}, "limits.max_rerank"),
        (
            {"model": MODEL, "limits": {"max_rerank": 2}, "mesh": {"hosts_along_model": 3}},
            "limits.max_rerank is 2 and the mesh spans 3 hosts",
        ),
        ({"model": {**MODEL, "draft_source": ""}, "engine": {"num_draft_tokens": 2}}, "model.draft_source"),
        ({"model": MODEL, "engine": {"num_draft_tokens": 65}}, "engine.num_draft_tokens"),
        ({"model": MODEL, "auth": {"keys": [{"name": "", "key": "env:A"}]}}, "auth.keys.0.name"),
        ({"model": MODEL, "auth": {"keys": [{"name": "a"}]}}, "auth.keys.0.key: is missing"),
        ({"model": MODEL, "auth": {"kyes": []}}, 'auth.kyes: unknown field; did you mean "keys"?'),
        (
            {"model": MODEL, "auth": {"keys": [{"name": "a", "nmae": "b", "key": "env:A"}]}},
            'auth.keys.0.nmae: unknown field; did you mean "name"?',
        ),
    ],
)
def test_mistakes_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_app_config(args)
    assert message in str(caught.value)


@pytest.mark.parametrize("use", [{"engine": {"num_draft_tokens": 2}}, {"limits": {"max_rerank": 2}}], ids=str)
def test_a_draft_model_goes_with_guesses_or_with_candidates(use: dict[str, Any]) -> None:
    assert parse_app_config({"model": {**MODEL, "draft_source": "small"}, **use}).model.draft_source == "small"


@pytest.mark.parametrize("window", [None, 1, 256, "full"])
def test_windows_of_the_model(window: object) -> None:
    assert parse_app_config({"model": {**MODEL, "window": window}}).model.window == window


@pytest.mark.parametrize(
    "auth",
    [
        "sk-clear",
        ["sk-clear"],
        {"keys": "sk-clear"},
        {"keys": {"alice": "sk-clear"}},
        {"keys": ["sk-clear"]},
        {"keys": [{"name": "alice", "key": "sk-clear"}]},
        {"keys": [{"name": "alice", "key": ["sk-clear"]}]},
        {"keys": [{"name": "alice", "key": "sha256:sk-clear"}]},
        {"keys": [{"name": "alice", "key": "env:sk-clear"}]},
        {"keys": [{"name": "alice", "key": "env:A", "token": "sk-clear"}]},
    ],
    ids=str,
)
def test_what_may_be_a_key_in_clear_text_is_refused_and_not_shown(auth: object) -> None:
    with pytest.raises(ConfigError, match="auth") as caught:
        parse_app_config({"model": MODEL, "auth": auth})
    assert "sk-clear" not in str(caught.value)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match="2 problems") as caught:
        parse_app_config({"model": MODEL, "engine": {"num_slot": 3, "page_size": "16"}})
    assert "engine.num_slot" in str(caught.value)
    assert "engine.page_size" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "holds no mapping"),
        ("a: [", "cannot be read"),
        ("application: []", 'applications is missing; did you mean "application"?'),
        ("applications: []", "applications"),
        ("applications: [{import_path: 'os:system', args: {model: {source: x}}}]", "applications.0.import_path"),
        (
            "applications: [{import_path: 'serve_app.app:build', args: {model: {source: x}, engine: {num_slot: 1}}}]",
            'args.engine.num_slot: unknown field; did you mean "num_slots"?',
        ),
        (
            "{http_options: {prot: 1}, applications: [{import_path: serve_app.app:build, args: {model: {source: x}}}]}",
            'http_options.prot: unknown field; did you mean "port"?',
        ),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "app.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_file(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        load_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf:org/name", "name"),
        ("hf:org/name@main", "name"),
        ("models/name/", "name"),
        ("package:pack/name.gguf", "name.gguf"),
    ],
)
def test_the_name_clients_use_comes_from_the_source(source: str, name: str) -> None:
    assert parse_app_config({"model": {"source": source}}).model.name == name
    assert parse_app_config({"model": {"source": source, "served_name": "other"}}).model.name == "other"


def test_serve_is_given_more_room_than_the_engine_so_that_the_engine_refuses() -> None:
    config = parse_app_config({"model": MODEL, "engine": {"num_slots": 5, "max_queue_len": 7}})
    assert config.max_in_flight == 12
    assert config.max_ongoing_requests > 12


def test_the_mesh_section_spans_hosts() -> None:
    mesh = parse_app_config(
        {"model": MODEL, "mesh": {"data": 2, "model": 4, "hosts_along_data": 3, "hosts": 3, "devices_per_host": 9}}
    ).mesh
    assert (mesh.num_hosts, mesh.devices_per_host) == (3, 9)
    assert parse_app_config({"model": MODEL}).mesh.num_hosts == 1


@pytest.mark.parametrize(
    ("mesh", "problem"),
    [
        ({"hosts_along_model": 2, "hosts": 4}, "hosts is 4; expected hosts_along_data times hosts_along_model, 2"),
        (
            {"data": 2, "model": 4, "devices_per_host": 7},
            "devices_per_host is 7; expected at least data times model, 8",
        ),
        ({"host_placement": "near"}, "mesh.host_placement"),
        ({"hosts_along_data": 0}, "mesh.hosts_along_data"),
        ({"host_silence_timeout_s": 0}, "mesh.host_silence_timeout_s"),
    ],
)
def test_hosts_that_contradict_each_other_are_refused(mesh: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_app_config({"model": MODEL, "mesh": mesh})
