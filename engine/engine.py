"""The engine: the scheduler (host side) and the runner (device side) joined. Token ids in, token ids out."""

from engine.config import EngineConfig
from engine.models.decoder import Decoder, Params
from engine.request import EngineStats, Request, RequestOutput
from engine.runner import Progress, StepHandle, StepRunner
from engine.scheduler import Scheduler, SchedulerLimits


class Engine:
    """Continuous batching of requests over one runner; see `engine.request.EngineProtocol`.

    The host works one step ahead: it schedules and dispatches step n + 1 while the device runs step n, then takes in
    the result of step n. All calls come from one thread.
    """

    def __init__(self, runner: StepRunner, config: EngineConfig) -> None:
        sizes, model = runner.sizes, runner.decoder.config
        self.runner = runner
        self.scheduler = Scheduler(
            SchedulerLimits(
                num_slots=sizes.num_slots,
                num_shards=sizes.num_shards,
                num_pages=sizes.num_pages,
                page_size=sizes.page_size,
                max_model_len=sizes.max_model_len,
                vocab_size=model.vocab_size,
                eos_token_ids=frozenset(model.eos_token_ids),
                prefill_buckets=sizes.prefill_buckets,
                decode_row_buckets=sizes.decode_row_buckets,
                max_queue_len=config.max_queue_len,
                max_queued_tokens=config.max_queued_tokens,
            )
        )
        self._under_way: StepHandle | None = None
        self._num_steps = self._num_prompt_tokens = self._num_padding_tokens = self._num_generated_tokens = 0

    @property
    def max_model_len(self) -> int:
        """The context length in tokens."""
        return self.runner.sizes.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""
        return self.runner.decoder.config.vocab_size

    def add_request(self, request: Request) -> None:
        """Queues a request; see `Scheduler.add` for what is raised."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its slot and pages at once. An unknown id is no error."""
        self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._under_way is not None or self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Dispatches the next step and takes in the one before."""
        plan = self.scheduler.schedule()
        before, self._under_way = self._under_way, None
        if plan is not None:
            self._under_way = self.runner.dispatch(plan)
            self._num_steps += 1
            self._num_prompt_tokens += sum(row.num_tokens for row in plan.prefill)
            self._num_padding_tokens += plan.num_padding_tokens
        outputs = [] if before is None else self.scheduler.update(before.plan, self.runner.fetch(before))
        self._num_generated_tokens += sum(len(output.token_ids) for output in outputs)
        return self.scheduler.take_aborted() + outputs

    def warm_up(self, progress: Progress | None = None) -> dict[str, float]:
        """Compiles and runs every program; returns the seconds each took. After it nothing compiles."""
        return self.runner.warm_up(progress)

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_slots=self.runner.sizes.num_slots,
            cache_usage=self.scheduler.cache_usage(),
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_padding_tokens=self._num_padding_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_compilations_since_warm_up=self.runner.num_compilations_since_warm_up,
        )


def build_engine(decoder: Decoder, params: Params, config: EngineConfig) -> Engine:
    """An engine over these weights. Raises `ConfigError` where the config does not fit the model or the mesh."""
    return Engine(StepRunner(decoder, params, config), config)
