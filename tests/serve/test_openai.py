"""The official `openai` client against the server: every documented parameter, streams, errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.conftest import Running
from tinyforge.formats import Loaded
from tinyforge.formats.generation import GenerationConfig
from tinyforge.infer import Conversation, Sampling
from tinyforge.infer.causal_lm import logits
from tinyforge.infer.scheduler import Scheduler
from tinyforge.infer.session import Token
from tinyforge.serve.answers import Writer
from tinyforge.serve.protocol import Extension
from tinyforge.serve.routes import ENDPOINTS
from tinyforge.tokenizers.chat_templates import TEMPLATES

openai = pytest.importorskip("openai", reason="needs the extra [dev]")
TIMINGS = {"cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"}
GO_ON = {"510": -100, "511": -100}  # what ends a text
QUESTIONS = ["How much is 13 plus 2?", "Which is larger, 1 or 12?", "What is the opposite of cold?"]


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as found:
        yield found


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_greedy_reply_is_that_of_the_chat(client: Any, small: Loaded, question: str) -> None:
    conversation = Conversation(small.model, small.tokenizer, small.template)
    expected = "".join(conversation.ask(question, Sampling(temperature=0)))
    whole = client.chat.completions.create(model="small", messages=asked(question), temperature=0)
    assert whole.choices[0].message.content == expected and whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].message.role == "assistant" and whole.object == "chat.completion"
    usage = whole.usage
    assert usage.completion_tokens == len(conversation.turns[-1].tokens or ())
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model="small", messages=asked(question), temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == usage.total_tokens
    assert len({c.id for c in chunks}) == 1


def test_turns_and_a_system_prompt_are_laid_out_by_the_template(client: Any, small: Loaded) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        *asked("How much is 1 plus 2?"),
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": [{"type": "text", "text": "How much is "}, {"type": "text", "text": "2 plus 2?"}]},
    ]
    reply = client.chat.completions.create(model="small", messages=messages, temperature=0)
    turns = [("How much is 1 plus 2?", "3"), ("How much is 2 plus 2?", None)]
    ids = TEMPLATES["alpaca"].encode(small.tokenizer, turns, "Be brief.")
    assert reply.usage.prompt_tokens == len(ids)
    scheduler = Scheduler(small.model, 2)
    request = scheduler.submit(ids, Sampling(temperature=0), TEMPLATES["alpaca"].stop_ids(small.tokenizer))
    while request.reason is None:
        scheduler.step()
    assert reply.choices[0].message.content == small.tokenizer.decode(request.tokens)


def test_a_seed_gives_the_same_text_and_n_gives_those_of_the_seeds_after_it(client: Any) -> None:
    given = {"model": "small", "prompt": "The dog", "max_tokens": 60, "temperature": 2.0, "logit_bias": GO_ON}

    def texts(**more: Any) -> list[str]:
        return [choice.text for choice in client.completions.create(**given, **more).choices]

    several = texts(seed=7, n=3)
    assert several == texts(seed=7, n=3) and len(set(several)) == 3, several
    assert [texts(seed=7 + i)[0] for i in range(3)] == several
    assert texts(seed=-7) == texts(seed=-7)
    assert len({texts()[0] for _ in range(3)}) > 1  # without a seed, another text each time
    streamed = ["", "", ""]
    for chunk in client.completions.create(**given, seed=7, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == several


def test_stop_strings_end_a_text_and_are_not_in_it(client: Any) -> None:
    given = {"model": "small", "prompt": "The dog", "max_tokens": 60, "temperature": 0, "logit_bias": GO_ON}

    def text(**more: Any) -> Any:
        return client.completions.create(**given, **more).choices[0]

    whole = text()
    assert whole.finish_reason == "length" and len(whole.text) > 20
    middle = whole.text[8:12]
    cut = text(stop=middle)
    assert cut.text == whole.text[: whole.text.index(middle)] and cut.finish_reason == "stop"
    assert text(stop=["no such text", middle]).text == cut.text
    pieces = client.completions.create(**given, stop=[middle], stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == cut.text


def test_log_probabilities_of_a_chat(client: Any) -> None:
    def logprobs(**more: Any) -> list[Any]:
        reply = client.chat.completions.create(
            model="small", messages=asked(QUESTIONS[0]), temperature=0, logprobs=True, **more
        )
        return reply.choices[0].logprobs.content

    found = logprobs(top_logprobs=4)
    for token in found:
        assert token.logprob <= 0 and bytes(token.bytes).decode() == token.token
        assert [t.logprob for t in token.top_logprobs] == sorted((t.logprob for t in token.top_logprobs), reverse=True)
        assert len(token.top_logprobs) == 4 and token.top_logprobs[0].token == token.token  # it was greedy
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1 + 1e-9
    assert [t.logprob for t in logprobs()] == [t.logprob for t in found] and not logprobs()[0].top_logprobs
    streamed = []
    for chunk in client.chat.completions.create(
        model="small", messages=asked(QUESTIONS[0]), temperature=0, logprobs=True, top_logprobs=4, stream=True
    ):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert streamed == found


def test_log_probabilities_and_echo_of_a_completion(client: Any) -> None:
    given = {"model": "small", "prompt": "The dog", "max_tokens": 9, "temperature": 0, "logit_bias": GO_ON}
    found = client.completions.create(**given, logprobs=2).choices[0]
    logprobs = found.logprobs
    assert "".join(logprobs.tokens) == found.text and len(logprobs.token_logprobs) == 9
    assert all(
        len(top) == 2 and max(top.values()) >= p
        for top, p in zip(logprobs.top_logprobs, logprobs.token_logprobs, strict=True)
    )
    assert all(found.text[at:].startswith(t) for at, t in zip(logprobs.text_offset, logprobs.tokens, strict=True))
    echoed = client.completions.create(**given, echo=True)
    assert echoed.choices[0].text == "The dog" + found.text


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_prompt(client: Any, small: Loaded, stream: bool) -> None:
    """As lm-evaluation-harness asks for them: `echo` with `logprobs`, and 0 or 1 new tokens."""
    text = "The dog says: caf\u00e9, and one two three. " * 2
    ids = small.tokenizer.encode(text)
    z = logits(small.model, [ids])[0].astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    z -= np.log(np.exp(z).sum(axis=-1, keepdims=True))
    for prompt, new in ((text, 0), (ids, 1)):
        given = {"model": "small", "prompt": prompt, "max_tokens": new, "temperature": 0, "echo": True, "logprobs": 2}
        made, logprobs = "", {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        answers = client.completions.create(**given, logit_bias=GO_ON, stream=stream)
        for chunk in answers if stream else [answers]:
            made += chunk.choices[0].text
            for name, values in logprobs.items():
                values += getattr(chunk.choices[0].logprobs, name, None) or []
        assert made.startswith(text) and len(logprobs["tokens"]) == len(ids) + new
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        for i, (told, top) in enumerate(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)):
            if 0 < i < len(ids):
                assert told == pytest.approx(z[i - 1, ids[i]], abs=1e-3) and told in top.values()
                assert (told == max(top.values())) == (z[i - 1].argmax() == ids[i])
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert "\ufffd" in token or made[at : at + len(token)] == token
    several = client.completions.create(**{**given, "prompt": ["a b", "c d"], "max_tokens": 0}, n=2)
    assert [choice.text for choice in several.choices] == ["a b", "a b", "c d", "c d"]
    assert several.usage.completion_tokens == 0 and several.choices[0].finish_reason == "length"


def test_prompt_logprobs_as_vllm_has_them(client: Any, small: Loaded) -> None:
    found = client.completions.create(
        model="small", prompt="The dog is", max_tokens=1, extra_body={"prompt_logprobs": 1}
    ).choices[0]
    ids = small.tokenizer.encode("The dog is")
    assert found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == len(ids)
    for token, entry in zip(ids[1:], found.prompt_logprobs[1:], strict=True):
        assert entry[str(token)]["logprob"] <= max(e["logprob"] for e in entry.values())
        assert 1 in [e["rank"] for e in entry.values()] and len(entry) <= 2
    assert found.logprobs is None


def test_a_reply_that_is_there_is_scored(server: Running) -> None:
    """Its tokens are those that were generated, with the probabilities that they had, wherever it stands."""
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    for _ in range(2):
        wish = {"messages": messages, "seed": 3, "temperature": 1, "max_tokens": 20, "tinyforge": {"look_inside": True}}
        made = server.post("/v1/chat/completions", wish)[1]["choices"][0]
        messages.append({"role": "assistant", "content": made["message"]["content"]})
        answer = server.post("/v1/chat/completions", {"messages": messages, "tinyforge": {"score": True}})[1]
        (found,) = answer["choices"]
        assert found["message"] == {**messages[-1], "refusal": None} and answer["usage"]["completion_tokens"] == 0
        for a, b in zip(made["tinyforge"]["tokens"], found["tinyforge"]["tokens"], strict=True):
            assert a["id"] == b["id"] and a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)
            assert [r["id"] for r in a["runners_up"]][:2] == [r["id"] for r in b["runners_up"]][:2]
        messages.append({"role": "user", "content": QUESTIONS[1]})
    status, answer, *_ = server.post("/v1/chat/completions", {"messages": messages, "tinyforge": {"score": True}})
    assert status == 400 and answer["error"]["param"] == "tinyforge.score"


def test_stop_text_that_is_removed_has_no_log_probabilities(client: Any) -> None:
    given = {"model": "small", "prompt": "The dog", "max_tokens": 60, "temperature": 0, "logit_bias": GO_ON}
    full = client.completions.create(**given).choices[0].text
    for stop in (full[8:12], full[10:17]):
        for stream in (False, True):
            made, tokens = "", []
            answers = client.completions.create(**given, logprobs=0, stop=["never", stop], stream=stream)
            for chunk in answers if stream else [answers]:
                made += chunk.choices[0].text
                tokens += chunk.choices[0].logprobs.tokens if chunk.choices[0].logprobs else []
            assert made == full[: full.index(stop)]
            assert "".join(tokens).startswith(made) and not "".join(tokens[:-1]).startswith(made)


def test_the_sampled_token_is_among_the_likely_ones(client: Any) -> None:
    given = {"model": "small", "prompt": "The", "max_tokens": 30, "temperature": 2, "seed": 1, "logit_bias": GO_ON}
    found = client.completions.create(**given, logprobs=1).choices[0].logprobs
    assert all(p in top.values() for p, top in zip(found.token_logprobs, found.top_logprobs, strict=True))
    assert {len(top) for top in found.top_logprobs} == {1, 2}


def test_parts_of_characters_are_told_apart(small: Loaded) -> None:
    lead = [small.tokenizer.encode(c)[0] for c in ("\U0001f600", "\u304a", "\u00e9")]
    letter = small.tokenizer.encode("a")[0]
    writer = Writer(small.tokenizer, "m", "f", False, 4, Extension(), [[1]], [])
    told = Token(lead[0], -0.2, tuple(zip([*lead, letter], (-0.2, -1.0, -2.0, -3.0), strict=True)))
    likely = {"bytes:\\xf0": -0.2, "bytes:\\xe3": -1.0, "bytes:\\xc3": -2.0, "a": -3.0}
    assert writer._by_text(told) == likely


def test_a_stream_with_usage_says_null_before_it(client: Any) -> None:
    chunks = client.completions.create(
        model="small", prompt="The", max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    *before, last = [chunk.model_dump() for chunk in chunks]
    assert all("usage" in chunk and chunk["usage"] is None for chunk in before) and last["usage"]["total_tokens"]


def test_prompts_may_be_several_texts_or_ids(client: Any, small: Loaded) -> None:
    def texts(prompt: Any) -> list[str]:
        found = client.completions.create(model="small", prompt=prompt, max_tokens=8, temperature=0)
        assert [choice.index for choice in found.choices] == list(range(len(found.choices)))
        return [choice.text for choice in found.choices]

    one, two = texts("The dog"), texts("The cat")
    assert texts(["The dog", "The cat"]) == one + two
    ids = small.tokenizer.encode("The dog")
    assert texts(ids) == one and texts([ids, small.tokenizer.encode("The cat")]) == one + two


def test_a_prompt_that_begins_as_another_one_did_is_partly_cached(client: Any) -> None:
    def cached(ends: str) -> int:
        found = client.completions.create(model="small", prompt=list(range(100)) + [len(ends)], max_tokens=1)
        return found.usage.prompt_tokens_details.cached_tokens

    assert [cached(""), cached("x")] == [0, 96]


def test_the_next_turn_of_a_chat_computes_only_what_is_new(client: Any, small: Loaded) -> None:
    messages: list[dict[str, str]] = []
    for turn, question in enumerate(("How much is 1 plus 2?", "And 2 plus 3?", "And 3 plus 4?")):
        messages += asked(question)
        reply = client.chat.completions.create(model="small", messages=messages, temperature=0)
        new = reply.usage.prompt_tokens - reply.usage.prompt_tokens_details.cached_tokens
        assert new <= len(small.tokenizer.encode(question)) + 40 or not turn
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    fresh = client.chat.completions.create(
        model="small", messages=messages[:-1], temperature=0, extra_body={"cache_prompt": False}
    )
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    assert fresh.choices[0].message.content == messages[-1]["content"]


@pytest.mark.slow
def test_what_changes_the_draw(client: Any, small: Loaded) -> None:
    """Each against the same text drawn by a session's rules, in a scheduler of its own."""
    ids, extra = small.tokenizer.encode("The dog"), small.tokenizer.encode(" is")[0]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({}, {"temperature": 1.0}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"extra_body": {"top_k": 3}}, {"top_k": 3}),
        ({"extra_body": {"min_p": 0.2}}, {"min_p": 0.2}),
        ({"extra_body": {"repetition_penalty": 1.5}}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
        ({"logit_bias": {**GO_ON, str(extra): 8}}, {"logit_bias": ((510, -100.0), (511, -100.0), (extra, 8.0))}),
        ({"extra_body": {"tinyforge": {"drafts": 3}}}, {"drafts": 3}),
    ]
    texts = set()
    for given, expected in cases:
        scheduler = Scheduler(small.model, 2)
        plain = {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "drafts": 0,
            "max_tokens": 40,
            "seed": 3,
            "logit_bias": ((510, -100.0), (511, -100.0)),
        }
        request = scheduler.submit(
            ids, Sampling(**{**plain, **expected}), TEMPLATES["alpaca"].stop_ids(small.tokenizer)
        )
        while request.reason is None:
            scheduler.step()
        plain = {"model": "small", "prompt": "The dog", "max_tokens": 40, "seed": 3, "logit_bias": GO_ON}
        found = client.completions.create(**{**plain, **given})
        assert found.choices[0].text == small.tokenizer.decode(request.tokens), given
        texts.add(found.choices[0].text)
    assert len(texts) > 6
    banned = client.completions.create(
        model="small", prompt="The dog", max_tokens=20, temperature=0, logit_bias={**GO_ON, str(extra): -100}
    )
    assert " is" not in banned.choices[0].text


