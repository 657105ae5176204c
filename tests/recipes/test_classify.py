"""recipes/classify.py: trained, stopped and resumed, exported; what can be wrong with labelled data."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import chat, checkpoint, get_backend
from tinyforge.data.labelled import answers, numbered, read_images, read_texts
from tinyforge.errors import UserError
from tinyforge.formats import convert, load
from tinyforge.models.bag_of_words import BagOfWords
from tinyforge.recipes import classify, pretrain, sft
from tinyforge.registry import models
from tinyforge.rng import Stream
from tinyforge.tokenizers import WordPiece
from tinyforge.train.batches import PackedTokens
from tinyforge.train.masked import MaskedWords, framed, padded
from tinyforge.zoo import published

ROOT = Path(__file__).resolve().parents[2]
CPU = get_backend("numpy", "fp32", workers=1)
SHAPE = "--model vit --set patch=2 dim=8 heads=2 layers=1 hidden=12 dropout=0.2 --backend numpy --workers 2"
COMMON = f"{SHAPE} --batch-size 4 --steps 6 --save-every 2 --eval-every 3 --keep 0 --shift 1"


def pictures(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Bright left or right halves: two classes that a line tells apart."""
    rng = np.random.default_rng(seed)
    images, labels = rng.integers(0, 90, (count, 6, 6)).astype(np.uint8), np.arange(count) % 2
    images[labels == 0, :, :3] += 150
    images[labels == 1, :, 3:] += 150
    return images, labels.astype(np.uint8)


