"""A model's own chat template on the server: what it renders, what it refuses, and that it takes nobody down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.serve.conftest import Running, running
from tinyforge.formats import Loaded
from tinyforge.tokenizers.chat_templates import ChatTemplate

SOURCE = (
    "{% if messages[0].role != 'system' %}{{ 'Be brief. ' }}{% endif %}{% for m in messages %}"
    "{% if m.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}"
    "{% if m.content == 'raise' %}{{ raise_exception('No\nraising') }}{% endif %}"
    "{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}{% if enable_thinking %}{{ 'Hm. ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def served(small: Loaded) -> Iterator[Running]:
    with running(replace(small, template=ChatTemplate({"default": SOURCE}, {"eos_token": "</s>"}))) as server:
        yield server


def prompt_tokens(served: Running, *contents: str, **more: object) -> int:
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    messages = more.pop("messages", messages)  # type: ignore[assignment]
    status, answer, _ = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **more})
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens"])


def test_the_prompt_is_what_the_template_renders(served: Running) -> None:
    tokenizer = served.loaded.tokenizer

    def count(text: str) -> int:  # each </s> is one token
        return sum(len(tokenizer.encode(part)) for part in text.split("</s>")) + text.count("</s>")

    assert prompt_tokens(served, "Hi") == count("Be brief. user: Hi</s>assistant: ")
    asked = count("Be brief. user: Hi</s>assistant: Hm. ")
    assert prompt_tokens(served, "Hi", chat_template_kwargs={"enable_thinking": True}) == asked
    # Names that are not the client's to set stay what they are.
    names = {"messages": "x", "tokenizer": "x", "self": "x", "reply_to_come": False, "add_generation_prompt": False}
    assert prompt_tokens(served, "Hi", chat_template_kwargs=names) == prompt_tokens(served, "Hi")
    developer = [{"role": "developer", "content": "S"}, {"role": "user", "content": "Hi"}]
    assert prompt_tokens(served, messages=developer) == count("system: S</s>user: Hi</s>assistant: ")
    system = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    assert prompt_tokens(served, messages=system) == count("system: S</s>user: Hi</s>assistant: ")
    # Roles that the built-in templates refuse are the template's business.
    twice = [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]
    assert prompt_tokens(served, messages=twice) == count("Be brief. user: A</s>user: B</s>assistant: ")
    typed = prompt_tokens(served, "</s>")
    assert typed == count("Be brief. user: ") + len(tokenizer.encode("</s>")) + count("</s>assistant: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [("raise", "the chat template says: No raising"), ("loop", "the chat template did not end in 0.5 s of CPU time")],
)
def test_what_the_template_refuses_is_the_requests_fault(served: Running, content: str, message: str) -> None:
    messages = [{"role": "user", "content": content}]
    status, answer, _ = served.post("/v1/chat/completions", {"messages": messages})
    assert status == 400 and answer["error"]["message"].startswith(message) and answer["error"]["param"] == "messages"
    assert prompt_tokens(served, "Hi")


def test_documents_and_functions_are_refused(served: Running) -> None:
    for name in ("documents", "functions"):
        body = {"messages": [{"role": "user", "content": "Hi"}], name: [{"title": "x", "text": "y"}]}
        status, answer, _ = served.post("/v1/chat/completions", body)
        assert status == 400 and answer["error"]["param"] == name


def test_its_program_is_shown_to_clients(served: Running) -> None:
    import httpx

    assert httpx.get(f"{served.url}/props").json()["chat_template"] == SOURCE
