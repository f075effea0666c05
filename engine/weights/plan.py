"""Which tensor of a checkpoint goes where in the parameter tree, checked in both directions before anything is read."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.weights.families.family import WeightMap
from engine.weights.tensors import TensorSource

AbstractParams = Mapping[str, Mapping[str, jax.ShapeDtypeStruct]]
"""{module: {param: shape and dtype}}; the flat path of a parameter is "module/param"."""

FLOAT_DTYPES = frozenset(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))

MAX_NAMES_IN_MESSAGE = 5


@dataclass(frozen=True)
class ParamPlan:
    """One parameter and the tensors it is made of."""

    path: str
    rule: str
    """The path with "{layer}" for the layer's number, as weight maps name it."""
    target: jax.ShapeDtypeStruct
    scale: jax.ShapeDtypeStruct | None
    """Where the target is int8: its scales, [..., O, G], under the name "scale" in the same module."""
    pieces: tuple[str, ...]
    """Names of the source tensors; none: the parameter is zero."""
    per_expert: bool
    """Each piece is one index of the leading axis; otherwise the only one is the whole parameter."""

    transposed: bool
    """The source tensors have the last two axes swapped."""
    source_name: str
    """What the tensor is called, or would be where it may be absent and is; with "{expert}" where there is one for
    each."""
    optional: bool
    """A checkpoint need not have it in every layer."""

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape that each source tensor must have."""
        shape = tuple(self.target.shape[1:] if self.per_expert else self.target.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape


def plan_params(
    source: TensorSource, weights: WeightMap, config: ModelConfig, abstract: AbstractParams
) -> tuple[ParamPlan, ...]:
    """The source tensors of every parameter.

    Raises `CheckpointError` where a parameter has no tensor, a tensor has no parameter, or a shape or dtype is not the
    declared one.
    """
    plans = tuple(
        _plan_param(
            f"{module}/{name}", target, params.get("scale") if is_quantized(name, params) else None, source, weights
        )
        for module, params in abstract.items()
        for name, target in params.items()
        if name != "scale" or not is_quantized("w", params)
    )
    _check_missing(source, plans)
    for plan in plans:
        for piece in plan.pieces:
            _check_tensor(source, plan, piece)
    _check_left_over(source, weights, config, set(tensor_names(source, plans)))
    return plans


def tensor_names(source: TensorSource, plans: Iterable[ParamPlan]) -> Iterator[str]:
    """Every source tensor of the plans, scales included."""
    for plan in plans:
        for piece in plan.pieces:
            yield piece
            scales = source.tensors[piece].scales
            if scales is not None:
                yield scales


def rule_of(path: str) -> str:
    """A parameter's path with "{layer}" for the layer's number."""
    return re.sub(r"^layer_\d+/", "layer_{layer}/", path)


def is_quantized(name: str, params: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
    """Whether a module's parameter `name` is int8 with scales beside it."""
    return name == "w" and "w" in params and np.dtype(params["w"].dtype) == np.int8 and "scale" in params


def _plan_param(
    path: str,
    target: jax.ShapeDtypeStruct,
    scale: jax.ShapeDtypeStruct | None,
    source: TensorSource,
    weights: WeightMap,
) -> ParamPlan:
    if scale is None and np.dtype(target.dtype) not in FLOAT_DTYPES:
        raise CheckpointError(f"{path} is declared as {np.dtype(target.dtype)} without a scale beside it")
    rule = rule_of(path)
    pattern = weights.names.get(rule)
    if pattern is None:
        raise CheckpointError(
            f"{source.path}: the model has a parameter {path!r}, for which its family knows no tensor"
        )
    match = re.match(r"layer_(\d+)/", path)
    layer = None if match is None else int(match.group(1))
    per_expert = "{expert}" in pattern
    pieces: tuple[str, ...] = ()
    if per_expert:
        pieces = tuple(pattern.format(layer=layer, expert=expert) for expert in range(target.shape[0]))
    elif layer is None or layer in weights.optional.get(rule, {layer}):
        pieces = (pattern.format(layer=layer),)
    return ParamPlan(
        path=path,
        rule=rule,
        target=target,
        scale=scale,
        pieces=pieces,
        per_expert=per_expert,
        transposed=rule in weights.transposed,
        source_name=pattern.replace("{layer}", str(layer)),
        optional=rule in weights.optional,
    )