def write_idx(folder: Path, split: str, images: np.ndarray, labels: np.ndarray) -> None:
    folder.mkdir(exist_ok=True)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        (folder / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


def write_png(path: Path, image: np.ndarray) -> None:
    from matplotlib.image import imsave

    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, np.repeat(image[..., None].astype(np.uint8), 3, axis=-1))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_idx(tmp_path / "idx", "train", *pictures(40, 0))
    write_idx(tmp_path / "idx", "t10k", *pictures(11, 1))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_images_learned_resumed_and_given_away(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert classify.main([*COMMON.split(), "--data", "idx", "--out", "whole"]) == 0
    said = capsys.readouterr().out
    assert "40 examples to learn from and 11 to test, 2 classes: 0, 1" in said and "image 28 -> 6: as the data" in said
    assert "images/s" in said and "% of 11 right" in said
    shutil.copytree("whole", "cut")
    for step in (4, 6):
        shutil.rmtree(f"cut/step-0000000{step}")
    assert classify.main(["--resume", "--out", "cut"]) == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        whole, cut = ((Path(run) / "step-00000006" / name).read_bytes() for run in ("whole", "cut"))
        assert whole == cut
    assert checkpoint.load(Path("whole")).meta["classes"] == ["0", "1"]

    capsys.readouterr()
    for flags in ("--base whole --model vit --batch-size 4", "--resume --out whole"):
        assert classify.main([*flags.split(), "--plan"]) == 0
        assert "a step of 4 x 10 tokens" in capsys.readouterr().out  # 9 patches and the class's
    assert convert.main(["whole", "hf"]) == 0
    assert "recipes/classify.py --model vit --base hf" in capsys.readouterr().out
    assert json.loads(Path("hf/config.json").read_text())["id2label"] == {"0": "0", "1": "1"}
    images = np.zeros((2, 1, 6, 6), np.int32)
    ours, again = (load(Path(name), CPU).model.classify(images) for name in ("whole", "hf"))
    assert np.array_equal(ours, again)
    flags = "--data idx --base hf --steps 2 --batch-size 4 --backend numpy --workers 1 --out tuned --model vit"
    assert classify.main(flags.split()) == 0
    assert "new: none" in capsys.readouterr().out


@pytest.mark.slow
def test_it_learns_and_draws_its_mistakes(here: Path) -> None:
    images, labels = pictures(11, 1)
    labels[:3] = 1 - labels[:3]  # wrong on purpose
    write_idx(here / "idx", "t10k", images, labels)
    flags = "--steps 150 --lr 0.01 --batch-size 8 --save-every 150 --shift 0 --set dropout=0.0 --data idx --out run"
    assert classify.main([*COMMON.split(), *flags.split()]) == 0
    assert json.loads(Path("run/scores.json").read_text())["test accuracy"] == 8 / 11
    assert Path("run/mistakes.png").read_bytes()[:4] == b"\x89PNG"


def test_mistakes_of_classes_with_dollars_in_their_names(here: Path) -> None:
    """matplotlib reads text between two dollars as a formula."""
    images, labels = pictures(12, 2)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        write_png(here / "png" / ("$5^{", "$x^{")[label] / f"{i:02}.png", image)
        write_png(here / "test" / ("$5^{", "$x^{")[1 - label] / f"{i:02}.png", image)
    flags = "--data png --test test --steps 1 --batch-size 2 --out run"
    assert classify.main([*SHAPE.split(), *flags.split()]) == 0
    assert Path("run/mistakes.png").read_bytes()[:4] == b"\x89PNG"


def test_folders_of_png_and_parquet_hold_the_same_images(here: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    images, labels = pictures(12, 2)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        write_png(here / "png" / ("left", "right")[label] / f"{i:02}.png", image)
    found = read_images(here / "png")
    assert found.names == ("left", "right") and found.inputs.shape == (12, 3, 6, 6) and found.inputs.dtype == np.uint8
    order = np.argsort(labels, kind="stable")
    np.testing.assert_array_equal(found.inputs[:, 0], images[order])
    np.testing.assert_array_equal(found.labels, labels[order])
    rows = [(path.read_bytes(), path.parent.name) for path in sorted((here / "png").glob("*/*.png"))]
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE t (image STRUCT(bytes BLOB, path VARCHAR), label VARCHAR)")
        connection.executemany("INSERT INTO t VALUES ({'bytes': ?, 'path': NULL}, ?)", rows)
        connection.execute("COPY t TO 'images.parquet'")
    again = read_images(here / "images.parquet")
    assert again.names == found.names and np.array_equal(again.inputs, found.inputs)
    assert classify.main([*SHAPE.split(), *"--data png --steps 1 --batch-size 2 --out run".split()]) == 0
    assert checkpoint.load(Path("run")).meta["config"]["channels"] == 3


def mixed_sizes(folder: Path) -> str:
    write_png(folder / "bad/a/1.png", np.zeros((6, 6)))
    write_png(folder / "bad/b/1.png", np.zeros((6, 7)))
    return "--data bad"


def empty_class(folder: Path) -> str:
    write_png(folder / "bad/a/1.png", np.zeros((6, 6)))
    (folder / "bad/b").mkdir()
    return "--data bad"


def other_columns(folder: Path) -> str:
    import duckdb

    duckdb.sql("SELECT 1 AS picture, 2 AS label").write_parquet(str(folder / "bad.parquet"))
    return "--data bad.parquet"


def no_pictures(folder: Path) -> str:
    import duckdb

    duckdb.sql("SELECT 'text' AS image, 2 AS label").write_parquet(str(folder / "bad.parquet"))
    return "--data bad.parquet"


def beyond(folder: Path) -> str:
    images, labels = pictures(4, 0)
    write_idx(folder / "idx", "t10k", images, labels + 1)
    return "--data idx"


def cut_off(folder: Path) -> str:
    path = folder / "idx/train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-5]))
    return "--data idx"


def half_a_gzip(folder: Path) -> str:
    path = folder / "idx/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    return "--data idx"


def damaged_png(folder: Path) -> str:
    write_png(folder / "bad/a/1.png", np.zeros((6, 6)))
    (folder / "bad/a/2.png").write_bytes(b"\x89PNG nothing")
    return "--data bad"


def oblong(folder: Path) -> str:
    write_png(folder / "bad/a/1.png", np.zeros((6, 9)))
    write_png(folder / "bad/b/1.png", np.zeros((6, 9)))
    return "--data bad"


BAD = {
    mixed_sizes: "bad/b/1.png is 3x6x7 (channels, height, width), bad/a/1.png 3x6x6; all must be of one size",
    empty_class: "bad/b: a class without an image",
    other_columns: "bad.parquet: no column 'image'; its columns are picture, label, expected image and label",
    no_pictures: "an image is str, expected the bytes of a PNG file",
    beyond: "label 2 of example 1, expected 0 to 1: there are 2 classes",
    cut_off: "its header says (40, 6, 6); it is truncated",
    half_a_gzip: "it is damaged, get it again",
    damaged_png: "bad/a/2.png cannot be read as an image",
    oblong: "images of 6 x 9 pixels, expected square ones",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda f: f.__name__)
def test_bad_images_are_one_line(spoil: Any, here: Path) -> None:
    flags = spoil(here)
    with pytest.raises(UserError) as caught:
        classify.main([*SHAPE.split(), *flags.split(), *"--steps 1 --out run".split()])
    assert BAD[spoil] in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--data idx --set classes=1 patch=2", "labels of 2 classes, --set classes=1"),
        ("--data idx --set classes=9 patch=2", "labels of 2 classes, --set classes=9; leave that out"),
        ("--data idx nowhere", "expected one folder of images or one parquet file"),
        ("--data nowhere", "nowhere: not a folder of images or a parquet file"),
        ("--data idx --set patch=4", "image 6 is not a whole number of patches of 4; use a patch that divides 6"),
        ("--data idx --model nanoeuler", "nanoeuler predicts next tokens; classes are learned by bert and vit"),
        ("--data idx --shift -1", "--shift is -1, expected a number of 0 or more"),
    ],
)
def test_bad_flags_are_one_line(flags: str, said: str, here: Path) -> None:
    with pytest.raises(UserError) as caught:
        classify.main([*"--model vit --backend numpy --workers 1 --steps 1 --out run".split(), *flags.split()])
    assert said in str(caught.value)
    assert not Path("run").exists()


