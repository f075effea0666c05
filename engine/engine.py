"""The engine: the scheduler (host side) and the runner (device side) joined. Token ids in, token ids out."""

import time
from collections.abc import Sequence
from dataclasses import replace

import jax

from engine.config import EngineConfig, ModelConfig
from engine.drafting import Drafter, Drafts, ModelDrafter, NgramDrafter, Paces
from engine.errors import ConfigError
from engine.models.decoder import Decoder, Params
from engine.plan import DraftRequest, StepPlan
from engine.request import EngineStats, Request, RequestOutput
from engine.runner import Progress, Runner, StepHandle, StepRunner
from engine.scheduler import Scheduler, SchedulerLimits
from engine.scoring import Scorer


class Engine:
    """Continuous batching of requests over one runner; see `engine.request.EngineProtocol`.

    The host works one step ahead: it schedules and dispatches step n + 1 while the device runs step n, then takes in
    the result of step n. All calls come from one thread.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        drafter: Drafter | None = None,
        scorer: Scorer | None = None,
    ) -> None:
        """`drafter` guesses tokens where the config asks for guesses; None: by the request's own tokens. `scorer`
        serves `score`."""
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
                step_token_budget=sizes.step_token_budget,
                decode_chunk=config.decode_chunk,
                decode_chunk_min=config.decode_chunk_min,
                prefix_caching=config.prefix_caching,
                exact=config.batch_invariant,
                window=_largest_window(model),
                priority_ageing_s=config.priority_ageing_s,
            )
        )
        self._num_draft_tokens = config.num_draft_tokens
        self._drafter = drafter or NgramDrafter(config.ngram_min_len, config.ngram_max_len)
        self._paces = Paces(config.num_draft_tokens)
        self._scorer = scorer
        self._under_way: StepHandle | None = None
        self._num_steps = self._num_prompt_tokens = self._num_padding_tokens = self._num_generated_tokens = 0
        self._num_decode_rows = 0

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
        """Dispatches the next step and takes in the one before; with guesses or chunks in the other order."""
        outputs: list[RequestOutput] = []
        drafts, requests = None, list[DraftRequest]()
        if self._num_draft_tokens and self.scheduler.may_draft() and self._paces.wants_turn():
            # Guesses follow tokens that the host has seen.
            outputs = self._take_in()
            requests = self.scheduler.draft_requests(self._num_draft_tokens)
            drafts = self._guess(requests)
        elif self.scheduler.next_chunk() > 1:
            # A chunk for a request that has just ended would be long, and for nothing.
            outputs = self._take_in()
        plan = self.scheduler.schedule(drafts)
        if drafts is not None:
            # There may be no room for some of them.
            self._paces.note(requests, {} if plan is None else plan.num_guesses)
        dispatched = None if plan is None else self._dispatch(plan)
        outputs += self._take_in()
        self._under_way = dispatched
        return self.scheduler.take_aborted() + outputs

    def _dispatch(self, plan: StepPlan) -> StepHandle:
        handle = self.runner.dispatch(plan)
        if self._num_draft_tokens:
            self._drafter.observe(plan)
        self._num_steps += 1
        self._num_decode_rows += len(plan.decode)
        self._num_prompt_tokens += sum(row.num_tokens for row in plan.prefill)
        self._num_padding_tokens += plan.num_padding_tokens
        return handle

    def _take_in(self) -> list[RequestOutput]:
        """What the step under way added, if there is one."""
        if self._under_way is None:
            return []
        handle, self._under_way = self._under_way, None
        outputs = self.scheduler.update(handle.plan, self.runner.fetch(handle))
        self._num_generated_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def _guess(self, requests: Sequence[DraftRequest]) -> Drafts:
        limits = self._paces.limits(requests)
        return self._drafter.propose([replace(r, num_tokens=limits[r.sequence_id]) for r in requests])

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Perplexity of the answer's tokens after the prompt, under the scorer's model.

        Raises `ConfigError` without a scorer, `InvalidRequestError` where the tokens are too many or none.
        """
        if self._scorer is None:
            raise ConfigError("this engine has no scorer; expected one to be given when it was built")
        return self._scorer.perplexity(prompt, answer)

    def warm_up(self, progress: Progress | None = None) -> dict[str, float]:
        """Compiles and runs every program; returns the seconds each took. After it nothing compiles."""
        # The runner is last: from then on it counts compilations, whoever asks for them.
        if self._num_draft_tokens:
            self._drafter.warm_up()
        scoring_s = self._warm_up_scorer()
        return self.runner.warm_up(progress) | scoring_s

    def _warm_up_scorer(self) -> dict[str, float]:
        if self._scorer is None:
            return {}
        start = time.perf_counter()
        self._scorer.warm_up()
        return {"score": time.perf_counter() - start}

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_slots=self.runner.sizes.num_slots,
            cache_usage=self.scheduler.cache_usage(),
            num_steps=self._num_steps,
            num_decode_rows=self._num_decode_rows,
            num_prompt_tokens=self._num_prompt_tokens,
            num_padding_tokens=self._num_padding_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_cached_tokens=self.scheduler.num_cached_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_draft_tokens=self.scheduler.num_draft_tokens,
            num_accepted_tokens=self.scheduler.num_accepted_tokens,
            page_utilization=self.scheduler.page_utilization(),
            num_compilations_since_warm_up=self.runner.num_compilations_since_warm_up,
            num_cache_misses=self.runner.compilations.num_cache_misses,
        )


