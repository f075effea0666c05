"""How the parameters of a model lie on a mesh: `python -m engine.sharding_table [MODEL] [--mesh DATAxMODEL]`.

Without MODEL it prints the rules themselves. With one (a source as `engine.weights.source` reads it) it prints every
parameter with the rule that it matches, its shape, and the shape on each device; no weights are read and no accelerator
is used. Exits 2 where the model cannot be read or does not fit the mesh.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from engine.config import ExpertSharding
from engine.devices import provide_cpu_devices
from engine.errors import EngineError
from engine.models.decoder import Decoder
from engine.sharding import make_mesh, param_rule, param_sharding, rules
from engine.verify import parse_mesh
from engine.weights.load import load_config
from engine.weights.source import resolve_source

Table = list[tuple[str, ...]]


def rule_table(expert_sharding: ExpertSharding) -> Table:
    """(pattern, partition) of every rule."""
    return [("parameter", "partition"), *((pattern, str(spec)) for pattern, spec in rules(expert_sharding))]


def parameter_table(decoder: Decoder) -> Table:
    """(path, rule, partition, shape, shape on each device) of every parameter."""
    table: Table = [("parameter", "rule", "partition", "shape", "on each device")]
    for module, arrays in decoder.abstract_params().items():
        for name, array in arrays.items():
            path = f"{module}/{name}"
            sharding = param_sharding(path, array.shape, decoder.mesh, decoder.expert_sharding)
            pattern, _ = param_rule(path, decoder.expert_sharding)
            local = sharding.shard_shape(array.shape)
            table.append((path, pattern, str(sharding.spec), str(list(array.shape)), str(list(local))))
    return table


def render(table: Table) -> str:
    """The table in aligned columns."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.sharding_table", description=__doc__)
    parser.add_argument("model", nargs="?", help="a model source; without it the rules are printed")
    parser.add_argument("--mesh", metavar="DATAxMODEL", type=parse_mesh, default=(1, 1))
    parser.add_argument("--expert-sharding", choices=get_args(ExpertSharding), default="width")
    options = parser.parse_args(argv)
    if options.model is None:
        sys.stdout.write(render(rule_table(options.expert_sharding)))
        return 0
    try:
        data, model = options.mesh
        provide_cpu_devices(data * model)
        config = load_config(resolve_source(options.model))
        decoder = Decoder(config, make_mesh(data, model), "float32", "float32", options.expert_sharding)
        sys.stdout.write(render(parameter_table(decoder)))
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
