"""The parameter tree of a config, written out by hand: the loader's tests need no model."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from engine.config import ModelConfig

Tree = dict[str, dict[str, jax.ShapeDtypeStruct]]


def abstract_tree(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> Tree:
    """{module: {param: shape and dtype}}."""
    tree: Tree = {}
    for path, shape in _shapes(config).items():
        module, _, name = path.rpartition("/")
        tree.setdefault(module, {})[name] = jax.ShapeDtypeStruct(shape, dtype)
    return tree


def int8_tree(
    config: ModelConfig, input_groups: int = 1, output_groups: int = 8, dtype: jnp.dtype = jnp.float32
) -> Tree:
    """The same with the layers' matrices, but for the router, as int8 with scales of `dtype`."""
    tree = abstract_tree(config, dtype)
    for module, params in tree.items():
        if "w" not in params or not module.startswith("layer_") or module.endswith("router"):
            continue
        shape = params["w"].shape
        groups = output_groups if module.endswith(("/o", "/down")) else input_groups
        params["w"] = jax.ShapeDtypeStruct(shape, jnp.int8)
        params["scale"] = jax.ShapeDtypeStruct((*shape[:-1], groups), dtype)
    return tree


def _shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    n_layers, d, f, n = c.num_layers, c.hidden_size, c.intermediate_size, c.head_size
    q, kv = c.num_heads * n, c.num_kv_heads * n
    block: dict[str, tuple[int, ...]] = {
        "attention/q/w": (q, d),
        "attention/k/w": (kv, d),
        "attention/v/w": (kv, d),
        "attention/o/w": (d, q),
    }
    norms = ["attention_norm", "ffn_norm"]
    if c.post_norms:
        norms += ["attention_post_norm", "ffn_post_norm"]
    for norm in norms:
        block[f"{norm}/scale"] = (d,)
        if c.norm == "layer":
            block[f"{norm}/bias"] = (d,)
    if c.qkv_bias:
        block |= {"attention/q/b": (q,), "attention/k/b": (kv,), "attention/v/b": (kv,)}
    if c.attention_output_bias:
        block["attention/o/b"] = (d,)
    if c.qk_norm:
        block |= {"attention/q_norm/scale": (n,), "attention/k_norm/scale": (n,)}
    if c.moe is None:
        block |= {"ffn/up/w": (f, d), "ffn/down/w": (d, f)}
        if c.gated:
            block["ffn/gate/w"] = (f, d)
        if c.ffn_bias:
            block |= {"ffn/up/b": (f,), "ffn/down/b": (d,)}
            if c.gated:
                block["ffn/gate/b"] = (f,)
    else:
        e, fe = c.moe.num_experts, c.moe.intermediate_size
        block |= {"moe/router/w": (e, d), "moe/gate/w": (e, fe, d), "moe/up/w": (e, fe, d), "moe/down/w": (e, d, fe)}
    shapes = {f"layer_{layer}/{path}": shape for layer in range(n_layers) for path, shape in block.items()}
    shapes |= {"embed/w": (c.vocab_size, d), "final_norm/scale": (d,)}
    if c.norm == "layer":
        shapes["final_norm/bias"] = (d,)
    if not c.tie_embeddings:
        shapes["lm_head/w"] = (c.vocab_size, d)
    return shapes


def mesh_of(num_devices: int) -> Mesh:
    """A ("data", "model") mesh of one row."""
    devices = np.array(jax.devices()[:num_devices]).reshape(1, num_devices)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def sharding_on(mesh: Mesh):
    """A `sharding_for`: experts, or else the largest axis that divides, go over "model"."""

    def sharding_for(path: str, shape: tuple[int, ...]) -> NamedSharding:
        spec: list[str | None] = [None] * len(shape)
        for axis in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
            if shape[axis] % mesh.shape["model"] == 0:
                spec[0 if "/moe/" in path else axis] = "model"
                break
        return NamedSharding(mesh, P(*spec))

    return sharding_for
