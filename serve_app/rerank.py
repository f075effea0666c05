"""Several candidates for one answer, of which the likeliest is given."""

import math
from dataclasses import replace

from serve_app.generation import Delta, GenerationCall, join


class Candidates:
    """The candidates of one call, by their index among its engine requests, and what was scored of them."""

    def __init__(self, call: GenerationCall) -> None:
        self._prompts = call.prompts
        self._num_candidates = call.num_candidates
        self._wants_logprobs = call.params.logprobs is not None
        self._whole: dict[int, Delta] = {}
        self._perplexities: dict[int, float] = {}

    def add(self, delta: Delta) -> None:
        """Takes what a candidate got; `delta.index` is the candidate's."""
        earlier = self._whole.get(delta.index)
        self._whole[delta.index] = delta if earlier is None else join(earlier, delta)

    def to_score(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(prompt, answer) of a candidate that has ended: all its tokens, the one that ended it included."""
        return self._prompts[index // self._num_candidates], self._whole[index].token_ids

    def choose(self, index: int, perplexity: float) -> Delta | None:
        """Takes the score of a candidate. The answer to its prompt, once all candidates of that have theirs.

        Of equal ones the first is the answer; one whose score is no number is never preferred.
        """
        self._perplexities[index] = math.inf if math.isnan(perplexity) else perplexity
        prompt = index // self._num_candidates
        rivals = range(prompt * self._num_candidates, (prompt + 1) * self._num_candidates)
        if any(rival not in self._perplexities for rival in rivals):
            return None
        best = self._whole[min(rivals, key=self._perplexities.__getitem__)]
        return replace(
            best,
            index=prompt,
            # As with OpenAI's best_of, all that was generated counts.
            num_tokens=sum(self._whole[rival].num_tokens for rival in rivals),
            # As with several choices: the others may have found what the first one computed.
            num_cached_tokens=min(self._whole[rival].num_cached_tokens for rival in rivals),
            token_ids=best.token_ids if self._wants_logprobs else (),
        )
