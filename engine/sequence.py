"""Requests on their way through the scheduler, and the sizes that it keeps to. Host only."""

from dataclasses import dataclass, field

from engine.page_pool import PageKey
from engine.request import Request


@dataclass(frozen=True)
class SchedulerLimits:
    """The sizes that the scheduler keeps to."""

    num_slots: int
    """Slots of all data shards together."""
    num_shards: int
    """Data shards; slots and pages are divided evenly among them."""
    num_pages: int
    """Pages of all shards together."""
    page_size: int
    """Positions of a page."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    prefill_buckets: tuple[int, ...]
    """Padded chunk lengths, ascending: multiples of the page size, or, but for the largest, divisors of it."""
    decode_row_buckets: tuple[int, ...]
    """Padded row counts of one shard, ascending; the last is at least the slots of a shard."""
    max_queue_len: int
    max_queued_tokens: int | None
    step_token_budget: int | None = None
    """Tokens of a step with decode rows, at most, times the prompts that wait (but one chunk of the smallest bucket
    always fits); None: no limit."""
    decode_chunk: int = 1
    """Tokens that one step samples of a request at most."""
    decode_chunk_min: int = 1
    """The same while something waits to be computed; chunks grow from it."""
    prefix_caching: bool = True
    exact: bool = False
    """Every position is computed by the program, and at the place in it, that would have computed it for the request
    alone: chunks begin at multiples of the bucket, and generated tokens are computed again one row each."""
    window: int | None = None
    """The largest window of the model's layers; None where a layer sees everything."""
    priority_ageing_s: float = 30.0
    """Seconds of waiting that count as much as one step of priority."""

    @property
    def num_rows(self) -> int:
        """Decode rows of one shard at most."""
        return self.decode_row_buckets[-1]

    @property
    def slots_per_shard(self) -> int:
        return self.num_slots // self.num_shards

    @property
    def pages_per_shard(self) -> int:
        return self.num_pages // self.num_shards

    def num_pages_of(self, num_tokens: int) -> int:
        """Pages of that many positions."""
        return -(-num_tokens // self.page_size)


@dataclass(eq=False)
class Sequence:
    """A request on its way: what is known of it and how far it has been computed."""

    sequence_id: int
    request: Request
    token_ids: list[int]
    """Prompt and generated tokens that the host has seen."""
    rank: tuple[float, int] = (0.0, 0)
    """Priority with ageing, then arrival: the lower goes first, and the highest is preempted first."""
    num_prefill_tokens: int = 0
    """How many of the tokens are computed in chunks; the others one row each."""
    num_computed_tokens: int = 0
    """Positions computed, or being computed by steps under way."""
    num_pending: int = 0
    """Tokens sampled by steps under way."""
    num_drafted: int = 0
    """Guesses being verified by a step under way; until it is known what came of them nothing else is planned."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it first started; None before."""
    charged: bool = False
    """Whether its prompt has been counted to its tenant: once, however often it is preempted."""
    slot: int | None = None
    started: bool = False
    """Whether cached pages have been looked for since it got its slot."""
    pages: list[int | None] = field(default_factory=list)
    """In order; None where the window has left a page."""
    num_left: int = 0
    """Leading pages that the window has left."""
    page_ids: tuple[int, ...] = ()
    """`pages` as plain data for plans."""
    page_keys: list[PageKey] = field(default_factory=list)
    """Of the full pages of known tokens, as far as they have been needed. They outlive a preemption."""
    num_registered: int = 0
    """Leading pages that have been offered to the prefix cache."""

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, seen or not."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens, seen or not."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def wants_prefill(self) -> bool:
        """Whether tokens are left that are computed in chunks."""
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def wants_decode(self) -> bool:
        """Whether the prompt is computed and another token may be wanted."""
        return (
            self.started
            and not self.wants_prefill
            and not self.num_drafted
            and self.num_computed_tokens < self.num_tokens
            and self.num_generated < self.request.params.max_tokens
        )
