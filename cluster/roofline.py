"""The least time that a step can take: that of reading what it must read, or of computing what it must compute.

Communication between devices, and everything else, is left out: these are limits, not predictions. Of one device, and
in seconds.
"""

from dataclasses import dataclass

from cluster.budget import Param, cache_bytes_per_position
from engine.config import CacheDType
from engine.models.decoder import Decoder
from engine.sharding import DATA, MODEL


@dataclass(frozen=True)
class Accelerator:
    """One device, as its data sheet has it."""

    memory_bytes: float
    bandwidth_bytes_per_s: float
    flop_per_s: float
    """Dense products of the activations' type."""


def expected_distinct_experts(num_experts: int, num_per_token: int, num_tokens: int) -> float:
    """How many experts a step reads: the mean, where every token chooses evenly and for itself."""
    return num_experts * (1 - (1 - num_per_token / num_experts) ** num_tokens)


@dataclass(frozen=True)
class StepCosts:
    """What decides the time of a step on each device."""

    dense_bytes: int
    """Weights that every step reads: all but experts, and an embedding that is no output layer."""
    expert_bytes: int
    """Weights of all experts that the device holds."""
    layer_params: float
    """Parameters that a token is multiplied with in the layers, of all devices: of experts, the chosen ones."""
    head_params: int
    """The same of the output layer, which only a row's last token meets."""
    attention_flop_per_pair: int
    """Of one query position with one key position, on all devices."""
    cache_bytes_per_position: int
    num_experts: int
    """0 without a mixture."""
    num_experts_per_token: int
    shares_experts_whole: bool
    """Experts are dealt out whole, not divided by their width."""
    num_shards: int
    model_axis: int

    @classmethod
    def of(cls, decoder: Decoder, params: list[Param], cache_dtype: CacheDType) -> "StepCosts":
        """The costs of a decoder whose parameters are `params`."""
        c, moe = decoder.config, decoder.config.moe
        head = "embed/w" if c.tie_embeddings else "lm_head/w"
        read = [p for p in params if p.path == head or p.path != "embed/w"]
        matrices = [p for p in read if p.path.endswith("/w") and p.path != head]
        share = 0.0 if moe is None else moe.num_experts_per_token / moe.num_experts
        return cls(
            dense_bytes=sum(p.shard_bytes for p in read if not p.is_expert),
            expert_bytes=sum(p.shard_bytes for p in read if p.is_expert),
            layer_params=sum(p.size * (share if p.is_expert else 1.0) for p in matrices),
            head_params=sum(p.size for p in read if p.path == head),
            attention_flop_per_pair=4 * c.num_layers * c.num_heads * c.head_size,
            cache_bytes_per_position=cache_bytes_per_position(decoder, cache_dtype),
            num_experts=0 if moe is None else moe.num_experts,
            num_experts_per_token=0 if moe is None else moe.num_experts_per_token,
            shares_experts_whole=decoder.expert_sharding == "expert",
            num_shards=decoder.mesh.shape[DATA],
            model_axis=decoder.mesh.shape[MODEL],
        )

    def expert_bytes_read(self, num_tokens: int) -> float:
        """Bytes of experts that the busiest device reads for `num_tokens` tokens of its data shard.

        Where experts are dealt out whole that is at least one of them.
        """
        if not self.num_experts:
            return 0.0
        distinct = expected_distinct_experts(self.num_experts, self.num_experts_per_token, num_tokens)
        if not self.shares_experts_whole:
            return self.expert_bytes * distinct / self.num_experts
        held = self.num_experts / self.model_axis
        return self.expert_bytes * max(1.0, distinct / self.model_axis) / held

    def decode_bytes(self, num_rows: int, context_len: int) -> float:
        """Bytes that a device reads in a decode step of `num_rows` rows (all shards), each of `context_len`
        positions."""
        rows = -(-num_rows // self.num_shards)
        cache = rows * context_len * self.cache_bytes_per_position
        return self.dense_bytes + self.expert_bytes_read(rows) + cache

    def decode_flop(self, num_rows: int, context_len: int) -> float:
        """Operations of a device in such a step."""
        rows = -(-num_rows // self.num_shards)
        per_row = 2 * (self.layer_params + self.head_params) + self.attention_flop_per_pair * context_len
        return rows * per_row / self.model_axis

    def decode_step_s(self, num_rows: int, context_len: int, device: Accelerator) -> float:
        """Seconds of such a step, which gives one token to each row."""
        read_s = self.decode_bytes(num_rows, context_len) / device.bandwidth_bytes_per_s
        return max(read_s, self.decode_flop(num_rows, context_len) / device.flop_per_s)

    def prefill_flop_per_token(self, prompt_len: int) -> float:
        """Operations of a device for one token of a prompt of `prompt_len`: the mean over its positions."""
        pairs = (prompt_len + 1) / 2
        return (2 * self.layer_params + self.attention_flop_per_pair * pairs) / self.model_axis

    def prefill_token_s(self, prompt_len: int, chunk_len: int, device: Accelerator) -> float:
        """Seconds for each token of a prompt that is prefilled in chunks of `chunk_len`, one at a time.

        The data shards prefill as many prompts at the same time.
        """
        chunk = min(chunk_len, prompt_len)
        read = self.dense_bytes + self.expert_bytes_read(chunk)
        compute_s = self.prefill_flop_per_token(prompt_len) / device.flop_per_s
        return max(compute_s, read / chunk / device.bandwidth_bytes_per_s)
