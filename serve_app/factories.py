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
    """`serve_app.builder.build_engine`, imported where it runs: it brings JAX, which only replicas need."""
    from serve_app.builder import build_engine

    return build_engine(config)


def build_text_lazily(config: AppConfig) -> TextTools:
    """`serve_app.text_builder.build_text`, imported where it runs."""
    from serve_app.text_builder import build_text

    return build_text(config)
