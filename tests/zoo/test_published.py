"""`python -m models show PATH`: what a trained model's files say, for each format, with and without a tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.formats.test_huggingface import TINY, write
from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import convert, open_model
from tinyforge.models.nanoeuler import SPEC
from tinyforge.zoo.command import main
from tinyforge.zoo.published import stored_types

FP32 = get_backend("numpy", "fp32", workers=1)
assert SPEC.bundled is not None
SMALL = SPEC.bundled


def shown(path: str | Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The lines of the command, by their labels; those without one belong to the label before."""
    capsys.readouterr()
    assert main(["show", str(path)]) == 0
    found: dict[str, str] = {}
    label = "name"
    for line in capsys.readouterr().out.splitlines():
        label = line[:14].strip() or label if line[14:15] == " " else label
        found[label] = f"{found[label]}\n{line[15:]}" if label in found else line[15:] if label != "name" else line
    return found


def test_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    found, config = shown("small", capsys), SPEC.presets["small"]
    opened = open_model(SMALL)
    count = opened.build(FP32).model.buffer.count
    assert found["architecture"].startswith("NanoEuler: ") and f"layers {config.layers}" in found["architecture"]
    assert found["parameters"] == f"{count:,}"
    assert found["stored"] == f"bf16: 27 tensors, {count:,} numbers, {2 * count:,} bytes, 16 bits a number"
    assert found["context"] == f"{config.context} tokens"
    assert found["vocabulary"] == f"{config.vocab} ids, {opened.tokenizer.vocab_size} of them tokens"
    assert found["tokenizer"] == "byte-level BPE, 2 special tokens"
    assert found["template"] == "alpaca, built in" and "</s> (511)" in found["ends of text"]
    assert f"weights {4 * count / 1e6:.1f} MB in fp32, {2 * count / 1e6:.1f} MB in bf16" in found["memory"]
    each = 2 * config.layers * config.kv_heads * (config.dim // config.heads) * 4
    assert f"; {each:,} bytes for each token of a text" in found["memory"]


def test_a_gguf_file_and_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, folder = tmp_path / "small.gguf", tmp_path / "folder"
    convert.main([str(SMALL), str(packed), "--type", "q8_0"])
    convert.main([str(SMALL), str(folder), "--dtype", "bf16"])
    stored = stored_types(packed)
    assert stored["q8_0"][2] == stored["q8_0"][1] // 32 * 34
    assert all(f"{kind}: {number} tensor" in shown(packed, capsys)["stored"] for kind, (number, _, _) in stored.items())
    assert "in all " in shown(packed, capsys)["stored"]
    for path in (packed, folder):
        found = shown(path, capsys)
        assert found["architecture"].startswith("Llama (LlamaForCausalLM): ")
        assert found["tokenizer"].startswith("byte-level BPE") and "</s> (511)" in found["ends of text"]
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message.content }}{% endfor %}" * 9)
    found = shown(folder, capsys)
    assert found["generation"] == "temperature 0.25, top_k 7"
    assert found["template"].startswith("its own, default, ") and found["template"].endswith("...")
    assert "\n" not in found["template"]


def test_a_model_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "bare")
    convert.main([str(SMALL), str(tmp_path / "alone.bin")])
    (tmp_path / "tok512.json").unlink()
    for path, vocab, why in (("bare", TINY.vocab, "the model takes ids"), ("alone.bin", 512, ".*no tokenizer next to")):
        found = shown(tmp_path / path, capsys)
        assert found["parameters"] and found["vocabulary"] == f"{vocab} ids" and "template" not in found
        assert re.match(f"none: {why}", found["tokenizer"])


def test_what_cannot_be_shown(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown model 'nosuch'; known: nanoeuler"):
        main(["show", "nosuch"])
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        main(["show", "no/such"])
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    (tmp_path / "model.safetensors").write_bytes((SMALL / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="architecture 'Other'; supported: "):
        main(["show", str(tmp_path)])


def test_optimizer_states_are_not_weights(tmp_path: Path) -> None:
    for file in SMALL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "optimizer.safetensors").write_bytes((SMALL / "model.safetensors").read_bytes())
    assert checkpoint.latest(tmp_path) == tmp_path
    assert stored_types(tmp_path) == stored_types(SMALL)
