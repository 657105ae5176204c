"""Published chat templates: the form of their calls is learned, and what they write is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.world.artefacts import artefact
from tests.world.test_chat_templates import VOCABULARIES
from tinyforge.formats.tokenizers import find_tokenizer, template_in
from tinyforge.infer.grammar import Grammars
from tinyforge.serve.protocol import Tool
from tinyforge.serve.tools import CallReader, Tools, grammar, read_calls
from tinyforge.tokenizers import TextTokenizer, load_tokenizer, thoughts
from tinyforge.tokenizers.chat_templates import ChatTemplate
from tinyforge.tokenizers.tool_calls import COUNT, CallForm, Fields, Literals, learn

pytest.importorskip("llguidance", reason="needs the extra [serve]")

HERMES = ("<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ')
FAMILIES = {
    "Qwen-Qwen2.5-7B-Instruct": HERMES,
    "Qwen-Qwen3-0.6B": HERMES,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": HERMES,
    "ibm-granite-granite-4.0": HERMES,
    "meta-llama-Llama-3.1-8B-Instruct": ("{", '{"name": "', '", "parameters": '),
    "meta-llama-Llama-3.2-3B-Instruct": ("{", '{"name": "', '", "parameters": '),
    "mistralai-Mistral-Nemo-Instruct-2407": ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "', '", "arguments": '),
    "unsloth-mistral-Devstral-Small-2507": ("[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]"),
    "moonshotai-Kimi-K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        f":{COUNT}<|tool_call_argument_begin|>",
    ),
    "Qwen3-Coder": ("<tool_call>", "<tool_call>\n<function=", ">\n"),
    "GLM-4.6": ("<tool_call>", "<tool_call>", "\n"),
    "MiniMax-M2": ("<minimax:tool_call>", '\n<minimax:tool_call>\n<invoke name="', '">\n'),
    "google-gemma-4-31B-it": ("<|tool_call>call:", "<|tool_call>call:", "{"),
    "LFM2.5-8B-A1B": ("<|tool_call_start|>", "<|tool_call_start|>[", "("),
    "lfm2_v2": ("<|tool_call_start|>", "<|tool_call_start|>[", "("),
    "deepseek-ai-DeepSeek-V3.2": (
        "<｜DSML｜function_calls>",
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="',
        '">\n',
    ),
}
WITHOUT = {"google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct", "llama-cpp-rwkv-world"}
CITY = {"type": "string", "description": "Its name"}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}]
ARGUMENTS = ({"city": 'Köln "{}]\n  <b>'}, {"city": "", "days": 2})


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, TextTokenizer]:
    names = {*VOCABULARIES.values(), "qwen3"}
    return {name: load_tokenizer(artefact(name) / "tokenizer.json") for name in names}


def templates() -> list[Path]:
    published = sorted(artefact("llama.cpp-templates").glob("*.jinja"))
    return [*published, *(f for f in sorted(artefact("templates").glob("*.jinja")) if "_training" not in f.name)]


def reply_of(template: ChatTemplate, tokenizer: TextTokenizer, form: CallForm, count: int) -> str:
    """The text that a template writes for a reply with calls."""
    calls = [
        {"id": "abc12345" + str(i), "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for i, arguments in enumerate(ARGUMENTS[:count])
    ]
    asked: dict[str, Any] = {"role": "user", "content": "Is it warm?"}
    text = template.text(
        tokenizer, [asked, {"role": "assistant", "content": "", "tool_calls": calls}], False, tools=TOOLS
    )
    return text[text.rindex("Is it warm?") + len("Is it warm?") :]


def test_forms_of_published_templates(vocabularies: dict[str, TextTokenizer]) -> None:
    found, read = dict[str, CallForm](), 0
    for file in templates():
        family = next((v for start, v in VOCABULARIES.items() if file.name.startswith(start)), "qwen3")
        tokenizer = vocabularies[family]
        template = ChatTemplate(
            {"default": file.read_text(encoding="utf-8")}, {"bos_token": "<s>", "eos_token": "</s>"}
        )
        form = learn(template, tokenizer)
        if form is None:
            continue
        found[file.stem] = form
        for count in (1, 2) if form.separator else (1,):
            reply = reply_of(template, tokenizer, form, count)
            for size in (1, len(reply)):
                reader = CallReader(form, ["weather"], True, {"weather": SCHEMA})
                events = [e for at in range(0, len(reply), size) for e in reader.push(reply[at : at + size])]
                _, calls = read_calls([*events, *reader.push("", last=True)])
                got = [json.loads(call["function"]["arguments"]) for call in calls]
                assert got == list(ARGUMENTS[:count]), (file.name, reply, got)
                read += 1
    assert {
        name: (form.head, form.before, form.between) for name, form in found.items() if name in FAMILIES
    } == FAMILIES
    assert not WITHOUT & set(found) and len(found) > 63 and read > 230, (len(found), read, sorted(found))
    kinds = [type(form.fields) for form in found.values()]
    assert kinds.count(Fields) > 20 and kinds.count(Literals) > 12


def test_grammars_of_published_templates(vocabularies: dict[str, TextTokenizer]) -> None:
    """What a template writes of a call is what its grammar takes, special tokens included."""
    tool = Tool.model_validate(TOOLS[0])
    for name, family in (
        ("meta-llama-Llama-3.1-8B-Instruct", "llama3.1"),
        ("Qwen-Qwen3-0.6B", "qwen3"),
        ("Qwen3-Coder", "qwen3"),
        ("GLM-4.6", "qwen3"),
        ("deepseek-ai-DeepSeek-V3.2", "deepseek-v3"),
    ):
        tokenizer = vocabularies[family]
        file = artefact("llama.cpp-templates") / f"{name}.jinja"
        form = learn(ChatTemplate({"default": file.read_text(encoding="utf-8")}, {"bos_token": ""}), tokenizer)
        assert form is not None
        end = max(tokenizer.specials.values())
        grammars = Grammars(tokenizer, [end], tokenizer.vocab_size)
        for arguments, right in (('{"city": "Rome"}', True), ('{"days": 1}', False), ('{"city": 1}', False)):
            if form.fields is not None:
                if not right and "city" in arguments:
                    continue  # every text is one
                ((key, value),) = json.loads(arguments).items()
                of = form.fields
                assert isinstance(of, Fields)
                arguments = f"{of.before}{key}{of.kind[0]}{of.kinds[0]}{of.kind[1]}{value}{of.after}"
            constraint = grammars.compile("lark", grammar(Tools([tool], form, None, forced=True), tokenizer))
            text = f"{form.before}weather{form.between}{arguments}{form.after}"
            ids = tokenizer.encode(text.lstrip(), "text")
            assert all(map(constraint.accept, ids)) == right, (name, text)


def test_tags_of_thoughts_in_published_templates(vocabularies: dict[str, TextTokenizer]) -> None:
    tokenizer, found = vocabularies["llama3.1"], {}
    for file in templates():
        template = ChatTemplate({"default": file.read_text(encoding="utf-8")}, {"bos_token": "<s>"})
        if (tags := thoughts.learn(template, tokenizer)) is not None:
            begun = tags.begun(template.text(tokenizer, [{"role": "user", "content": "Hi"}]))
            found[file.stem] = (tags.open, tags.close, begun)
    think = ("<think>", "</think>")
    assert found["Qwen-Qwen3-0.6B"] == (*think, False) and found["llama-cpp-deepseek-r1"] == (*think, True)
    assert found["qwen3_5_think"] == (*think, True) and found["qwen3_5_nothink"] == (*think, False)
    assert found["ByteDance-Seed-OSS"] == ("<seed:think>", "</seed:think>", False)
    assert found["mistralai-Ministral-3-14B-Reasoning-2512"] == ("[THINK]", "[/THINK]", False)
    assert len(found) > 45 and not (WITHOUT - {"llama-cpp-rwkv-world"}) & set(found), sorted(found)


def test_templates_of_published_models_without_tools(smollm2: Path) -> None:
    tokenizer = find_tokenizer(smollm2, 49152)
    assert learn(template_in(smollm2, tokenizer), tokenizer) is None
    for name in ("gemma3", "llama3.1"):
        folder = artefact(name)
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        assert learn(template_in(folder, tokenizer), tokenizer) is None
    folder = artefact("qwen3")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    form = learn(template_in(folder, tokenizer), tokenizer)
    assert form is not None and (form.head, form.before, form.between) == HERMES
