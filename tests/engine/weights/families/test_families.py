"""The config mapping of each Hugging Face family, through the function that serves them all."""

import json
import re
from pathlib import Path

import pytest

from engine.config import Llama3RopeScaling, ModelConfig, MoEConfig
from engine.errors import CheckpointError
from engine.weights.families import FAMILIES
from engine.weights.families.hf_config import read_hf_config
from engine.weights.families.pi05 import PI05, pi05_config
from engine.weights.load import load_config
from engine.weights.plan import rule_of

from ..checkpoints import LLAMA_CONFIG, reference_dir
from ..trees import abstract_tree

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "pi05": "Pi05ForCausalLM",
}

NEEDED: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "norm_topk_prob": True},
    "pi05": {"sliding_window": None, "layer_norm_eps": 1e-5, "attention_bias": "first layer only"},
}


@pytest.fixture
def parse(tmp_path):
    def run(family: str, without: str | None = None, **changes: object) -> ModelConfig:
        values = LLAMA_CONFIG | {"model_type": family, "architectures": [ARCHITECTURES[family]]}
        values |= NEEDED.get(family, {}) | changes
        values.pop(without, None)
        (tmp_path / "config.json").write_text(json.dumps(values))
        return load_config(tmp_path)

    return run


def common(family: str) -> dict[str, object]:
    return {
        "family": family,
        "vocab_size": 320,
        "hidden_size": 64,
        "num_layers": 3,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_size": 8,
        "intermediate_size": 176,
        "max_position_embeddings": 256,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }


REFERENCE_CONFIGS = {
    "llama-tiny": common("llama"),
    "llama3-rope-tiny": common("llama")
    | {
        "max_position_embeddings": 2048,
        "rope_theta": 500000.0,
        "rope_scaling": Llama3RopeScaling(8.0, 1.0, 4.0, 128),
        "tie_embeddings": True,
    },
    "mistral-window-tiny": common("mistral") | {"layer_windows": (12, 12, 12)},
    "qwen2-tiny": common("qwen2") | {"rope_theta": 1e6, "qkv_bias": True, "tie_embeddings": True},
    "qwen3-tiny": common("qwen3") | {"rope_theta": 1e6, "qk_norm": True, "tie_embeddings": True, "head_size": 24},
    "mixtral-tiny": common("mixtral") | {"rope_theta": 1e6, "moe": MoEConfig(8, 2, 176, True)},
    "qwen3-moe-tiny": common("qwen3_moe")
    | {"rope_theta": 1e6, "qk_norm": True, "head_size": 24, "intermediate_size": 40, "moe": MoEConfig(16, 4, 40, True)},
    "pi05-tiny": common("pi05")
    | {
        "num_heads": 4,
        "head_size": 16,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
        "activation": "gelu",
        "norm": "layer",
        "gated": False,
        "qkv_bias": True,
        "attention_output_bias": True,
        "ffn_bias": True,
        "layer_windows": (16, 16, 16),
    },
}


