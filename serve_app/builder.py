"""From a config to a replica's engine."""

import os
import time
from pathlib import Path

import jax

from engine.engine import build_engine as join_engine
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.request import EngineProtocol
from engine.sharding import make_mesh, param_sharding
from engine.weights.load import load_config, load_params
from engine.weights.quantize import QuantizationError, describe_errors
from engine.weights.source import resolve_source
from serve_app.config import AppConfig, MeshSection
from serve_app.console import StartUpLines, say
from serve_app.text.base import Tokenizer
from serve_app.text_builder import load_model_tokenizer


def build_engine(config: AppConfig) -> tuple[EngineProtocol, Tokenizer]:
    """The engine with its weights on the mesh (not warmed up), and its tokenizer. Says on stdout how far it is.

    Raises `ConfigError`, `CheckpointError` or `TokenizerError`.
    """
    path = resolve_source(config.model.source)
    model = load_config(path)
    say(f"model found: {path} ({model.family}, {model.num_layers} layers, {model.vocab_size} tokens)")
    tokenizer = load_model_tokenizer(config)
    engine_config = config.engine.to_engine_config()
    prepare_platform(config.mesh)
    prepare_compilation_cache(config.compilation_cache_dir)
    mesh = make_mesh(config.mesh.data, config.mesh.model)
    experts = engine_config.expert_sharding
    decoder = Decoder(model, mesh, engine_config.weight_dtype, engine_config.activation_dtype, experts)
    started_at = time.monotonic()
    errors: list[QuantizationError] = []
    params = load_params(
        path,
        model,
        decoder.abstract_params(),
        lambda name, shape: param_sharding(name, shape, mesh, experts),
        StartUpLines().weights,
        errors.append,
    )
    say(f"weights loaded in {time.monotonic() - started_at:.1f} s onto {mesh.size} {mesh.devices.flat[0].platform}")
    if errors:
        say(describe_errors(errors))
    return join_engine(decoder, params, engine_config), tokenizer


def prepare_platform(config: MeshSection) -> None:
    """Chooses the platform before jax's first use. Raises `ConfigError` where it or its devices are not there."""
    num_devices = config.data * config.model
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(config.memory_fraction)
    if config.platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(config.platform, config.platform))
    if config.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", num_devices)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise ConfigError(f"mesh.platform is {config.platform!r}, and jax cannot use it: {error}") from None
    if len(devices) < num_devices:
        raise ConfigError(
            f"mesh asks for {config.data} x {config.model} devices; there are {len(devices)} ({devices[0].platform})"
        )


def prepare_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs in `directory` between starts."""
    if directory is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(Path(directory).expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
