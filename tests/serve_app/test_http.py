"""Bodies that do not come to their end."""

import json
import logging

import pytest

from tests.serve_app.harness import Connection, run, running

PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_does_not_come_in_time_is_a_408_and_its_connection_is_closed(path: str) -> None:
    async def test() -> None:
        async with running(body_timeout_s=0.01) as h:
            connection = Connection(h.api.app, path, b'{"model": ', is_whole=False)
            start, body = await connection.sent.get(), await connection.sent.get()
            assert start["status"] == 408
            assert dict(start["headers"])[b"connection"] == b"close"
            assert json.loads(body["body"])["error"] == {
                "message": "the body did not come within 0.01 s, the limit of this server",
                "type": "invalid_request_error",
                "param": None,
                "code": "request_timeout",
            }
            await connection.task

    run(test)


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_during_its_upload_is_counted_as_gone(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with running() as h:
            connection = Connection(h.api.app, path, b'{"model": ', is_whole=False)
            connection.hang_up()
            await connection.task
            assert connection.sent.empty()
            metrics = h.api.metrics.render({}).decode()
            assert "llm_client_disconnects_total 1.0" in metrics
            assert f'llm_http_requests_total{{path="{path}",status="499"}} 1.0' in metrics

    run(test)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
