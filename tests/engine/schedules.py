"""What tests of the scheduler share."""

from engine.request import SamplingParams

from .fake_device import Loop

FOREVER = SamplingParams(max_tokens=20, ignore_eos=True)


def rows_of(loop: Loop, sequence_id: int) -> list[tuple[str, int, int]]:
    """(kind, first position, positions) of everything computed for a sequence."""
    found = []
    for plan in loop.device.plans:
        for kind, rows in [("prefill", plan.prefill), ("decode", plan.decode)]:
            found += [(kind, row.position, row.num_tokens) for row in rows if row.sequence_id == sequence_id]
    return found


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


PREFIX = (1, 2, 3, 5, 8, 0, 12, 7, 6, 11, 9, 10)
"""Three pages."""
