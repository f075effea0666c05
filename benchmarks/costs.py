"""What a step must read and compute at least, and the rates that follow from a machine's limits.

Exact for dense models; a mixture of experts is counted as if every expert ran, so its shares come out too high.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from benchmarks.machine import Limits
from engine.config import ModelConfig

Params = Mapping[str, Mapping[str, jax.Array | jax.ShapeDtypeStruct]]


@dataclass(frozen=True)
class ModelCosts:
    """Sizes that decide the cost of a step. Norms and biases are counted with the layers."""

    layer_params: int
    """Parameters of all layers: each is read once in a step and used once for each token."""
    head_params: int
    """Parameters of the output layer: used only for tokens after which one is sampled."""
    weight_bytes: int
    """Bytes of both."""
    cache_bytes_per_token: int
    """Keys and values of one position in all layers."""
    attention_flop_per_pair: int
    """Of one query position with one key position, in all layers: q·k and the weighted sum of v."""

    @classmethod
    def of(cls, model: ModelConfig, params: Params, cache_itemsize: int) -> "ModelCosts":
        """The costs of `params`; `cache_itemsize` in bytes."""
        sizes = {f"{module}/{name}": array for module, group in params.items() for name, array in group.items()}
        head = sizes["embed/w" if model.tie_embeddings else "lm_head/w"]
        layers = [array for path, array in sizes.items() if path not in ("embed/w", "lm_head/w")]
        return cls(
            layer_params=sum(array.size for array in layers),
            head_params=head.size,
            weight_bytes=sum(array.size * array.dtype.itemsize for array in [*layers, head]),
            cache_bytes_per_token=2 * model.num_layers * model.num_kv_heads * model.head_size * cache_itemsize,
            attention_flop_per_pair=4 * model.num_layers * model.num_heads * model.head_size,
        )

    def prefill_flop(self, prompt_len: int) -> int:
        """Operations of one prompt, its first token included."""
        pairs = prompt_len * (prompt_len + 1) // 2
        return 2 * self.layer_params * prompt_len + 2 * self.head_params + self.attention_flop_per_pair * pairs

    def prefill_limit_tokens_per_s(self, prompt_len: int, limits: Limits) -> float:
        """Prompt tokens a second if the machine did nothing but the necessary products, at its peak."""
        return prompt_len * limits.peak_flop_per_s / self.prefill_flop(prompt_len)

    def decode_limit_steps_per_s(self, num_streams: int, context_len: float, limits: Limits) -> float:
        """Decode steps a second: the slower of reading weights and cache once, and computing at the peak."""
        read = self.weight_bytes + num_streams * context_len * self.cache_bytes_per_token
        flop = num_streams * (2 * (self.layer_params + self.head_params) + self.attention_flop_per_pair * context_len)
        return min(limits.bandwidth_bytes_per_s / read, limits.peak_flop_per_s / flop)
