"""The real application with engines that take their time, importable by Ray Serve: `tests.fakes.paced:build`."""

import time
from collections.abc import Sequence
from typing import Any

from ray.serve import Application

from engine.request import EngineProtocol, RequestOutput
from serve_app.app import build_app
from serve_app.config import AppConfig, parse_app_config
from serve_app.factories import build_engine_lazily, build_text_lazily
from serve_app.text.base import Tokenizer

_STEP_S = 0.01


class PacedEngine:
    """The real engine of a tiny model, whose streams last as long as a large one's."""

    def __init__(self, engine: EngineProtocol) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Sequence[RequestOutput]:
        """See `EngineProtocol`."""
        time.sleep(_STEP_S)
        return self._engine.step()


def paced_engine(config: AppConfig) -> tuple[EngineProtocol, Tokenizer]:
    """A factory for `build_app`."""
    engine, tokenizer = build_engine_lazily(config)
    return PacedEngine(engine), tokenizer


def build(args: dict[str, Any]) -> Application:
    """As `serve_app.app.build`."""
    return build_app(parse_app_config(args), paced_engine, build_text_lazily)
