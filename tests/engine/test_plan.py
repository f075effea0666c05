import io
import pickle

from engine.plan import PlanRow, SampledToken, StepPlan, StepResult
from engine.request import SamplingParams, TokenLogprobs


def make_plan() -> StepPlan:
    params = SamplingParams(max_tokens=5, temperature=0.7, top_k=3, seed=2**63 + 1, stop_token_ids=(4, 9), logprobs=2)
    prefill = PlanRow(11, 2, 32, 7, (5, 6, 7, 8, 9, 10, 11), (3, 1, 4), params, True)
    decode = PlanRow(7, 0, 19, 1, (), (0, 2), SamplingParams(), True)
    return StepPlan((prefill,), 16, (decode,), 4)


def test_a_plan_survives_pickling():
    plan = make_plan()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_result_survives_pickling():
    result = StepResult(
        ((),), ((SampledToken(3, TokenLogprobs(-0.5, ((3, -0.5), (1, -1.25)))), SampledToken(4, None)),)
    )
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_plan_is_plain_data():
    modules = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module, name):
            modules.add(module)
            return super().find_class(module, name)

    Recorder(io.BytesIO(pickle.dumps(make_plan()))).load()
    assert modules <= {"engine.plan", "engine.request", "copyreg", "builtins"}


def test_padding_is_the_bucket_less_the_tokens_of_each_chunk():
    assert make_plan().num_padding_tokens == 9
    assert StepPlan((), 0, make_plan().decode, 4).num_padding_tokens == 0
