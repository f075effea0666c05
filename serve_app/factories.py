"""How the deployments come by their engine and their text tools: real ones, or a test's."""

from collections.abc import Callable

from engine.request import EngineProtocol
from serve_app.api import TextTools
from serve_app.config import AppConfig
from serve_app.text.base import Tokenizer

EngineFactory = Callable[[AppConfig], tuple[EngineProtocol, Tokenizer]]
"""Makes a replica's engine, not warmed up, and its tokenizer. `serve_app.builder.build_engine` is the real one."""

TextFactory = Callable[[AppConfig], TextTools]
"""Makes an ingress process's text tools. `serve_app.text_builder.build_text` is the real one."""
