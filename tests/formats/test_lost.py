"""`convert` names every file, key and tensor that the result does not have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.formats.test_huggingface import edit_config, edit_tensors
from tinyforge.formats import convert
from tinyforge.models.nanoeuler import SPEC

NOTES = Callable[..., list[str]]


@pytest.fixture
def notes(capsys: pytest.CaptureFixture[str]) -> NOTES:
    def converted(source: Path, target: Path, *flags: str) -> list[str]:
        capsys.readouterr()
        assert convert.main([str(source), str(target), *flags]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "left out" in line]

    return converted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with more in it than is read."""
    path = tmp_path / "published"
    assert SPEC.bundled is not None
    convert.main([str(SPEC.bundled), str(path)])
    (path / "onnx").mkdir()
    for name in ("LICENSE", "training_args.bin", "onnx/model.onnx", ".gitattributes"):
        (path / name).write_bytes(b"x")
    edit_config(path, initializer_range=0.02, attention_dropout=0.0)
    inv = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32) for i in range(4)}
    edit_tensors(path, lambda stored: stored.update(inv))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "padding_side": "left"}))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "typical_p": 0.9}))
    return path


def test_a_directory_as_a_directory(folder: Path, tmp_path: Path, notes: NOTES) -> None:
    assert notes(folder, tmp_path / "copy") == [
        "note: left out: tensors: model.layers.*.self_attn.rotary_emb.inv_freq (4)",
        "note: left out: files: .gitattributes, LICENSE, README.md, onnx/model.onnx, training_args.bin",
        "note: left out: keys of config.json: attention_dropout, initializer_range",
    ]
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert not {"attention_dropout", "initializer_range"} & config.keys()
    again = notes(tmp_path / "copy", tmp_path / "again")
    assert again == ["note: left out: files: README.md"]  # which a new one replaces


def test_a_directory_as_a_gguf_file_and_a_checkpoint(folder: Path, tmp_path: Path, notes: NOTES) -> None:
    found = notes(folder, tmp_path / "model.gguf")
    assert "note: left out: keys of generation_config.json: typical_p" in found
    (keys,) = [line for line in found if "tokenizer_config.json" in line]
    assert "padding_side" in keys and "chat_template" not in keys and "eos_token" not in keys
    (keys,) = [line for line in found if "config.json: attention_dropout" in line]
    assert "initializer_range" in keys and "hidden_size" not in keys and "rope_theta" not in keys
    found = notes(folder, tmp_path / "ours", "--format", "tinyforge")
    assert [line for line in found if "tokenizer_config" in line or "generation" in line] == []  # kept as published
    assert any("initializer_range" in line for line in found)


def test_a_gguf_file(tmp_path: Path, notes: NOTES) -> None:
    assert SPEC.bundled is not None
    convert.main([str(SPEC.bundled), str(tmp_path / "a.gguf")])
    assert notes(tmp_path / "a.gguf", tmp_path / "b.gguf") == []
    (line,) = notes(tmp_path / "a.gguf", tmp_path / "copy")
    assert line.startswith("note: left out: keys of the metadata: general.") and "tokenizer.ggml.tokens" not in line


def test_what_a_file_says_in_its_own_way_is_not_lost(folder: Path, tmp_path: Path, notes: NOTES) -> None:
    edit_config(folder, torch_dtype="float32")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["extra_special_tokens"] = config["additional_special_tokens"] = ["<|user|>"]
    config["chat_template"] = [{"name": name, "template": "{{ tools }}"} for name in ("default", "tool_use")]
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for target, flags in (("a.gguf", []), ("ours", ["--format", "tinyforge"]), ("copy", [])):
        found = "\n".join(notes(folder, tmp_path / target, *flags))
        assert "attention_dropout" in found and "special_tokens" not in found
        assert "dtype" not in found and "model_type" not in found
    found = "\n".join(notes(tmp_path / "a.gguf", tmp_path / "back"))
    assert "general." in found and "tool_use" not in found
    assert (tmp_path / "back/additional_chat_templates/tool_use.jinja").read_text() == "{{ tools }}"
