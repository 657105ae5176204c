"""Calibration: the scale against brute force, the weights, what evaluation says of them, and what is refused."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tinyforge import chat
from tinyforge.backends import get_backend
from tinyforge.data.world import documents, instructions
from tinyforge.errors import UserError
from tinyforge.formats import convert, open_model, save_pretrained
from tinyforge.formats.labels import Labels
from tinyforge.formats.opened import Opened
from tinyforge.params import named
from tinyforge.recipes import calibrate, evaluate, pretrain, sft
from tinyforge.registry import find_model
from tinyforge.shards import SEPARATOR, Shards
from tinyforge.tokenizers import Tokenizer

FP32, FP64 = (get_backend("numpy", precision, workers=1) for precision in ("fp32", "fp64"))
TOKENIZER = Tokenizer.train(list(documents("train", 60)), 300, [SEPARATOR, "</s>"], progress=False)
TRAINED = "--data shards --workers 1 --batch-size 4 --backend numpy --lr 2e-2 --warmup 0.1"
SHAPE = "dim=16 heads=4 kv_heads=2 layers=1 hidden=24 context=160 mtp_heads=2"
WINDOW = 48  # tokens in pretraining


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_shards: Callable[..., None]) -> Path:
    """Shards; a base, another one that keeps documents apart, and a model fine-tuned from that."""
    folder = tmp_path_factory.mktemp("made")
    make_shards(folder / "shards", TOKENIZER, {"books": (60, 30), "web": (30, 9), "unread": (3, 0)})
    make_shards(folder / "short", TOKENIZER, {"books": (9, 1)})
    make_shards(folder / "other", Tokenizer([], [SEPARATOR, "</s>"]), {"books": (9, 2)})
    records = [{"instruction": e.instruction, "input": e.input, "output": e.output} for e in instructions("train", 40)]
    (folder / "records.json").write_text(json.dumps(records), encoding="utf-8")
    (folder / "text.txt").write_text("Once.\n" * 99, encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    try:
        given = f"{TRAINED} --steps 30 --seq-len {WINDOW} --set {SHAPE}"
        pretrain.main(f"{given} --out base --card".split())
        pretrain.main(f"{given} --out apart --document-mask restart".split())
        sft.main("--base apart --data records.json --steps 3 --batch-size 4 --workers 1 --out tuned".split())
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory where what was made can be read."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calibrated(flags: str) -> dict[str, Any]:
    """Calibrate with these flags to the path of the second word; returns what OUT's meta says of it."""
    assert calibrate.main([*flags.split(), "--backend", "numpy"]) == 0
    noted: dict[str, Any] = open_model(Path(flags.split()[1])).meta["calibration"]
    return noted


def tensors(path: str) -> dict[str, np.ndarray]:
    return {name: read() for name, read in open_model(Path(path)).tensors.items()}


def change(source: str, target: str, name: str, by: float) -> None:
    """Write the model with one tensor multiplied."""
    found = open_model(Path(source))
    model = found.build(FP32).model
    param = next(p for p in model.params() if p.name == name)
    model.buffer.set_master(param, by * named(model.buffer, model.buffer.masters, FP32)[name])
    model.buffer.publish()
    save_pretrained(model, found.tokenizer, target, format="tinyforge", meta=found.meta)


def windows(sources: str = "books web") -> list[np.ndarray]:
    """The windows of held-out text with the token after each, in order."""
    shards = Shards([Path("shards")])
    streams = [shards.sequence(name, "val")[:] for name in sources.split()]
    return [ids[i : i + WINDOW + 1] for ids in streams for i in range(0, len(ids) - 1, WINDOW)]


def logits(opened: Opened, ids: np.ndarray) -> np.ndarray:
    model = opened.build(FP64).model
    return np.asarray(model.logits(model.hidden(ids[None])))[0]


def nats(z: np.ndarray, targets: np.ndarray, scale: float) -> float:
    """The mean over tokens, by the definition."""
    p = np.exp(scale * (z - z.max(axis=1, keepdims=True)))
    return float(-np.log((p / p.sum(axis=1, keepdims=True))[np.arange(len(z)), targets]).mean())


