"""What passes between ingress and replica: one call per HTTP request, one batch of deltas per engine step."""

from dataclasses import dataclass

from engine.request import AdaptiveWindow, FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class GenerationCall:
    """All prompts of one HTTP request, each with all its choices. They are admitted together or not at all."""

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    """Token ids, at least one prompt."""
    params: SamplingParams
    """`max_tokens` is the limit for every choice; `seed` is that of each prompt's first one."""
    choices_per_prompt: int = 1
    """Answers to each prompt."""
    num_candidates: int = 1
    """Candidates for each answer, each one engine request; the one of the lowest perplexity is the answer. Above 1,
    there is one choice per prompt."""
    stop: tuple[str, ...] = ()
    """Stop strings; the text ends before the first one found."""
    continues_text: bool = False
    """The answer goes on from the prompt's text (completions): a space in front of its first word is part of it."""
    deadline_s: float | None = None
    """Seconds from the arrival at the replica until every prompt must be finished; None: no limit."""
    clip_max_tokens: bool = False
    """The client named no limit: lower `max_tokens` to what the context leaves instead of refusing."""
    priority: int = 0
    """See `engine.request.Request`, as for all below."""
    tenant: str | None = None
    cache_salt: str | None = None
    window: int | None = None
    adaptive_window: AdaptiveWindow | None = None
    decode_chunk: int | None = None
    chunk_overlap: int = 0

    @property
    def num_choices(self) -> int:
        """Answers in all. Choice i of prompt p has the index p * choices_per_prompt + i."""
        return len(self.prompts) * self.choices_per_prompt

    @property
    def requests_per_prompt(self) -> int:
        """Engine requests of each prompt, for its choices or its candidates. Request i of prompt p has the index
        p * requests_per_prompt + i."""
        return self.choices_per_prompt * self.num_candidates

    @property
    def num_requests(self) -> int:
        """Engine requests in all."""
        return len(self.prompts) * self.requests_per_prompt

    def request_seed(self, index: int) -> int:
        """Request i of a prompt is drawn as a call with the seed `params.seed` + i would draw its only one."""
        return (self.params.seed + index % self.requests_per_prompt) % 2**64


@dataclass(frozen=True, slots=True)
class Delta:
    """What one or more steps added to one choice of a call."""

    index: int
    """Which choice of the call."""
    text: str
    """New text. It may lag behind the tokens: a character or a possible stop string may be incomplete."""
    num_tokens: int
    """Tokens generated for this choice so far (not only in this delta)."""
    token_ids: tuple[int, ...] = ()
    """The new tokens; only where the call asked for log-probabilities (or for candidates, until one is chosen)."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`."""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


def join(earlier: Delta, later: Delta) -> Delta:
    """Two deltas of one choice as one."""
    return Delta(
        index=later.index,
        text=earlier.text + later.text,
        num_tokens=later.num_tokens,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        finish_reason=later.finish_reason,
        num_cached_tokens=max(earlier.num_cached_tokens, later.num_cached_tokens),
    )
