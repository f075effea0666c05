"""The mapping of a checkpoint's tensors to the engine's parameters as a table: one row for each parameter."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from engine.weights.families import WeightMap
from engine.weights.plan import ParamPlan
from engine.weights.tensors import TensorSource

HEADER = ("SOURCE", "TARGET", "SHAPE", "TRANSPOSE", "DTYPE", "OPTIONAL")


@dataclass(frozen=True)
class TableRow:
    """One parameter, in words."""

    source: str
    """Name of its tensor; with "{expert}" where there is one for each expert."""
    target: str
    """Path of the parameter."""
    shape: str
    """Of the parameter."""
    transpose: str
    """"yes" where the tensor's last two axes are swapped, "no", or the name of another rearrangement."""
    dtype: str
    """Of the tensor, and behind an arrow that of the parameter where it is another; "absent" for zeros."""
    optional: str
    """"yes" where a checkpoint need not have it in every layer, or "no"."""


def mapping_table(source: TensorSource, weights: WeightMap, plans: Iterable[ParamPlan]) -> list[TableRow]:
    """A row for each parameter, in the order of the plans."""
    return [
        TableRow(
            source=plan.source_name,
            target=plan.path,
            shape=" x ".join(map(str, plan.target.shape)),
            transpose=_rearrangement(plan, weights),
            dtype=_dtypes(source, plan),
            optional="yes" if plan.optional else "no",
        )
        for plan in plans
    ]


def describe_table(rows: Sequence[TableRow]) -> str:
    """The table in aligned columns under a header."""
    cells = [HEADER, *(astuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADER))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def _rearrangement(plan: ParamPlan, weights: WeightMap) -> str:
    transform = weights.transforms.get(plan.rule)
    if transform is not None:
        return transform.__name__.strip("_")
    return "yes" if plan.transposed else "no"


def _dtypes(source: TensorSource, plan: ParamPlan) -> str:
    infos = [source.tensors[piece] for piece in plan.pieces]
    there = "/".join(sorted({str(info.dtype) for info in infos})) if infos else "absent"
    here = str(np.dtype(plan.target.dtype))
    if plan.scale is not None:
        here += f" with scales of {np.dtype(plan.scale.dtype)}"
    if any(info.scales is not None for info in infos):
        there += " with scales"
    return there if there == here else f"{there} -> {here}"
