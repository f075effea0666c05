"""Makes the small tokenizers, and the text to try them on."""

import io
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

CORPUS = [
    "the quick brown fox jumps over the lazy dog, then the dog sleeps and the fox runs on",
    "Hello world, hello there. What is the capital of France? Paris is the capital.",
    "naïve café — “quotes” … 日本語のテキスト Привет мир 🙂🚀",
    "for i in range(10):\n    print(i ** 2)\n",
]

AWKWARD = [
    "",
    " ",
    "  leading",
    "trailing  ",
    "in   between",
    "\n\n\ttabs\r\n",
    "日本語のテキスト",
    "🙂🚀👩‍👩‍👧‍👦",
    "e\u0301 \u3000 \u00a0",
    "\x00\x01",
    "3.14159 and 1234567890",
]


def llama_tokenizer() -> tokenizers.Tokenizer:
    """llama 2's kind by hand: <unk> 0, <s> 1, </s> 2, bytes 3 to 258, ▁ 259, a to z 260 to 285, then merged tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    pieces += ["he", "th", "the", "\u2581the"]
    merges = [("h", "e"), ("t", "h"), ("t", "he"), ("\u2581", "the")]
    model = models.BPE(
        vocab={p: i for i, p in enumerate(pieces)}, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in pieces[:3]])
    return tokenizer


def train_sentencepiece(path: Path, **options: Any) -> Path:
    """A SentencePiece BPE with byte fallback, as language models use it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n", "<|separator|>"],
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path
