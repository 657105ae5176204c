"""sft.py --lora: what it keeps, that it resumes to the same bytes, and that what it has learned is used everywhere."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.data.world import documents
from tinyforge.errors import run_command
from tinyforge.formats import convert, load
from tinyforge.memory import gib
from tinyforge.recipes import pretrain, sft
from tinyforge.registry import find_model
from tinyforge.train import metrics
from tinyforge.train.plan import plan_step

CPU = get_backend("numpy", "fp32", workers=1)
DATA = Path(__file__).resolve().parents[3] / "shared/data"
SHAPE = "--set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=96 vocab=280 --batch-size 2 --workers 1"
PLAN = "--steps 8 --save-every 3 --eval-every 4 --batch-size 4"
LORA = f"--base run --data alpaca.json --lora 4 --lora-dropout 0.1 {PLAN}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, another base, records, and a run with adapters."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text("\n".join(documents("train", 40)), encoding="utf-8")
    records = [{"instruction": f"Add {a}.", "input": str(b), "output": str(a + b)} for a in range(6) for b in range(9)]
    (folder / "alpaca.json").write_text(json.dumps(records), encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    try:
        for out, seed in (("run", 0), ("other", 1)):
            pretrain.main(f"{SHAPE} --data text.txt --steps 2 --seed {seed} --out {out}".split())
        sft.main(f"{LORA} --workers 2 --keep 0 --out whole --card".split())
    finally:
        os.chdir(before)
    return folder


def test_a_checkpoint_holds_the_adapters_alone(folder: Path) -> None:
    found = checkpoint.load(Path("whole"))
    names = ("qkv", "out", "gate_up", "down")
    assert set(found.weights) == {f"blocks.0.{name}.lora_{m}" for name in names for m in "ab"}
    assert {name.removeprefix("m.") for name in found.optimizer() if name.startswith("m.")} == set(found.weights)
    about = found.meta["lora"]
    base = load(Path("run"), CPU).model.buffer
    assert about["parameters"] == base.count and about["base"] == "../run/step-00000002"
    assert (about["rank"], about["alpha"], about["dropout"]) == (4, 8.0, 0.1)
    card = Path("whole/README.md").read_text(encoding="utf-8")
    assert f"{base.count:,} parameters" in card and "--lora 4" in card


def test_it_resumes_to_the_same_bytes(folder: Path) -> None:
    """From its second checkpoint, in a process that knows nothing of the first."""
    shutil.copytree("whole", "again")
    shutil.rmtree("again/step-00000008")
    assert sft.main("--resume --out again".split()) == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        got, expected = (Path(run, "step-00000008", name).read_bytes() for run in ("again", "whole"))
        assert got == expected, name


def test_what_was_learned_is_merged_when_it_is_loaded(folder: Path) -> None:
    """Into a plain model, which fused decoders take; written in our own format it is no adapter any more."""
    merged, base = load(Path("whole"), CPU), load(Path("run"), CPU)
    assert merged.template.name == "alpaca" and merged.meta["kind"] == "sft"
    assert merged.model.buffer.count == base.model.buffer.count and merged.model.fused_weights() is not None
    changed = {
        p.name
        for p, q in zip(merged.model.buffer.params, base.model.buffer.params, strict=True)
        if not np.array_equal(p.value, q.value)
    }
    assert changed == {f"blocks.0.{name}.weight" for name in ("qkv", "out", "gate_up", "down")}
    assert convert.main(["whole", "merged", "--format", "tinyforge"]) == 0
    assert np.array_equal(load(Path("merged"), CPU).model.buffer.values, merged.model.buffer.values)


def test_the_plan_is_that_of_the_adapters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sft.main(f"{LORA} --precision bf16 --plan".split()) == 0
    shown = capsys.readouterr().out
    config = find_model("nanoeuler").config.from_dict(checkpoint.load(Path("run")).meta["config"])
    whole = plan_step(find_model("nanoeuler"), config, "bf16", 4, 96).peak
    assert f"of the {gib(whole)} that all weights need" in shown


def test_a_base_in_four_bits_learns_and_resumes_to_the_same_bytes(folder: Path) -> None:
    """QLoRA, on two workers: dim 64 is a whole group, hidden 48 is not and is kept in int8."""
    pretrain.main(f"{SHAPE.replace('dim=32', 'dim=64')} --data text.txt --steps 2 --out wide".split())
    flags = f"{LORA.replace('--base run', '--base wide')} --weights nf4 --workers 2 --keep 0"
    sft.main(f"{flags} --out four".split())
    about = checkpoint.load(Path("four")).meta["lora"]
    assert about["weights"] == "nf4" and "weights" not in checkpoint.load(Path("whole")).meta["lora"]
    expected = Path("four/step-00000008/model.safetensors").read_bytes()
    shutil.rmtree("four/step-00000008")
    assert sft.main("--resume --out four".split()) == 0
    assert Path("four/step-00000008/model.safetensors").read_bytes() == expected
    sft.main(f"{flags.replace('--weights nf4', '')} --out plain".split())
    assert Path("plain/step-00000008/model.safetensors").read_bytes() != expected
    assert load(Path("four"), CPU).model.fused_weights() is not None  # merged into the base's own weights


def fault(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        run_command(lambda: sft.main(flags.split()))
    shown = capsys.readouterr().err
    assert left.value.code == 2 and shown.startswith("error: ") and shown.count("\n") == 1, shown
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    return shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--base run --lora 0", "--lora is 0, expected a number above 0"),
        ("--base run --lora-targets qkv", "--lora-targets is given without --lora"),
        ("--base run --weights nf4", "--weights is given without --lora"),
        ("--base run --lora-alpha 8", "--lora-alpha is given without --lora"),
        ("--base run --lora 4 --lora-dropout 1", "--lora-dropout is 1.0, expected a share from 0 to below 1"),
        ("--base run --lora 4 --lora-targets qkv,gate", "is called 'gate'; known: qkv, out, gate_up, down"),
        ("--base run --lora 4 --lora-targets ,", "--lora-targets is ,, expected names with commas between them"),
        ("--resume --out whole --lora 8", "--resume: --lora is 8, the run in whole has 4"),
        ("--base run --lora 1000", "--lora is 1000, expected at most "),
        ("--base nothing --lora 4", "no checkpoint in nothing"),
    ],
)
def test_one_line(folder: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    assert message in fault(f"{flags} --data alpaca.json" if "--resume" not in flags else flags, capsys)


def test_another_base_in_the_place_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree("run")
    assert "its base run/step-00000002 is missing" in fault("--resume --out whole", capsys)
    shutil.copytree("other", "run")
    assert "whole/step-00000008 is an adapter for another base: run/step-00000002" in fault(
        "--resume --out whole", capsys
    )


@pytest.mark.slow
def test_adapters_on_a_model_of_others_learn_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """stories260K, which has read nothing but stories, and 500 records of Alpaca."""
    model, records = DATA / "llama2c/stories260K.bin", DATA / "instruct/alpaca.zip"
    if not (model.is_file() and records.is_file()):
        pytest.skip(f"{model} or {records} is not there")
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile(records) as opened:
        found = json.loads(opened.read("alpaca.json"))[:500]
    Path("alpaca.json").write_text(json.dumps(found), encoding="utf-8")
    common = f"--base {model} --data alpaca.json --lora 8 --seq-len 256 --batch-size 4".split()
    held_out = []
    for out, flags in (("before", "--steps 1 --lr 1e-12"), ("after", "--steps 30 --lr 5e-3")):
        assert sft.main([*common, *flags.split(), "--out", out]) == 0
        rows = metrics.read(Path(out, "metrics.jsonl"))
        held_out.append([row["val_bits_per_byte"] for row in rows if "val_bits_per_byte" in row][-1])
    assert held_out[1] < 0.8 * held_out[0]