@pytest.mark.slow
def test_newtons_scale_is_the_best_of_a_grid() -> None:
    noted = calibrated("base out --data shards --tokens 100000")
    source, half = open_model(Path("base")), windows()[0::2]
    z = np.concatenate([logits(source, ids[:-1]) for ids in half])
    targets = np.concatenate([ids[1:] for ids in half])
    scale = noted["scale"]
    assert abs(scale - 1) > 0.01  # there is something to find
    grid = scale + np.linspace(-0.02, 0.02, 41)  # its middle is the scale
    losses = [nats(z, targets, s) for s in grid]
    assert int(np.argmin(losses)) == 20 and losses == sorted(losses[:21], reverse=True) + sorted(losses[21:])
    near = [nats(z, targets, scale * s) for s in (1 - 1e-4, 1, 1 + 1e-4)]
    assert near[1] < min(near[0], near[2])
    size = int(TOKENIZER.byte_lengths[targets].sum())
    for bits, s in zip(noted["fitted"], (1.0, scale), strict=True):
        assert bits == pytest.approx(nats(z, targets, s) * len(targets) / math.log(2) / size, rel=1e-6)


def test_the_derivatives_are_those_of_the_loss() -> None:
    source = open_model(Path("base"))
    model, ids = source.build(FP64).model, windows()[0]
    held = calibrate.Predicted(model, model.hidden(ids[None, :-1])[0], ids[1:], 99)
    for scale in (0.3, 1.0, 2.5):
        value, slope, curvature = held.loss(scale)
        below, above = held.loss(scale - 1e-4), held.loss(scale + 1e-4)
        assert value == pytest.approx(nats(logits(source, ids[:-1]), ids[1:], scale), rel=1e-12)
        assert slope == pytest.approx((above[0] - below[0]) / 2e-4, rel=1e-6)
        assert curvature == pytest.approx((above[1] - below[1]) / 2e-4, rel=1e-6) and curvature > 0


def test_chunks_of_logits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(Path("base")).build(FP64).model
    ids = windows()[0]
    held = calibrate.Predicted(model, model.hidden(ids[None, :-1])[0], ids[1:], 99)
    whole = held.loss(0.9)
    for count in (1, 7 * 300):
        monkeypatch.setattr(calibrate, "LOGITS", count)
        assert held.loss(0.9) == pytest.approx(whole, rel=1e-13)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda s: ((s - 3) ** 2, 2 * (s - 3), 2.0), 3.0),
        (lambda s: (s - 0.001 * math.log(s), 1 - 0.001 / s, 0.001 / s**2), 0.001),  # at 1 Newton's step is -999
        # log cosh, on which Newton's step from 1 is 10
        (lambda s: (math.log(math.cosh(x := 10 * (s - 1.3))), 10 * math.tanh(x), 100 / math.cosh(x) ** 2), 1.3),
        (lambda s: (0.0, 0.0, 0.0), 1.0),
        (lambda s: (math.exp(-s), -math.exp(-s), math.exp(-s)), None),  # falls for ever
        (lambda s: (s, 1.0, 0.0), None),  # least at 0
        (lambda s: (math.nan, math.nan, math.nan), None),
        (lambda s: (math.inf, math.nan, math.nan), None),
    ],
)
def test_newtons_method(loss: Callable[[float], tuple[float, float, float]], expected: float | None) -> None:
    found = calibrate.fit_scale(loss)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-5))


def test_a_model_that_is_twice_as_sure_gets_half_the_scale() -> None:
    change("base", "sure", "final_norm.weight", 2.0)
    noted, sure = calibrated("base out --data shards"), calibrated("sure out2 --data shards")
    assert sure["scale"] == pytest.approx(noted["scale"] / 2, rel=1e-5)
    assert sure["fitted"][0] > noted["fitted"][0] and sure["rest"][0] > sure["rest"][1]
    assert sure["fitted"][1] == pytest.approx(noted["fitted"][1], rel=1e-6)
    assert sure["rest"][1] == pytest.approx(noted["rest"][1], rel=1e-6)


