"""From a config to a replica's engine."""

import time
from pathlib import Path

import jax
from jax.sharding import Mesh

from cluster.mesh import MeshConfig, build_mesh
from cluster.platform import prepare_platform
from engine.config import EngineConfig, ModelConfig
from engine.engine import build_engine as join_engine
from engine.kernels.choice import choose_attention
from engine.models.decoder import Decoder, Params
from engine.request import EngineProtocol
from engine.sharding import param_sharding
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
    path, model = _find("model", config.model.source)
    draft = None if config.model.draft_source is None else _find("draft model", config.model.draft_source)
    tokenizer = load_model_tokenizer(config)
    engine_config = config.engine.to_engine_config()
    shape = MeshConfig(local=(config.mesh.data, config.mesh.model))
    prepare_platform(config.mesh.platform, shape.devices_per_host, config.mesh.memory_fraction)
    prepare_compilation_cache(config.compilation_cache_dir)
    mesh = build_mesh(shape)
    decoder, params = _load(path, model, mesh, engine_config)
    drafter = None if draft is None else _load(*draft, mesh, engine_config)
    return join_engine(decoder, params, engine_config, drafter), tokenizer


_MAX_CACHE_BYTES = 32 << 30
"""Of compiled programs on the disk."""


def _find(what: str, source: str) -> tuple[Path, ModelConfig]:
    path = resolve_source(source)
    model = load_config(path)
    say(f"{what} found: {path} ({model.family}, {model.num_layers} layers, {model.vocab_size} tokens)")
    return path, model


def _load(path: Path, model: ModelConfig, mesh: Mesh, config: EngineConfig) -> tuple[Decoder, Params]:
    """The decoder with its weights on the mesh."""
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
