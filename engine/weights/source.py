"""Where a model's files come from: a source string becomes a local path."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from engine.errors import CheckpointError

SOURCE_KINDS = (
    "expected a local path (a .gguf file, a Hugging Face directory or a state dict in one, a Grok-1 release or a "
    "converted model), "
    "package:<package>/<file>, or hf:<org>/<name>[@<revision>]"
)

HUB_ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""Not `*.bin`: repositories that have both formats would be downloaded twice."""

HUB_IGNORE_PATTERNS = ("*/*", "consolidated*.safetensors")
"""Other layouts of the same weights, which some repositories carry beside the Hugging Face one."""


def resolve_source(source: str, download: Callable[..., str] = snapshot_download) -> Path:
    """The local file or directory that `source` names.

    `package:<package>/<file>` is looked up without importing the package. `hf:<org>/<name>[@<revision>]` is downloaded
    through `download` (huggingface_hub's cache and HF_HUB_OFFLINE are honoured). Raises `CheckpointError` naming the
    source and what would work.
    """
    scheme, separator, rest = source.partition(":")
    if separator and scheme == "package":
        return _package_path(source, rest)
    if separator and scheme == "hf":
        return _hub_path(source, rest, download)
    path = Path(source).expanduser()
    if not source or not path.exists():
        raise CheckpointError(f"model source {source!r}: no such file or directory; {SOURCE_KINDS}")
    return path


def _package_path(source: str, rest: str) -> Path:
    package, _, file = rest.partition("/")
    # A dotted name would make find_spec import the parent package.
    if not package.isidentifier() or not file:
        raise CheckpointError(
            f"model source {source!r}: expected package:<package>/<file> with the name of a top-level package"
        )
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise CheckpointError(f"model source {source!r}: package {package!r} is not installed in this environment")
    for location in spec.submodule_search_locations or ():
        root = Path(location).resolve()
        path = (root / file).resolve()
        if not path.is_relative_to(root):
            raise CheckpointError(f"model source {source!r}: {file!r} leads outside the package's directory")
        if path.exists():
            return path
    raise CheckpointError(f"model source {source!r}: package {package!r} is installed but holds no file {file!r}")


def _hub_path(source: str, rest: str, download: Callable[..., str]) -> Path:
    repo, _, revision = rest.partition("@")
    organisation, _, name = repo.partition("/")
    if not organisation or not name or "/" in name:
        raise CheckpointError(f"model source {source!r}: expected hf:<org>/<name>[@<revision>]")
    try:
        return Path(
            download(
                repo_id=repo,
                revision=revision or None,
                allow_patterns=list(HUB_ALLOW_PATTERNS),
                ignore_patterns=list(HUB_IGNORE_PATTERNS),
            )
        )
    except HFValidationError as error:
        raise CheckpointError(f"model source {source!r}: not a valid repository name ({error})") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"model source {source!r}: not in the local Hugging Face cache, and the hub cannot be reached (offline, or "
            "HF_HUB_OFFLINE is set). Download it beforehand, or give a local path"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"model source {source!r}: cannot be downloaded ({type(error).__name__}). Check the name, the revision and "
            "the access token, or give a local path"
        ) from error
