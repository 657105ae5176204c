"""Whatever the server's own description allows, and what it does not, it never answers with a fault of its own.

SCHEMA_EXAMPLES=1000 python -m pytest tests/serve/test_schema.py -m slow      to each of 5 addresses: 5,000 requests
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.serve.conftest import Running

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "30"))


def test_the_description_is_openapi(server: Running) -> None:
    import httpx

    found = httpx.get(server.url + "/openapi.json").json()
    assert found["openapi"] == "3.1.0" and len(found["paths"]) == 13
    chat = found["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "logit_bias", "top_logprobs", "tinyforge", "stream"} <= set(chat)


@pytest.mark.slow
def test_no_request_is_a_fault_of_the_server(server: Running) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="needs the extra [dev]")
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    sent: dict[int, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()

        def check(case: Any) -> None:
            answer = case.call(timeout=30)
            sent[answer.status_code] = sent.get(answer.status_code, 0) + 1
            # 504 is the answer to a timeout of its own that is too short.
            assert answer.status_code < 500 or answer.status_code == 504, (case.as_curl_command(), answer.text[:500])
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        if operation.method == "get":
            check(operation.Case())
            continue
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            strategy = operation.as_strategy(generation_mode=mode)
            bounded = settings(
                max_examples=EXAMPLES // 2, deadline=None, database=None, suppress_health_check=list(HealthCheck)
            )
            bounded(given(case=strategy)(check))()
    print(f"\nanswers by status: {dict(sorted(sent.items()))}")
    assert sent.get(200, 0) > EXAMPLES / 2 and sent.get(400, 0) > EXAMPLES
    assert server.settled()
