"""How the deployments come by their engine and their text tools: real ones, or a test's."""

from collections.abc import Callable

from engine.request import EngineProtocol
from serve_app.api import TextTools
from serve_app.config import AppConfig
from serve_app.text.base import Tokenizer

EngineFactory = Callable[[AppConfig], tuple[EngineProtocol, Tokenizer]]
"""Makes a replica's engine, not warmed up, and its tokenizer."""

TextFactory = Callable[[AppConfig], TextTools]
"""Makes an ingress process's text tools."""


def build_engine_lazily(config: AppConfig) -> tuple[EngineProtocol, Tokenizer]:
    """`build_engine` of `serve_app.builder`, or of `serve_app.hosts` for a mesh over several hosts.

    They are imported where they run: they bring JAX, which only replicas need.
    """
    if config.mesh.num_hosts > 1:
        from serve_app.hosts import build_engine as build_engine_over_hosts

        return build_engine_over_hosts(config)
    from serve_app.builder import build_engine

    return build_engine(config)


def build_text_lazily(config: AppConfig) -> TextTools:
    """`serve_app.text_builder.build_text`, imported where it runs."""
    from serve_app.text_builder import build_text

    return build_text(config)