@pytest.mark.parametrize("name", REFERENCE_CONFIGS)
def test_the_reference_configs_are_read_as_they_are_meant(name):
    assert load_config(reference_dir(f"hf/{name}")) == ModelConfig(**REFERENCE_CONFIGS[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_give_the_same_config(parse, family):
    old = parse(family, torch_dtype="bfloat16", rope_theta=70000.0)
    new = parse(family, "rope_theta", dtype="bfloat16", rope_parameters={"rope_type": "default", "rope_theta": 70000.0})
    assert old == new
    assert old.rope_theta == 70000.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", [None, "absent"])
def test_head_size_follows_from_the_width_where_it_is_not_given(parse, family, head_dim):
    without = "head_dim" if head_dim == "absent" else None
    assert parse(family, without, hidden_size=40, head_dim=None).head_size == 10
    with pytest.raises(CheckpointError, match="head_dim is missing, and hidden_size 10 is no multiple"):
        parse(family, without, head_dim=None)


def test_a_biased_llama_has_biases_everywhere(parse):
    config = parse("llama", attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.attention_output_bias, config.ffn_bias) == (True, True, True)
    config = parse("llama")
    assert (config.qkv_bias, config.attention_output_bias, config.ffn_bias) == (False, False, False)


def test_an_old_llama_without_theta_or_kv_heads(parse):
    assert parse("llama", "rope_theta").rope_theta == 10000.0
    assert parse("llama", "num_key_value_heads").num_kv_heads == 4


def test_the_experts_of_both_spellings(parse):
    assert parse("mixtral", "num_local_experts", num_experts=6).moe == MoEConfig(6, 2, 16, True)
    assert parse("qwen3_moe", "num_experts", num_local_experts=6).moe == MoEConfig(6, 2, 14, True)
    assert parse("qwen3_moe", "norm_topk_prob").moe == MoEConfig(8, 2, 14, False)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (None, 9, 9)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, (None, None, None)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (9, None, 9),
        ),
    ],
)
def test_qwen_windows(parse, family, changes, expected):
    assert parse(family, **changes).layer_windows == expected


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is .*not supported"),
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        (
            "llama",
            {"architectures": ["LlamaForSequenceClassification"]},
            r"architectures .*expected \['LlamaForCausalLM'\]",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ("llama", {"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ("mistral", {"attention_bias": True}, "attention_bias is True: not supported for model_type 'mistral'"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen2", {"attention_bias": True}, "attention_bias is True"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, "sliding_window is missing"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9}, "max_window_layers is None"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is not true"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types .*expected 3 entries"),
        ("qwen3", {"layer_types": ["full_attention"] * 2}, "layer_types .*expected 3 entries"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias is True"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ("pi05", {"attention_bias": None}, "attention_bias is None: expected true, false, 'first layer only' or a li"),
        ("pi05", {"attention_bias": "last"}, r"attention_bias is 'last': .* list of layer numbers in \[0, 3\)"),
        ("pi05", {"attention_bias": [3]}, r"attention_bias is \[3\]"),
        ("pi05", {"attention_bias": [True]}, r"attention_bias is \[True\]"),
        ("pi05", {"layer_norm_eps": None}, "layer_norm_eps is missing"),
        ("qwen3_moe", {"num_experts": None}, "num_experts or num_local_experts is missing"),
    ],
)
def test_options_that_cannot_be_served_are_refused_by_name(parse, family, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        parse(family, **changes)
    assert "config.json" in str(caught.value) or "ConfigError" in repr(caught.value.__cause__)


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        (True, {0, 1, 2}),
        (False, set()),
        ("first layer only", {0}),
        ([], set()),
        ([2, 0], {0, 2}),
        ([0, 1, 2], {0, 1, 2}),
    ],
)
def test_the_layers_of_pi05_that_have_attention_biases(parse, tmp_path, value, layers):
    config = parse("pi05", attention_bias=value)
    assert config.qkv_bias == config.attention_output_bias == bool(layers)
    optional = PI05.weights_for(read_hf_config(tmp_path)).optional
    names = {f"layer_{{layer}}/attention/{projection}/b" for projection in "qkvo"}
    assert optional == ({} if layers == {0, 1, 2} else dict.fromkeys(names, layers))


def test_the_full_size_pi05_has_what_the_design_states():
    config = pi05_config(num_layers=2)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size) == (1024, 16, 16, 64)
    assert (config.norm, config.norm_eps, config.activation, config.gated) == ("layer", 1e-5, "gelu", False)
    assert (config.layer_windows, config.max_position_embeddings) == ((256, 256), 512)
    rules = {rule_of(f"{path}/{name}") for path, leaves in abstract_tree(config).items() for name in leaves}
    assert rules <= PI05.weights.names.keys()


def test_mistral_must_say_whether_it_has_a_window(parse):
    with pytest.raises(CheckpointError, match="sliding_window is missing"):
        parse("mistral", "sliding_window")
    assert parse("mistral", sliding_window=7).layer_windows == (7, 7, 7)


def test_an_unknown_family_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"model_type": "gpt2"}))
    with pytest.raises(CheckpointError, match="model_type is 'gpt2'") as caught:
        load_config(tmp_path)
    assert all(family in str(caught.value) for family in FAMILIES)


def test_every_family_has_a_module_and_one_place_for_each_name():
    for family in FAMILIES.values():
        names = list(family.weights.names.values())
        assert len(set(names)) == len(names)
        assert not any(re.search(r"\{(?!layer\}|expert\})", name) for name in names)
    folder = Path(__file__).parents[4] / "engine" / "weights" / "families"
    assert all((folder / f"{name}.py").exists() for name in FAMILIES)
