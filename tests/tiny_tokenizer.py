"""Makes the tokenizers of the tiny models in configs/ from the text of the licence: `python -m tests.tiny_tokenizer`.

As many pieces as each model's vocabulary; special tokens and byte fallback as in Grok-1's own tokenizer.
"""

import io
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

ROOT = Path(__file__).parents[1]
TINY_TOKENIZER = ROOT / "configs" / "grok1-tiny.model"
PI05_TOKENIZER = ROOT / "configs" / "pi05-tiny.model"

PI05_OPTIONS: dict[str, Any] = {"vocab_size": 320, "character_coverage": 0.98}
"""256 bytes leave room for the most frequent characters and a few pieces of several."""


def train(text: str, vocab_size: int = 512, character_coverage: float = 1.0) -> bytes:
    """A SentencePiece model file. Characters beyond the coverage are spelled in bytes."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in text.splitlines() if line.strip()]),
        model_writer=trained,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=character_coverage,
        # The default's table of characters would be 240 KB.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece="[PAD]",
        bos_piece="[BOS]",
        eos_piece="[EOS]",
        unk_piece="[UNK]",
        user_defined_symbols=["\n"],
        num_threads=1,
        minloglevel=2,
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(trained.getvalue())
    return model.SerializeToString(deterministic=True)


def main() -> None:
    """Writes the files."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    TINY_TOKENIZER.write_bytes(train(text))
    PI05_TOKENIZER.write_bytes(train(text, **PI05_OPTIONS))


if __name__ == "__main__":
    main()
