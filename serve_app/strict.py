"""Strict pydantic models whose complaints name the field, with what was meant where that is clear."""

import difflib
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo


class StrictModel(BaseModel):
    """No unknown fields, no conversions between types, no changes after validation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?`, or nothing where no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.75)
    return "; did you mean " + " or ".join(f'"{match}"' for match in close) + "?" if close else ""


def known_fields(model: type[BaseModel], path: Iterable[int | str]) -> list[str]:
    """Names of the fields where `path` (of a validation error) ends, its last part left out."""
    fields: Mapping[str, FieldInfo] = model.model_fields
    for part in list(path)[:-1]:
        if isinstance(part, int):
            continue  # an item of a list: the list's own annotation has led to its type
        fields = _fields_of(fields.get(part))
    return list(fields)


def _is_secret(model: type[BaseModel], path: Iterable[int | str]) -> bool:
    """Whether the path leads to or into a field that is declared with `repr=False`."""
    fields: Mapping[str, FieldInfo] = model.model_fields
    for part in path:
        if isinstance(part, int):
            continue
        if part in fields and not fields[part].repr:
            return True
        fields = _fields_of(fields.get(part))
    return False


def _fields_of(field: FieldInfo | None) -> Mapping[str, FieldInfo]:
    """Those of the model that a field holds, alone or in a list; none where it holds no model."""
    alternatives = _alternatives(None if field is None else field.annotation)
    nested = [a for a in alternatives if isinstance(a, type) and issubclass(a, BaseModel)]
    return nested[0].model_fields if nested else {}


def _alternatives(annotation: object) -> tuple[object, ...]:
    return getattr(annotation, "__args__", (annotation,))


def complaints(model: type[BaseModel], error: ValidationError) -> list[tuple[str, str]]:
    """(dotted field, what is wrong with it) for each problem that pydantic found.

    What was given is shown, but not for fields that are declared with `repr=False`.
    """
    found = []
    for problem in error.errors(include_url=False):
        location = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            last = str(problem["loc"][-1])
            found.append((location, "unknown field" + suggestion(last, known_fields(model, problem["loc"]))))
        elif problem["type"] == "missing":
            found.append((location, "is missing"))
        elif problem["type"] == "value_error":
            found.append((location, str(problem["ctx"]["error"])))
        elif _is_secret(model, problem["loc"]):
            found.append((location, problem["msg"]))
        else:
            found.append((location, f"{problem['msg']} (given: {_shown(problem['input'])})"))
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
