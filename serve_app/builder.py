"""From a config to a replica's engine."""

import time
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from cluster.mesh import MeshConfig, build_mesh
from cluster.platform import prepare_platform
from engine.config import EngineConfig, ModelConfig
from engine.engine import build_engine as join_engine
from engine.errors import ConfigError
from engine.kernels.choice import choose_attention
from engine.models.decoder import Decoder, Params
from engine.request import EngineProtocol
from engine.sharding import param_sharding
from engine.verify import with_window
from engine.weights.load import load_config, load_params
from engine.weights.quantize import QuantizationError, describe_errors
from engine.weights.source import resolve_source
from serve_app.config import AppConfig
from serve_app.console import StartUpLines, say
from serve_app.text.base import Tokenizer
from serve_app.text_builder import load_model_tokenizer


def build_engine(config: AppConfig) -> tuple[EngineProtocol, Tokenizer]:
    """The engine with its weights on the mesh (not warmed up), and its tokenizer. Says on stdout how far it is.

    Raises `ConfigError`, `CheckpointError` or `TokenizerError`.
    """
    if config.mesh.num_hosts > 1:
        raise ConfigError("the mesh spans several hosts; only a replica of Ray Serve can start them")
    path, model = find_model("model", config.model.source, config.model.window)
    draft = None if config.model.draft_source is None else find_model("draft model", config.model.draft_source)
    tokenizer = load_model_tokenizer(config)
    engine_config = config.engine.to_engine_config()
    shape = mesh_config(config)
    prepare_platform(config.mesh.platform, num_devices(config), config.mesh.memory_fraction)
    prepare_compilation_cache(config.compilation_cache_dir)
    mesh = build_mesh(shape)
    decoder, params = load_model(path, model, mesh, engine_config)
    small = None if draft is None else load_model(*draft, mesh, engine_config)
    drafter = small if engine_config.num_draft_tokens else None
    judge = (small or (decoder, params)) if config.limits.max_rerank else None
    return join_engine(decoder, params, engine_config, drafter, judge), tokenizer


def mesh_config(config: AppConfig) -> MeshConfig:
    """The shapes of a replica's mesh."""
    mesh = config.mesh
    return MeshConfig((mesh.data, mesh.model), (mesh.hosts_along_data, mesh.hosts_along_model))


def num_devices(config: AppConfig) -> int:
    """Devices of each of its processes."""
    return config.mesh.devices_per_host or mesh_config(config).devices_per_host


_MAX_CACHE_BYTES = 32 << 30
"""Of compiled programs on the disk."""


def find_model(what: str, source: str, window: int | Literal["full"] | None = None) -> tuple[Path, ModelConfig]:
    """Where a model lies on this machine, and its config, with `model.window` of a config file in place of its own.

    Raises `CheckpointError`.
    """
    path = resolve_source(source)
    model = load_config(path)
    say(f"{what} found: {path} ({model.family}, {model.num_layers} layers, {model.vocab_size} tokens)")
    if window is None:
        return path, model
    return path, with_window(model, (None if window == "full" else window,))


def load_model(path: Path, model: ModelConfig, mesh: Mesh, config: EngineConfig) -> tuple[Decoder, Params]:
    """The decoder with its weights on the mesh. Raises `CheckpointError` or `ConfigError`."""
    experts = config.expert_sharding
    attention = choose_attention(config.attention_kernel, mesh, model, config)
    decoder = Decoder(model, mesh, config.weight_dtype, config.activation_dtype, experts, attention)
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
    return decoder, params


def prepare_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs in `directory` between starts, where several replicas may read and write at once."""
    if directory is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(Path(directory).expanduser()))
    # jax locks only a cache of limited size; what was used longest ago goes first.
    jax.config.update("jax_compilation_cache_max_size", _MAX_CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
