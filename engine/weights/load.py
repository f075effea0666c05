"""A checkpoint's config and weights: strict in both directions, streamed onto the mesh a few tensors at a time."""

from contextlib import closing
from pathlib import Path

from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.weights.families import FAMILIES, GGUF_FAMILIES, Family, GGUFFamily, WeightMap
from engine.weights.families.hf_config import HFConfig, read_hf_config
from engine.weights.gguf_file import GGUFSource
from engine.weights.grok1 import GROK1_WEIGHTS, Grok1Source, is_grok1, read_grok1_config
from engine.weights.hf import HFSource
from engine.weights.layout import SAFETENSORS, TORCH
from engine.weights.loader import NUM_THREADS, Loader, Params, Progress, ShardingFor
from engine.weights.native import NativeSource, is_native, native_weights, read_native_config
from engine.weights.plan import AbstractParams, plan_params
from engine.weights.quantize import QuantizationReport
from engine.weights.tensors import TensorSource
from engine.weights.torch_file import SUFFIXES, TorchSource


def load_config(path: Path) -> ModelConfig:
    """The model of a Hugging Face directory (or a state dict in one), a GGUF file, a Grok-1 release or a converted
    model.

    Raises `CheckpointError` naming the file and the key that is missing, contradictory or not supported.
    """
    try:
        if is_grok1(path):
            return read_grok1_config(path)
        if is_native(path):
            return read_native_config(path)
        if _is_hf(path):
            config = read_hf_config(folder_of(path))
            return _hf_family(config).parse_config(config)
        with closing(GGUFSource(path)) as source:
            return _gguf_family(source).parse_config(source)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def load_params(
    path: Path,
    config: ModelConfig,
    abstract: AbstractParams,
    sharding_for: ShardingFor,
    progress: Progress | None = None,
    report: QuantizationReport | None = None,
    num_threads: int = NUM_THREADS,
) -> Params:
    """Loads every parameter of `abstract` (shapes, dtypes) onto the devices that `sharding_for` says.

    Where `abstract` has an int8 "w" and a "scale" [..., O, G] beside it, the file's quantised tensor is taken as it
    is (its groups of inputs may be G or a divisor of G), or a floating-point one is quantised, and its error given to
    `report`. A quantised tensor for a floating-point parameter is multiplied out.

    The host holds `num_threads` source tensors at a time, the devices the parameters and as many such tensors.

    Raises `CheckpointError` where a tensor is missing, left over, of another shape, not floating-point, or holds a
    value that is not finite or that the declared dtype cannot hold.
    """
    source, weights = open_source(path, config)
    with closing(source):
        plans = plan_params(source, weights, config, abstract)
        return Loader(source, weights, config, sharding_for).load(plans, progress, report, num_threads)


def open_source(path: Path, config: ModelConfig) -> tuple[TensorSource, WeightMap]:
    """A checkpoint opened for reading (the caller closes it), and where its tensors go. Raises `CheckpointError`."""
    if is_grok1(path):
        return Grok1Source(path, config), GROK1_WEIGHTS
    if is_native(path):
        native = NativeSource(path)
        return native, native_weights(native)
    if _is_hf(path):
        if config.family not in FAMILIES:
            raise CheckpointError(f"{path}: family {config.family!r}; expected one of {sorted(FAMILIES)}")
        weights = FAMILIES[config.family].weights_for(read_hf_config(folder_of(path)))
        return _open_state_dict(path), weights
    gguf = GGUFSource(path)
    try:
        return gguf, _gguf_family(gguf).weights
    except CheckpointError:
        gguf.close()
        raise


def folder_of(path: Path) -> Path:
    """The folder with a checkpoint's config and tokenizer."""
    return path if path.is_dir() else path.parent


def _is_hf(path: Path) -> bool:
    return path.is_dir() or path.suffix in (SAFETENSORS.suffix, *SUFFIXES)


def _open_state_dict(path: Path) -> TensorSource:
    """Of a folder that holds both formats, the safetensors: they are checked more closely, and read faster."""
    if not path.is_dir():
        return HFSource(path) if path.suffix == SAFETENSORS.suffix else TorchSource(path)
    if SAFETENSORS.is_in(path):
        return HFSource(path)
    if TORCH.is_in(path):
        return TorchSource(path)
    names = (SAFETENSORS.single, SAFETENSORS.index, TORCH.single, TORCH.index)
    raise CheckpointError(f"{path}: holds no weights; expected one of {', '.join(names)}")


def _hf_family(config: HFConfig) -> Family:
    model_type = config.values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise config.refuse("model_type", f"expected one of {sorted(FAMILIES)}")
    architectures = config.values.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        raise config.refuse("architectures", f"expected [{family.architecture!r}]")
    if config.has("auto_map"):
        raise config.refuse("auto_map", "models with code of their own are not supported")
    return family


def _gguf_family(source: GGUFSource) -> GGUFFamily:
    architecture = source.header.metadata.get("general.architecture")
    family = GGUF_FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise CheckpointError(
            f"{source.path}: general.architecture is {architecture!r}; expected one of {sorted(GGUF_FAMILIES)}"
        )
    return family
