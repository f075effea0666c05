"""Which tensor of a checkpoint goes where in the parameter tree, checked in both directions before anything is read."""

import re
from collections.abc import Mapping
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
    pieces: tuple[str, ...]
    """Names of the source tensors; none: the parameter is zero."""
    per_expert: bool
    """Each piece is one index of the leading axis; otherwise the only one is the whole parameter."""

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape that each source tensor must have."""
        return tuple(self.target.shape[1:] if self.per_expert else self.target.shape)


def plan_params(
    source: TensorSource, weights: WeightMap, config: ModelConfig, abstract: AbstractParams
) -> tuple[ParamPlan, ...]:
    """The source tensors of every parameter.

    Raises `CheckpointError` where a parameter has no tensor, a tensor has no parameter, or a shape or dtype is not the
    declared one.
    """
    plans = tuple(
        _plan_param(f"{module}/{name}", target, source, weights)
        for module, params in abstract.items()
        for name, target in params.items()
    )
    _check_missing(source, plans)
    for plan in plans:
        for piece in plan.pieces:
            _check_tensor(source, plan, piece)
    _check_left_over(source, weights, config, {piece for plan in plans for piece in plan.pieces})
    return plans


def _plan_param(path: str, target: jax.ShapeDtypeStruct, source: TensorSource, weights: WeightMap) -> ParamPlan:
    match = re.match(r"layer_(\d+)/", path)
    rule = path if match is None else f"layer_{{layer}}/{path[match.end() :]}"
    pattern = weights.names.get(rule)
    if pattern is None:
        raise CheckpointError(
            f"{source.path}: the model has a parameter {path!r}, for which its family knows no tensor"
        )
    layer = None if match is None else int(match.group(1))
    if layer and rule in weights.first_layer_only:
        return ParamPlan(path, rule, target, (), per_expert=False)
    if "{expert}" not in pattern:
        return ParamPlan(path, rule, target, (pattern.format(layer=layer),), per_expert=False)
    pieces = tuple(pattern.format(layer=layer, expert=expert) for expert in range(target.shape[0]))
    return ParamPlan(path, rule, target, pieces, per_expert=True)


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
    if info.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{info.file}: tensor {piece!r} has dtype {info.dtype}; expected one of "
            f"{sorted(str(dtype) for dtype in FLOAT_DTYPES)}"
        )


def _check_left_over(source: TensorSource, weights: WeightMap, config: ModelConfig, used: set[str]) -> None:
    checks = [(_pattern_regex(pattern), check) for pattern, check in weights.extras.items()]
    left_over = []
    for name in source.tensors:
        if name in used:
            continue
        check = next((check for regex, check in checks if regex.fullmatch(name)), None)
        if check is None:
            left_over.append(repr(name))
        else:
            check(source, name, config)
    if left_over:
        raise CheckpointError(
            f"{source.path}: {_listed(sorted(left_over))} left over: the checkpoint holds them, the model of its "
            "config has no such parameters"
        )


def _pattern_regex(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern)
    for axis in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{axis}}}"), r"\d+")
    return re.compile(escaped)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_IN_MESSAGE])
    more = len(names) - MAX_NAMES_IN_MESSAGE
    return f"{len(names)} tensors ({shown}, and {more} more)" if more > 0 else f"tensor(s) {shown}"
