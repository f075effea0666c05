"""From a config to what an ingress process needs for text. No JAX here."""

from pathlib import Path

from engine.errors import ConfigError
from engine.weights.source import resolve_source
from serve_app.api import TextTools
from serve_app.config import AppConfig
from serve_app.text.base import Tokenizer
from serve_app.text.chat import ChatTemplate
from serve_app.text.tokenizer import load_tokenizer


def load_model_tokenizer(config: AppConfig) -> Tokenizer:
    """The tokenizer that the config names. Raises `CheckpointError` or `TokenizerError`."""
    return load_tokenizer(resolve_source(config.model.tokenizer or config.model.source))


def build_text(config: AppConfig) -> TextTools:
    """Tokenizer and chat template. Raises `ConfigError`, `CheckpointError` or `TokenizerError`."""
    tokenizer = load_model_tokenizer(config)
    source = tokenizer.chat_template
    if config.model.chat_template is not None:
        source = _read_template(Path(config.model.chat_template).expanduser())
    template = None if source is None else ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token)
    return TextTools(tokenizer, template)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {path} cannot be read: {error}") from None
