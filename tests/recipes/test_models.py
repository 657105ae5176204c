"""Every model of the zoo goes through the same recipes: pretrained, stopped and resumed, fine-tuned, asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tinyforge import chat, checkpoint, get_backend
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.formats import save_pretrained
from tinyforge.recipes import evaluate, pretrain, sft
from tinyforge.registry import default_model, models
from tinyforge.tokenizers import Tokenizer
from tinyforge.train.metrics import read_scores

CPU = get_backend("numpy", "fp32", workers=1)

# A shape that takes seconds. GPT-2's drops out: what is random in a step must be the same when it is resumed.
SHAPES = {
    "nanoeuler": "dim=16 heads=2 kv_heads=1 layers=1 hidden=24",
    "gpt2": "dim=16 heads=2 layers=1 dropout=0.2",
    "llama": "dim=16 heads=2 kv_heads=1 layers=1 hidden=24",
    "moe": "dim=16 heads=2 kv_heads=1 layers=1 hidden=12 experts=3",
    "mamba": "dim=16 layers=1 state=4",
    "lstm": "dim=24 layers=1 dropout=0.2",
    "char_mlp": "window=4 dim=8 hidden=24",
}
COMMON = "--data text.txt --steps 6 --save-every 2 --eval-every 3 --keep 0 --batch-size 3 --grad-accum 2"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("\n".join(documents("train", 60)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def test_every_registered_model_is_tried() -> None:
    assert set(SHAPES) == {name for name, spec in models().items() if spec.learns == "text"}


QUICK = ("nanoeuler", "char_mlp")  # the default, and the one whose forward is unlike the others


@pytest.mark.parametrize("model", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in SHAPES])
def test_a_model_of_the_zoo(model: str, here: None, capsys: pytest.CaptureFixture[str]) -> None:
    shape = f"--model {model} --set {SHAPES[model]} context=96 vocab=300 --workers 2 --backend numpy"
    assert pretrain.main([*COMMON.split(), *shape.split(), "--out", "base", "--card"]) == 0
    shutil.copytree("base", "cut")
    for step in (4, 6):
        shutil.rmtree(f"cut/step-0000000{step}")
    assert pretrain.main(["--resume", "--out", "cut"]) == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        whole, cut = ((Path(run) / "step-00000006" / name).read_bytes() for run in ("base", "cut"))
        assert whole == cut
    card = Path("base/README.md").read_text(encoding="utf-8")
    assert (f"--model {model}" in card) == (model != default_model()) and "context=96 vocab=300" in card

    record = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    Path("records.json").write_text(json.dumps([record] * 20), encoding="utf-8")
    tuning = "--base base --data records.json --steps 2 --batch-size 2 --workers 1 --backend numpy --out tuned"
    assert sft.main(tuning.split()) == 0
    assert checkpoint.load(Path("tuned")).meta["model"] == model
    flags = "--checkpoint tuned --backend numpy --prompts 1 --sentences 20 --max-tokens 3 --seeds 1"
    assert evaluate.main([*flags.split(), "--data", "text.txt", "--instructions", "records.json"]) == 0
    capsys.readouterr()
    assert chat.main("--checkpoint base --backend numpy --prompt The --max-tokens 5 --top-k 1".split()) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_documents_are_kept_apart_from_pretraining_to_evaluation(here: None) -> None:
    """Resumed to the same bytes, and measured as it was trained."""
    for number, text in enumerate(documents("train", 60)):
        Path("texts").mkdir(exist_ok=True)
        Path(f"texts/{number:02}.txt").write_text(text, encoding="utf-8")
    shape = f"--model gpt2 --set {SHAPES['gpt2']} context=96 vocab=300 --workers 2 --backend numpy"
    flags = [*COMMON.replace("text.txt", "texts").split(), *shape.split(), "--document-mask", "restart"]
    assert pretrain.main([*flags, "--out", "base"]) == 0
    shutil.copytree("base", "cut")
    for step in (4, 6):
        shutil.rmtree(f"cut/step-0000000{step}")
    assert pretrain.main(["--resume", "--out", "cut"]) == 0
    whole, cut = ((Path(run) / "step-00000006/model.safetensors").read_bytes() for run in ("base", "cut"))
    assert whole == cut
    assert pretrain.main([*flags[:-2], "--out", "plain"]) == 0
    assert (Path("plain") / "step-00000006/model.safetensors").read_bytes() != whole

    record = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    Path("records.json").write_text(json.dumps([record] * 20), encoding="utf-8")
    tuning = "--base base --data records.json --steps 2 --batch-size 2 --workers 1 --backend numpy --out".split()
    assert sft.main([*tuning, "tuned", "--document-mask", "keep"]) == 0
    assert checkpoint.load(Path("tuned")).meta["settings"]["document_mask"] == "keep"
    figures = {}
    for run in ("base", "plain"):
        trained = read_scores(Path(run), 6)["held-out text, bits per byte"]
        asked = "--data texts --prompts 1 --sentences 20 --max-tokens 3 --seeds 1 --backend numpy --json figures.json"
        assert evaluate.main(["--checkpoint", run, *asked.split()]) == 0
        figures[run] = json.loads(Path("figures.json").read_text(encoding="utf-8"))["text"]["bits_per_byte"]
        assert figures[run] == pytest.approx(trained, rel=1e-6)
    assert figures["base"] != figures["plain"]


@pytest.mark.slow
def test_a_carried_state_is_resumed(here: None) -> None:
    """Bit for bit, from workers that each carry the state of their rows; and it is not what runs without it learn."""
    shape = "--model lstm --set dim=16 layers=2 context=24 vocab=300 --workers 2 --backend numpy"
    for out, *carry in (("base", "--stateful"), ("alone",)):
        assert pretrain.main([*COMMON.split(), *shape.split(), *carry, "--out", out]) == 0
    shutil.copytree("base", "cut")
    for step in (4, 6):
        shutil.rmtree(f"cut/step-0000000{step}")
    assert pretrain.main(["--resume", "--out", "cut"]) == 0
    files = [Path(run) / "step-00000006/optimizer.safetensors" for run in ("base", "cut", "alone")]
    whole, cut, alone = (file.read_bytes() for file in files)
    assert whole == cut != alone
    states = [checkpoint.load(Path("base") / f"step-0000000{step}").optimizer()["carried"] for step in (2, 6)]
    assert states[0].shape == (2, 2, 3, 16) and np.abs(states[1]).min() > 0 and not np.array_equal(*states)
    assert "carried" not in checkpoint.load(Path("alone")).optimizer()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model gpt2 --stateful", "--stateful: gpt2 has no state to carry; use --model lstm"),
        ("--model lstm --stateful --batch-size 4000", "take 512001; give more text, a smaller --seq-len"),
    ],
)
def test_what_cannot_be_carried_is_refused(flags: str, message: str, here: None) -> None:
    common = "--data text.txt --set dim=12 layers=1 vocab=300 --steps 1 --backend numpy --workers 1 --out base"
    with pytest.raises(UserError, match=message):
        pretrain.main([*flags.split(), *common.split()])
    assert not Path("base").exists()


@pytest.mark.parametrize("tokenizer", [["--tokenizer", "chars"], []])
def test_characters_in_place_of_a_vocabulary(
    here: None, capsys: pytest.CaptureFixture[str], tokenizer: list[str]
) -> None:
    """As nanoGPT's shakespeare_char: an id for each character, and one for the end of a document. The preset, which has
    no room for the bytes, needs no flag for it."""
    characters = len(set(Path("text.txt").read_text(encoding="utf-8")))
    shape = ["--model", "gpt2", "--config", "char", "--set", "dim=12", "heads=2", "layers=1", "context=16"]
    flags = "--data text.txt --steps 1 --batch-size 2 --workers 1 --backend numpy --out base".split()
    assert pretrain.main([*flags, *shape, *tokenizer]) == 0
    meta = checkpoint.load(Path("base")).meta
    assert meta["config"]["vocab"] == characters + 1
    size = Path("text.txt").stat().st_size
    assert meta["corpus"][0]["bytes"] == int(size * 0.9)  # ASCII; the last tenth is held out
    printed = capsys.readouterr().out
    assert f"vocab 65 -> {characters + 1}: the characters of the text" in printed and "sft.py" not in printed
    for one in ("corpus: 1 document from text.txt", "plan: 1 step of 32 tokens", "1 step in "):
        assert one in printed
    assert chat.main("--checkpoint base --backend numpy --prompt The --max-tokens 5".split()) == 0


@pytest.mark.slow
def test_presets_run_with_the_built_in_corpus(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    """It has fewer words than a vocabulary of 4,096 expects; the model is made smaller than the preset here."""
    shape = "--config base --set dim=8 heads=2 kv_heads=1 layers=1 hidden=8 context=16"
    assert pretrain.main([*shape.split(), *"--steps 1 --batch-size 1 --workers 1 --backend numpy --out b".split()]) == 0
    vocab = checkpoint.load(Path("b")).meta["config"]["vocab"]
    assert vocab % 64 == 0 and 1024 < vocab < 4096
    said = f"vocab 4096 -> {vocab}: what can be learned from the text"
    assert said in capsys.readouterr().out.splitlines()


def made_elsewhere(model: str, format: str) -> None:
    """A model of another program, in the folder `imported`: it brings no settings and knows nothing of our data."""
    spec = models()[model]
    shape = {"dim": 12, "heads": 2, "layers": 1, "context": 96, "vocab": 300}
    made = spec.build(spec.config.from_dict(shape | ({"kv_heads": 1} if model == "llama" else {})), CPU)
    made.initialise(0)
    tokenizer = Tokenizer.train([Path("text.txt").read_text(encoding="utf-8")], 300, progress=False)
    save_pretrained(made, tokenizer, "imported", format=format)


@pytest.mark.parametrize(("model", "format"), [("llama", "hf"), ("llama", "tinyforge"), ("gpt2", "hf")])
def test_an_imported_model_is_measured(model: str, format: str, here: None) -> None:
    made_elsewhere(model, format)
    flags = "--checkpoint imported --backend numpy --sentences 20 --data text.txt --json found.json"
    assert evaluate.main(flags.split()) == 0
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert found["precision"] == "fp32" and 2 < found["text"]["bits_per_byte"] < 9


def test_a_converted_model_is_fine_tuned(here: None) -> None:
    """The card says nothing of a pretraining that nobody here has seen."""
    made_elsewhere("llama", "tinyforge")
    record = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    Path("records.json").write_text(json.dumps([record] * 20), encoding="utf-8")
    flags = "--base imported --data records.json --steps 1 --batch-size 2 --workers 1 --backend numpy --out tuned"
    assert sft.main([*flags.split(), "--card"]) == 0
    card = Path("tuned/README.md").read_text(encoding="utf-8")
    assert "recipes/sft.py" in card and "recipes/pretrain.py" not in card and "license: other" in card
    assert evaluate.main("--checkpoint tuned --backend numpy --prompts 1 --sentences 20 --seeds 0".split()) == 0
