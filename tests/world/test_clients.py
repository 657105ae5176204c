"""Clients of other projects against the server, unchanged.

They bring hundreds of packages, so they have an environment of their own, $TINYFORGE_CLIENTS, by default
~/.cache/tinyforge/world/clients:

    python -m venv ~/.cache/tinyforge/world/clients
    cd ~/.cache/tinyforge/world/clients
    bin/pip install "lm_eval[api]" instructor langchain-openai outlines guidellm openai anthropic xllamacpp
    npm install ai @ai-sdk/openai @ai-sdk/openai-compatible zod
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Running, running
from tests.world.artefacts import CACHE, artefact
from tinyforge.backends import get_backend
from tinyforge.formats import Loaded, load, save_pretrained
from tinyforge.infer.likelihood import Scorer
from tinyforge.tokenizers.chat_templates import ChatTemplate

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("TINYFORGE_CLIENTS", CACHE / "clients")) / "bin" / "python"
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: '{text}'
doc_to_target: '{target}'
target_delimiter: ''
metric_list: [{{metric: {metric}}}]
"""

pytest.importorskip("uvicorn", reason="needs the extra [serve]")
pytest.importorskip("llguidance", reason="needs the extra [serve]")


@pytest.fixture(scope="module")
def storyteller() -> Loaded:
    return load(ROOT / "models" / "nanoeuler" / "storyteller", get_backend("numpy", "fp32", workers=1))


@pytest.fixture(scope="module")
def server(storyteller: Loaded) -> Iterator[Running]:
    with running(storyteller, rows=16, queue=64, name="storyteller") as found:
        yield found


@pytest.fixture(scope="module")
def tool_server(storyteller: Loaded) -> Iterator[Running]:
    """A model that knows of no tools, with Qwen's template: what it calls is forced."""
    source = (artefact("templates") / "qwen2_5.jinja").read_text(encoding="utf-8")
    loaded = replace(storyteller, template=ChatTemplate({"default": source}, {"eos_token": "</s>"}))
    with running(loaded, name="storyteller") as found:
        yield found


@pytest.fixture(scope="module")
def smollm2_server(smollm2: Path) -> Iterator[Running]:
    loaded = load(smollm2, get_backend("numpy", "fp32", workers=1))
    assert isinstance(loaded.template, ChatTemplate)
    source = (artefact("templates") / "qwen2_5.jinja").read_text(encoding="utf-8")
    with running(
        replace(loaded, template=replace(loaded.template, sources={"default": source})), name="storyteller"
    ) as found:
        yield found


@pytest.fixture
def ask(server: Running, tmp_path: Path) -> Callable[..., Any]:
    def call(name: str, server: Running = server) -> Any:
        if not PROGRAM.exists():
            pytest.skip(f"no clients at {PROGRAM}; see the head of {Path(__file__).name}")
        module = {"langchain": "langchain_openai", "langchain_tools": "langchain_openai"}.get(name, name)
        if subprocess.run([PROGRAM, "-c", f"import {module}"], capture_output=True).returncode:
            pytest.skip(f"{name} is not installed for {PROGRAM}")
        script = Path(__file__).with_name("client.py")
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [PROGRAM, script, name, server.url, tmp_path], capture_output=True, text=True, env=environment, timeout=500
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.strip().split("\n")[-1])

    return call


def test_three_modes_of_instructor(ask: Callable[..., Any], smollm2_server: Running) -> None:
    found = ask("instructor", smollm2_server)
    assert len(found) == 3
    for pet in found:
        assert pet["kind"] in ("dog", "cat") and 0 <= pet["age"] <= 9


def test_tools_of_langchain(ask: Callable[..., Any], tool_server: Running) -> None:
    """Over chats, and over the Responses API."""
    for found in ask("langchain_tools", tool_server):
        for call in (found["call"], *found["streamed"]):
            assert call["name"] == "Pet" and call["args"]["kind"] in ("dog", "cat") and 0 <= call["args"]["age"] <= 9
        assert len(found["streamed"]) == 1 and found["text"]


