"""Which kernel is chosen, and that one that computes something else is not."""

import logging

import jax
import jax.numpy as jnp
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels import choice, paged_attention
from engine.kernels.choice import check_pallas, choose_attention
from engine.sharding import make_mesh

from ..tiny_models import LLAMA

CONFIG = EngineConfig()
CHECKED = (LLAMA, 3, 16, "int8", "float32", True)


def choose(requested):
    return choose_attention(requested, make_mesh(1, 1), LLAMA, CONFIG)


def break_kernel(monkeypatch, change):
    works = paged_attention.paged_attention
    monkeypatch.setattr(paged_attention, "paged_attention", lambda *args: change(works(*args)))


def pretend_nvidia(monkeypatch, problem):
    monkeypatch.setattr(choice, "is_nvidia", lambda device: True)
    monkeypatch.setattr(choice, "check_pallas", lambda *args: problem)


def test_a_cpu_uses_the_reference_and_says_so_where_it_was_asked_for_the_kernel():
    assert choose("auto") == choose("reference") == "reference"
    with pytest.raises(ConfigError, match=r"attention_kernel is pallas.*NVIDIA GPU.*cpu"):
        choose("pallas")


def test_a_gpu_uses_the_kernel_that_passed(monkeypatch):
    pretend_nvidia(monkeypatch, None)
    assert (choose("auto"), choose("pallas"), choose("reference")) == ("pallas", "pallas", "reference")


def test_a_gpu_whose_check_failed_warns_and_uses_the_reference(monkeypatch, caplog):
    pretend_nvidia(monkeypatch, "it differs")
    with caplog.at_level(logging.WARNING):
        assert choose("auto") == "reference"
    assert "it differs" in caplog.text
    with pytest.raises(ConfigError, match="it differs"):
        choose("pallas")


@pytest.mark.parametrize("activation_dtype", ["float32", "bfloat16", "float16"])
def test_the_kernel_passes_its_check(activation_dtype):
    assert check_pallas(LLAMA, 3, 16, "float8_e4m3", activation_dtype, True) is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda out: out * 1.01, "differs from the reference by"),
        (lambda out: out.at[3, 1, 2, 0, 9].set(jnp.nan), "differs from the reference by nan"),
        (lambda out: jnp.roll(out, 1, axis=2), "differs from the reference by"),
    ],
)
def test_a_kernel_that_computes_something_else_fails_the_check(monkeypatch, change, complaint):
    break_kernel(monkeypatch, change)
    assert complaint in check_pallas(*CHECKED)


def test_a_kernel_that_does_not_compile_fails_the_check(monkeypatch):
    def refuse(out: jax.Array) -> jax.Array:
        raise NotImplementedError("cannot cast from `float8_e4m3fn`")

    break_kernel(monkeypatch, refuse)
    assert check_pallas(*CHECKED) == "NotImplementedError: cannot cast from `float8_e4m3fn`"
