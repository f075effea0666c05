"""What a model is, and how an engine runs it. Frozen; facts derived from them live elsewhere."""

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh"]
DType = Literal["float32", "bfloat16", "float16"]
WeightDType = Literal["float32", "bfloat16", "float16", "int8"]
CacheDType = Literal["float32", "bfloat16", "float16", "float8_e4m3", "int8"]
ExpertSharding = Literal["width", "expert"]
AttentionChoice = Literal["auto", "reference", "pallas"]
AttentionKernel = Literal["reference", "pallas", "interpreted"]
"""interpreted: the Pallas kernel without a GPU, slowly, for tests."""


@dataclass(frozen=True)
class Llama3RopeScaling:
    """The frequency scaling of llama 3.1 (section 3.4.1 of "The Llama 3 Herd of Models", and its released code)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by `factor` (Chen et al., 2023, "Extending Context Window of Large Language Models via
    Positional Interpolation")."""

    factor: float


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the feed-forward."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """Width of one expert."""
    renormalize: bool
    """Whether the gates of the chosen experts are rescaled to sum to 1 (Mixtral yes, Grok-1 no)."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"{self.num_experts_per_token} experts per token cannot be chosen from {self.num_experts}; expected "
                f"1 to {self.num_experts}"
            )
        if self.intermediate_size < 1:
            raise ConfigError(f"the experts' intermediate_size is {self.intermediate_size}; expected at least 1")


@dataclass(frozen=True)
class QuantizationConfig:
    """How int8 weights are scaled: every output has one scale for each group of consecutive inputs."""

    input_groups: int = 1
    """Groups of the projections into a wider space: q, k, v, gate and up."""
    output_groups: int = 8
    """Groups of the projections back, o and down, whose inputs are divided over devices (Grok-1's release: by 8)."""

    def __post_init__(self) -> None:
        for name in ["input_groups", "output_groups"]:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")


