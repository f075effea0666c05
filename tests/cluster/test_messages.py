"""Messages hold plans and nothing that runs."""

import pickle
from dataclasses import fields
from subprocess import Popen

import pytest

from cluster.messages import Answer, Hello, Logits, Message, Step, Stop, classes_of, decode, encode
from engine.plan import PageCopy, PlanRow, StepPlan
from engine.request import FinishReason, RequestOutput, SamplingParams

ROW = PlanRow(3, 1, 16, 2, (5, 7), (4, 2), SamplingParams(temperature=0.5, logprobs=2, stop_token_ids=(9,)), True, 11)
PLAN = StepPlan((ROW,), 16, (ROW, ROW), 2, (PageCopy(0, 3, 4),))


@pytest.mark.parametrize(
    "message",
    [
        Step(7, PLAN),
        Logits(8, (ROW,), 1, 16),
        Hello(1, 2, "a host", {"jax": "1"}),
        Answer(7, b"digest", 0),
        Stop(None),
        Stop("why"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_comes_out_as_it_went_in(message):
    assert decode(encode(message)) == message


def test_every_class_that_a_plan_is_made_of_is_known():
    assert {StepPlan, PlanRow, PageCopy, SamplingParams} <= classes_of(StepPlan)
    assert classes_of(RequestOutput) >= {RequestOutput, FinishReason}
    assert all(field.type for field in fields(StepPlan))


class Payload:
    """Would start a program when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Popen, (["touch", str(self.marker)],)


@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: Step(1, p), lambda p: {"a": p}], ids=["bare", "step", "dict"])
def test_any_other_class_is_refused_and_not_called(tmp_path, wrap):
    marker = tmp_path / "ran"
    data = pickle.dumps(wrap(Payload(marker)))
    with pytest.raises(ConnectionError, match=r"subprocess\.Popen is no part of a message"):
        decode(data)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "cluster.messages.encode", "engine.plan.dataclass"])
def test_a_function_is_refused(name):
    module, _, function = name.rpartition(".")
    with pytest.raises(ConnectionError, match="is no part of a message"):
        decode(f"c{module}\n{function}\n.".encode())


@pytest.mark.parametrize("data", [b"", b"nonsense", encode(Stop(None))[:-3]])
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(ConnectionError, match="cannot be read"):
        decode(data)


def test_a_plan_alone_is_no_message():
    with pytest.raises(ConnectionError, match="a StepPlan is no message"):
        decode(pickle.dumps(PLAN))
    assert StepPlan not in Message.__args__
