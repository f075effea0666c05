"""The README's tables, written from the code: `make docs` puts them in place, and a test compares.

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from engine.request import EngineStats
from serve_app.async_engine import AsyncEngineStats
from serve_app.config import AppConfig, ServeFile
from serve_app.errors import ERROR_TABLE
from serve_app.metrics import Metrics
from serve_app.parameters import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION
from serve_app.protocol import ChatCompletionRequest, CompletionRequest

README = Path(__file__).parents[1] / "README.md"

_MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(readme: str) -> str:
    """The README with every marked table written anew. Raises `KeyError` for an unknown name."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{_TABLES[match[2]]()}\n{match[3]}", readme)


def table_names(readme: str) -> list[str]:
    """Names of the marked tables, in order."""
    return [match[2] for match in _MARKED.finditer(readme)]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _file_fields() -> str:
    rows = [row for row in _fields(ServeFile, "") if not row[0].startswith("`applications[].args.")]
    return _table(["field", "default", "meaning"], rows)


def _app_fields() -> str:
    return _table(["field", "default", "meaning"], _fields(AppConfig, ""))


def _fields(model: type[BaseModel], prefix: str) -> list[list[str]]:
    rows = []
    for name, field in model.model_fields.items():
        path, inner = prefix + name, _section(field)
        if inner is None:
            rows.append([f"`{path}`", _default(field), _meaning(model, name)])
        else:
            rows += _fields(inner, f"{path}[]." if isinstance(field.annotation, type(list[int])) else f"{path}.")
    return rows


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The model that a field holds, alone or in a list."""
    kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none: required"
    default = field.get_default(call_default_factory=True, validated_data={})
    assert default is not PydanticUndefined
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _meaning(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    assert field.description, f"{model.__name__}.{name} has no description"
    choices = _choices(model.model_json_schema()["properties"][name])
    one_of = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    # In a table, <name> would count as HTML.
    return field.description.replace("<", "&lt;") + one_of


def _choices(schema: dict[str, Any]) -> list[str]:
    found = list(schema.get("enum", []))
    for option in schema.get("anyOf", []):
        found += _choices(option)
    return found


def _parameters() -> str:
    chat, completion = ChatCompletionRequest.model_fields, CompletionRequest.model_fields
    rows = []
    for name in dict.fromkeys([*completion, *chat]):
        models = [model for model in (CompletionRequest, ChatCompletionRequest) if name in model.model_fields]
        where = {CompletionRequest: "completions", ChatCompletionRequest: "chat"}
        meanings = dict.fromkeys(model.model_fields[name].description or "" for model in models)
        endpoints = "both" if len(models) == 2 else where[models[0]]
        rows.append([f"`{name}`", endpoints, _default(models[0].model_fields[name]), " / ".join(meanings)])
    return _table(["parameter", "endpoint", "default", "meaning"], rows)


def _refused() -> str:
    rows = []
    for name in sorted({**UNSUPPORTED_COMPLETION, **UNSUPPORTED_CHAT}):
        tables = {"completions": UNSUPPORTED_COMPLETION, "chat": UNSUPPORTED_CHAT}
        where = [endpoint for endpoint, table in tables.items() if name in table]
        neutral = {json.dumps(value) for endpoint in where for value in tables[endpoint][name]} | {"null"}
        values = ", ".join(f"`{value}`" for value in sorted(neutral))
        rows.append([f"`{name}`", "both" if len(where) == 2 else where[0], values])
    return _table(["parameter", "endpoint", "accepted without effect"], rows)


def _errors() -> str:
    rows = []
    for error_class, kind in ERROR_TABLE:
        meaning = (error_class.__doc__ or "").strip().splitlines()[0]
        rows.append([str(kind.status), f"`{kind.type}`", f"`{kind.code}`", meaning])
    return _table(["status", "`error.type`", "`error.code`", "when"], rows)


def _metrics() -> str:
    stats = AsyncEngineStats(EngineStats(), 0)
    rows = []
    for family in text_string_to_metric_families(Metrics().render({"0": stats}).decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        if not name.endswith("_created"):
            rows.append([f"`{name}`", family.type, family.documentation])
    return _table(["metric", "kind", "meaning"], rows)


_TABLES = {
    "file": _file_fields,
    "app": _app_fields,
    "parameters": _parameters,
    "refused": _refused,
    "errors": _errors,
    "metrics": _metrics,
}

TABLE_NAMES = frozenset(_TABLES)
"""Tables that the README must have."""


def main() -> None:
    """Writes the tables into the README."""
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
