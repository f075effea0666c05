"""JSON files of a checkpoint, as data that is checked when it is used."""

import json
from pathlib import Path

from engine.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises `CheckpointError` where the file is missing or holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
