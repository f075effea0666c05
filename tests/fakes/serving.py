"""Factories of fakes for `serve_app.app.build_app`, importable by Ray's workers."""

import os
import time
from collections.abc import Sequence

from engine.request import EngineProtocol, RequestOutput
from serve_app.api import TextTools
from serve_app.config import AppConfig
from serve_app.text.base import Tokenizer
from serve_app.text.chat import ChatTemplate
from tests.fakes.engine import ByteTokenizer, FakeEngine

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


def fake_text(config: AppConfig) -> TextTools:
    """Bytes as tokens, and a template that can be written down by hand."""
    return TextTools(ByteTokenizer(TEMPLATE), ChatTemplate(TEMPLATE, "<bos>", "<eos>"))


class PacedEngine(FakeEngine):
    """Takes a while for each step, as a model does, so that requests overlap.

    A prompt that ends in "%" ends the process at its fourth step, as a fault in a driver would.
    """

    def step(self) -> Sequence[RequestOutput]:
        time.sleep(0.01)
        if any(r.request.prompt_token_ids[-1] == ord("%") and len(r.tokens) == 3 for r in self.running):
            os._exit(1)
        return super().step()


def fake_engine(config: AppConfig) -> tuple[EngineProtocol, Tokenizer]:
    """A paced engine of the config's sizes."""
    engine = PacedEngine(
        num_slots=config.engine.num_slots,
        max_queue_len=config.engine.max_queue_len,
        max_model_len=config.engine.max_model_len or 64,
        decode_chunk=config.engine.decode_chunk,
    )
    return engine, ByteTokenizer(TEMPLATE)
