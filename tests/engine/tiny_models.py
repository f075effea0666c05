"""Small random models of every option, with dimensions that cannot stand in for each other."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from engine.config import EngineConfig, LinearRopeScaling, Llama3RopeScaling, ModelConfig
from engine.engine import Engine, build_engine
from engine.models.decoder import Decoder, Params
from engine.request import FinishReason, Request, RequestOutput
from engine.sharding import make_mesh, param_sharding

LLAMA = ModelConfig(
    family="llama",
    vocab_size=53,
    hidden_size=22,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_size=10,
    intermediate_size=26,
    max_position_embeddings=256,
    eos_token_ids=(11,),
)

WIDE = replace(LLAMA, num_heads=8, num_kv_heads=4, intermediate_size=40)
"""Can be divided by 8, but for its KV heads and its vocabulary."""

MODELS = {
    "llama": LLAMA,
    "window, llama 3 rope, one KV head": replace(
        LLAMA,
        layer_windows=(7, None),
        num_kv_heads=1,
        rope_theta=5e5,
        rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 64),
    ),
    "biases, tied, tanh gelu, linear rope": replace(
        LLAMA,
        qkv_bias=True,
        attention_output_bias=True,
        ffn_bias=True,
        tie_embeddings=True,
        activation="gelu_tanh",
        rope_scaling=LinearRopeScaling(3.0),
    ),
    "layer norm, no gate, qk norm, no grouping": replace(
        LLAMA, norm="layer", gated=False, activation="gelu", ffn_bias=True, qk_norm=True, num_kv_heads=6
    ),
    "grok-like": replace(
        LLAMA,
        post_norms=True,
        attention_softcap=1.5,
        attention_scale=0.7,
        embedding_multiplier=3.5,
        output_multiplier=0.6,
    ),
}
"""Between them, every option of the decoder."""


def random_params(config: ModelConfig, seed: int = 0, scale: float = 0.3) -> dict[str, np.ndarray]:
    """{path: float32 array}: larger than an initialisation would be, so that every parameter shows in the logits."""
    rng = np.random.default_rng(seed)
    shapes = flatten(Decoder(config, make_mesh(1, 1), "float32", "float32").abstract_params())
    return {
        path: (rng.normal(size=a.shape) * scale + (1.0 if path.endswith("scale") else 0.0)).astype(np.float32)
        for path, a in shapes.items()
    }


def flatten(tree: dict) -> dict:
    """{path: leaf} of a Haiku tree."""
    return {f"{module}/{name}": leaf for module, leaves in tree.items() for name, leaf in leaves.items()}


def place(params: dict[str, np.ndarray], mesh: jax.sharding.Mesh) -> Params:
    """A Haiku tree on a mesh."""
    tree: Params = {}
    for path, value in params.items():
        module, _, name = path.rpartition("/")
        tree.setdefault(module, {})[name] = jax.device_put(value, param_sharding(path, value.shape, mesh))
    return tree


def make_engine(
    config: ModelConfig, params: dict[str, np.ndarray], engine_config: EngineConfig, mesh: tuple[int, int] = (1, 1)
) -> Engine:
    """An engine in float32, not warmed up."""
    decoder = Decoder(config, make_mesh(*mesh), "float32", "float32")
    return build_engine(decoder, place(params, decoder.mesh), engine_config)


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[RequestOutput]]:
    """Queues all requests and steps until the engine is idle: the outputs of each."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        for output in engine.step():
            outputs[output.request_id].append(output)
    engine.scheduler.check_integrity()
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    """All tokens of one request."""
    return [token for output in outputs for token in output.token_ids]


def reason_of(outputs: list[RequestOutput]) -> FinishReason | None:
    """Why a request ended."""
    return outputs[-1].finish_reason