@dataclass(frozen=True)
class ModelConfig:
    """The one decoder's parameters. Raises `ConfigError` where they contradict each other."""

    family: str
    """Name of the family whose weight map applies, e.g. "llama"."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_position_embeddings: int
    """Positions the model was trained for: the upper limit of the context length."""
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated: bool = True
    """down(act(gate(x)) * up(x)) where true, down(act(up(x))) where false."""
    rope_theta: float = 10000.0
    rope_scaling: Llama3RopeScaling | LinearRopeScaling | None = None
    qkv_bias: bool = False
    attention_output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before RoPE (qwen3)."""
    post_norms: bool = False
    """Further norms after attention and after the feed-forward, before the residual is added (Grok-1)."""
    tie_embeddings: bool = False
    layer_windows: tuple[int | None, ...] | None = None
    """Sliding window of each layer (position i sees j with i - window < j <= i); None: the layer sees everything.
    The field itself None: no layer has a window."""
    attention_scale: float | None = None
    """Multiplies q·k; None: 1 / sqrt(head_size)."""
    attention_softcap: float | None = None
    """c: attention logits become c * tanh(x / c)."""
    embedding_multiplier: float = 1.0
    output_multiplier: float = 1.0
    """Multiplies the logits."""
    moe: MoEConfig | None = None
    quantization: QuantizationConfig = QuantizationConfig()
    """Of weights kept as int8; says nothing where they are not."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in [
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "intermediate_size",
            "max_position_embeddings",
        ]:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads: the first number must be a "
                "multiple of the second"
            )
        if self.head_size % 2:
            raise ConfigError(f"head_size is {self.head_size}; RoPE rotates pairs, so it must be even")
        if self.moe is not None and (self.ffn_bias or not self.gated):
            raise ConfigError("experts have a gate and no biases; ffn_bias must be false and gated true beside moe")
        if self.layer_windows is not None and len(self.layer_windows) != self.num_layers:
            raise ConfigError(f"layer_windows has {len(self.layer_windows)} entries for {self.num_layers} layers")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs a model. Raises `ConfigError` naming the field that cannot work."""

    num_slots: int = 8
    """Requests that can run at once: rows of the largest decode program."""
    max_model_len: int | None = None
    """Context length in tokens; None: the model's `max_position_embeddings`."""
    prefill_buckets: tuple[int, ...] = (8, 32, 128, 512)
    """Padded prompt-chunk lengths, ascending: multiples of the page size, or, but for the largest, divisors of it. A
    prompt above the largest is prefilled in chunks of it."""
    context_bucket_min: int = 256
    """Smallest context bucket of attention on an accelerator; the others double up to `max_model_len`. On the CPU one
    program serves every context: it stops at the longest one."""
    page_size: int = 16
    """Positions of a cache page; divides 128."""
    num_pages: int | None = None
    """Pages of the cache over all data shards; None: enough for the whole context of every slot, so that nothing is
    ever preempted. Fewer save memory where requests are shorter than the context."""
    prefix_caching: bool = True
    """Keep the pages of ended requests while there is room, for requests that begin with the same tokens."""
    step_token_budget: int | None = None
    """Tokens of a step with decode rows: a prompt is computed in chunks small enough to fit beside them (the smallest
    bucket always fits). With n prompts waiting it is n times as much, so that a lone long prompt stalls nobody, and a
    crowd is not kept waiting. Less keeps the gaps between tokens short, more ends prompts sooner. None: on a CPU, where
    time grows with every token, all rows and the smallest bucket; on an accelerator all rows and 512."""
    priority_ageing_s: float = 30.0
    """Seconds of waiting that count as much as one step of a request's priority."""
    decode_chunk: int = 1
    """Tokens that one step samples of each request at most, in a loop on the device (real-time chunking): the tokens of
    a step come together, and new requests join between steps. More pays where a step is short beside its dispatch."""
    decode_chunk_min: int = 1
    """The least that chunks shrink to while something waits to be computed; while nothing does they double, step by
    step, up to `decode_chunk`."""
    num_draft_tokens: int = 0
    """Tokens guessed ahead of a request at most and verified in one step (speculative decoding); 0: none. Guesses
    change no token, and use rows that running requests leave free."""
    ngram_min_len: int = 2
    """Guesses without a draft model: the tokens that followed the last occurrence of the request's last tokens, where
    at least this many of them recur."""
    ngram_max_len: int = 4
    """The most tokens whose recurrence is looked for."""
    max_queue_len: int = 256
    """Requests that may wait for a slot; one more is refused with `QueueFullError`."""
    max_queued_tokens: int | None = None
    """Prompt tokens that may wait; None: no limit beside `max_queue_len`."""
    activation_dtype: DType = "float32"
    weight_dtype: WeightDType = "float32"
    """int8: the layers' matrices stay int8 with scales, for memory-bound accelerators; everything else is kept in the
    activations' type. On a CPU choose float32, which widens such a checkpoint once, at loading. Norms and routers are
    float32 in any case."""
    expert_sharding: ExpertSharding = "width"
    """How experts lie over the model axis: each divided by its width, or whole experts dealt out."""
    cache_dtype: CacheDType | None = None
    """None: that of the activations. int8 keeps a float32 scale for each token and KV head; float8_e4m3 keeps none, and
    what lies beyond ±448 becomes that."""
    attention_kernel: AttentionChoice = "auto"
    """What computes the attention of decode rows. pallas: a kernel for NVIDIA GPUs that reads pages where they lie.
    auto: that one where the devices are such and it passes a check at the start, else reference, which is XLA's."""
    batch_invariant: bool = False
    """One program shape per kind and reductions over blocks of one size, so that a request's tokens are exactly the
    same whatever else runs. Slower: every decode step computes all slots over the whole context."""

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ConfigError(f"num_slots is {self.num_slots}; expected at least 1")
        if not self.prefill_buckets or list(self.prefill_buckets) != sorted(set(self.prefill_buckets)):
            raise ConfigError(
                f"prefill_buckets is {list(self.prefill_buckets)}; expected ascending lengths, at least one"
            )
        if self.prefill_buckets[0] < 2:
            # One token of each row is a decode program.
            raise ConfigError(f"prefill_buckets starts with {self.prefill_buckets[0]}; expected at least 2")
        if self.context_bucket_min < 1:
            raise ConfigError(f"context_bucket_min is {self.context_bucket_min}; expected at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; expected at least 2 (one prompt token, one new)")
        if self.num_pages is not None and self.num_pages < 1:
            raise ConfigError(f"num_pages is {self.num_pages}; expected at least 1, or null for enough")
        if self.step_token_budget is not None and self.step_token_budget < 1:
            raise ConfigError(f"step_token_budget is {self.step_token_budget}; expected at least 1, or null")
        if not 0 < self.priority_ageing_s < float("inf"):
            raise ConfigError(f"priority_ageing_s is {self.priority_ageing_s}; expected a number of seconds above 0")
        if not 1 <= self.decode_chunk_min <= self.decode_chunk <= 1024:
            raise ConfigError(
                f"decode_chunk_min is {self.decode_chunk_min} and decode_chunk {self.decode_chunk}; expected 1 to "
                "1024, the first no larger than the second"
            )
        if not 0 <= self.num_draft_tokens <= 64:
            raise ConfigError(f"num_draft_tokens is {self.num_draft_tokens}; expected 0 (off) to 64")
        if not 1 <= self.ngram_min_len <= self.ngram_max_len:
            raise ConfigError(
                f"ngram_min_len is {self.ngram_min_len} and ngram_max_len {self.ngram_max_len}; expected 1 or more, "
                "the first no larger than the second"
            )
        if self.max_queue_len < 1:
            raise ConfigError(f"max_queue_len is {self.max_queue_len}; expected at least 1")
        if self.max_queued_tokens is not None and self.max_queued_tokens < 1:
            raise ConfigError(
                f"max_queued_tokens is {self.max_queued_tokens}; expected at least 1, or null for no limit"
            )
