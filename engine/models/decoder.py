"""The one decoder, parameterised by a `ModelConfig`.

Letters: B sequences, T tokens of each, D model, H query heads, K KV heads, N head size, V vocabulary, L layers.
Activations are feature-major, `[D, B * T]`.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped

from engine.attention import Group, write_and_attend
from engine.config import AttentionKernel, ExpertSharding, ModelConfig
from engine.kv_cache import BLOCK_LEN, NO_WINDOW, BatchLayout, KVCache
from engine.models.layers import FeedForward, Linear, Norm, OfLayer, ParamDTypes, Rotation, rotate, rotation
from engine.models.moe import MixtureOfExperts
from engine.sharding import DATA, check_model_fits_mesh, num_cache_heads

Params = dict[str, dict[str, jax.Array]]


class _Batch(NamedTuple):
    """What every layer needs beside the activations."""

    groups: tuple[Group, ...]
    is_real: Bool[Array, " M"]
    """False for tokens that only fill up the batch."""
    rotation: Rotation


class Attention(hk.Module):
    """Grouped-query attention (Ainslie et al., 2023) over the paged cache."""

    def __init__(
        self, config: ModelConfig, dtypes: ParamDTypes, mesh: Mesh, kernel: AttentionKernel, name: str
    ) -> None:
        super().__init__(name)
        self._config, self._dtypes, self._mesh, self._kernel = config, dtypes, mesh, kernel

    def __call__(
        self,
        x: Float[Array, "D BT"],
        cache: KVCache,
        batch: _Batch,
        layer: int | Int[Array, ""],
        window: int | Int[Array, ""] | None,
    ) -> tuple[Float[Array, "D BT"], KVCache]:
        c, groups = self._config, self._config.quantization

        def heads(name: str, count: int) -> Float[Array, "heads N BT"]:
            linear = Linear(count * c.head_size, c.qkv_bias, self._dtypes, name, groups.input_groups)
            return linear(x).reshape(count, c.head_size, -1)

        q, k, v = heads("q", c.num_heads), heads("k", c.num_kv_heads), heads("v", c.num_kv_heads)
        if c.qk_norm:
            q = Norm("rms", c.norm_eps, self._dtypes.exact, "q_norm", axis=1)(q)
            k = Norm("rms", c.norm_eps, self._dtypes.exact, "k_norm", axis=1)(k)
        q, k = rotate(q, batch.rotation), rotate(k, batch.rotation)
        repeat = num_cache_heads(c, self._mesh) // c.num_kv_heads
        if repeat > 1:
            k, v = jnp.repeat(k, repeat, axis=0), jnp.repeat(v, repeat, axis=0)
        out, cache = write_and_attend(
            q,
            k,
            v,
            cache,
            layer,
            window,
            batch.groups,
            mesh=self._mesh,
            scale=c.head_size**-0.5 if c.attention_scale is None else c.attention_scale,
            softcap=c.attention_softcap,
            kernel=self._kernel,
        )
        out = out.reshape(c.num_heads * c.head_size, -1)
        project = Linear(c.hidden_size, c.attention_output_bias, self._dtypes, "o", groups.output_groups)
        return project(out), cache


class Block(hk.Module):
    """One layer: attention and feed-forward (or a mixture of experts), each behind a norm and added to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        dtypes: ParamDTypes,
        mesh: Mesh,
        expert_sharding: ExpertSharding,
        kernel: AttentionKernel,
        name: str,
    ) -> None:
        super().__init__(name)
        self._kernel = kernel
        self._config, self._dtypes, self._mesh, self._expert_sharding = config, dtypes, mesh, expert_sharding

    def __call__(
        self,
        x: Float[Array, "D BT"],
        cache: KVCache,
        batch: _Batch,
        layer: int | Int[Array, ""],
        window: int | Int[Array, ""] | None,
    ) -> tuple[Float[Array, "D BT"], KVCache]:
        c = self._config

        def norm(name: str) -> Norm:
            return Norm(c.norm, c.norm_eps, self._dtypes.exact, name)

        attention = Attention(c, self._dtypes, self._mesh, self._kernel, "attention")
        h, cache = attention(norm("attention_norm")(x), cache, batch, layer, window)
        x = x + (norm("attention_post_norm")(h) if c.post_norms else h)
        h = norm("ffn_norm")(x)
        if c.moe is None:
            h = FeedForward(c, self._dtypes, "ffn")(h)
        else:
            experts = MixtureOfExperts(c, self._dtypes, self._mesh, self._expert_sharding, "moe")
            h = experts(h, batch.is_real)
        x = x + (norm("ffn_post_norm")(h) if c.post_norms else h)
        return x, cache