def test_the_models_own_settings_are_those_of_requests_without(start: Callable[..., Any]) -> None:
    """In that order: the request's, the model's, OpenAI's."""
    import httpx

    own = GenerationConfig({}, {"temperature": 0.0, "top_k": 3, "repetition_penalty": 1.5, "max_tokens": 6})
    with start(generation=own) as ours, openai.OpenAI(base_url=f"{ours.url}/v1", api_key="none") as client:

        def text(**more: Any) -> str:
            prompt = "Sara has a moon boat. Sara has a moon boat. Sara has"
            body = {"model": "small", "prompt": prompt, "max_tokens": 30, "seed": 3, "logit_bias": GO_ON}
            return str(client.completions.create(**(body | more)).choices[0].text)

        def extra(**fields: float) -> dict[str, Any]:
            return {"extra_body": fields}

        assert text() == text(temperature=0, **extra(repetition_penalty=1.5)) != text(**extra(repetition_penalty=1))
        assert text(**extra(repeat_penalty=1)) == text(**extra(repetition_penalty=1))
        warm = text(temperature=1.5)
        assert warm == text(temperature=1.5, **extra(top_k=3)) != text(temperature=1.5, **extra(top_k=0))
        assert warm == text(temperature=1.5, top_p=1)  # the file leaves it out: OpenAI's

        def length(**more: Any) -> int:
            body = {"model": "small", "messages": asked("Tell me of 1 dog."), "logit_bias": GO_ON}
            return int(client.chat.completions.create(**(body | more)).usage.completion_tokens)

        assert length() == 6 and length(max_tokens=9) == 9 and length(max_tokens=-1) > 60
        assert client.completions.create(model="small", prompt="one", logit_bias=GO_ON).usage.completion_tokens == 16
        (entry,) = client.models.list().data
        assert entry.tinyforge["sampling"] == own.fields
        shown = httpx.get(ours.url + "/props").json()["default_generation_settings"]["params"]
    assert shown == {
        "temperature": 0,
        "top_k": 3,
        "top_p": 1,
        "min_p": 0,
        "repeat_penalty": 1.5,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "n_predict": 6,
        "max_tokens": 6,
    }


