"""Makes the tokenizer of configs/grok1-tiny.yaml: `python -m tests.tiny_tokenizer` trains it on the licence's text.

512 pieces, as the tiny model's vocabulary; special tokens and byte fallback as in Grok-1's own tokenizer.
"""

import io
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

ROOT = Path(__file__).parents[1]
TINY_TOKENIZER = ROOT / "configs" / "grok1-tiny.model"


def train(text: str) -> bytes:
    """A SentencePiece model file."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in text.splitlines() if line.strip()]),
        model_writer=trained,
        vocab_size=512,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
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
    """Writes the file."""
    TINY_TOKENIZER.write_bytes(train((ROOT / "LICENSE").read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
