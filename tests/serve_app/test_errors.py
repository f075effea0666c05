"""From exceptions to HTTP."""

import pickle

import pytest

from engine import errors
from serve_app.errors import ERROR_TABLE, InvalidApiKeyError, ModelNotFoundError, answer_for

RAISED_WHILE_SERVING = [
    (errors.InvalidRequestError("m", "p"), 400),
    (errors.UnsupportedParameterError("m", "p"), 400),
    (errors.PromptTooLongError("m", "p"), 400),
    (ModelNotFoundError("m", "model"), 404),
    (InvalidApiKeyError("m"), 401),
    (errors.OverloadedError("m", 7), 503),
    (errors.QueueFullError("m", 7), 503),
    (errors.DrainingError("m", 7), 503),
    (errors.DeadlineExceededError("m"), 504),
    (errors.RequestCancelledError("m"), 499),
    (errors.EngineDeadError("m"), 503),
]


@pytest.mark.parametrize(("error", "status"), RAISED_WHILE_SERVING, ids=lambda value: type(value).__name__)
def test_each_error_has_its_status_and_shows_its_message(error: errors.EngineError, status: int) -> None:
    answer = answer_for(error, "id")
    assert answer.status == status
    body = answer.body["error"]
    assert isinstance(body, dict)
    assert (body["message"], body["param"]) == ("m", getattr(error, "param", None))


@pytest.mark.parametrize("error", [errors.ConfigError("secret"), errors.CheckpointError("secret"), KeyError("secret")])
def test_anything_else_shows_the_request_id_only(error: Exception) -> None:
    answer = answer_for(error, "id-1")
    assert answer.status == 500
    assert "id-1" in str(answer.body)
    assert "secret" not in str(answer.body)


def test_overload_says_when_to_come_back() -> None:
    assert answer_for(errors.QueueFullError("m", 7), "id").headers == {"retry-after": "7"}


def test_a_refused_key_says_how_to_send_one() -> None:
    answer = answer_for(InvalidApiKeyError("m"), "id")
    assert answer.headers == {"www-authenticate": "Bearer"}
    assert answer.body["error"] == {
        "message": "m",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


def test_no_row_of_the_table_is_hidden_by_an_earlier_one() -> None:
    for position, (error_class, _) in enumerate(ERROR_TABLE):
        assert not any(issubclass(error_class, earlier) for earlier, _ in ERROR_TABLE[:position])


@pytest.mark.parametrize("error", [error for error, _ in RAISED_WHILE_SERVING], ids=lambda value: type(value).__name__)
def test_errors_survive_the_way_from_replica_to_ingress(error: errors.EngineError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert answer_for(there, "id") == answer_for(error, "id")