def test_the_messages_api_by_its_official_client(ask: Callable[..., Any], tool_server: Running) -> None:
    found = ask("anthropic", tool_server)
    whole, streamed = found["whole"], found["streamed"]
    assert whole["content"][0]["text"] == streamed["content"][0]["text"] and whole["stop_reason"] in (
        "end_turn",
        "max_tokens",
    )
    assert {**whole["usage"], **streamed["usage"]} == {**streamed["usage"], **whole["usage"]}
    assert found["stopped"] == ["stop_sequence", True, False]
    for message in found["called"]:
        (block,) = message["content"]
        assert block["type"] == "tool_use" and block["name"] == "pet" and message["stop_reason"] == "tool_use"
        assert block["input"]["kind"] in ("dog", "cat") and 0 <= block["input"]["age"] <= 9
    assert found["after"][0] and found["after"][1] in ("end_turn", "max_tokens")
    assert found["wrong"]["type"] == "error" and found["wrong"]["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["langchain", "outlines"])
def test_structured_output_of_other_libraries(ask: Callable[[str], Any], name: str) -> None:
    found = ask(name)
    assert found["kind"] in ("dog", "cat") and 0 <= found["age"] <= 9
    assert found.get("choice", "yes") in ("yes", "no") and found.get("dimensions", 384) == 384
    assert found.get("response", "text")


def test_a_load_of_guidellm(ask: Callable[[str], Any], storyteller: Loaded, tmp_path: Path) -> None:
    save_pretrained(storyteller.model, storyteller.tokenizer, tmp_path / "model")
    found = ask("guidellm")
    assert found["successful"] >= 8 and not found["errored"]


AI_SDK = """
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenAI } from "@ai-sdk/openai";
import { z } from "zod";
const given = { baseURL: process.argv[2] + "/v1", apiKey: "none" };
const schema = z.object({ kind: z.enum(["dog", "cat"]), age: z.number().int().min(0).max(9) });
const asked = { prompt: "Tell me about a pet.", maxRetries: 0 };
const chat = createOpenAICompatible({ name: "it", ...given, supportsStructuredOutputs: true })("storyteller");
const responses = createOpenAI(given)("storyteller");
if (process.argv[3]) {  // tools: a forced call that the client executes, and the step after it
  const calls = [];
  const tools = { pet: tool({ inputSchema: schema, execute: (given) => (calls.push(given), "It is a good pet.") }) };
  for (const model of [chat, responses]) {
    await generateText({ model, tools, toolChoice: "required", maxOutputTokens: 200, ...asked });
    const stream = streamText({
      model, tools, maxOutputTokens: 200, stopWhen: stepCountIs(2), ...asked,
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    });
    calls.push((await stream.steps).map((step) => step.finishReason));
  }
  console.log(JSON.stringify(calls));
  process.exit(0);
}
const found = [];
for (const model of [chat, responses]) found.push((await generateObject({ model, schema, ...asked })).object);
let text = "";
for await (const part of streamText({ model: responses, ...asked }).textStream) text += part;
console.log(JSON.stringify({ found, text }));
"""


def test_tools_of_the_ai_sdk(tool_server: Running) -> None:
    """A call, and one in a stream whose result comes back in a second step: over chats, and the Responses API."""
    found = ai_sdk(tool_server, "tools")
    assert len(found) == 6
    for one, two, reasons in (found[:3], found[3:]):
        for pet in (one, two):
            assert pet["kind"] in ("dog", "cat") and 0 <= pet["age"] <= 9
        assert reasons[0] == "tool-calls" and reasons[1] in ("stop", "length")


def ai_sdk(server: Running, *arguments: str) -> Any:
    folder = PROGRAM.parents[1]
    if not (folder / "node_modules" / "ai").is_dir():
        pytest.skip(f"the AI SDK is not installed in {folder}; see the head of {Path(__file__).name}")
    script = folder / "ai-sdk.mjs"
    script.write_text(AI_SDK, encoding="utf-8")
    done = subprocess.run(["node", script, server.url, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().split("\n")[-1])


def test_the_ai_sdk(server: Running) -> None:
    """`generateObject` over chats and over the Responses API, and a stream of the latter."""
    found = ai_sdk(server)
    assert len(found["found"]) == 2 and found["text"]
    for pet in found["found"]:
        assert pet["kind"] in ("dog", "cat") and 0 <= pet["age"] <= 9


def test_lm_evals_scores_are_those_of_our_own_harness(
    ask: Callable[[str], Any], storyteller: Loaded, tmp_path: Path
) -> None:
    """Multiple choice and perplexity, through `echo` with `logprobs`."""
    rng, rows = random.Random(0), []
    for _ in range(20):
        name, thing = rng.choice(["Max", "Lily", "Tom"]), rng.choice(["ball", "dog", "cake", "red car"])
        ends = [f" {name} played with the {thing}.", " The of and ran blue.", f" She went to buy a {thing}."]
        rng.shuffle(ends)
        rows.append({"text": f"{name} had a {thing}.", "ends": ends, "right": rng.randrange(3)})
    pages = [
        "Once upon a time there was a girl. She loved her dog. " * n + "Then the caf\u00e9 closed." for n in (1, 4, 110)
    ]
    tasks = (
        ("choices", "multiple_choice", "{{text}}", "{{right}}", "acc", rows),
        ("pages", "loglikelihood_rolling", "", "{{page}}", "byte_perplexity", [{"page": page} for page in pages]),
    )
    for task, kind, text, target, metric, data in tasks:
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
        page = TASK.format(name=task, folder=tmp_path, kind=kind, text=text, target=target, metric=metric)
        choice = "doc_to_choice: '{{ends}}'\n" if kind == "multiple_choice" else ""
        (tmp_path / f"{task}.yaml").write_text(page + choice, encoding="utf-8")
    save_pretrained(storyteller.model, storyteller.tokenizer, tmp_path / "model")
    found = ask("lm_eval")
    scorer, right = Scorer(storyteller.model, storyteller.tokenizer), 0
    for row in rows:
        scores = scorer.score([scorer.pair(row["text"], end) for end in row["ends"]])
        right += max(range(3), key=lambda i: scores[i].log_prob) == row["right"]
    assert found["acc"] == pytest.approx(right / len(rows))
    # The harness leaves a token of the context for the reply, and one more.
    scorer.context = storyteller.model.config.context - 2
    total, size = sum(map(scorer.rolling, pages)), sum(len(page.encode()) for page in pages)
    assert found["byte_perplexity"] == pytest.approx(math.exp(-total / size), rel=1e-5)
