"""The files of a published tokenizer: kept to the byte by conversions, and what tuning changes in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.tokenizers.test_sentencepiece import train
from tinyforge import chat
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import average, convert, load, open_model, save_pretrained
from tinyforge.formats.gguf_file import read as read_gguf
from tinyforge.models.llama import Config, Llama
from tinyforge.recipes import dpo, grpo, sft
from tinyforge.tensors import read_header
from tinyforge.tokenizers import Tokenizer, load_tokenizer
from tinyforge.tokenizers.chat_templates import TEMPLATES, ChatTemplate
from tinyforge.zoo.push import prepared

FP32 = get_backend("numpy", "fp32", workers=1)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENIZER = Tokenizer.train(["Say 1. It is 1. No 1"] * 9, 262, SPECIALS)
TEXT_END, TURN_END = TOKENIZER.specials["<|endoftext|>"], TOKENIZER.specials["<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "add_prefix_space": False,
    "bos_token": None,
    "chat_template": [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools|tojson }}"}],
    "eos_token": {"content": "<|endoftext|>", "lstrip": False, "normalized": False, "special": True},
    "model_max_length": 1000000000000000019884624838656,
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "GPT2Tokenizer",
}
GENERATION = {
    "_from_model_config": True,
    "eos_token_id": [TEXT_END, TURN_END],
    "temperature": 0.6,
    "pad_token_id": TEXT_END,
}
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A published chat model, whose tokenizer.json has settings that ours would not write."""
    monkeypatch.chdir(tmp_path)
    model = Llama(Config(dim=8, heads=2, kv_heads=1, layers=1, context=128, vocab=264, hidden=8), FP32)
    model.initialise(0)
    save_pretrained(model, TOKENIZER, tmp_path / "base")
    tokenizer = json.loads((tmp_path / "base/tokenizer.json").read_text())
    for name, content in {
        "tokenizer.json": {**tokenizer, "padding": None, "truncation": None, "more": 1},
        "tokenizer_config.json": CONFIG,
        "special_tokens_map.json": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        "generation_config.json": GENERATION,
    }.items():
        (tmp_path / "base" / name).write_text(json.dumps(content, separators=(" ,", ": ")))
    return tmp_path / "base"


def same(left: Path, right: Path, *names: str) -> bool:
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in names or FILES)


def test_conversions_keep_every_byte(base: Path, tmp_path: Path) -> None:
    assert convert.main([str(base), str(tmp_path / "again")]) == 0
    assert convert.main([str(base), str(tmp_path / "ours"), "--format", "tinyforge"]) == 0
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert same(base, tmp_path / "again") and same(base, tmp_path / "back")
    found = open_model(tmp_path / "ours")
    assert isinstance(found.template, ChatTemplate) and found.template.sources["default"] == CHATML
    assert found.template.ends == (TEXT_END, TURN_END) and found.generation.content == GENERATION


