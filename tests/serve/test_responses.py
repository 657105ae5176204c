"""The Responses API and embeddings, through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.serve.conftest import Running
from tinyforge.formats import Loaded

openai = pytest.importorskip("openai", reason="needs the extra [dev]")
QUESTION = "How much is 13 plus 2?"


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as found:
        yield found


def test_a_response_is_the_chat_of_its_input(client: Any) -> None:
    chat = client.chat.completions.create(
        model="small",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        temperature=0,
    )
    parts = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    for given in (QUESTION, parts, [{"type": "message", **parts[0]}]):
        found = client.responses.create(model="small", input=given, instructions="Be brief.", temperature=0)
        assert found.output_text == chat.choices[0].message.content and found.status == "completed"
        assert found.usage.input_tokens == chat.usage.prompt_tokens
        assert found.usage.output_tokens == chat.usage.completion_tokens
    cut = client.responses.create(model="small", input=QUESTION, max_output_tokens=2, temperature=0)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_the_events_of_a_stream(client: Any) -> None:
    whole = client.responses.create(model="small", input=QUESTION, temperature=0)
    events = list(client.responses.create(model="small", input=QUESTION, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    with client.responses.stream(model="small", input=QUESTION, temperature=0) as stream:  # it keeps a snapshot
        assert stream.get_final_response().output_text == whole.output_text


def test_a_response_continues_another(client: Any) -> None:
    first = client.responses.create(model="small", input="How much is 1 plus 2?", temperature=0)
    later = client.responses.create(model="small", input="And 2 plus 2?", previous_response_id=first.id, temperature=0)
    chat = client.chat.completions.create(
        model="small",
        messages=[
            {"role": "user", "content": "How much is 1 plus 2?"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And 2 plus 2?"},
        ],
        temperature=0,
    )
    assert later.output_text == chat.choices[0].message.content
    assert later.usage.input_tokens == chat.usage.prompt_tokens
    forgotten = client.responses.create(model="small", input="Hi", store=False, max_output_tokens=1)
    for name in ("resp_0", forgotten.id):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="small", input="x", previous_response_id=name)
        assert caught.value.code == "previous_response_not_found"


def test_log_probabilities_of_a_response(client: Any) -> None:
    found = client.responses.create(
        model="small", input=QUESTION, temperature=0, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    told = found.output[0].content[0].logprobs
    assert "".join(token.token for token in told) == found.output_text
    assert all(len(token.top_logprobs) == 2 and token.top_logprobs[0].logprob == token.logprob for token in told)


def test_what_a_response_may_not_ask(client: Any) -> None:
    for given, words in (
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "template has no tools"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "only text"),
        ({"input": []}, "input"),
        ({"background": True}, "background is not supported"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt is not supported"),
        ({"text": {"format": {"type": "xml"}}}, "expected text, json_object or json_schema"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            client.responses.create(**{"model": "small", "input": "x", **given})


def test_embeddings_are_means_of_the_final_hidden_states(client: Any, small: Loaded) -> None:
    texts = ["The dog barks.", "one two three " * 12]
    for encoding in ("float", "base64"):
        found = client.embeddings.create(model="small", input=texts, encoding_format=encoding)
        for text, entry in zip(texts, found.data, strict=True):
            h = small.model.hidden(np.asarray([small.tokenizer.encode(text)], np.int32))[0].astype(np.float64)
            expected = h.mean(axis=0) / np.linalg.norm(h.mean(axis=0))
            vector = entry.embedding
            if encoding == "base64" and isinstance(vector, str):
                import base64

                vector = np.frombuffer(base64.b64decode(vector), "<f4")
            assert np.abs(np.asarray(vector) - expected).max() < 1e-5
    ids = [small.tokenizer.encode(text) for text in texts]
    assert client.embeddings.create(model="small", input=ids).data[1].embedding == pytest.approx(
        client.embeddings.create(model="small", input=texts[1]).data[0].embedding, abs=1e-6
    )
    for given in ({"input": "ten " * 500}, {"input": ""}, {"input": []}, {"dimensions": 3}, {"input": [[9999]]}):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(**{"model": "small", "input": "x", **given})
