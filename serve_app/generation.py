"""What passes between ingress and replica: one call per HTTP request, one batch of deltas per engine step."""

from dataclasses import dataclass

from engine.request import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class GenerationCall:
    """All prompts of one HTTP request. They are admitted together or not at all."""

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    """Token ids, at least one prompt; each becomes one engine request."""
    params: SamplingParams
    """`max_tokens` is the limit for every prompt."""
    stop: tuple[str, ...] = ()
    """Stop strings; the text ends before the first one found."""
    continues_text: bool = False
    """The answer goes on from the prompt's text (completions): a space in front of its first word is part of it."""
    deadline_s: float | None = None
    """Seconds from the arrival at the replica until every prompt must be finished; None: no limit."""
    clip_max_tokens: bool = False
    """The client named no limit: lower `max_tokens` to what the context leaves instead of refusing."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one or more steps added to one prompt of a call."""

    index: int
    """Which prompt of the call."""
    text: str
    """New text. It may lag behind the tokens: a character or a possible stop string may be incomplete."""
    num_tokens: int
    """Tokens generated for this prompt so far (not only in this delta)."""
    token_ids: tuple[int, ...] = ()
    """The new tokens; only where the call asked for log-probabilities."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`."""
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