def test_a_generation_config_that_was_edited_since_is_the_one_that_is_written(base: Path, tmp_path: Path) -> None:
    assert convert.main([str(base), str(tmp_path / "ours"), "--format", "tinyforge"]) == 0
    (tmp_path / "ours/generation_config.json").write_text('{"top_k": 3}')
    assert convert.main([str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back/generation_config.json").read_text()) == {"top_k": 3}


RECORDS = [{"instruction": f"Say {i}", "input": "", "output": f"It is {i}"} for i in range(40)]
PAIRS = [{"instruction": f"Say {i}", "input": "", "chosen": f"It is {i}.", "rejected": f"No {i}"} for i in range(40)]


def tune(recipe: Any, records: Any, *flags: str) -> None:
    Path("data.json").write_text(json.dumps(records))
    command = ["--base", "base", "--data", "data.json", "--steps", "2", "--batch-size", "2", "--out", "run", *flags]
    recipe.main(command)


@pytest.mark.parametrize(("recipe", "records"), [(sft, RECORDS), (dpo, PAIRS), (grpo, RECORDS)])
@pytest.mark.parametrize("lora", [False, True])
def test_a_tuned_model_keeps_its_template_and_ends_as_it_learned(
    base: Path, tmp_path: Path, recipe: Any, records: Any, lora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(recipe, records, *(["--lora", "2"] * lora), *(["--cache", "cache"] * (recipe is dpo)))
    assert "chat template: the base's own" in capsys.readouterr().out
    found = load(Path("run"), FP32)
    assert isinstance(found.template, ChatTemplate) and found.template.sources["default"] == CHATML
    assert found.template.end_id(found.tokenizer) == TURN_END
    assert convert.main(["run", "out"]) == 0
    # What replies end with was not the tokenizer's end of text: now it is, in every file.
    assert same(base, Path("out"), "tokenizer.json", "generation_config.json")
    read = {name: json.loads(Path("out", name).read_text()) for name in FILES}
    assert read["tokenizer_config.json"] == {**CONFIG, "eos_token": "<|im_end|>"}
    assert read["special_tokens_map.json"] == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"][0] == TURN_END
    assert convert.main(["run", "m.gguf"]) == 0
    stored = read_gguf(Path("m.gguf")).metadata
    assert stored["tokenizer.ggml.eos_token_id"] == TURN_END and stored["tokenizer.ggml.padding_token_id"] == TEXT_END
    assert stored["tokenizer.chat_template"] == CHATML
    assert stored["tokenizer.chat_template.tool_use"] == "{{ tools|tojson }}"
    again = open_model(Path("m.gguf")).template
    assert isinstance(again, ChatTemplate) and again.sources == found.template.sources


def test_a_mean_and_a_model_for_the_hub_keep_the_files_too(base: Path, tmp_path: Path) -> None:
    assert average.main(["base", "base", "mean"]) == 0
    assert convert.main(["mean", "back"]) == 0
    assert same(base, Path("back"))
    tune(sft, RECORDS)
    assert convert.main(["run", "out"]) == 0
    assert same(prepared(Path("run"), "owner/name", tmp_path), Path("out"))


def test_another_template_takes_the_place_of_the_published_one(base: Path, tmp_path: Path) -> None:
    (base / "chat_template.jinja").write_text(CHATML)
    tune(sft, RECORDS, "--template", "alpaca")
    assert load(Path("run"), FP32).template is TEMPLATES["alpaca"]
    assert convert.main(["run", "out"]) == 0
    config = json.loads(Path("out/tokenizer_config.json").read_text())
    assert "chat_template" not in config and config["pad_token"] == "<|endoftext|>"
    assert "### Instruction:" in Path("out/chat_template.jinja").read_text()
    assert open_model(Path("out")).template is TEMPLATES["alpaca"]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_the_types_of_a_chat_template(base: Path, file: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "chat_template"}
    (base / "tokenizer_config.json").write_text(json.dumps(config))

    def read(given: Any) -> Any:
        (base / file).write_text(
            json.dumps({**(config if file != "chat_template.json" else {}), "chat_template": given})
        )
        return open_model(base).template

    tool = "{{ tools|tojson }}"
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": tool}]
    for given in ({"default": CHATML, "tool_use": tool}, named):
        assert read(given).sources == {"default": CHATML, "tool_use": tool}
    assert read(CHATML).source() == CHATML
    for nothing in (None, [], {}):
        assert read(nothing) is TEMPLATES["plain"]
    for wrong, named_as in (
        (5, "chat_template is 5"),
        (["x"], r"chat_template is \['x'\]"),
        ({"rag": 5}, "the chat template 'rag' is 5"),
        ([{"name": "rag"}], "the chat template 'rag' is None"),
    ):
        with pytest.raises(UserError, match=rf"{file}: {named_as}, expected a text"):
            read(wrong)


def test_the_note_names_the_template_in_use(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.jinja").write_text(CHATML)
    for flags, named in (((), "the model's own"), (("--template", "my.jinja"), "my.jinja")):
        assert chat.main(["--checkpoint", "base", "--prompt", "Hi", "--max-tokens", "2", *flags]) == 0
        assert f"note: chat template: {named}" in capsys.readouterr().err


def test_a_base_without_a_template_says_which_it_learns(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (base / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": None}))
    assert open_model(base).template is TEMPLATES["plain"]
    tune(sft, RECORDS)
    assert "chat template: the base has none; learning alpaca, another with --template" in capsys.readouterr().out
    tune(sft, RECORDS, "--out", "other", "--template", "chatml")
    assert convert.main(["other", "out"]) == 0
    assert json.loads(Path("out/tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert json.loads(Path("out/generation_config.json").read_text()) == GENERATION


def test_tokens_added_to_a_sentencepiece_model_in_other_files(base: Path, tmp_path: Path) -> None:
    """As chat models before 2024: tokenizer.model is the base's, the tokens of ChatML are listed elsewhere."""
    plain = train(base / "tokenizer.model", vocab_size=300)
    (base / "tokenizer.json").unlink()
    own = load_tokenizer(base / "tokenizer.model").vocab_size
    config = json.loads((base / "config.json").read_text()) | {"vocab_size": own + 3}
    stored = read_header(base / "model.safetensors")
    tensors = {name: tensor.read() for name, tensor in stored.items()}
    for name, value in tensors.items():
        if value.shape[:1] == (264,):
            tensors[name] = np.resize(value, (own + 3, *value.shape[1:]))
    save_file(tensors, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps(config))
    (base / "added_tokens.json").write_text(json.dumps({"<|im_end|>": own, "<tool>": own + 2, "<|im_start|>": own + 1}))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = CONFIG | {"eos_token": "<|im_end|>", "bos_token": "<s>", "unk_token": "<unk>", "pad_token": None}
    settings |= {"tokenizer_class": "LlamaTokenizer", "legacy": True}
    settings["added_tokens_decoder"] = {str(own + 1): {"content": "<|im_start|>", **flags}}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "special_tokens_map.json").unlink()
    found = open_model(base)
    assert found.tokenizer.specials.items() >= {"<|im_end|>": own, "<|im_start|>": own + 1}.items()
    assert found.tokenizer.user_defined == {"<tool>": own + 2}
    assert found.tokenizer.encode("a<tool>the end") == [*plain.encode("a"), own + 2, *plain.encode("the end")]
    assert isinstance(found.template, ChatTemplate)
    ids = found.template.encode_messages(found.tokenizer, [{"role": "user", "content": "two <tool>"}])
    assert [id for id in ids if id >= own] == [own + 1, own + 2, own, own + 1]
    assert found.template.stop_ids(found.tokenizer) >= {own}
    (base / "added_tokens.json").write_text(json.dumps({"<far>": own + 40}))
    with pytest.raises(UserError, match="add the tokens .*<far>.* to a tokenizer of"):
        open_model(base)


def test_every_end_of_a_reply_in_gguf(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for ends in ([TEXT_END, TURN_END], [TEXT_END, TURN_END, 7], [TEXT_END, TURN_END, 7, 8]):
        (base / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        capsys.readouterr()
        assert convert.main([str(base), f"{len(ends)}.gguf"]) == 0
        assert ("left out: ends of text: 8; GGUF has 3" in capsys.readouterr().err) == (len(ends) == 4)
        stored = read_gguf(Path(f"{len(ends)}.gguf")).metadata
        assert [stored.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")][: len(ends)] == ends[
            :3
        ]
        found = open_model(Path(f"{len(ends)}.gguf"))
        assert found.template.stop_ids(found.tokenizer) >= {*ends[:3]}


def test_tokenizers_that_gguf_cannot_hold(base: Path) -> None:
    content = json.loads((base / "tokenizer.json").read_text()) | {"normalizer": {"type": "NFKC"}}
    del content["more"]
    (base / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="only the package tokenizers reads, .*use --format hf"):
        convert.main([str(base), "m.gguf"])
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (base / name).unlink()
    assert not Path("m.gguf").exists()
    assert convert.main([str(base), "m.gguf"]) == 0  # a model that takes ids
    assert read_gguf(Path("m.gguf")).metadata["tokenizer.ggml.model"] == "none"
    assert open_model(Path("m.gguf")).tokenizer.vocab_size == open_model(base).config.vocab


def test_the_special_ids_of_an_untuned_model(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    given = {"bos_token_id": TEXT_END, "eos_token_id": TURN_END, "pad_token_id": TEXT_END}
    (base / "config.json").write_text(json.dumps(config | given))
    assert convert.main([str(base), "again"]) == 0
    assert convert.main([str(base), "ours", "--format", "tinyforge"]) == 0
    assert convert.main(["ours", "back"]) == 0
    for path in ("again", "back"):
        assert json.loads(Path(path, "config.json").read_text()).items() >= given.items()
    # A .gguf file has them with its tokenizer.
    settings = CONFIG | {"bos_token": "<|endoftext|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    assert convert.main([str(base), "m.gguf"]) == 0
    assert convert.main(["m.gguf", "of-gguf"]) == 0
    expected = given | {"eos_token_id": [TEXT_END, TURN_END]}
    assert json.loads(Path("of-gguf/config.json").read_text()).items() >= expected.items()


def test_numbers_of_a_generation_config_that_cannot_be(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"eos_token_id": [TURN_END, 99_999, -1], "max_length": 10**30}
    (base / "generation_config.json").write_text(json.dumps(content))
    template = open_model(base).template
    assert isinstance(template, ChatTemplate) and template.ends == (TURN_END,)
    assert "eos_token_id [99999, -1]: the model has no such id" in capsys.readouterr().err
    (base / "generation_config.json").write_text(json.dumps({"top_k": 10**30}))
    with pytest.raises(UserError, match="top_k is 1000.*, expected a whole number"):
        open_model(base)


def test_ends_that_are_not_special_tokens(base: Path, tmp_path: Path) -> None:
    """As "special": false has them in tokenizer.json, and USER_DEFINED in GGUF: both end replies, and stay."""
    content = json.loads((base / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = token["content"] == "<|endoftext|>"
    (base / "tokenizer.json").write_text(json.dumps(content))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": TEXT_END}))
    config = {**CONFIG, "chat_template": CHATML}
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    (base / "special_tokens_map.json").unlink()
    assert convert.main([str(base), str(tmp_path / "out.gguf")]) == 0
    for path in (base, tmp_path / "out.gguf"):
        found = open_model(path)
        assert "<|im_end|>" in found.tokenizer.user_defined and found.template.end_id(found.tokenizer) == TURN_END
        assert found.template.stop_ids(found.tokenizer) == {TEXT_END, TURN_END}
    tune(sft, RECORDS)
    assert convert.main(["run", "out"]) == 0
    assert json.loads(Path("out/tokenizer_config.json").read_text()) == {**config, "eos_token": "<|im_end|>"}
    assert json.loads(Path("out/generation_config.json").read_text())["eos_token_id"][0] == TURN_END
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"][0] == TURN_END
    assert convert.main(["run", "run.gguf"]) == 0
    assert "<|im_end|>" in Path("run.Modelfile" if Path("run.Modelfile").exists() else "Modelfile").read_text()
