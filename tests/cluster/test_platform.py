"""The start-up check: what jax finds is stood in for, since no test can take a GPU away."""

import os
from types import SimpleNamespace

import jax
import pytest

from cluster import platform
from cluster.platform import prepare_platform
from engine.devices import provide_cpu_devices
from engine.errors import ConfigError


@pytest.fixture
def settings(monkeypatch):
    """jax's settings as they are changed, without changing them."""
    changed = {}
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "unset")
    monkeypatch.setattr(jax.config, "update", changed.__setitem__)
    return changed


def find(monkeypatch, name):
    """jax finds devices of this platform only."""
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform=name)])


@pytest.mark.parametrize("fraction", [0.9, 0.5])
def test_the_memory_fraction_reaches_jax(settings, monkeypatch, tmp_path, fraction):
    find(monkeypatch, "gpu")
    prepare_platform("auto", 8, fraction, tmp_path)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == str(fraction)
    assert settings == {}


@pytest.mark.parametrize(("name", "jax_name"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_an_accelerator_that_is_asked_for_is_required(settings, monkeypatch, tmp_path, name, jax_name):
    def devices():
        raise RuntimeError("no device there")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=f"mesh.platform is '{name}', and jax cannot use it: no device there") as e:
        prepare_platform(name, 1, 0.9, tmp_path / "none")
    assert settings == {"jax_platforms": jax_name}
    assert f"Installed: jax {jax.__version__}" in str(e.value)
    assert "CUDA_VISIBLE_DEVICES is ''" in str(e.value)


def test_a_process_that_runs_on_something_else_already_is_refused(settings, monkeypatch):
    find(monkeypatch, "cpu")
    with pytest.raises(ConfigError, match=r"mesh\.platform is 'gpu', and jax already runs on 'cpu' in this process"):
        prepare_platform("gpu", 1, 0.9)


def test_auto_refuses_the_cpu_where_there_is_a_gpu(settings, monkeypatch, tmp_path):
    find(monkeypatch, "cpu")
    monkeypatch.setattr(platform, "_CUDA_PLUGINS", ("no_such_plugin",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    file = tmp_path / "nvidia0"
    prepare_platform("auto", 1, 0.9, file)
    file.touch()
    with pytest.raises(ConfigError, match=r"but jax found only a CPU.*without a CUDA plugin.*is not set") as error:
        prepare_platform("auto", 1, 0.9, file)
    assert str(file) in str(error.value)
    assert "make setup CUDA=1" in str(error.value)
    assert "set mesh.platform to cpu" in str(error.value)
    find(monkeypatch, "gpu")
    prepare_platform("auto", 1, 0.9, file)


def test_the_cpu_may_be_asked_for_beside_a_gpu(settings, monkeypatch, tmp_path):
    find(monkeypatch, "cpu")
    (tmp_path / "nvidia0").touch()
    prepare_platform("cpu", 8, 0.9, tmp_path / "nvidia0")
    assert settings == {"jax_platforms": "cpu"}


def test_a_cpu_that_is_asked_for_stands_for_as_many_devices_as_needed(settings, monkeypatch):
    find(monkeypatch, "cpu")
    prepare_platform("cpu", 9, 0.9)
    assert settings["jax_num_cpu_devices"] == 9


def test_too_late_for_more_cpu_devices_is_an_error():
    num_devices = jax.device_count("cpu")
    provide_cpu_devices(num_devices)
    with pytest.raises(ConfigError, match=f"cannot stand for {num_devices + 1} devices any more"):
        provide_cpu_devices(num_devices + 1)
