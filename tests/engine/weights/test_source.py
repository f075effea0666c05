import importlib
import sys

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.errors import CheckpointError
from engine.weights.source import HUB_ALLOW_PATTERNS, resolve_source


@pytest.fixture
def package(tmp_path, monkeypatch):
    root = tmp_path / "site" / "some_weights"
    (root / "sub").mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    (root / "sub" / "model.gguf").write_bytes(b"GGUF")
    (root.parent / "secret.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(root.parent))
    importlib.invalidate_caches()
    return root


def test_a_package_file_is_found_without_importing_the_package(package):
    found = resolve_source("package:some_weights/sub/model.gguf")
    assert found == (package / "sub" / "model.gguf").resolve()
    assert "some_weights" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("package:some_weights/../secret.gguf", "outside"),
        ("package:some_weights//etc/hosts", "outside"),
        ("package:some_weights/other.gguf", "holds no file 'other.gguf'"),
        ("package:no_such_package_here/model.gguf", "not installed"),
        ("package:some_weights", "expected package:<package>/<file>"),
        ("package:some_weights.sub/model.gguf", "top-level package"),
        ("hf:only-a-name", "expected hf:<org>/<name>"),
        ("hf:a/b/c", "expected hf:<org>/<name>"),
        ("no/such/place", "no such file or directory; expected a local path"),
        ("", "no such file or directory"),
    ],
)
def test_a_source_that_leads_nowhere_is_named_with_what_would_work(package, source, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_source(source)
    assert repr(source) in str(caught.value)


def test_a_local_path_is_taken_as_it_is(tmp_path):
    assert resolve_source(str(tmp_path)) == tmp_path


def test_a_hub_download_leaves_out_pickles(tmp_path):
    asked = {}

    def download(**arguments):
        asked.update(arguments)
        return str(tmp_path)

    assert resolve_source("hf:org/name@v2", download) == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("org/name", "v2")
    assert asked["allow_patterns"] == list(HUB_ALLOW_PATTERNS)
    assert not any(pattern.endswith((".bin", ".pt", ".pth", "*")) for pattern in HUB_ALLOW_PATTERNS)


def test_the_latest_revision_is_the_default(tmp_path):
    asked = {}

    def download(**arguments):
        asked.update(arguments)
        return str(tmp_path)

    resolve_source("hf:org/name", download)
    assert asked["revision"] is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("gone"), "not in the local Hugging Face cache"),
        (ConnectionError("refused"), "cannot be downloaded"),
    ],
)
def test_a_failed_download_says_what_to_do(error, message):
    def download(**arguments):
        raise error

    with pytest.raises(CheckpointError, match=message) as caught:
        resolve_source("hf:org/name", download)
    assert "'hf:org/name'" in str(caught.value)
