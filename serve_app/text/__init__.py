"""Text in and text out: tokenizers, incremental detokenization, stop strings, chat templates."""