def test_max_tokens(client: Any, small: Loaded) -> None:
    def length(**more: Any) -> tuple[int, str]:
        found = client.chat.completions.create(
            model="small", messages=asked("Tell me of 1 dog."), temperature=0, logit_bias=GO_ON, **more
        )
        return found.usage.completion_tokens, found.choices[0].finish_reason

    room = (
        small.model.config.context
        - client.chat.completions.create(
            model="small", messages=asked("Tell me of 1 dog."), max_tokens=1
        ).usage.prompt_tokens
    )
    assert length(max_tokens=5) == (5, "length") == length(max_completion_tokens=5)
    assert length() == (room, "length") == length(max_tokens=-1) == length(max_tokens=100000)
    legacy = client.completions.create(model="small", prompt="The dog", temperature=0, logit_bias=GO_ON)
    assert legacy.usage.completion_tokens == 16  # as OpenAI has it


def test_streamed_text_never_splits_a_character(client: Any, small: Loaded) -> None:
    """Bytes of all kinds, drawn at random: what is streamed is what all tokens together give."""
    bias = {str(i): 20 for i in range(256) if small.tokenizer.token_bytes(i) > b"\x7f"}
    assert len(bias) == 128
    for seed in range(2):
        text, data = "", []
        for chunk in client.completions.create(
            model="small",
            prompt="x",
            max_tokens=60,
            temperature=2,
            seed=seed,
            logit_bias=bias,
            logprobs=0,
            stream=True,
            extra_body={"tinyforge": {"look_inside": True}},
        ):
            text += chunk.choices[0].text
            for token in (getattr(chunk.choices[0], "tinyforge", None) or {"tokens": []})["tokens"]:
                data += token["bytes"]
        assert text == bytes(data).decode("utf-8", "replace") and any("\x80" <= c < "\ufffd" for c in text)