def test_a_calibrated_model_is_left_as_it_is_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    noted = calibrated("base out --data shards")
    assert "calibrated already" not in capsys.readouterr().out
    again = calibrated("out out2 --data shards")
    assert again["scale"] == pytest.approx(1, abs=1e-5)
    assert again["fitted"][0] == pytest.approx(noted["fitted"][1], rel=1e-6)
    assert "gains nothing: the model was calibrated already\nwrote out2" in capsys.readouterr().out


SCALED = (
    "nanoeuler --set heads=2 kv_heads=1 hidden=24 mtp_heads=3",
    "moe --set heads=2 kv_heads=1 hidden=12 experts=3",
    "llama --set heads=2 kv_heads=1 hidden=24 tied=true",
    "llama --set heads=2 kv_heads=1 hidden=24 tied=false qk_norm=true",
    "gpt2 --set heads=2 bias=true",
    "gpt2 --set heads=2 bias=false dropout=0.2",
    "mamba --set state=4",
)


@pytest.mark.parametrize("model", SCALED)
def test_logits_of_every_head_are_scaled_and_nothing_else_changes(model: str) -> None:
    """RMSNorm and LayerNorm, with and without a bias, tied heads and others, one head and several."""
    shape = f"--model {model} dim=16 layers=2 context=64"
    pretrain.main(f"{TRAINED} --steps 10 --seq-len {WINDOW} --out run {shape}".split())
    noted = calibrated("run out --data shards --tokens 2000")
    assert abs(noted["scale"] - 1) > 1e-3 and noted["rest"][1] < noted["rest"][0] + 0.01
    before, after = open_model(Path("run")), open_model(Path("out"))
    ids = FP32.asarray(windows()[3][None, :-1])
    one, two = (found.build(FP32).model for found in (before, after))
    for head in range(before.config.prediction_heads):
        z, scaled = (np.asarray(m.logits(m.hidden(ids), head)) for m in (one, two))
        np.testing.assert_allclose(scaled, noted["scale"] * z, rtol=1e-5, atol=1e-5 * np.abs(z).max())
    norm = {"final_norm.weight", "final_norm.bias"}
    old, new = tensors("run"), tensors("out")
    assert old.keys() == new.keys() and len(norm & old.keys()) == 1 + ("bias=true" in model)
    for name, value in new.items():
        expected = (old[name].astype(np.float64) * (noted["scale"] if name in norm else 1)).astype(np.float32)
        assert value.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        ("lstm", "dim=16 layers=1", ": LSTM has no norm before its output head that could scale its logits; it"),
        ("char_mlp", "window=3 dim=4 hidden=16", "its last norm, norm.gain, does not scale its logits; it cannot be"),
        ("bert", "dim=16 heads=2 layers=1 hidden=24", "is a BERT, which learns masked text; give a model of next"),
        ("vit", "dim=16 heads=2 layers=1 hidden=24 image=8 patch=4", "which learns images; give a model of next tok"),
    ],
)
def test_models_that_no_norm_scales_are_refused(model: str, shape: str, message: str) -> None:
    spec = find_model(model)
    if spec.learns == "text":
        pretrain.main(f"{TRAINED} --model {model} --steps 5 --set context=64 {shape} --out run".split())
    else:
        sizes = {name: int(value) for name, value in (item.split("=") for item in shape.split())}
        images = spec.learns == "images"
        config = spec.config().override({**sizes, **({"classes": 2} if images else {"vocab": 300})})
        built = spec.build(config, FP32)
        built.initialise(1)
        tokenizer: Any = Labels(["a", "b"]) if images else TOKENIZER
        save_pretrained(built, tokenizer, "run", format="tinyforge", meta={"classes": ["a", "b"]} if images else {})
    refused("run out --data shards", message)


