"""Finds the tokenizer of a model: the one way in for the rest of the serving layer."""

from pathlib import Path

from engine.errors import TokenizerError
from serve_app.text.base import Tokenizer
from serve_app.text.gguf_tokenizer import load_gguf_tokenizer
from serve_app.text.hf_tokenizer import load_hf_tokenizer
from serve_app.text.sentencepiece_tokenizer import load_sentencepiece_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer at `path`: a .gguf file, a SentencePiece .model file, a tokenizer.json, or a directory that holds
    tokenizer.json (preferred) or tokenizer.model.

    Raises `TokenizerError` where there is none, or one of an unknown kind.
    """
    if path.is_dir():
        for name in ("tokenizer.json", "tokenizer.model"):
            if (path / name).exists():
                return load_tokenizer(path / name)
        raise TokenizerError(f"{path} holds neither a tokenizer.json nor a tokenizer.model")
    if not path.exists():
        raise TokenizerError(f"{path} does not exist; expected a tokenizer file or a directory that holds one")
    if path.suffix == ".gguf":
        return load_gguf_tokenizer(path)
    if path.suffix == ".model":
        return load_sentencepiece_tokenizer(path)
    if path.suffix == ".json":
        return load_hf_tokenizer(path)
    raise TokenizerError(f"{path} is no known kind of tokenizer file; expected .gguf, .model or .json, or a directory")