def _largest_window(model: ModelConfig) -> int | None:
    windows = model.layer_windows or (None,)
    return None if None in windows else max(w for w in windows if w is not None)


def build_engine(
    decoder: Decoder,
    params: Params,
    config: EngineConfig,
    draft: tuple[Decoder, Params] | None = None,
    judge: tuple[Decoder, Params] | None = None,
) -> Engine:
    """An engine over these weights; `draft`: a smaller model with the same vocabulary, which guesses tokens; `judge`:
    the model that `Engine.score` asks, which may be this one.

    Raises `ConfigError` where the config does not fit the model or the mesh, or another model not the model.
    """
    runner = StepRunner(decoder, params, config)
    drafter = None if draft is None else _model_drafter(*draft, runner, config)
    scorer = None if judge is None else _scorer(*judge, runner, config)
    return Engine(runner, config, drafter, scorer)


def _scorer(decoder: Decoder, params: Params, runner: Runner, config: EngineConfig) -> Scorer:
    _check_vocabulary("scoring", decoder, runner)
    if any(device.process_index != jax.process_index() for device in decoder.mesh.devices.flat):
        raise ConfigError("a scoring model is given, and the mesh spans several processes; scores need a mesh of one")
    return Scorer(decoder, params, runner.sizes.max_model_len, config.activation_dtype)


def _model_drafter(decoder: Decoder, params: Params, runner: Runner, config: EngineConfig) -> ModelDrafter:
    sizes = runner.sizes
    if not config.num_draft_tokens:
        raise ConfigError("a draft model is given and num_draft_tokens is 0; expected at least 1")
    _check_vocabulary("draft", decoder, runner)
    # The same pages of the same sizes, whatever the draft model was trained for.
    alike = replace(config, max_model_len=sizes.max_model_len, num_pages=sizes.num_pages)
    draft = StepRunner(decoder, params, alike)
    return ModelDrafter(draft, draft.sizes.decode_row_buckets, sizes.num_shards, sizes.num_slots // sizes.num_shards)


def _check_vocabulary(kind: str, decoder: Decoder, runner: Runner) -> None:
    vocab_size = runner.decoder.config.vocab_size
    if decoder.config.vocab_size != vocab_size:
        raise ConfigError(
            f"the {kind} model has {decoder.config.vocab_size} tokens and the model {vocab_size}; they must have the "
            "same vocabulary"
        )
