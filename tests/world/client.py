"""Clients of other projects, each unchanged: python client.py NAME URL FOLDER prints what it got, as JSON.

Run by test_clients.py with the Python of an environment of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

ASK = "Tell me about a pet."


class Pet(BaseModel):
    kind: Literal["dog", "cat"]
    age: int = Field(ge=0, le=9)


def openai_of(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def instructor(url: str, folder: Path) -> Any:
    import instructor

    found = []
    # JSON asks for any object, so the model has to understand the question.
    messages = [{"role": "user", "content": 'Repeat this: {"kind": "dog", "age": 3}'}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_of(url), mode=mode)
        asked: dict[str, Any] = {"messages": messages, "response_model": Pet, "max_retries": 0, "temperature": 0}
        found.append(client.chat.completions.create(model="storyteller", **asked).model_dump())
    return found


def langchain_tools(url: str, folder: Path) -> Any:
    """A forced call, its streamed parts, and the conversation that goes on with its result."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    given: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": "storyteller", "max_tokens": 200}
    found = []
    for more in ({}, {"use_responses_api": True}):
        model = ChatOpenAI(**given, **more)
        forced = model.bind_tools([Pet], tool_choice="required")
        asked = [HumanMessage(ASK)]
        reply = forced.invoke(asked)
        streamed = None
        for chunk in forced.stream(asked):
            streamed = chunk if streamed is None else streamed + chunk
        (call,) = reply.tool_calls
        answer = ToolMessage("It is a good pet.", tool_call_id=call["id"])
        text = model.bind_tools([Pet], tool_choice="none").invoke([*asked, reply, answer]).text
        found.append({"call": call, "streamed": streamed.tool_calls, "text": text})
    return found


def anthropic(url: str, folder: Path) -> Any:
    """The Messages API: whole, streamed, a stop sequence, a forced call and its result, a continued reply, an error."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "storyteller", "max_tokens": 60, "messages": [{"role": "user", "content": ASK}]}
    greedy: dict[str, Any] = {"extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked, **greedy)
    with client.messages.stream(**asked, **greedy) as stream:
        streamed = stream.get_final_message()
    word = whole.content[0].text.split()[3]
    stopped = client.messages.create(**asked, **greedy, stop_sequences=["#", word])
    pet = {"name": "pet", "description": "A pet.", "input_schema": Pet.model_json_schema()}
    tools: dict[str, Any] = {"tools": [pet], "tool_choice": {"type": "tool", "name": "pet"}}
    called = client.messages.create(**asked, **tools)
    with client.messages.stream(**asked, **tools) as stream:
        call = stream.get_final_message()
    result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": "It is a good pet."}
    later = [
        *asked["messages"],
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(**{**asked, "messages": later, "system": "Be brief."}, tools=[pet])
    counted = client.messages.count_tokens(model="storyteller", messages=later, system="Be brief.", tools=[pet])
    try:
        client.messages.create(**asked, extra_body={"temperature": 3})
    except anthropic.BadRequestError as error:
        wrong = error.body
    return {
        "whole": whole.model_dump(),
        "streamed": streamed.model_dump(),
        "stopped": [stopped.stop_reason, stopped.stop_sequence == word, word in stopped.content[0].text],
        "called": [m.model_dump() for m in (called, call)],
        "after": [after.usage.input_tokens == counted.input_tokens, after.stop_reason],
        "wrong": wrong,
    }


def langchain(url: str, folder: Path) -> Any:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    given: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": "storyteller"}
    structured = ChatOpenAI(**given).with_structured_output(Pet, method="json_schema").invoke(ASK)
    response = ChatOpenAI(**given, use_responses_api=True).invoke(ASK)
    vector = OpenAIEmbeddings(**given, check_embedding_ctx_length=False).embed_query(ASK)
    return {**structured.model_dump(), "response": response.content[0]["text"], "dimensions": len(vector)}


def outlines(url: str, folder: Path) -> Any:
    import outlines

    model = outlines.from_vllm(openai_of(url), "storyteller")
    return {**json.loads(model(ASK, Pet)), "choice": model(ASK, Literal["yes", "no"])}


def lm_eval(url: str, folder: Path) -> Any:
    """The harness's own command on the tasks in the folder."""
    args = (
        f"model=storyteller,base_url={url}/v1/completions,tokenizer={folder / 'model'},max_length=1024,num_concurrent=4"
    )
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", args]
    tasks = ["--tasks", "choices,pages", "--include_path", str(folder), "--output_path", str(folder / "out")]
    subprocess.run([*command, *tasks, "--batch_size", "4"], check=True, stdout=sys.stderr)
    (found,) = (folder / "out").rglob("results_*.json")
    results = json.loads(found.read_text(encoding="utf-8"))["results"]
    return {"acc": results["choices"]["acc,none"], "byte_perplexity": results["pages"]["byte_perplexity,none"]}


def guidellm(url: str, folder: Path) -> Any:
    """Four streams of its own load."""
    options = {
        "backend": f"kind=openai_http,target={url}",
        "profile": "kind=concurrent,streams=4",
        "constraint": "kind=max_requests,count=8",
        "tokenizer": f"kind=hf_auto,model={folder / 'model'}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "output": f"kind=json,path={folder / 'load.json'}",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [str(Path(sys.executable).with_name("guidellm")), "run", *flags, "--disable-progress"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (load,) = json.loads((folder / "load.json").read_text(encoding="utf-8"))["benchmarks"]
    return load["metrics"]["request_totals"]


if __name__ == "__main__":
    name, url, folder = sys.argv[1:4]
    functions = (anthropic, instructor, langchain, langchain_tools, outlines, lm_eval, guidellm)
    print(json.dumps({f.__name__: f for f in functions}[name](url, Path(folder))))