def test_the_plan_is_of_the_length_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert classify.main("--plan --seq-len 32 --batch-size 2".split()) == 0
    assert "a step of 2 x 32 tokens" in capsys.readouterr().out


def test_the_exit_status_is_2(here: Path) -> None:
    found = subprocess.run(
        [sys.executable, str(ROOT / "recipes/classify.py"), *"--model vit --data nowhere --out run".split()],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2 and found.stderr.startswith("error: nowhere") and found.stderr.count("\n") == 1


def test_an_image_model_neither_chats_nor_continues(here: Path) -> None:
    assert classify.main([*SHAPE.split(), *"--data idx --steps 1 --batch-size 2 --out run".split()]) == 0
    with pytest.raises(UserError, match="ViT learns images and cannot continue text; use recipes/classify.py"):
        chat.main("--checkpoint run --backend numpy --prompt The".split())
    with pytest.raises(UserError, match="ViT learns images and cannot continue text"):
        sft.main("--base run --out tuned".split())
    with pytest.raises(UserError, match="ViT learns images and cannot continue text"):
        pretrain.main("--model vit --out other".split())


def test_the_model_is_that_of_the_base(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = "--data idx --steps 1 --batch-size 2".split()
    assert classify.main([*SHAPE.split(), *once, "--out", "run"]) == 0
    assert classify.main(["--base", "run", *once, "--out", "tuned"]) == 0
    assert classify.main(["--base", "run", *once, "--out", "other", "--plan"]) == 0
    found = capsys.readouterr().out
    assert found.count("model: vit, ") == 2 and (here / "tuned" / "step-00000001").is_dir()
    published.show(here / "tuned")
    shown = capsys.readouterr().out
    assert "recipes/classify.py" in shown and "continues text" not in shown


# --- texts ------------------------------------------------------------------------------------------------------------

TEXT_SHAPE = "--set dim=16 heads=2 layers=1 hidden=24 context=24 dropout=0.1 --backend numpy --workers 2 --batch-size 4"
GOOD, BAD_WORDS = ("good", "fine", "great"), ("bad", "poor", "dull")


def write_reviews(path: Path, count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        words = rng.choice(["film", "plot", "cast", "the", "was", "very"], 6).tolist()
        words.insert(int(rng.integers(7)), str(rng.choice(GOOD if i % 2 else BAD_WORDS)))
        rows.append({"text": " ".join(words), "label": i % 2})
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return rows


def test_texts_pretrained_fine_tuned_resumed_and_given_away(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_reviews(here / "train.jsonl", 40, 0)
    write_reviews(here / "test.jsonl", 12, 1)
    (here / "text.txt").write_text("\n".join(row["text"] for row in rows) * 3, encoding="utf-8")
    shape = f"--model bert {TEXT_SHAPE} --data text.txt --keep 0".split()
    assert pretrain.main([*shape, *"--set vocab=80 --steps 4 --save-every 2 --eval-every 2 --out bert".split()]) == 0
    said = capsys.readouterr().out
    assert "to beat: loss " in said
    assert "val perplexity" in said and "|" in said and "next: python recipes/classify.py --base bert" in said
    shutil.copytree("bert", "cut")
    shutil.rmtree("cut/step-00000004")
    assert pretrain.main(["--resume", "--out", "cut"]) == 0
    assert same_weights("bert", "cut", 4)

    capsys.readouterr()
    longer = "--base bert --set masked=0.5 --steps 2 --lr 1e-9 --out longer".split()
    assert pretrain.main([*shape, *longer]) == 0
    assert "new: none" in capsys.readouterr().out
    first, second = (load(Path(name), CPU).model for name in ("bert", "longer"))
    assert second.config == first.config.override({"masked": 0.5})
    np.testing.assert_allclose(first.buffer.masters, second.buffer.masters, atol=1e-7)

    with pytest.raises(UserError, match="bert: its model is a bert, expected a vit; give another --base or --model"):
        classify.main("--model vit --base bert --backend numpy --workers 1 --out tuned".split())
    flags = "--base bert --data train.jsonl --test test.jsonl --steps 4 --save-every 2 --eval-every 2 --keep 0"
    assert classify.main([*flags.split(), *"--batch-size 4 --backend numpy --workers 2 --out tuned".split()]) == 0
    said = capsys.readouterr().out
    assert "new: head.bias, head.weight, pooler.bias, pooler.weight" in said
    assert "bag of words: " in said and "bag of words, tf-idf: 100.00%" in said and "the model: " in said
    shutil.copytree("tuned", "cut2")
    shutil.rmtree("cut2/step-00000004")
    assert classify.main(["--resume", "--out", "cut2"]) == 0
    assert same_weights("tuned", "cut2", 4)
    other = [{**json.loads(line), "text": "other"} for line in (here / "train.jsonl").read_text().splitlines()]
    (here / "train.jsonl").write_text("\n".join(map(json.dumps, other)))  # with the same labels
    shutil.rmtree("cut2/step-00000004")
    with pytest.raises(UserError, match="made with another data"):
        classify.main(["--resume", "--out", "cut2"])

    assert convert.main(["tuned", "hf"]) == 0
    ids, lengths = np.arange(10)[None], np.array([7])
    ours, again = (load(Path(name), CPU).model.classify(ids, ids * 0, lengths) for name in ("tuned", "hf"))
    assert np.array_equal(ours, again)
    assert json.loads(Path("hf/tokenizer.json").read_text())["model"]["type"] == "WordPiece"
    with pytest.raises(UserError, match="BERT learns masked text and cannot continue text"):
        chat.main("--checkpoint bert --backend numpy --prompt The".split())
    with pytest.raises(UserError, match="BERT learns masked text and cannot continue text"):
        sft.main("--base bert --out other".split())


def same_weights(one: str, other: str, step: int) -> bool:
    name = f"step-{step:08d}/model.safetensors"
    return (Path(one) / name).read_bytes() == (Path(other) / name).read_bytes()


def test_pairs_are_framed_and_long_texts_keep_both_ends() -> None:
    tokenizer = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"])
    assert framed(tokenizer, [5, 6], [7], 9) == ([2, 5, 6, 3, 7, 3], [0, 0, 0, 0, 1, 1])
    assert framed(tokenizer, list(range(5, 15)), [], 6) == ([2, 5, 12, 13, 14, 3], [0] * 6)
    assert framed(tokenizer, list(range(5, 15)), [7, 8, 9], 8) == ([2, 5, 6, 7, 3, 7, 8, 3], [0] * 5 + [1] * 3)
    ids, segments, lengths = padded([([2, 5, 3], [0, 0, 0]), ([2, 3], [0, 0])], 0)
    assert ids.tolist() == [[2, 5, 3], [2, 3, 0]] and lengths.tolist() == [3, 2] and segments.shape == ids.shape


def test_hidden_words_are_drawn_as_in_the_paper() -> None:
    tokenizer = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(200))])
    config = models()["bert"].config(vocab=205, context=102)
    rng = np.random.default_rng(0)
    text = rng.integers(5, 205, (64, 100)).astype(np.int32)
    text[:, 50] = 3
    words = MaskedWords(None, tokenizer, config, 102, 0)  # type: ignore[arg-type]
    batch = words.hide(text, Stream(1, "test"))
    segments, lengths, places = batch.extra_inputs
    whole = np.concatenate([np.full((64, 1), 2), text, np.full((64, 1), 3)], axis=1)
    rows = np.arange(64)[:, None]
    assert places.shape == (64, 15) and all(len(set(row)) == 15 for row in places.tolist())
    assert np.array_equal(batch.targets[..., 0], whole[rows, places]) and (batch.targets >= 5).all()
    changed = batch.ids != whole
    untouched = np.ones_like(changed)
    untouched[rows, places] = False
    assert not (changed & untouched).any() and (lengths == 102).all() and not segments.any()
    shown = batch.ids[rows, places]
    masked, kept = (shown == 4).mean(), (shown == batch.targets[..., 0]).mean()
    assert 0.76 < masked < 0.84 and 0.07 < kept < 0.13
    short = words.hide(np.full((2, 3), 3, np.int32), Stream(1, "test"))  # nothing that could be hidden
    assert (short.extra_inputs[2] == -1).all() and (short.targets == -1).all()


def test_what_frequencies_alone_are_worth() -> None:
    tokenizer = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"])
    text = PackedTokens(np.tile(np.array([5, 5, 6, 3], np.int32), 50), 16, 1, 0)
    words = MaskedWords(text, tokenizer, models()["bert"].config(vocab=8, context=18), 18, 0)
    expected = -(2 * np.log(2 / 3) + np.log(1 / 3)) / 3  # [SEP] is never hidden
    assert words.frequency_loss(1000) == pytest.approx(expected)


def test_the_bag_of_words_learns_what_words_say() -> None:
    texts = [(f"film {word}", "") for word in (*GOOD, *BAD_WORDS) for _ in range(5)]
    labels = np.repeat([1, 0], 15)
    for tf_idf in (False, True):
        found = BagOfWords(texts, labels, 2, tf_idf=tf_idf)
        assert np.array_equal(found.predict(texts).argmax(axis=1), labels)
        assert found.predict([("unknown", "")]).shape == (1, 2)


def test_the_built_in_questions_cannot_be_told_by_their_words() -> None:
    train, test = answers("train", 3000, 0), answers("val", 500, 0)
    assert abs(train.labels.mean() - 0.5) < 0.05 and train.names == ("wrong", "right")
    found = BagOfWords(train.inputs, train.labels, 2, tf_idf=True).predict(test.inputs).argmax(axis=1)
    assert (found == test.labels).mean() < 0.65


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'\xef\xbb\xbf{"text": "a, b", "label": "x"}\r\n\r\n{"text": "c", "label": "y"}\n'),
        ("a.csv", b'\xef\xbb\xbftext,label\r\n"a, b",x\r\nc,y\r\n'),
        ("a.CSV", b"label;text\nx;a, b\ny;c\n"),
        ("a.tsv", b"text\tlabel\na, b\tx\nc\ty\n"),
    ],
)
def test_labelled_texts_as_programs_write_them(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    found = read_texts(tmp_path / name)
    assert [text for text, _ in found.inputs] == ["a, b", "c"] and found.names == ("x", "y")


@pytest.mark.parametrize("length", [1, 2])
def test_a_row_without_room_for_text_is_refused(length: int, here: Path) -> None:
    write_reviews(here / "train.jsonl", 20, 0)
    flags = f"{TEXT_SHAPE} --data train.jsonl --steps 1 --out short --seq-len {length}".split()
    for recipe, model in ((classify, []), (pretrain, ["--model", "bert"])):
        with pytest.raises(UserError, match=f"--seq-len is {length}, expected 3 or more"):
            recipe.main([*flags, *model])


def test_labelled_texts_in_another_encoding(tmp_path: Path) -> None:
    for name, content in (
        ("a.csv", "text,label\nd\u00e9j\u00e0,x\n"),
        ("a.jsonl", '{"text": "d\u00e9j\u00e0", "label": "x"}\n'),
    ):
        (tmp_path / name).write_text(content, encoding="latin-1")
        assert read_texts(tmp_path / name, encoding="latin-1").inputs == [("d\u00e9j\u00e0", "")]
        with pytest.raises(UserError, match="expected utf-8 text"):
            read_texts(tmp_path / name)


def test_a_vocabulary_that_is_asked_for_does_not_stop_a_resumed_run(here: Path) -> None:
    write_reviews(here / "train.jsonl", 20, 0)
    shape = f"{TEXT_SHAPE} --data train.jsonl --steps 2".split()
    assert classify.main([*shape, *"--set vocab=300 --save-every 1 --out run".split()]) == 0
    whole = Path("run/step-00000002/model.safetensors").read_bytes()
    shutil.rmtree("run/step-00000002")
    assert classify.main(["--resume", "--out", "run"]) == 0
    assert Path("run/step-00000002/model.safetensors").read_bytes() == whole
    for flags, said in (("--set vocab=20", "--set vocab=20: the model gets the tokenizer of --base"),
                        ("--tokenizer t.json", "--tokenizer: the model gets that of --base"),
                        ("--shift 1", "--shift moves images, and bert reads texts")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            classify.main([*shape, *f"--base run --out other {flags}".split()])
    with pytest.raises(UserError, match="--tokenizer chars: expected a WordPiece tokenizer; leave it out"):
        classify.main([*shape, *"--tokenizer chars --out other".split()])


@pytest.mark.parametrize(
    ("names", "labels", "found"),
    [
        (("1", "2", "other"), [1, 2], ["1", "2"]),
        (("-1", "0", "1"), [0, 1], ["0", "1"]),
        (("1", "10", "2"), [10, 2], ["10", "2"]),
        (("0", "1", "2"), [1, 2], ["1", "2"]),
        (("wrong", "right"), [0, 1], ["wrong", "right"]),
    ],
)
def test_a_number_is_a_name_where_names_are_numbers(
    names: tuple[str, ...], labels: list[int], found: list[str]
) -> None:
    """As of a table to test on whose labels are all digits."""
    numbers, known = numbered(labels, names, "test.csv")
    assert known == names and [known[number] for number in numbers] == found


TEXT_FAULTS = {
    "columns.parquet": "no column 'text'; its columns are review, label, expected text and label",
    "cut.jsonl": "cut.jsonl:2: expected an object with text and label",
    "label.csv": "label 'maybe' of example 0 is none of the 2 classes: 0, 1",
    "columns.csv": "its columns are review, label; expected text and label",
    "commas.csv": "row 1 has more cells than text, label; put texts in quotes",
    "empty.jsonl": "holds no labelled text",
    "null.jsonl": "row 0 lacks a text or a label",
    "unlabelled.csv": "row 1 lacks a text or a label",
    "text.txt": "expected one of .parquet, .jsonl, .jsonl.gz, .csv",
    "beyond.jsonl": "label 2 of example 1, expected 0 to 1: there are 2 classes",
}


@pytest.mark.parametrize("name", TEXT_FAULTS)
def test_bad_texts_are_one_line(name: str, here: Path) -> None:
    import duckdb

    write_reviews(here / "train.jsonl", 8, 0)
    duckdb.sql("SELECT 'good' AS review, 1 AS label").write_parquet(str(here / "columns.parquet"))
    (here / "cut.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "la')
    (here / "label.csv").write_text("text,label\nfine,maybe\n")
    (here / "columns.csv").write_text("review,label\nfine,1\n")
    (here / "commas.csv").write_text("text,label\nfine,1\nfine, good,1\n")
    (here / "empty.jsonl").write_text("")
    (here / "null.jsonl").write_text('{"text": null, "label": 1}')
    (here / "unlabelled.csv").write_text("text,label\nfine,1\ngood,\n")
    (here / "text.txt").write_text("fine")
    (here / "beyond.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 2}')
    flags = f"{TEXT_SHAPE} --data train.jsonl --test {name} --steps 1 --out run".split()
    with pytest.raises(UserError) as caught:
        classify.main(flags)
    assert TEXT_FAULTS[name] in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("run").exists()
