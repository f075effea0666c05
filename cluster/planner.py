"""A plan: what a model needs on a mesh, by arithmetic and by its compiler."""

import math
import sys
from dataclasses import asdict, dataclass

import jax

from cluster.abstract_programs import (
    ProgramMemory,
    argument_bytes,
    compile_programs,
    cut,
    extrapolate,
    program_shapes,
)
from cluster.budget import (
    Memory,
    abstract_params,
    cache_bytes_per_position,
    list_params,
    weight_bytes,
    workspace_bytes,
)
from cluster.mesh import MeshConfig, build_mesh
from cluster.roofline import Accelerator, StepCosts
from engine.config import EngineConfig, ModelConfig
from engine.forward import AbstractParams
from engine.models.decoder import Decoder
from engine.sizes import derive_sizes


@dataclass(frozen=True)
class PlanInput:
    """What a plan is made for."""

    name: str
    model: ModelConfig
    mesh: tuple[int, int]
    """(data, model)."""
    device: Accelerator
    memory_fraction: float
    engine: EngineConfig
    """Its slots, context, chunk, page size and dtypes."""


@dataclass(frozen=True)
class CompiledPrograms:
    """What the compiler says."""

    layers: tuple[int, ...]
    """Depths that were compiled. Of two, the figures are on the line through both."""
    programs: dict[str, ProgramMemory]


@dataclass(frozen=True)
class Plan:
    """The answer. Bytes are of one device, times in seconds."""

    input: PlanInput
    num_params: int
    num_active_params: int
    """Of the layers and the output layer, those that one token is multiplied with."""
    memory: Memory
    costs: StepCosts
    expected_arguments: dict[str, int]
    """By arithmetic, what each program takes: weights, cache and batch."""
    compiled: CompiledPrograms | None

    @property
    def context_len(self) -> int:
        """Positions of a slot."""
        return self.input.engine.max_model_len or self.input.model.max_position_embeddings

    @property
    def fits(self) -> bool:
        """Whether the slots asked for fit."""
        return self.memory.fits(self.input.engine.num_slots, self.context_len)

    def decode_step_s(self, num_rows: int) -> float:
        """The least time of a decode step over full contexts."""
        return self.costs.decode_step_s(num_rows, self.context_len, self.input.device)

    def prefill_token_s(self) -> float:
        """The least time for a token of a prompt as long as the context."""
        return self.costs.prefill_token_s(self.context_len, self.input.engine.prefill_buckets[-1], self.input.device)

    def as_json(self) -> dict[str, object]:
        """All of it as plain data."""
        engine, memory = self.input.engine, self.memory
        return {
            "model": self.input.name,
            "num_layers": self.input.model.num_layers,
            "num_params": self.num_params,
            "num_active_params": self.num_active_params,
            "mesh": list(self.input.mesh),
            "device": asdict(self.input.device),
            "memory_fraction": self.input.memory_fraction,
            "weight_dtype": engine.weight_dtype,
            "activation_dtype": engine.activation_dtype,
            "cache_dtype": engine.cache_dtype or engine.activation_dtype,
            "expert_sharding": engine.expert_sharding,
            "num_slots": engine.num_slots,
            "context_len": self.context_len,
            "bytes_per_device": {
                "usable": memory.usable,
                "weights": memory.weights,
                "workspace_estimate": memory.workspace,
                "free_for_cache": memory.free,
                "cache_per_position": memory.cache_per_position,
                "cache_per_slot": memory.cache_per_slot(self.context_len),
            },
            "fits": self.fits,
            "num_slots_that_fit": memory.num_slots(self.context_len),
            "num_pages_that_fit": memory.num_pages(engine.page_size),
            "page_size": engine.page_size,
            "largest_context": memory.largest_context(engine.num_slots),
            "context_that_memory_holds": memory.context_that_memory_holds(engine.num_slots),
            "roofline_s": {
                "per_output_token_1_row": self.decode_step_s(1),
                "decode_step_all_slots": self.decode_step_s(engine.num_slots),
                "per_prefill_token": self.prefill_token_s(),
            },
            "compiled": None if self.compiled is None else self._compiled_as_json(self.compiled),
        }

    def _compiled_as_json(self, compiled: CompiledPrograms) -> dict[str, object]:
        programs = {}
        for name, memory in compiled.programs.items():
            expected = self.expected_arguments[name]
            programs[name] = asdict(memory) | {"peak": memory.peak, "arguments_by_arithmetic": expected}
        return {
            "layers_compiled": list(compiled.layers),
            "extrapolated": len(compiled.layers) > 1,
            "programs": programs,
        }


def make_plan(question: PlanInput, num_layers_compiled: int | None = None) -> Plan:
    """The plan; with `num_layers_compiled` layers of the model compiled (as many as there are: all of them; fewer:
    extrapolated from that depth and half of it), with None nothing is.

    Raises `ConfigError` where the mesh cannot split the model, or the engine's sizes fit neither.
    """
    decoder = _decoder(question, question.model)
    tree = abstract_params(decoder)
    params, engine = list_params(tree), question.engine
    sizes = derive_sizes(engine, decoder)
    cache_dtype = engine.cache_dtype or engine.activation_dtype
    memory = Memory(
        usable=math.floor(question.device.memory_bytes * question.memory_fraction),
        weights=weight_bytes(params),
        workspace=workspace_bytes(
            decoder, params, engine.activation_dtype, sizes.decode_row_buckets[-1], sizes.prefill_buckets[-1]
        ),
        cache_per_position=cache_bytes_per_position(decoder, cache_dtype),
        num_shards=question.mesh[0],
        max_positions=question.model.max_position_embeddings,
    )
    costs = StepCosts.of(decoder, params, cache_dtype)
    weights = sum(memory.weights.values())
    return Plan(
        question,
        num_params=sum(p.size for p in params if not p.is_quantization_scale),
        num_active_params=round(costs.layer_params + costs.head_params),
        memory=memory,
        costs=costs,
        expected_arguments={
            name: argument_bytes(shape, weights, memory.cache_per_position, engine.page_size)
            for name, shape in program_shapes(sizes).items()
        },
        compiled=None if num_layers_compiled is None else _compile(question, decoder, tree, num_layers_compiled),
    )


def _decoder(question: PlanInput, model: ModelConfig) -> Decoder:
    mesh = build_mesh(MeshConfig(local=question.mesh), jax.devices("cpu"))
    engine = question.engine
    return Decoder(model, mesh, engine.weight_dtype, engine.activation_dtype, engine.expert_sharding)


def _compile(question: PlanInput, decoder: Decoder, tree: AbstractParams, num_layers: int) -> CompiledPrograms:
    full = question.model.num_layers
    if not 1 < num_layers < full:
        return CompiledPrograms((full,), compile_programs(decoder, question.engine, tree, _say))
    depths = (num_layers // 2, num_layers)
    shallow, deep = (
        compile_programs(_decoder(question, cut(question.model, depth)), question.engine, None, _say)
        for depth in depths
    )
    return CompiledPrograms(depths, {name: extrapolate(shallow[name], deep[name], depths, full) for name in shallow})


def _say(line: str) -> None:
    sys.stderr.write(f"compiling {line}\n")
