"""Step plans and their results: plain data, the only thing that passes between the host side and the device side.

A plan holds ids, counts and sampling parameters; it can be pickled and sent to another process, which then runs exactly
the same step.
"""

from collections import Counter
from dataclasses import dataclass

from engine.request import AdaptiveWindow, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class PlanRow:
    """What one step computes for one request: `num_tokens` positions from `position` on."""

    sequence_id: int
    """Number of the request in its engine; slots are used again, this is not."""
    slot: int
    """Slot of the request; it decides the data shard, too."""
    position: int
    """First position computed."""
    num_tokens: int
    """Positions computed; 1 in a decode row."""
    token_ids: tuple[int, ...]
    """The tokens at those positions. Empty in a decode row whose token was sampled into the slot by the step before and
    has not been seen by the host yet."""
    page_ids: tuple[int, ...]
    """The slot's pages in order, covering at least `position + num_tokens` positions."""
    params: SamplingParams
    samples: bool
    """Whether the token after these is sampled (false for all but the last chunk of a prompt)."""
    window: int | None = None
    """The request's sliding window in positions; None: the layers' own."""
    adaptive_window: AdaptiveWindow | None = None
    """How that window grows with the context."""
    max_new_tokens: int = 1
    """Tokens that a decode row samples at most, one after the other on the device; it ends early at a stop token."""


@dataclass(frozen=True)
class PageCopy:
    """A page whose content is needed where it can be written to."""

    shard: int
    source: int
    target: int


@dataclass(frozen=True)
class StepPlan:
    """One step: at most one prefill chunk for each data shard, and decode rows."""

    prefill: tuple[PlanRow, ...]
    prefill_bucket: int
    """Padded length of each chunk; 0 without prefill."""
    decode: tuple[PlanRow, ...]
    decode_rows: int
    """Padded number of rows of each data shard; 0 without decode. A request may have several rows, of consecutive
    positions: each sees the keys and values of those before it."""
    copies: tuple[PageCopy, ...] = ()
    """Pages to copy before anything is computed."""

    @property
    def num_guesses(self) -> dict[int, int]:
        """Guessed tokens that the step verifies, by sequence: its rows that sample, but for the first."""
        num_sampling = Counter(row.sequence_id for row in self.decode if row.samples)
        return {sequence_id: count - 1 for sequence_id, count in num_sampling.items()}

    @property
    def num_padding_tokens(self) -> int:
        """Prefill positions that are computed for nothing."""
        return sum(self.prefill_bucket - row.num_tokens for row in self.prefill)


@dataclass(frozen=True)
class SampledToken:
    """The outcome of one row that samples."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None where the request asked for none."""


@dataclass(frozen=True)
class StepResult:
    """Outcomes parallel to the rows of the plan: the tokens sampled after each, none for rows that do not sample."""

    prefill: tuple[tuple[SampledToken, ...], ...]
    decode: tuple[tuple[SampledToken, ...], ...]


@dataclass(frozen=True)
class DraftRequest:
    """A request for which tokens may be guessed ahead."""

    sequence_id: int
    slot: int
    token_ids: list[int]
    """All its tokens; not to be changed."""
    num_prompt_tokens: int
    page_ids: tuple[int, ...]
    """Pages of all its tokens and of `num_tokens` more."""
    params: SamplingParams
    window: int | None
    adaptive_window: AdaptiveWindow | None
    num_tokens: int
    """The most tokens worth guessing."""