def refused(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        calibrate.main(["--backend", "numpy", *flags.split()])
    assert "\n" not in str(caught.value) and not Path("out").exists()


@pytest.mark.parametrize("name", ["base", "apart", "tuned"])
def test_evaluation_finds_the_same_bits_per_byte(name: str) -> None:
    """In windows of the run's pretraining, with its document mask, over all of the text of two sources."""
    noted = calibrated(f"{name} out --data shards --tokens 1000000")
    every = windows()
    assert noted["tokens"] == sum(len(ids) - 1 for ids in every) and noted["sources"] == ["books", "web"]
    size = [sum(int(TOKENIZER.byte_lengths[ids[1:]].sum()) for ids in every[half::2]) for half in (0, 1)]
    for path, at in ((name, 0), ("out", 1)):
        quick = "--backend numpy --sentences 1 --prompts 1 --max-tokens 2 --seeds 1 --json found.json"
        assert evaluate.main(f"--checkpoint {path} --data shards {quick}".split()) == 0
        overall = json.loads(Path("found.json").read_text())["text"]["bits_per_byte"]
        mean = (noted["fitted"][at] * size[0] + noted["rest"][at] * size[1]) / sum(size)
        assert overall == pytest.approx(mean, rel=1e-5)


def test_what_is_read_of_the_text() -> None:
    """One source, no more tokens than asked for, in windows that lie evenly in it: half of them for the fit."""
    noted = calibrated(f"base out --data shards --source web --tokens {5 * WINDOW + 9}")
    web = windows("web")
    chosen = [web[i * len(web) // 5] for i in range(5)]
    assert noted["sources"] == ["web"] and noted["tokens"] == 5 * WINDOW
    for half, name in ((chosen[0::2], "fitted"), (chosen[1::2], "rest")):
        z = np.concatenate([logits(open_model(Path("base")), ids[:-1]) for ids in half])
        targets = np.concatenate([ids[1:] for ids in half])
        bits = nats(z, targets, 1.0) * len(targets) / math.log(2) / TOKENIZER.byte_lengths[targets].sum()
        assert noted[name][0] == pytest.approx(bits, rel=1e-5)
    several = calibrated("base out2 --data shards short")
    assert several["sources"] == ["books", "web"] and several["data_hash"] != noted["data_hash"]


def test_the_same_again_is_the_same_bytes() -> None:
    for target in ("out", "again"):
        calibrated(f"tuned {target} --data shards")
    for file in ("model.safetensors", "meta.json", "README.md"):
        assert Path("out", file).read_bytes() == Path("again", file).read_bytes()


def test_what_is_kept_and_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    save = open_model(Path("tuned"))
    save_pretrained(
        save.build(FP32).model,
        save.tokenizer,
        "own",
        format="tinyforge",
        meta=save.meta,
        generation={"temperature": 0.5},
        card="# Mine\n\nWeights are float32.\n",
    )
    noted = calibrated("own out --data shards --dtype bf16")
    found = open_model(Path("out"))
    assert found.meta == {**open_model(Path("own")).meta, "calibration": noted}
    assert found.tokenizer.hash() == TOKENIZER.hash() and found.template.name == "alpaca"
    assert found.generation.content == {"temperature": 0.5}
    scale, fitted, rest = noted["scale"], noted["fitted"], noted["rest"]
    card = Path("out/README.md").read_text()
    assert card.startswith("# Mine\n\nWeights are bfloat16.\n\n## Calibration\n\nOne number was fitted on half")
    assert f"of books, web: all logits are multiplied by {scale:.4f}, a temperature" in card
    assert f"| the other half | {rest[0]:.4f} | {rest[1]:.4f} |" in card
    said = capsys.readouterr().out
    assert (
        f"logits x {scale:.3f} (temperature {1 / scale:.3f}): {fitted[0]:.4f} -> {fitted[1]:.4f} bits per byte of "
        f"held-out text; not used for the fit: {rest[0]:.4f} -> {rest[1]:.4f}\n" in said
    )
    calibrated("base plain --data shards")
    assert "## Calibration" in Path("plain/README.md").read_text()


def test_every_form_of_a_model_is_read_int8_is_written_and_other_formats_take_the_scale() -> None:
    assert convert.main("base base8 --format tinyforge --dtype int8".split()) == 0
    assert convert.main("base base-hf".split()) == 0
    foreign = calibrated("base-hf out-hf --data shards")  # of a context's length: nothing is known of its pretraining
    assert 0 < foreign["scale"] != 1
    noted = calibrated("base8 out8 --data shards --dtype int8")
    before, after = (load_file(f"{name}/model.safetensors") for name in ("base8", "out8"))
    for name, stored in before.items():
        if stored.dtype == np.int8:
            assert np.array_equal(after[name], stored), name
    np.testing.assert_allclose(
        tensors("out8")["final_norm.weight"], noted["scale"] * tensors("base8")["final_norm.weight"], rtol=1e-6
    )
    assert "Weights are int8" in Path("out8/README.md").read_text()
    for target in ("out8-hf", "out8.gguf"):
        assert convert.main(["out8", target]) == 0
        assert np.array_equal(tensors(target)["final_norm.weight"], tensors("out8")["final_norm.weight"])
    assert chat.main("--checkpoint out8 --backend numpy --prompt The --max-tokens 5".split()) == 0


def test_a_run_from_a_calibrated_model_says_so() -> None:
    noted = calibrated("base out --data shards")
    sft.main("--base out --data records.json --steps 1 --batch-size 2 --workers 1 --out from".split())
    assert open_model(Path("from")).meta["base"]["calibration"] == noted


def test_a_model_for_which_no_scale_is_best_is_refused() -> None:
    """The head is negated: any guess is better than its own."""
    change("base", "worse", "heads.weight", -1.0)
    refused("worse out --data shards", "worse: no scale of its logits is best for this text; give a model that")
    change("base", "broken", "final_norm.weight", math.nan)
    refused("broken out --data shards", "broken: no scale of its logits is best for this text")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("base out", "arguments are required: --data"),
        ("base --data shards", "arguments are required: OUT"),
        ("base short --data shards", "short exists already; remove it, or choose another name"),
        ("base out.gguf --data shards", "out.gguf is not a name for --format tinyforge"),
        ("absent out --data shards", "no checkpoint in absent"),
        ("base out --data text.txt", "--data: text.txt holds no token shards; make some: python -m data.shards"),
        ("base out --data shards text.txt", "--data: shards holds token shards, text.txt does not"),
        ("base out --data other", "other was made with the tokenizer .*, the model has .*; make shards with python -m"),
        ("base out --data shards --source poems", "no held-out text of 'poems'; they have books, web"),
        ("base out --data shards --source unread", "no held-out text of 'unread'; they have books, web"),
        ("base out --data shards --tokens 95", "--tokens is 95, expected two windows of 48 tokens; raise it"),
        ("base out --data shards --tokens 0", "--tokens is 0, expected two windows of 48 tokens; raise it"),
        ("base out --data shards --tokens -5", "--tokens is -5, expected two windows of 48 tokens; raise it"),
        ("base out --data shards --tokens many", "argument --tokens: invalid int value: 'many'"),
        ("base out --data shards --dtype q8_0", "argument --dtype: invalid choice: 'q8_0'"),
        ("base out --data shards --backend tpu", "unknown backend 'tpu'; known: auto, numpy, cupy, webgpu"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(flags: str, message: str) -> None:
    refused(flags, message)


def test_text_of_less_than_two_windows_is_refused(make_shards: Callable[..., None]) -> None:
    make_shards(Path("few"), TOKENIZER, {"books": (9, 1)})
    length = len(Shards([Path("few")]).sequence("books", "val"))
    pretrain.main(f"{TRAINED} --steps 1 --set {SHAPE.replace('160', '200')} --out long".split())
    message = (
        f"the held-out text has {length - 1}, expected two windows of {min(200, length - 1)} tokens; give more text"
    )
    refused("long out --data few", message)
    shape = f"--seq-len {length - 2} --set {SHAPE.replace('160', '200')}"
    pretrain.main(f"{TRAINED} --steps 1 {shape} --out but-one".split())
    noted = calibrated("but-one out --data few")
    assert noted["tokens"] == length - 1 and np.isfinite(noted["rest"]).all()  # one is a separator, of 0 bytes


def test_changed_shards_are_refused(make_shards: Callable[..., None]) -> None:
    make_shards(Path("damaged"), TOKENIZER, {"books": (9, 9)})
    file = next(Path("damaged").glob("books-val-*.bin"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    refused("base out --data damaged", "books-val")
