"""docs/models.md is what the registry and docs/results give, and every model has said what the page asks of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.files import read_json
from tinyforge.gradcheck import TOLERANCE
from tinyforge.models.char_mlp import SPEC as CHAR_MLP
from tinyforge.models.llama import PRESETS, Llama
from tinyforge.registry import models, register
from tinyforge.zoo import page

ROOT = Path(__file__).resolve().parents[2]
RECORD = read_json(ROOT / page.RECORD, "the record")


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / page.PAGE).read_text(encoding="utf-8") == page.text(ROOT), "run python -m models page"


@pytest.mark.parametrize("name", models())
def test_every_model_has_what_the_page_asks_of_it(name: str) -> None:
    spec = models()[name]
    missing = [field for field in ("summary", "source", "backward") if not getattr(spec, field)]
    assert missing == [], f"ModelSpec of {name} lacks {missing}; they are shown in docs/models.md"
    assert name in RECORD["ledger"], f"{page.RECORD} lacks {name}; run python -m models record, then page"
    assert 0 < RECORD["ledger"][name]["error"] <= TOLERANCE
    if spec.architectures:
        asked = f"{page.RECORD} lacks the parity of {name}: have its tests use the fixture `parity`, and record again"
        assert RECORD["parity"].get(name, {}).keys() >= {"logits", "gradients"}, asked


def test_a_new_model_is_on_the_page_without_further_ado() -> None:
    place = "gpu-shakespeare-char.json#results/tinyforge/losses/1/0"
    register(replace(CHAR_MLP, name="toy", title="Toy", backward="Nothing.", source="", trained={"steps": place}))
    try:
        text = page.text(ROOT)
    finally:
        del models()["toy"]
    assert "| Toy | An MLP on the last few characters | `char` 90,384<br>`wide` 472,088 | - |" in text
    assert "| Toy | - | - |" in text  # not checked; not timed, and without a row there
    assert text.count("| Toy |") == 3
    assert "| Toy | steps | [500.000](results/gpu-shakespeare-char.json) |" in text
    assert "- **Toy.** Nothing." in text


def test_speed_comes_from_every_file_that_times_a_model_beside_pytorch(tmp_path: Path) -> None:
    folder = tmp_path / page.RESULTS
    folder.mkdir(parents=True)
    config = PRESETS["stories15M"].to_dict()
    found = {
        "model": "llama",
        "config": {**config, "context": 9},
        "batch_size": 3,
        "seq_len": 5,
        "precision": "fp32",
        "device": {"cpu": "Some(R) Core(TM) Processor", "cores": 7},
        "results": {
            "tinyforge": {"median_ms": 2.0},
            "torch eager": {"median_ms": 8.0},
            "torch compiled": {"median_ms": 4.0},
        },
    }
    decode = {key: value for key, value in found.items() if key not in ("seq_len", "model")} | {
        "config": {"dim": 132},
        "device": {"gpu": "Some GPU (GPU 0), 1 GiB"},
        "results": {"tinyforge": {"median_us": 3.0}, "torch eager, 1 thread": {"median_us": 300.0}},
    }
    others = {
        "no-peer": found | {"results": {"tinyforge": {"median_ms": 2.0}}},
        "no-config": {"results": found["results"]},
        "not-here": found | {"model": "absent"},
        "another-config": found | {"config": {"x": 1}},
        "list": {"results": []},
    }
    for name, content in ({"a": found, "b": decode} | others).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    assert list(page.timings(tmp_path)) == [
        page.Timed(
            "llama",
            "stories15M: training step, 3 x 5 tokens",
            "Some Core(TM), 7 cores, fp32",
            2.0,
            4.0,
            "compiled",
            "ms",
            "a.json",
        ),
        page.Timed(
            "nanoeuler",
            "decoding a token for each of 3 texts",
            "Some GPU, fp32",
            3.0,
            300.0,
            "eager, 1 thread",
            "us",
            "b.json",
        ),
    ]


def test_a_stale_page_is_said_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / page.RESULTS, tmp_path / page.RESULTS)
    assert page.write(tmp_path, check=True) == 1 and not (tmp_path / page.PAGE).exists()
    assert page.write(tmp_path) == 0 and page.write(tmp_path, check=True) == 0
    assert capsys.readouterr().out == f"stale: {page.PAGE}\nwrote: {page.PAGE}\n"


@pytest.mark.parametrize(
    "place", ["cpu-train-16x128.json#results/x", "cpu-train-16x128.json#results/tinyforge", "absent.json#a"]
)
def test_a_figure_that_is_not_there_is_one_line(place: str) -> None:
    with pytest.raises(UserError, match=place.partition("#")[0]) as caught:
        page._value(ROOT, place)
    assert "\n" not in str(caught.value)


def test_outside_of_the_checkout_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no folder docs/results; run it from the root of the repository"):
        page.write(tmp_path)
    with pytest.raises(UserError, match="has no folder tests; run it from the root of the repository"):
        page.record(tmp_path)


def test_parity_is_noted_and_bounded(
    parity: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Llama(PRESETS["stories260K"], get_backend("numpy", "fp32", workers=1))
    monkeypatch.delenv(page.PARITY, raising=False)
    parity(model, "logits", 1e-12, 1e-9)
    monkeypatch.setenv(page.PARITY, str(tmp_path / "found"))
    parity(model, "logits", 1e-12, 1e-9)
    with pytest.raises(AssertionError, match="gradients: 1.0e-07, expected below 1e-08"):
        parity(model, "gradients", 1e-7, 1e-8, peer="numpy")
    lines = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert lines[0] == {"model": "llama", "what": "logits", "error": 1e-12, "peer": "transformers"}
    assert lines[1]["peer"] == "numpy"
