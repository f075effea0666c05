"""Model families: how each one's config reads and what its weights are called. One module per family."""

from collections.abc import Mapping

from engine.weights.families.family import Family, WeightMap
from engine.weights.families.gguf_llama import GGUF_LLAMA, GGUFFamily
from engine.weights.families.llama import LLAMA
from engine.weights.families.mistral import MISTRAL
from engine.weights.families.mixtral import MIXTRAL
from engine.weights.families.pi05 import PI05
from engine.weights.families.qwen2 import QWEN2
from engine.weights.families.qwen3 import QWEN3
from engine.weights.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES", "GGUF_FAMILIES", "Family", "GGUFFamily", "WeightMap"]

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, PI05)
}
"""By the `model_type` of config.json."""

GGUF_FAMILIES: Mapping[str, GGUFFamily] = {family.architecture: family for family in (GGUF_LLAMA,)}
"""By the `general.architecture` of a GGUF file."""
