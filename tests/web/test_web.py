"""The folder that `tinyforge web` writes; tests/browser/test_web.py opens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.web.models import CHATML, tiny
from tinyforge import checkpoint
from tinyforge.errors import UserError
from tinyforge.formats import resolve_checkpoint
from tinyforge.tensors import read_entries
from tinyforge.tokenizers.chat_templates import TEMPLATES, ChatTemplate
from tinyforge.web.__main__ import PART, main
from tinyforge.web.conversation import encode, fixed_parts


def written(out: Path, checkpoint: str, *more: str) -> tuple[dict[str, Any], bytes]:
    """The manifest, and the weights."""
    main([str(out), "--checkpoint", checkpoint, *more])
    manifest = json.loads((out / "model.json").read_text())
    return manifest, b"".join((out / part["file"]).read_bytes() for part in manifest["parts"])


def test_the_weights_are_the_checkpoints_codes_and_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, data = written(tmp_path / "site", "storyteller")
    assert "storyteller, 16." in capsys.readouterr().out and len(manifest["parts"]) == 2
    assert all(part["bytes"] == (tmp_path / "site" / part["file"]).stat().st_size <= PART for part in manifest["parts"])
    stored = read_entries(resolve_checkpoint("storyteller") / "model.safetensors")
    names = {"embedding": "embedding.weight", "head": "heads.weight"}
    names |= {
        f"{i}.{name}": f"blocks.{i}.{name}.weight" for i in range(8) for name in ("qkv", "out", "gate_up", "down")
    }
    for ours, theirs in names.items():
        place, tensor = manifest["tensors"][ours], stored[theirs]
        rows, columns = place["shape"]
        raw = np.fromfile(tensor.file, np.int8, rows * columns, offset=tensor.start).reshape(rows, columns)
        assert np.array_equal(np.frombuffer(data, np.int8, rows * columns, place["at"]).reshape(rows, columns), raw)
        scales = np.frombuffer(data, np.float32, rows, place["scales"])
        np.testing.assert_allclose(scales, stored[f"{theirs}_scale"].read().reshape(-1)[:rows], rtol=2e-7)
    assert len(manifest["tensors"]) == len(names) + 3 + 16  # cos, sin, and the norms


def test_nothing_is_fetched_from_elsewhere(tmp_path: Path) -> None:
    """No address of another host, and no code from text, in any file of the page."""
    manifest, _ = written(tmp_path / "site", "small")
    policy = (tmp_path / "site/index.html").read_text().partition('content="default-src')[2].partition('">')[0]
    assert policy.startswith(" 'none'") and "http" not in policy and "unsafe" not in policy
    for file in (tmp_path / "site").iterdir():
        if file.suffix in (".js", ".css", ".html"):
            text = file.read_text().replace("http://www.w3.org/2000/svg", "").replace("http://localhost", "")
            assert "://" not in text and "eval(" not in text and "innerHTML" not in text, file.name
    listed = json.loads((tmp_path / "site/sw.js").read_text().partition("FILES = ")[2].partition(";")[0])
    others = {part["file"] for part in manifest["parts"]} | {"sw.js"}
    assert set(listed) == {"./"} | {file.name for file in (tmp_path / "site").iterdir()} - others


def test_a_tied_head_is_written_once_and_the_context_is_cut(tmp_path: Path) -> None:
    tiny(tmp_path / "model")
    manifest, data = written(tmp_path / "site", str(tmp_path / "model"), "--context", "20", "--name", "tiny")
    assert "head" not in manifest["tensors"] and manifest["name"] == "tiny"
    assert manifest["shape"]["context"] == manifest["about"]["context"] == 20
    assert manifest["tensors"]["cos"]["shape"] == [20, 4]
    with pytest.raises(UserError, match="--context is 15, expected 16 or more"):
        main([str(tmp_path / "other"), "--checkpoint", "small", "--context", "15"])


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    tiny(tmp_path / "windowed", window=3, qk_norm=True)
    tiny(tmp_path / "odd", dim=18, heads=3, kv_heads=1, head_dim=6, rotary_dim=0)
    tiny(tmp_path / "normed", name="nanoeuler", qk_scale="learned")
    tiny(tmp_path / "gpt", name="gpt2", dim=16, heads=2, layers=1)
    for name, says in (
        ("windowed", "windowed is a Llama with qk_norm, window; the page runs"),
        ("normed", "normed is a NanoEuler with qk_scale; the page runs"),
        ("odd", "4 does not divide"),
        ("gpt", "gpt is a GPT-2; the page runs"),
    ):
        with pytest.raises(UserError, match=says):
            main([str(tmp_path / "site"), "--checkpoint", str(tmp_path / name)])
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        main([str(tmp_path / "there"), "--checkpoint", "small"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        main([str(tmp_path / "file" / "site"), "--checkpoint", "small"])
    assert not list(tmp_path.glob(".partial*")) and not (tmp_path / "site").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tinyforge.web.__main__.write_page", full)
    with pytest.raises(UserError, match="No space left"):
        main([str(tmp_path / "site"), "--checkpoint", "small"])
    assert list(tmp_path.iterdir()) == []


SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
TRIMS = CHATML.replace("m['content']", "m['content'] | trim")
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
COUNTS = CHATML.replace("{{ m['content'] }}", "{{ loop.index }}{{ m['content'] }}")


@pytest.mark.parametrize("source", [CHATML, SYSTEM, TRIMS, REFUSES], ids=["chatml", "own system", "trims", "refuses"])
def test_a_template_as_fixed_parts(source: str, tmp_path: Path) -> None:
    loaded = tiny(tmp_path / "model", ChatTemplate({"default": source}, {"eos_token": "<|im_end|>"}))
    parts = fixed_parts(loaded)
    assert parts["ends"] == [258] and parts["strips"] is (source is TRIMS)
    assert (parts["system"] is None) is (source is REFUSES)
    turns = [("a", "b\nc"), ("<|im_end|> d ", "e"), ("f", None)]
    for system in ("", "Be brief.") if source is not REFUSES else ("",):
        expected = loaded.template.encode(loaded.tokenizer, turns, system)
        assert encode(loaded.tokenizer, parts, turns, system) == expected


def test_a_template_that_is_no_fixed_parts_is_refused(tmp_path: Path) -> None:
    tiny(tmp_path / "model", ChatTemplate({"default": COUNTS}, {"eos_token": "<|im_end|>"}))
    with pytest.raises(UserError, match="does not write the same parts around every message"):
        main([str(tmp_path / "site"), "--checkpoint", str(tmp_path / "model")])
    main([str(tmp_path / "site"), "--checkpoint", str(tmp_path / "model"), "--template", "chatml"])


def test_the_built_in_templates(tmp_path: Path) -> None:
    for name in ("plain", "chatml"):
        loaded = tiny(tmp_path / name, TEMPLATES[name])
        assert checkpoint.read_meta(tmp_path / name)["template"] == name
        parts, turns = fixed_parts(loaded), [("a", "b"), ("c", None)]
        assert encode(loaded.tokenizer, parts, turns, "s") == loaded.template.encode(loaded.tokenizer, turns, "s")
