"""Runs step plans on a mesh: weights, cache and compiled programs. Never sees a request or a policy."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from engine import kv_cache
from engine.config import EngineConfig
from engine.devices import put
from engine.forward import DeviceState, MixedOutput, StepOutput, compile_copies, compile_mixed, compile_step
from engine.kv_cache import BLOCK_LEN, CacheShape
from engine.models.decoder import Decoder, Params
from engine.models.moe import experts_apart
from engine.packing import BatchShape, PackedCopies, pack_rows, row_indices
from engine.plan import PageCopy, PlanRow, SampledToken, StepPlan, StepResult
from engine.request import TokenLogprobs
from engine.sharding import DATA
from engine.sizes import RunnerSizes, derive_sizes


class CompilationCounter:
    """Counts the programs that are made in this process, whoever asked for them: compiled, or read from the cache."""

    _MADE = "/jax/core/compile/backend_compile_duration"
    _FOUND = "/jax/compilation_cache/cache_hits"

    def __init__(self) -> None:
        self.count = 0
        """Programs made."""
        self.num_cache_hits = 0
        """Of those, the ones that the compilation cache had."""
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def num_cache_misses(self) -> int:
        """Programs that had to be compiled."""
        return self.count - self.num_cache_hits

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == self._MADE:
            with self._lock:
                self.count += 1

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == self._FOUND:
            with self._lock:
                self.num_cache_hits += 1


@dataclass(frozen=True)
class StepHandle:
    """A dispatched step: its plan and the arrays that will hold its result."""

    plan: StepPlan
    prefill: StepOutput | None
    decode: StepOutput | None


@dataclass(frozen=True)
class _Program:
    """What tells one program from another."""

    rows_per_shard: int
    num_tokens: int
    max_blocks: int | None
    max_steps: int = 1
    all_logits: bool = False
    """Returns the logits of every token, too: for verification."""
    chunk: int = 0
    """Tokens of a prompt chunk computed beside the decode rows."""

    @property
    def name(self) -> str:
        context = "" if self.max_blocks is None else f" context {self.max_blocks * BLOCK_LEN}"
        if self.chunk:
            return f"prefill {self.chunk} tokens beside {self.rows_per_shard} rows{context}"
        if self.num_tokens > 1:
            return f"prefill {self.num_tokens} tokens{context}"
        return f"decode {self.rows_per_shard} rows{context}"


Progress = Callable[[int, int, str], None]
"""Called with (done, total, what comes next)."""


class Runner(Protocol):
    """What an engine asks of whatever runs its steps: a `StepRunner`, or one on several hosts."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def params(self) -> Params: ...
    @property
    def sizes(self) -> RunnerSizes: ...
    @property
    def compilations(self) -> CompilationCounter: ...
    @property
    def compiled_programs(self) -> dict[str, jax.stages.Compiled]: ...
    @property
    def num_compilations_since_warm_up(self) -> int: ...
    def memory_bytes(self) -> dict[str, int]: ...
    def warm_up(self, progress: Progress | None = None) -> dict[str, float]: ...
    def dispatch(self, plan: StepPlan) -> StepHandle: ...
    def fetch(self, handle: StepHandle) -> StepResult: ...
    def execute(self, plan: StepPlan) -> StepResult: ...
    def all_logits(self, rows: Sequence[PlanRow], rows_per_shard: int, num_tokens: int) -> np.ndarray: ...


_NUM_COMPILERS = 2
"""Threads that compile at start-up: one traces (Python, one core) while the other's program is compiled."""