def test_fields_that_openai_has_and_this_server_ignores(client: Any) -> None:
    reply = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": QUESTIONS[0], "name": "Bob"}],
        temperature=0,
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        reasoning_effort="low",
        response_format={"type": "text"},
        extra_body={"no_such_field": [1, {"a": None}], "typical_p": 1, "mirostat": 0, "min_tokens": 0, "bad_words": []},
    )
    assert reply.choices[0].message.content == "13 14 15, so 15"


def test_llama_cpps_web_client(server: Running, small: Loaded) -> None:
    """The calls of its page, with all fields that it sends: /props at the start, then a streamed chat with timings."""
    import httpx

    props = httpx.get(server.url + "/props").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 128 and settings["params"]["temperature"] == 1 and props["total_slots"] == 4
    assert props["modalities"] == {"vision": False, "audio": False} and props["role"] == "model"
    assert "### Response:" in props["chat_template"] and "/" not in props["model_path"]
    expected = {name: settings["params"][name] for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens")}
    body = {
        "messages": asked(QUESTIONS[0]),
        "stream": True,
        "return_progress": True,
        "model": props["model_path"],
        "reasoning_format": "auto",
        **expected,
        "temperature": 0,
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "xtc_probability": 0,
        "xtc_threshold": 0.1,
        "typ_p": 1,
        "repeat_last_n": 64,
        "repeat_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "dry_multiplier": 0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
        "cache_prompt": True,
        "backend_sampling": False,
        "timings_per_token": True,
    }
    lines = httpx.post(f"{server.url}/v1/chat/completions", json=body).text.split("\n")
    data = [line[6:] for line in lines if line.startswith("data: ")]
    chunks = [json.loads(line) for line in data[:-1]]
    assert data[-1] == "[DONE]" and {chunk["model"] for chunk in chunks} == {"small"}
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "13 14 15, so 15"
    assert all(set(c["timings"]) == TIMINGS and c["timings"]["prompt_ms"] > 0 for c in chunks[1:])
    last = chunks[-1]["timings"]
    assert last["predicted_n"] == 7 and last["cache_n"] + last["prompt_n"] == len(
        TEMPLATES["alpaca"].encode(small.tokenizer, [(QUESTIONS[0], None)], "")
    )


def test_llama_cpps_name_of_the_penalty(client: Any) -> None:
    def text(**extra: float) -> str:
        made = client.completions.create(
            model="small",
            prompt="one two one two one",
            max_tokens=20,
            temperature=0,
            extra_body={"ignore_eos": True, **extra},
        )
        return str(made.choices[0].text)

    assert text(repeat_penalty=1.5) == text(repetition_penalty=1.5) != text() == text(repeat_penalty=1)
    assert text(repeat_penalty=1.5, repetition_penalty=1) == text()


def test_vllms_tokens_that_end_a_text(server: Running) -> None:
    def made(**extra: Any) -> Any:
        wish = {"prompt": "The dog", "max_tokens": 8, "logit_bias": GO_ON, "tinyforge": {"look_inside": True}}
        return server.post("/v1/completions", {**wish, "temperature": 0, **extra})[1]["choices"][0]

    tokens = made()["tinyforge"]["tokens"]
    end = next(i for i, token in enumerate(tokens) if token["id"] not in [before["id"] for before in tokens[:i]] and i)
    found = made(stop_token_ids=[tokens[end]["id"], 1])
    assert found["finish_reason"] == "stop" and found["text"] == "".join(token["text"] for token in tokens[:end])


def test_vllms_least_number_of_tokens(client: Any) -> None:
    def count(**extra: Any) -> int:
        made = client.completions.create(model="small", prompt="x", max_tokens=9, extra_body={"min_tokens": 9, **extra})
        return int(made.usage.completion_tokens)

    assert count(ignore_eos=True) == 9
    for extra in ({}, {"ignore_eos": True, "stop": "a"}, {"ignore_eos": True, "guided_choice": ["a"]}):
        with pytest.raises(openai.BadRequestError, match="min_tokens expects ignore_eos and no stops"):
            count(**extra)


def test_models(client: Any, small: Loaded) -> None:
    (entry,) = client.models.list().data
    assert entry.id == "small" and entry == client.models.retrieve("small")
    assert entry.tinyforge["context"] == 128 and entry.tinyforge["parameters"] == 1053824
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o'") as caught:
        client.models.retrieve("gpt-4o")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own(client: Any, start: Callable[..., Any]) -> None:
    def wrong(kind: type[Exception], match: str, **given: Any) -> Any:
        with pytest.raises(kind, match=match) as caught:
            client.chat.completions.create(**{"model": "small", "messages": asked("Hi"), **given})
        return caught.value

    assert wrong(openai.NotFoundError, "no model 'gpt-4o'", model="gpt-4o").code == "model_not_found"
    long = wrong(openai.BadRequestError, "messages: 227 tokens, which leave no room", messages=asked("ten " * 100))
    assert long.code == "context_length_exceeded" and long.param == "messages"
    assert "messages: at least" in str(wrong(openai.BadRequestError, "context", messages=asked("ten " * 10000)))
    with pytest.raises(openai.BadRequestError, match="prompt: .* tokens, which leave no room .*; shorten the text"):
        client.completions.create(model="small", prompt="ten " * 100)
    assert wrong(openai.BadRequestError, "temperature", temperature=-1).param == "temperature"
    for given, match in (
        ({"n": 9}, "n is 9, expected at most 8 on this server"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "expected text, json_object or json_schema"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"logit_bias": {"512": 1}}, "expected 0 to 511"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ["a" * 1000] * 5}, "stop has 5000 characters, at most 4096"),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex: the grammar cannot be"),
        ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "both constrain the text"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "a"}}}, "structural_tag is not supported"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "choices expect a list of texts"),
        ({"extra_body": {"json_schema": {"type": "array", "prefixItems": 5}}}, "json_schema"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"stop": ""}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "user first"),
        ({"messages": [{"role": "tool", "content": "Hi", "tool_call_id": "1"}]}, "template has no tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "only text"),
    ):
        wrong(openai.BadRequestError, match, **given)
    for given, match in (
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": [513]}, "513"),
        ({"prompt": []}, "0 texts"),
        ({"prompt": ""}, "empty"),
        ({"prompt": ["a"] * 65}, "65 texts"),
        ({"prompt": [[1], [-1]]}, "-1"),
    ):
        with pytest.raises(openai.BadRequestError, match=match):
            client.completions.create(**{"model": "small", "prompt": "x", **given})


