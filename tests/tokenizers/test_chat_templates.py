"""Chat templates: their text against the published Jinja programs, and that no user text becomes a special token."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tinyforge.errors import UserError
from tinyforge.tokenizers import Tokenizer
from tinyforge.tokenizers.chat_templates import END_OF_REPLY, TEMPLATES, Special, Template, recognise, render_prompt
from tinyforge.tokenizers.template_formats import jinja, modelfile

# As published, with Qwen2-7B-Instruct, Llama 3 8B Instruct and TinyLlama-1.1B-Chat-v1.0.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
    "}}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
    "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
ALPACA = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] + '\n\n' }}{% elif m['role'] == 'user' %}"
    "{{ '### Instruction:\n' + m['content'] + '\n\n' }}{% else %}{{ '### Response:\n' + m['content'] + '</s>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
PUBLISHED = {"chatml": CHATML, "llama3": LLAMA3, "zephyr": ZEPHYR, "alpaca": ALPACA}

SPECIALS = [
    "<s>",
    "</s>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
TURNS = [("Hello ", "Hi!"), ("  2 + 2?\nNow.", " four\n"), ("Bye", None)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer([(104, 105), (10, 72)], SPECIALS)  # "hi", and "\nH": a merge across the edge of a heading


def written(template: Template, turns: list[tuple[str, str | None]], system: str = "") -> str:
    return "".join(p.text if isinstance(p, Special) else str(p) for p in template.render(turns, system))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_text_equals_the_published_program(name: str, system: str) -> None:
    jinja2 = pytest.importorskip("jinja2")
    program = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(PUBLISHED[name])
    template = recognise(PUBLISHED[name], SPECIALS)
    assert template is not None and template.name == name
    messages = [{"role": "system", "content": system}] if system else []
    for user, reply in TURNS:
        messages += [{"role": "user", "content": user}]
        messages += [{"role": "assistant", "content": reply}] if reply is not None else []
    wanted = program.render(messages=messages, add_generation_prompt=True, bos_token="", eos_token="</s>")
    assert written(template, TURNS, system) == wanted
    prompt = [*([messages[0]] if system else []), {"role": "user", "content": "Hi"}]
    wanted = program.render(messages=prompt, add_generation_prompt=True, bos_token="", eos_token="</s>")
    assert template.prompt("Hi", system) == wanted


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("trimmed", [False, True])
def test_text_equals_the_program_that_is_written(name: str, system: str, trimmed: bool) -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = TEMPLATES[name]
    text = jinja(template)
    program = jinja2.Environment(trim_blocks=trimmed, lstrip_blocks=trimmed).from_string(text)
    messages = [{"role": "system", "content": system}] if system else []
    for user, reply in TURNS:
        messages += [{"role": "user", "content": user}]
        messages += [{"role": "assistant", "content": reply}] if reply is not None else []
    assert program.render(messages=messages, add_generation_prompt=True, eos_token="</s>") == written(
        template, TURNS, system
    )
    found = recognise(text, SPECIALS)
    assert name == "plain" if found is None else found == template


def test_a_default_system_prompt_is_written_too() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = replace(TEMPLATES["chatml"], default_system='Say "yes".')
    for system in ("", "Be brief."):
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": "Hi"})
        text = jinja2.Environment().from_string(jinja(template)).render(messages=messages, add_generation_prompt=True)
        assert text == template.prompt("Hi", system)
    assert 'SYSTEM """Say "yes"."""' in modelfile(template, "m.gguf", [], {"num_ctx": 128})


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_equals_what_ollama_makes_of_the_modelfile(name: str) -> None:
    """As Ollama's template.go: each turn by TEMPLATE, a block of an absent value left out, cut at the reply to come."""
    template = TEMPLATES[name]
    text = modelfile(template, "m.gguf", template.ends, {"num_ctx": 128})
    assert text.startswith("FROM ./m.gguf\n") and text.endswith("PARAMETER num_ctx 128\n")
    assert re.findall(r'PARAMETER stop "(.*)"', text) == list(template.ends)
    found = re.search(r'TEMPLATE """(.*?)"""\n', text, re.DOTALL)
    assert found is not None

    def turn(system: str, prompt: str, response: str | None) -> str:
        made = found[1] if response is not None else found[1][: found[1].index("{{ .Response }}")]
        for field, value in (("System", system), ("Prompt", prompt)):
            block = re.escape(f"{{{{ if .{field} }}}}") + "(.*?)" + re.escape("{{ end }}")
            made = re.sub(block, (lambda match: match[1]) if value else "", made, flags=re.DOTALL)
            made = made.replace(f"{{{{ .{field} }}}}", value)
        return made.replace("{{ .Response }}", response or "")

    turns = [(user.strip(), reply.strip() if reply else None) for user, reply in TURNS]
    for system in ("", "Be brief."):
        made = "".join(turn("" if n else system, user, reply) for n, (user, reply) in enumerate(turns))
        assert made == written(template, turns, system)


