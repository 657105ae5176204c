"""Published chat templates: ids equal to those of transformers' apply_chat_template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.world.artefacts import artefact
from tinyforge.errors import UserError
from tinyforge.formats import convert, open_model
from tinyforge.formats.tokenizers import find_tokenizer, published_files, template_in
from tinyforge.tokenizers import load_tokenizer
from tinyforge.tokenizers.chat_templates import ChatTemplate
from tinyforge.tokenizers.huggingface import to_huggingface

SYSTEM = {"role": "system", "content": "Answer in one word.\n"}
ASKED = [{"role": "user", "content": "  What is the capital of France?\n\nSay it — café, 東京, 🤗. "}]
TURNS = [
    {"role": role, "content": f"{text} {number}: <b>{number * 7}</b>."}
    for number in range(5)
    for role, text in (("user", "Question"), ("assistant", "<think>\nHm.\n</think>\n\nAnswer"))
][:-1]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}
CALLED = [
    {"role": "user", "content": "Is it warm?"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call12345", **CALL}]},
    {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": '{"warm": true, "sky": "<blue>"}'},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "It says so."},
    {"role": "user", "content": "And now?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city, in °C.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
DOCUMENTS = [{"title": "A", "text": "The <i>first</i> one."}, {"title": "B", "text": "Another."}]


def requests() -> Iterator[tuple[list[dict[str, Any]], bool, dict[str, Any]]]:
    """Messages, whether a reply is to come, and variables."""
    for messages in (ASKED, [SYSTEM, *ASKED], TURNS, [SYSTEM, *TURNS], TURNS[:-1], CALLED, [SYSTEM, *CALLED]):
        for reply_to_come in (True, False):
            for thinking in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
                for more in ({}, {"tools": TOOLS}):
                    yield messages, reply_to_come, {**thinking, **more}
    yield ASKED, True, {"documents": DOCUMENTS}
    yield [*ASKED, *ASKED], True, {}
    yield TURNS[1:], True, {}


def differing(ours: ChatTemplate, tokenizer: Any, theirs: Any, source: str | None = None) -> list[str]:
    """The requests whose ids differ, or that one side refuses and the other does not."""
    import jinja2

    wrong, equal = [], 0
    for messages, reply_to_come, variables in requests():
        expected: Any = None
        options = {"tokenize": True, "return_dict": False, **variables}
        with suppress(jinja2.TemplateError, TypeError):
            expected = theirs.apply_chat_template(
                messages, chat_template=source, add_generation_prompt=reply_to_come, **options
            )
        try:
            got = ours.encode_messages(tokenizer, messages, reply_to_come, **variables)
        except UserError:
            got = None
        equal += got == expected is not None
        if got != expected:
            wrong.append(
                f"{variables} {messages}: {got and tokenizer.decode(got)!r}, {expected and theirs.decode(expected)!r}"
            )
    assert equal > 10, wrong[:1]
    return wrong


@pytest.fixture(scope="session")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the peer is transformers")


@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "gemma3", "deepseek-v3"])
def test_published_directories(name: str, transformers: Any) -> None:
    folder = artefact(name)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ours = template_in(folder, tokenizer)
    assert isinstance(ours, ChatTemplate)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.chat_template = ours.source()
    assert not (wrong := differing(ours, tokenizer, theirs)), f"{len(wrong)}, first {wrong[0]}"


def test_smollm2s_file(smollm2: Path, transformers: Any, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(smollm2, 49152)
    ours = template_in(smollm2, tokenizer)
    assert isinstance(ours, ChatTemplate) and "named SmolLM" in ours.source()
    (tmp_path / "tokenizer.json").write_text(json.dumps(to_huggingface(tokenizer, recognise_specials=True)))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), **ours.tokens, chat_template=ours.source()
    )
    assert not (wrong := differing(ours, tokenizer, theirs)), f"{len(wrong)}, first {wrong[0]}"
    specials = tokenizer.specials
    assert ours.end_id(tokenizer) == specials["<|im_end|>"] and ours.stop_ids(tokenizer) == {specials["<|im_end|>"]}


VOCABULARIES = {"gptoss": "gpt-oss", "llama3": "llama3.1", "deepseek": "deepseek-v3", "gemma": "gemma3"}


def test_the_templates_of_trl(transformers: Any) -> None:
    """Each with the vocabulary of its family where that is here, else with Qwen 3's."""
    files = sorted(artefact("templates").glob("*.jinja"))
    assert len(files) > 50
    known: dict[str, tuple[Any, Any, Any]] = {}
    wrong = {}
    for file in files:
        family = next((v for start, v in VOCABULARIES.items() if file.name.startswith(start)), "qwen3")
        if family not in known:
            folder = artefact(family)
            tokenizer = load_tokenizer(folder / "tokenizer.json")
            theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            known[family] = tokenizer, theirs, theirs.special_tokens_map
        tokenizer, theirs, tokens = known[family]
        source = file.read_text(encoding="utf-8")
        if found := differing(ChatTemplate({"default": source}, tokens), tokenizer, theirs, source):
            wrong[file.name] = f"{len(found)}, first {found[0][:1500]}"
    assert not wrong, wrong


# --- there and back -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def qwen3_directory(tmp_path_factory: pytest.TempPathFactory, transformers: Any) -> Path:
    """A small Qwen 3 of random weights with the published tokenizer and template."""
    folder = tmp_path_factory.mktemp("qwen3")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 151_936}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
    config = transformers.Qwen3Config(**shape, **heads, tie_word_embeddings=True, eos_token_id=[151_645, 151_643])
    model = transformers.Qwen3ForCausalLM(config)
    model.generation_config.update(eos_token_id=[151_645, 151_643], pad_token_id=151_643, do_sample=True, top_k=20)
    model.save_pretrained(folder)
    for file in artefact("qwen3").iterdir():
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("name", ["smollm2_directory", "qwen3_directory"])
@pytest.mark.parametrize("through", ["", "tinyforge"])
def test_a_directory_comes_back_as_it_was(
    name: str, through: str, request: pytest.FixtureRequest, tmp_path: Path, transformers: Any
) -> None:
    source = target = request.getfixturevalue(name)
    if through:
        assert convert.main([str(source), str(target := tmp_path / "ours"), "--format", through]) == 0
    assert convert.main([str(target), str(tmp_path / "back")]) == 0
    files = published_files(source)
    assert {"tokenizer.json", "tokenizer_config.json"} < set(files)
    assert published_files(tmp_path / "back") == files
    ours = open_model(tmp_path / "back")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert isinstance(ours.template, ChatTemplate)
    assert not (wrong := differing(ours.template, ours.tokenizer, theirs)), f"{len(wrong)}, first {wrong[0]}"
