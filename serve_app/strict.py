"""Strict pydantic models whose complaints name the field, with what was meant where that is clear."""

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, ValidationError


class StrictModel(BaseModel):
    """No unknown fields, no conversions between types, no changes after validation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?`, or nothing where no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.75)
    return "; did you mean " + " or ".join(f'"{match}"' for match in close) + "?" if close else ""


def known_fields(model: type[BaseModel], path: Iterable[int | str]) -> list[str]:
    """Names of the fields where `path` (of a validation error) ends, its last part left out."""
    fields = model.model_fields
    for part in list(path)[:-1]:
        if isinstance(part, int):
            continue  # an item of a list: the list's own annotation has led to its type
        annotation = fields[part].annotation if part in fields else None
        nested = [a for a in _alternatives(annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not nested:
            return []
        fields = nested[0].model_fields
    return list(fields)


def _alternatives(annotation: object) -> tuple[object, ...]:
    return getattr(annotation, "__args__", (annotation,))


def complaints(model: type[BaseModel], error: ValidationError) -> list[tuple[str, str]]:
    """(dotted field, what is wrong with it) for each problem that pydantic found."""
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
        else:
            found.append((location, f"{problem['msg']} (given: {_shown(problem['input'])})"))
    return found


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