class Decoder:
    """The decoder on a mesh as pure functions of (params, inputs).

    `weight_dtype` is that of the parameters, `activation_dtype` that of the residual stream. int8 weights: the layers'
    matrices, with scales; everything else is then in the activations' type. Parameters of norms and routers are always
    float32, as in Grok-1's release. Norms, routing, RoPE, softmax and logits are computed in float32.

    Raises `ConfigError` where the mesh cannot split the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        weight_dtype: str,
        activation_dtype: str,
        expert_sharding: ExpertSharding = "width",
        attention_kernel: AttentionKernel = "reference",
    ) -> None:
        check_model_fits_mesh(config, mesh, expert_sharding)
        self.config = config
        self.mesh = mesh
        self.expert_sharding = expert_sharding
        self.attention_kernel = attention_kernel
        self._dtypes = ParamDTypes.of(weight_dtype, activation_dtype)
        self._activation_dtype = jnp.dtype(activation_dtype)

    def hidden(
        self,
        params: Params,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        layout: BatchLayout,
        num_blocks: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "D BT"], KVCache]:
        """Runs all layers: the normed hidden state of every token, and the cache with their keys and values."""
        return self.hidden_of_groups(params, cache, [tokens], [Group(layout, num_blocks)])

    def hidden_of_groups(
        self, params: Params, cache: KVCache, tokens: Sequence[Array], groups: Sequence[Group]
    ) -> tuple[Float[Array, "D M"], KVCache]:
        """As `hidden`, for groups of sequences with different numbers of tokens; `flatten` says how the M tokens of all
        of them stand, and `unflatten` parts what was computed of them."""
        return hk.transform(self._hidden).apply(params, None, params, cache, tokens, groups)

    def flatten(self, arrays: Sequence[Array]) -> Shaped[Array, " M"]:
        """One entry for each token of each group, as `write_and_attend` wants them: by data shard, then by group."""
        num_shards = self.mesh.shape[DATA]
        by_shard = [a.reshape(num_shards, -1) for a in arrays]
        return (by_shard[0] if len(by_shard) == 1 else jnp.concatenate(by_shard, axis=1)).reshape(-1)

    def unflatten(self, x: Shaped[Array, "D M"], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """The columns of `flatten` as they were: one array for each (B, T)."""
        num_shards = self.mesh.shape[DATA]
        ends = list(itertools.accumulate(batch // num_shards * num_tokens for batch, num_tokens in shapes))
        by_shard = jnp.split(x.reshape(x.shape[0], num_shards, -1), ends[:-1], axis=2)
        return [part.reshape(x.shape[0], *shape) for part, shape in zip(by_shard, shapes, strict=True)]

    def layer_states(
        self,
        params: Params,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        layout: BatchLayout,
        num_blocks: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "L D BT"], Float[Array, "D BT"]]:
        """As `hidden`, for verification: the residual stream after each layer, and the normed hidden state."""
        group = Group(layout, num_blocks)
        return hk.transform(self._layer_states).apply(params, None, params, cache, [tokens], [group])

    def logits(self, params: Params, hidden: Float[Array, "D M"]) -> Float[Array, "V M"]:
        """Float32 logits of hidden states."""
        head = params["embed" if self.config.tie_embeddings else "lm_head"]["w"]
        out = jax.lax.dot_general(
            head, hidden.astype(head.dtype), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return out if self.config.output_multiplier == 1.0 else out * self.config.output_multiplier

    def abstract_params(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Shape and dtype of every parameter."""
        return jax.eval_shape(self.init_params, jax.random.key(0))

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters (normal, standard deviation 0.02): for tests and benchmarks."""
        num_heads = num_cache_heads(self.config, self.mesh)
        pages, size = BLOCK_LEN // 16, self.config.head_size
        data = self.mesh.shape["data"]
        lead = (self.config.num_layers, pages * data, num_heads)
        cache = KVCache(jnp.zeros((*lead, size, 16)), jnp.zeros((*lead, 16, size)))
        ints = jnp.zeros((data, 1), jnp.int32)
        layout = BatchLayout(jnp.zeros((data, pages), jnp.int32), ints, ints[:, 0], ints)

        def run() -> None:
            self._hidden(None, cache, [ints], [Group(layout, 1)])
            if not self.config.tie_embeddings:
                head_dtypes = ParamDTypes(self._dtypes.others, self._dtypes.others)
                with_head = Linear(self.config.vocab_size, False, head_dtypes, "lm_head")
                with_head(jnp.zeros((self.config.hidden_size, 1), self._activation_dtype))

        return hk.transform(run).init(key)

    @property
    def _scans_layers(self) -> bool:
        """Whether one body serves all layers, which compiles several times faster than a copy for each.

        The body chooses its layer's matrices by `OfLayer`; a scan over stacked ones would copy them on the CPU, which
        doubles a decode step. On an accelerator the choice costs a round trip to the host.
        """
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return on_cpu and self.config.moe is None and self._dtypes.matrices != jnp.int8

    def _block(self, name: str) -> Block:
        return Block(self.config, self._dtypes, self.mesh, self.expert_sharding, self.attention_kernel, name)

    def _scan_layers(
        self, params: Params, x: Array, cache: KVCache, batch: _Batch, keep_states: bool
    ) -> tuple[tuple[Array, KVCache], Array | None]:
        c = self.config
        windows = c.layer_windows or (None,) * c.num_layers
        limits = jnp.array([NO_WINDOW if w is None else w for w in windows], jnp.int32)
        block = hk.transform(lambda *args: self._block("layer")(*args))
        paths = [path.removeprefix("layer_0/") for path in params if path.startswith("layer_0/")]

        def layer(carry: tuple[Array, KVCache], index: Array) -> tuple[tuple[Array, KVCache], Array | None]:
            of_layer = {
                f"layer/{path}": {
                    name: OfLayer(tuple(params[f"layer_{i}/{path}"][name] for i in range(c.num_layers)), index)
                    for name in params[f"layer_0/{path}"]
                }
                for path in paths
            }
            window = windows[0] if len(set(windows)) == 1 else limits[index]
            x, cache = block.apply(of_layer, None, *carry, batch, index, window)
            return (x, cache), x if keep_states else None

        return jax.lax.scan(layer, (x, cache), jnp.arange(c.num_layers))

    def _hidden(
        self, params: Params | None, cache: KVCache, tokens: Sequence[Array], groups: Sequence[Group]
    ) -> tuple[Array, KVCache]:
        x, cache, _ = self._run_layers(params, cache, tokens, groups, keep_states=False)
        return self._final_norm(x), cache

    def _layer_states(
        self, params: Params, cache: KVCache, tokens: Sequence[Array], groups: Sequence[Group]
    ) -> tuple[Array, Array]:
        x, _, states = self._run_layers(params, cache, tokens, groups, keep_states=True)
        assert states is not None
        return states, self._final_norm(x)

    def _final_norm(self, x: Array) -> Array:
        return Norm(self.config.norm, self.config.norm_eps, self._dtypes.exact, "final_norm")(x)

    def _run_layers(
        self,
        params: Params | None,
        cache: KVCache,
        tokens: Sequence[Array],
        groups: Sequence[Group],
        keep_states: bool,
    ) -> tuple[Array, KVCache, Array | None]:
        c = self.config
        x = _Embedding(c, self._dtypes.others, "embed")(self.flatten(tokens)).astype(self._activation_dtype)
        if c.embedding_multiplier != 1.0:
            x = x * jnp.asarray(c.embedding_multiplier, x.dtype)
        layouts = [group.layout for group in groups]
        is_real = self.flatten([jnp.arange(a.positions.shape[1])[None] < a.num_tokens[:, None] for a in layouts])
        positions = self.flatten([a.positions for a in layouts])
        batch = _Batch(tuple(groups), is_real, rotation(c, positions))

        if params is not None and self._scans_layers:
            (x, cache), states = self._scan_layers(params, x, cache, batch, keep_states)
            return x, cache, states
        kept = []
        for layer, window in enumerate(c.layer_windows or (None,) * c.num_layers):
            x, cache = self._block(f"layer_{layer}")(x, cache, batch, layer, window)
            kept.append(x)
        return x, cache, jnp.stack(kept) if keep_states else None


class _Embedding(hk.Module):
    """Rows of the table `w` [V, D] as columns [D, T]."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, name: str) -> None:
        super().__init__(name)
        self._config, self._dtype = config, dtype

    def __call__(self, tokens: Int[Array, " T"]) -> Float[Array, "D T"]:
        init = hk.initializers.RandomNormal(0.02)
        w = hk.get_parameter("w", (self._config.vocab_size, self._config.hidden_size), self._dtype, init)
        return w[tokens].T