class StepRunner:
    """Executes step plans with one set of weights. All calls come from one thread."""

    def __init__(self, decoder: Decoder, params: Params, config: EngineConfig) -> None:
        self.decoder = decoder
        self.params = experts_apart(params, decoder.mesh)
        self.sizes = derive_sizes(config, decoder)
        self.compilations = CompilationCounter()
        self._compiled_at_warm_up: int | None = None
        self._programs: dict[_Program, jax.stages.Compiled] = {}
        mesh = decoder.mesh
        self.cache_shape = CacheShape.of(
            decoder.config,
            mesh,
            self.sizes.num_pages,
            self.sizes.page_size,
            config.cache_dtype or config.activation_dtype,
        )
        make_tokens = jax.jit(
            lambda: jnp.zeros(self.sizes.num_slots, jnp.int32), out_shardings=NamedSharding(mesh, P())
        )
        self._state = DeviceState(kv_cache.allocate(self.cache_shape, mesh), make_tokens())
        self._abstract_state = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), self._state
        )
        self._copy = compile_copies(mesh, self._state, self._put_copies(()))
        # Steps that hold collectives hang on the CPU backend when several are under way.
        self._wait_each_step = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"

    @property
    def num_compilations_since_warm_up(self) -> int:
        """Stays 0 once the engine serves."""
        return 0 if self._compiled_at_warm_up is None else self.compilations.count - self._compiled_at_warm_up

    def warm_up(self, progress: Progress | None = None) -> dict[str, float]:
        """Compiles every program, ahead on threads, and runs it once; returns the seconds each was waited for."""
        programs = self._all_programs()
        seconds = {}
        self._state = self._copy(self._state, self._put_copies(()))
        compilers = ThreadPoolExecutor(_NUM_COMPILERS, "compile")
        try:
            compiled = [compilers.submit(self._compiled, program) for program in programs]
            for done, program in enumerate(programs):
                if progress is not None:
                    progress(done, len(programs), program.name)
                start = time.perf_counter()
                compiled[done].result()
                output = self._run_pair((), (), program) if program.chunk else self._run((), program)[0]
                jax.block_until_ready(output)
                seconds[program.name] = time.perf_counter() - start
        finally:
            compilers.shutdown(cancel_futures=True)
        if progress is not None:
            progress(len(programs), len(programs), "")
        self._compiled_at_warm_up = self.compilations.count
        return seconds

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Starts a step; `fetch` waits for it."""
        if plan.copies:
            self._state = self._copy(self._state, self._put_copies(plan.copies))
        if self._is_mixed(plan):
            mixed = self._run_mixed(plan)
            return StepHandle(plan, mixed.prefill, mixed.decode)
        prefill = decode = None
        if plan.prefill:
            prefill, _ = self._run(plan.prefill, self._program(plan.prefill, 1, plan.prefill_bucket))
        if plan.decode:
            decode, _ = self._run(plan.decode, self._program(plan.decode, plan.decode_rows, 1))
        return StepHandle(plan, prefill, decode)

    def fetch(self, handle: StepHandle) -> StepResult:
        """The result of a dispatched step. Only tokens and log-probabilities asked for come to the host."""
        plan = handle.plan
        return StepResult(
            self._collect(plan.prefill, 1, plan.prefill_bucket, handle.prefill),
            self._collect(plan.decode, plan.decode_rows, 1, handle.decode),
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a step to its end."""
        return self.fetch(self.dispatch(plan))

    def all_logits(self, rows: Sequence[PlanRow], rows_per_shard: int, num_tokens: int) -> np.ndarray:
        """Runs one step and returns the logits of every token, float32 [V, B, T]; rows as `row_indices` places them.

        For verification only: it compiles programs of its own, each at its first use.
        """
        program = replace(self._program(rows, rows_per_shard, num_tokens), max_steps=1, all_logits=True)
        _, logits = self._run(rows, program)
        return np.asarray(logits).reshape(-1, self.sizes.num_shards * rows_per_shard, num_tokens)

    @property
    def compiled_programs(self) -> dict[str, jax.stages.Compiled]:
        """The serving programs compiled so far, by name: for inspection."""
        return {p.name: compiled for p, compiled in self._programs.items() if not p.all_logits}

    def memory_bytes(self) -> dict[str, int]:
        """Bytes over all devices of weights and cache."""
        return {"weights": sum(a.nbytes for a in jax.tree.leaves(self.params)), "cache": self.cache_shape.num_bytes}

    def _all_programs(self) -> list[_Program]:
        s = self.sizes
        prefill = [_Program(1, b, c) for b in s.prefill_buckets for c in s.context_blocks]
        # A context shorter than the bucket itself never meets it.
        prefill = [
            p for p in prefill if p.max_blocks is None or p.max_blocks * BLOCK_LEN >= min(p.num_tokens, s.max_model_len)
        ]
        rows = [(r, c) for r in s.decode_row_buckets for c in s.context_blocks]
        mixed = [_Program(r, 1, c, chunk=s.mixed_chunk) for r, c in rows if s.mixed_chunk]
        return prefill + [_Program(r, 1, c, s.decode_chunk) for r, c in rows] + mixed

    def _program(self, rows: Sequence[PlanRow], rows_per_shard: int, num_tokens: int) -> _Program:
        needed = -(-max(row.position + row.num_tokens + row.max_new_tokens - 1 for row in rows) // BLOCK_LEN)
        needed = max(needed, -(-min(num_tokens, self.sizes.max_model_len) // BLOCK_LEN))
        blocks = next(b for b in self.sizes.context_blocks if b is None or b >= needed)
        return _Program(rows_per_shard, num_tokens, blocks, self.sizes.decode_chunk if num_tokens == 1 else 1)

    def _is_mixed(self, plan: StepPlan) -> bool:
        """Whether one pass over the weights does for both kinds."""
        one_each = all(row.max_new_tokens == 1 for row in plan.decode)
        return bool(plan.prefill and plan.decode and one_each and plan.prefill_bucket == self.sizes.mixed_chunk)

    def _run_mixed(self, plan: StepPlan) -> MixedOutput:
        program = self._program(plan.prefill + plan.decode, plan.decode_rows, 1)
        program = replace(program, max_steps=1, chunk=plan.prefill_bucket)
        return self._run_pair(plan.prefill, plan.decode, program)

    def _run_pair(self, chunks: Sequence[PlanRow], rows: Sequence[PlanRow], program: _Program) -> MixedOutput:
        compiled = self._compiled(program)
        packed = self._put(chunks, self._shape(1, program.chunk)), self._put(rows, self._shape_of(program))
        self._state, output, _ = compiled(self.params, self._state, packed)
        self._wait(output)
        return output

    def _compiled(self, program: _Program) -> jax.stages.Compiled:
        if program not in self._programs:
            self._programs[program] = self._compile(program)
        return self._programs[program]

    def _compile(self, program: _Program) -> jax.stages.Compiled:
        what, shape = (self.decoder, self.params, self._abstract_state), self._shape_of(program)
        if program.chunk:
            return compile_mixed(*what, (self._shape(1, program.chunk), shape), program.max_blocks)
        return compile_step(*what, shape, program.max_blocks, program.max_steps, program.all_logits)

    def _wait(self, *results: object) -> None:
        if self._wait_each_step:
            jax.block_until_ready((self._state, results))

    def _shape_of(self, program: _Program) -> BatchShape:
        return self._shape(program.rows_per_shard, program.num_tokens)

    def _shape(self, rows_per_shard: int, num_tokens: int) -> BatchShape:
        s = self.sizes
        return BatchShape(s.num_shards, rows_per_shard, num_tokens, s.num_columns, s.num_slots)

    def _run(self, rows: Sequence[PlanRow], program: _Program) -> tuple[StepOutput, jax.Array | None]:
        compiled = self._compiled(program)
        packed = self._put(rows, self._shape_of(program))
        self._state, output, logits = compiled(self.params, self._state, packed)
        self._wait(output, logits)
        return output, logits

    def _put_copies(self, copies: Sequence[PageCopy]) -> PackedCopies:
        """Sources and targets as `kv_cache.copy_pages` takes them; a step copies at most one page for each slot."""
        s = self.sizes
        per_shard = s.num_slots // s.num_shards
        sources = np.zeros((s.num_shards, per_shard), np.int32)
        targets = np.full((s.num_shards, per_shard), s.num_pages, np.int32)
        used = [0] * s.num_shards
        for copy in copies:
            sources[copy.shard, used[copy.shard]] = copy.source
            targets[copy.shard, used[copy.shard]] = copy.target
            used[copy.shard] += 1
        packed = PackedCopies(sources.reshape(-1), targets.reshape(-1))
        return put(packed, NamedSharding(self.decoder.mesh, P(DATA)))

    def _put(self, rows: Sequence[PlanRow], shape: BatchShape) -> tuple:
        return put(pack_rows(rows, shape), NamedSharding(self.decoder.mesh, P(DATA, None)))

    def _collect(
        self, rows: Sequence[PlanRow], rows_per_shard: int, num_tokens: int, output: StepOutput | None
    ) -> tuple[tuple[SampledToken, ...], ...]:
        if output is None or not any(row.samples for row in rows):
            return ((),) * len(rows)
        counts, tokens = np.asarray(output.num_sampled).tolist(), np.asarray(output.sampled.tokens)
        wants = any(row.params.logprobs is not None and row.samples for row in rows)
        reports = jax.device_get(output.sampled[1:]) if wants else None
        collected: list[tuple[SampledToken, ...]] = []
        for index, row in zip(row_indices(rows, self._shape(rows_per_shard, num_tokens)), rows, strict=True):
            count, num_top = counts[index] if row.samples else 0, row.params.logprobs
            collected.append(
                tuple(
                    SampledToken(token, _report(reports, step, index, num_top))
                    for step, token in enumerate(tokens[:count, index].tolist())
                )
            )
        return tuple(collected)


def _report(arrays: Sequence[np.ndarray] | None, step: int, index: int, count: int | None) -> TokenLogprobs | None:
    if arrays is None or count is None:
        return None
    chosen, ids, values = (a[step, index] for a in arrays)
    return TokenLogprobs(float(chosen), tuple(zip(ids[:count].tolist(), values[:count].tolist(), strict=True)))