def test_a_key(start: Callable[..., Any]) -> None:
    with start(key="right") as server:
        for key, good in (("right", True), ("wrong", False), ("", False)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key or "x", max_retries=0) as client:
                if good:
                    assert client.models.list().data[0].id == "small"
                    continue
                with pytest.raises(openai.AuthenticationError) as caught:
                    client.models.list()
                assert caught.value.code == "invalid_api_key"
        assert server.post("/tokenize", {"content": "x"})[0] == 401
        assert server.post("/v1/attention", {"text": "x"}, headers={"Authorization": "Bearer right"})[0] == 200


def test_routes_require_the_key_unless_the_table_makes_them_public(start: Callable[..., Any], tmp_path: Path) -> None:
    """Also addresses that are not there: a new route is closed until its line says otherwise."""
    import httpx

    (tmp_path / "index.html").write_text("page")
    with start(key="right", page=tmp_path) as server:
        found = {}
        for path in (*(e.path for e in ENDPOINTS), "/", "/absent", "/healthy", "/health/x"):
            found[path] = httpx.get(server.url + path.replace("{name:path}", "small")).status_code
            assert httpx.post(server.url + path, content=b"{}").status_code == 401
        assert {path for path, status in found.items() if status != 401} == {"/", "/health", "/openapi.json"}


def test_a_full_queue_is_a_rate_limit(start: Callable[..., Any]) -> None:
    with start(rows=1, queue=1) as server:
        server.slow[0] = 0.05
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            long = {
                "model": "small",
                "prompt": "The dog",
                "logit_bias": GO_ON,
                "max_tokens": 100,
                "stream": True,
                "temperature": 0,
                "extra_body": {"ignore_eos": True},
            }
            streams = [client.completions.create(**long) for _ in range(2)]
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(**long)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            with pytest.raises(openai.RateLimitError):
                client.completions.create(**{**long, "stream": False})
            for stream in streams:
                stream.close()
            assert server.settled()
            short = client.completions.create(**{**long, "max_tokens": 2, "stream": False})
            assert short.choices[0].text


def test_one_token_has_no_speed(server: Running) -> None:
    wish = {"prompt": "The dog", "max_tokens": 1, "ignore_eos": True, "tinyforge": {"look_inside": True}}
    assert server.post("/v1/completions", wish)[1]["tinyforge"]["tokens_per_second"] is None
    assert server.post("/v1/completions", {**wish, "max_tokens": 9})[1]["tinyforge"]["tokens_per_second"] > 0