def test_a_base_model_goes_on_with_the_text(tokenizer: Tokenizer) -> None:
    plain = TEMPLATES["plain"]
    assert plain.prompt("Once upon") == "Once upon" and plain.end == ""
    assert plain.encode(tokenizer, [("a", "b"), ("c", None)]) == [97, 98, 99]
    assert plain.stop_ids(tokenizer) == frozenset(tokenizer.specials.values())


def test_alpaca_is_what_fine_tuning_trains_on() -> None:
    alpaca = TEMPLATES["alpaca"]
    assert alpaca.prompt("Name it.") == render_prompt("Name it.") and alpaca.end == END_OF_REPLY == "</s>"
    assert render_prompt("Add.", "1 2") == "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"


def test_alpacas_replies_end_as_the_vocabulary_has_it() -> None:
    published = Tokenizer([], ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    end = published.specials["<|endoftext|>"]
    alpaca = TEMPLATES["alpaca"]
    ids = alpaca.encode(published, [("Hello", "Hi!"), ("Bye", None)])
    assert ids.count(end) == 1 and end in alpaca.stop_ids(published)
    with pytest.raises(UserError, match="no special token </s>, nor another to end a reply"):
        alpaca.encode(Tokenizer([], ["<|x|>"]), [("Hello", "Hi!")])


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_user_types_never_becomes_a_special_token(name: str, tokenizer: Tokenizer) -> None:
    template = TEMPLATES[name]
    ids = template.encode(tokenizer, [("x", "y"), ("x", None)], "x")
    harmless = [id for id in ids if id in tokenizer.specials.values()]
    attack = "".join(SPECIALS)
    ids = template.encode(tokenizer, [(attack, attack), (attack, None)], attack)
    assert [id for id in ids if id in tokenizer.specials.values()] == harmless
    assert tokenizer.decode(ids) == written(template, [(attack, attack), (attack, None)], attack)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_beginning_of_the_prompt_with_its_reply(name: str, tokenizer: Tokenizer) -> None:
    template = TEMPLATES[name]
    prompt = template.encode(tokenizer, [("Hello", None)])
    whole = template.encode(tokenizer, [("Hello", "Hi!")])
    assert whole[: len(prompt)] == prompt
    reply = tokenizer.encode("Hi!")
    assert whole[len(prompt) :][: len(reply)] == reply
    # Ids that the model generated stand in the next prompt as they are.
    assert template.encode(tokenizer, [("Hello", [104, 105]), ("x", None)])[len(prompt) :][:2] == [104, 105]
    if template.end:
        assert whole[len(prompt) + len(reply)] == tokenizer.specials[template.end]
        assert tokenizer.specials[template.end] in template.stop_ids(tokenizer)


def test_a_text_begins_with_the_tokenizers_bos(tokenizer: Tokenizer) -> None:
    other = Tokenizer([], SPECIALS)
    other.bos = other.specials["<s>"]
    for template in TEMPLATES.values():
        ids = template.encode(other, [("a", None)])
        assert ids[0] == other.bos and ids.count(other.bos) == 1


def test_recognise() -> None:
    found = recognise(CHATML, SPECIALS)
    assert found is not None and found.default_system == "You are a helpful assistant."
    assert found.prompt("Hi").startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user")
    assert found.prompt("Hi", "Sys").startswith("<|im_start|>system\nSys<|im_end|>\n<|im_start|>user")
    assert recognise(CHATML.replace("\n", "\\n"), SPECIALS) == found  # newlines as escapes of Jinja
    # Not without its special tokens, and not another family with the same headings.
    assert recognise(CHATML, ["</s>"]) is None
    assert recognise(ZEPHYR, ["<|endoftext|>"]) is None
    assert recognise(ZEPHYR.replace("+ eos_token", "+ '<|end|>' + eos_token"), SPECIALS) is None
    assert recognise("{{ '[INST] ' + messages[0]['content'] + ' [/INST]' }}", SPECIALS) is None
    assert recognise("", SPECIALS) is None


def test_a_template_whose_special_token_is_missing() -> None:
    with pytest.raises(UserError, match=r"chatml needs the special token <\|im_start\|>, which the tokenizer does not"):
        TEMPLATES["chatml"].encode(Tokenizer([], ["</s>"]), [("a", None)])
