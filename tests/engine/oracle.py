"""A plain full forward pass in float64, written from the papers, without a cache.

Letters: T tokens, D model, H query heads, K KV heads, N head size, V vocabulary.
"""

import math

import numpy as np

from engine.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig

_erf = np.vectorize(math.erf)


def full_logits(config: ModelConfig, params: dict[str, np.ndarray], tokens: tuple[int, ...]) -> np.ndarray:
    """Logits [T, V]. `params` is {path: array}."""
    p = {path: value.astype(np.float64) for path, value in params.items()}
    x = p["embed/w"][list(tokens)] * config.embedding_multiplier
    windows = config.layer_windows or [None] * config.num_layers
    for index, window in enumerate(windows):
        prefix = f"layer_{index}/"
        layer = {path.removeprefix(prefix): a for path, a in p.items() if path.startswith(prefix)}
        x = _block(config, layer, x, window)
    head = p["embed/w" if config.tie_embeddings else "lm_head/w"]
    return _norm(config, p, "final_norm", x) @ head.T * config.output_multiplier


def _block(c: ModelConfig, p: dict[str, np.ndarray], x: np.ndarray, window: int | None) -> np.ndarray:
    h = _attention(c, p, _norm(c, p, "attention_norm", x), window)
    x = x + (_norm(c, p, "attention_post_norm", h) if c.post_norms else h)
    h = _feed_forward(c, p, _norm(c, p, "ffn_norm", x))
    return x + (_norm(c, p, "ffn_post_norm", h) if c.post_norms else h)


def _attention(c: ModelConfig, p: dict[str, np.ndarray], x: np.ndarray, window: int | None) -> np.ndarray:
    num_tokens = len(x)
    q = _linear(p, "attention/q", x).reshape(num_tokens, c.num_heads, c.head_size)
    k = _linear(p, "attention/k", x).reshape(num_tokens, c.num_kv_heads, c.head_size)
    v = _linear(p, "attention/v", x).reshape(num_tokens, c.num_kv_heads, c.head_size)
    if c.qk_norm:
        q = _rms(q, c.norm_eps) * p["attention/q_norm/scale"]
        k = _rms(k, c.norm_eps) * p["attention/k_norm/scale"]
    q, k = _rope(c, q), _rope(c, k)
    scale = c.attention_scale if c.attention_scale is not None else 1 / math.sqrt(c.head_size)
    out = np.zeros_like(q)
    for head in range(c.num_heads):
        kv = head // (c.num_heads // c.num_kv_heads)
        for i in range(num_tokens):
            first = 0 if window is None else max(0, i - window + 1)
            scores = k[first : i + 1, kv] @ q[i, head] * scale
            if c.attention_softcap is not None:
                scores = c.attention_softcap * np.tanh(scores / c.attention_softcap)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[first : i + 1, kv]
    return _linear(p, "attention/o", out.reshape(num_tokens, -1))


def _feed_forward(c: ModelConfig, p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    up = _linear(p, "ffn/up", x)
    hidden = _activate(c, _linear(p, "ffn/gate", x)) * up if c.gated else _activate(c, up)
    return _linear(p, "ffn/down", hidden)


def _activate(c: ModelConfig, x: np.ndarray) -> np.ndarray:
    if c.activation == "silu":
        return x / (1 + np.exp(-x))
    if c.activation == "gelu":
        return x * 0.5 * (1 + _erf(x / math.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _linear(p: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ p[f"{name}/w"].T + p.get(f"{name}/b", 0.0)


def _norm(c: ModelConfig, p: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    if c.norm == "rms":
        return _rms(x, c.norm_eps) * p[f"{name}/scale"]
    centred = x - x.mean(-1, keepdims=True)
    return _rms(centred, c.norm_eps) * p[f"{name}/scale"] + p[f"{name}/bias"]


def _rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def _rope(c: ModelConfig, x: np.ndarray) -> np.ndarray:
    """Rotates the pair (i, i + N/2) of every head at position t by t · frequency_i: as multiplication by e^(iφ)."""
    half = c.head_size // 2
    angles = np.outer(np.arange(len(x)), [_frequency(c, i) for i in range(half)])
    rotated = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([rotated.real, rotated.imag], axis=-1)


def _frequency(c: ModelConfig, i: int) -> float:
    frequency = c.rope_theta ** (-2 * i / c.head_size)
    scaling = c.rope_scaling
    if isinstance(scaling, LinearRopeScaling):
        return frequency / scaling.factor
    if isinstance(scaling, Llama3RopeScaling):
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        if turns < scaling.low_freq_factor:
            return frequency / scaling.factor
        if turns < scaling.high_freq_factor:
            share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            return (1 - share) * frequency / scaling.factor + share * frequency
    return frequency