def _check_missing(source: TensorSource, plans: tuple[ParamPlan, ...]) -> None:
    missing = [f"{piece!r} (for {plan.path})" for plan in plans for piece in plan.pieces if piece not in source.tensors]
    if missing:
        raise CheckpointError(
            f"{source.path}: {_listed(missing)} missing from the checkpoint, though its config needs them"
        )


def _check_tensor(source: TensorSource, plan: ParamPlan, piece: str) -> None:
    info = source.tensors[piece]
    if info.shape != plan.piece_shape:
        raise CheckpointError(
            f"{info.file}: tensor {piece!r} has shape {list(info.shape)}; the config asks for {list(plan.piece_shape)} "
            f"({plan.path})"
        )
    if info.scales is None and info.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{info.file}: tensor {piece!r} has dtype {info.dtype}; expected one of "
            f"{sorted(str(dtype) for dtype in FLOAT_DTYPES)} ({plan.path})"
        )
    if info.scales is not None:
        _check_scales(source, plan, piece, info.scales)
    if plan.scale is not None and plan.target.shape[-1] % plan.scale.shape[-1]:
        raise CheckpointError(
            f"{plan.path}: {plan.target.shape[-1]} inputs cannot be divided into {plan.scale.shape[-1]} groups of one "
            "scale each"
        )


def _check_scales(source: TensorSource, plan: ParamPlan, piece: str, name: str) -> None:
    values, info = source.tensors[piece], source.tensors[name]
    axis = -2 if plan.transposed else -1
    num_inputs, num_groups = values.shape[axis], info.shape[axis] if len(info.shape) == len(values.shape) else 0
    expected = list(values.shape)
    expected[axis] = num_groups
    if values.dtype != np.int8 or info.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{info.file}: {piece!r} has dtype {values.dtype} with scales of {info.dtype}; expected int8 with floats"
        )
    if list(info.shape) != expected or num_groups < 1 or num_inputs % num_groups:
        raise CheckpointError(
            f"{info.file}: {piece!r} has shape {list(values.shape)} with scales of {list(info.shape)}; expected the "
            f"same shape with a divisor of {num_inputs} in place of {num_inputs}"
        )
    if plan.scale is not None and plan.scale.shape[-1] % num_groups:
        raise CheckpointError(
            f"{info.file}: {piece!r} has {num_groups} groups of inputs with a scale each; {plan.path} cannot have "
            f"{plan.scale.shape[-1]}, only a multiple of that"
        )


def _check_left_over(source: TensorSource, weights: WeightMap, config: ModelConfig, used: set[str]) -> None:
    checks = [(_pattern_regex(pattern), check) for pattern, check in weights.extras.items()]
    left_over = []
    for name in source.tensors:
        if name in used:
            continue
        check = next((check for regex, check in checks if regex.fullmatch(name)), None)
        if check is None:
            left_over.append(_with_place(name, weights))
        else:
            check(source, name, config)
    if left_over:
        raise CheckpointError(
            f"{source.path}: {_listed(sorted(left_over))} left over: the checkpoint holds them, the model of its "
            "config has no such parameters"
        )


def _with_place(name: str, weights: WeightMap) -> str:
    """A tensor's name with the parameter that it would be, had the model such a one."""
    for path, pattern in weights.names.items():
        match = _pattern_regex(pattern).fullmatch(name)
        if match is not None:
            return f"{name!r} (for {path.format_map(match.groupdict())})"
    return repr(name)


def _pattern_regex(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern)
    for axis in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{axis}}}"), rf"(?P<{axis}>\d+)", 1)
    return re.compile(escaped)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_IN_MESSAGE])
    more = len(names) - MAX_NAMES_IN_MESSAGE
    return f"{len(names)} tensors ({shown}, and {more} more)" if more > 0 else f"tensor(s) {shown}"
