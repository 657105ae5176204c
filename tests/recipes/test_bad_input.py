"""What a user can get wrong: one line that says what to do, exit status 2, and not a byte of their files changed."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyforge import checkpoint
from tinyforge.data.alpaca import Record
from tinyforge.data.world import documents
from tinyforge.errors import run_command
from tinyforge.models.nanoeuler import chat
from tinyforge.recipes import pretrain, sft
from tinyforge.tokenizers import Tokenizer
from tinyforge.tokenizers.chat_templates import TEMPLATES

ROOT = Path(__file__).resolve().parents[2]
MAINS: dict[str, Callable[[list[str]], int]] = {"pretrain": pretrain.main, "sft": sft.main, "chat": chat.main}
SHAPE = "--set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=96 vocab=280 --batch-size 2 --workers 1"
RECORD = {"instruction": "Add.", "input": "1 and 2", "output": "3"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good and bad files, and a run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("made")
    text = "\n".join(documents("train", 40))
    files: dict[str, bytes] = {
        "text.txt": text.encode(),
        "other.txt": text.upper().encode(),
        "empty.txt": b"",
        "blank.txt": b" \n\n",
        "latin.txt": "caf\xe9 au lait".encode("latin-1"),
        "short.txt": b"A cat sat.",
        "good.json": json.dumps([RECORD] * 20).encode(),
        "cut.json": json.dumps([RECORD] * 3).encode()[:-20],
        "field.json": json.dumps([RECORD, {"instruction": "Add."}]).encode(),
        "silent.json": json.dumps([RECORD | {"output": " "}] * 5).encode(),
        "long.json": json.dumps([RECORD | {"input": "1 and " * 99}] * 5).encode(),
        "key.json": json.dumps({"dims": 32}).encode(),
        "list.json": b"[1, 2]",
        "broken.json": b"{dim: 3}",
        "fake.parquet": b"not parquet",
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "nothing").mkdir()
    (folder / "download").mkdir()
    (folder / "download/model.gguf").write_bytes(b"GGUF")
    Tokenizer([], ["<|endoftext|>", "</s>"]).save(folder / "bytes.json")
    Tokenizer.train([text[:3000]], 280, progress=False).save(folder / "mine.json")
    before = os.getcwd()
    os.chdir(folder)
    try:
        pretrain.main(f"{SHAPE} --data text.txt --steps 4 --save-every 2 --out run".split())
    finally:
        os.chdir(before)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fault(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The error that the command ends with; checks its form, its status, and that no file changed."""
    program, *flags = command.split()
    before = contents(Path())
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        run_command(lambda: MAINS[program](flags))
    shown = capsys.readouterr().err
    assert left.value.code == 2, shown
    assert contents(Path()) == before
    lines = shown.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and shown.endswith("\n"), shown
    return lines[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        # data
        ("pretrain --data text.txt ./text.txt", "text.txt is given twice: its text would be learned and held out"),
        ("pretrain --data absent.txt", "absent.txt: no such file or folder; check the path"),
        ("pretrain --data empty.txt", "empty.txt: is empty, expected text; give another file"),
        ("pretrain --data text.txt blank.txt", "blank.txt: is empty, expected text; give another file"),
        ("pretrain --data nothing", "nothing: no documents in this folder"),
        ("pretrain --data fake.parquet", "fake.parquet: not a readable parquet file"),
        ("pretrain --data latin.txt", "got byte 0xe9 at offset 3, expected utf-8 text; pass --encoding latin-1"),
        ("pretrain --data latin.txt --encoding klingon", "--encoding klingon: no such text encoding; try utf-8"),
        ("pretrain --data short.txt --set vocab=512", "expected 254; use --set vocab=263, or give more text"),
        (
            "pretrain --data short.txt --tokenizer bytes.json --set vocab=258",
            "corpus: 10 tokens, one training sequence takes 129; give more text or a smaller --seq-len",
        ),
        ("sft --base run --data absent.json", "absent.json: no such file or folder"),
        ("sft --base run --data empty.txt", "empty.txt: is empty, expected Alpaca records"),
        ("sft --base run --data latin.txt", "pass --encoding latin-1"),
        ("sft --base run --data cut.json", "cut.json: record 2 (counted from 0), line 1, column"),
        ("sft --base run --data field.json", "field.json: record 1 (counted from 0), line 1: got the keys"),
        ("sft --base run --data silent.json", "no example left to train on; check that the records have replies"),
        ("sft --base run --data long.json", "no example left to train on; check that the records have replies"),
        # config and flags
        ("pretrain --set dims=32", "config: unknown key 'dims'; known: context, vocab, dim"),
        ("pretrain --config key.json", "config: unknown key 'dims'; known: context, vocab, dim"),
        ("pretrain --config list.json", "cannot read --config list.json: got a list, expected an object"),
        ("pretrain --config broken.json", "cannot read --config broken.json: it is not JSON"),
        ("pretrain --config tiny", "--config: 'tiny' is not a preset (small, base, fast, large, xl, 2b) or a file"),
        ("pretrain --set dim=130", "config: dim 130 is not divisible by heads 4; use dim 128"),
        ("pretrain --set dim=1.5", "config: dim is 1.5, expected a whole number"),
        ("pretrain --set dim=wide", "--set: 'dim=wide' expects KEY=VALUE with a number"),
        ("pretrain --set mtp_weights=1", "config: mtp_weights is 1, expected a list of numbers"),
        ("pretrain --data text.txt --set vocab=200", "vocabulary too small for the bytes: got vocab_size 200"),
        ("pretrain --data text.txt --tokenizer absent.json", "cannot read the tokenizer absent.json"),
        ("pretrain --data text.txt --tokenizer bytes.json", "bytes.json has 258 ids, the config's vocab is 512"),
        ("pretrain --data text.txt --seq-len 129", "--seq-len is 129, the config's context is 128; use at most that"),
        ("pretrain --workers 100", "--workers is 100, a batch has 8 rows to share; use at most"),
        ("pretrain --lr nan", "--lr is nan, expected a number above 0"),
        ("pretrain --steps 0", "--steps is 0, expected a number above 0"),
        ("pretrain --steps 9 --minutes 1", "--steps and --minutes are both given, and a run ends by one of them"),
        ("pretrain --decay-fraction 1.5", "--decay-fraction is 1.5, expected a share above 0 and up to 1"),
        ("pretrain --warmup 1", "--warmup is 1.0, expected a share from 0 to below 1"),
        ("sft --base run --max-reply 0", "--max-reply is 0, expected a number above 0"),
        ("sft --base run --data good.json --max-reply 1", "no example left to train on; check that the records have"),
        ("pretrain --teacher run --teacher-share 0", "--teacher-share is 0.0, expected a share above 0 and up to 1"),
        ("pretrain --teacher-share 0.9", "--teacher-share is given without --teacher; add it, or leave this out"),
        (
            "pretrain --model lstm --stateful --data text.txt --teacher run",
            "--stateful: a teacher keeps no state from batch",
        ),
        (
            "pretrain --data text.txt --teacher run --tokenizer mine.json",
            "--tokenizer: the model gets its teacher's; leave out --tokenizer or --teacher",
        ),
        ("pretrain --data text.txt --teacher absent", "no checkpoint in absent"),
        ("pretrain --data text.txt --teacher run", "step-00000004 reads 96 tokens, a row has 128; use --seq-len 96"),
        ("pretrain --data text.txt --teacher run --base storyteller", "has another tokenizer than"),
        ("pretrain --keep -1", "--keep is -1, expected a number of 0 or more"),
        ("pretrain --backend abacus", "unknown backend 'abacus'; known: "),
        ("pretrain --precision fp7", "precision 'fp7' is not available"),
        ("chat --checkpoint run --top-p 0", "--top-p is 0.0, expected a number above 0 and at most 1"),
        # runs and checkpoints
        ("pretrain --resume --out nothing", "--resume: nothing to resume in nothing; start the run without --resume"),
        ("sft --resume --out absent", "--resume: nothing to resume in absent; start the run without --resume"),
        ("sft --base absent --data good.json", "no checkpoint in absent; train one first"),
        ("sft --data good.json", "no pretrained run under runs/; run python recipes/pretrain.py first, or give --base"),
        ("sft --resume --out run", "--resume: the run in run is one of pretrain.py; resume it with that, or"),
        ("chat --checkpoint text.txt", "text.txt is a file, but not a model; expected a run, a Hugging Face directory"),
        ("chat --checkpoint .", "no checkpoint in .: it has no step-* folder and no config.json; check the path"),
        ("chat --checkpoint nothing", "no checkpoint in nothing; train one first"),
        ("chat --checkpoint download", "no config.json; give its file, download/model.gguf"),
        ("pretrain --resume --out run --set dim=64", "--resume: --set is dim=64, the run in run has dim=32"),
        ("pretrain --resume --out run --config base", "--resume: --config is base, the run in run has small; drop"),
        ("pretrain --resume --out run --tokenizer mine.json", "--tokenizer is mine.json, the run in run has none;"),
        (
            "pretrain --resume --out run --steps 9",
            "--resume: --steps is 9, the run in run has 4; drop --steps, or "
            "start a new run with another --out and --base run, which trains on from its weights",
        ),
        (f"pretrain {SHAPE} --data text.txt --steps 1 --out run", "run already holds a run; continue it with --resume"),
        (f"pretrain {SHAPE} --data text.txt --steps 1 --out text.txt", "cannot write in text.txt: File exists; choose"),
    ],
)
def test_one_line_and_nothing_changed(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    assert message in fault(command, capsys)


@pytest.mark.parametrize(
    "command", ["pretrain --resume --out run", "sft --base run --data good.json", "chat --checkpoint run"]
)
def test_a_damaged_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    weights = Path("run/step-00000004/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "model.safetensors has SHA-256" in fault(command, capsys)
    weights.unlink()
    assert "model.safetensors is missing; use another checkpoint of the run" in fault(command, capsys)


@pytest.mark.parametrize("recipe", ["pretrain", "sft"])
def test_a_base_that_comes_with_the_repository_is_known_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    assert MAINS[recipe]("--base small --plan --backend numpy".split()) == 0
    assert "peak" in capsys.readouterr().out


def test_data_that_changed_under_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same file name with other text gives another tokenizer, or with a given tokenizer other tokens."""
    shutil.copy("other.txt", "text.txt")
    assert "was made with another tokenizer; give the same tokenizer" in fault("pretrain --resume --out run", capsys)
    flags = f"{SHAPE} --data text.txt --tokenizer mine.json --steps 2 --out second"
    assert pretrain.main(flags.split()) == 0
    Path("text.txt").write_text("A cat sat. " * 99, encoding="utf-8")
    assert "was made with another data; give the same data" in fault("pretrain --resume --out second", capsys)


def test_a_tokenizer_of_another_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Put into a checkpoint with its hash mended, as one who edits checkpoints might."""
    path = Path("run/step-00000004")
    shutil.copy("mine.json", path / "tokenizer.json")
    hashes = json.loads((path / "hashes.json").read_text(encoding="utf-8"))
    hashes["tokenizer.json"] = hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()
    (path / "hashes.json").write_text(json.dumps(hashes), encoding="utf-8")
    for command in ("sft --base run --data good.json", "chat --checkpoint run --prompt hello"):
        assert "tokenizer.json is not the one it was trained with" in fault(command, capsys)


def subprocess_error(arguments: list[str], limit: int | None = None) -> str:
    """stderr of a recipe run as a user runs it, which must exit with 2; `limit`: largest file it may write, bytes."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_from_the_command_line(folder: Path) -> None:
    shown = subprocess_error([str(ROOT / "recipes" / "pretrain.py"), "--data", "absent.txt"])
    assert shown.startswith("error: absent.txt: no such file") and shown.count("\n") == 1
    shown = subprocess_error([str(ROOT / "recipes" / "sft.py"), "--base", "absent"])
    assert shown.startswith("error: no checkpoint in absent") and shown.count("\n") == 1


def test_a_disk_that_fills_while_saving(folder: Path) -> None:
    """No file may grow beyond 100 KB, which the weights would: the checkpoint from before stays and can be used."""
    shutil.rmtree("run/step-00000004")
    before = contents(Path("run/step-00000002"))
    shown = subprocess_error([str(ROOT / "recipes" / "pretrain.py"), "--resume", "--out", "run"], limit=100_000)
    last = shown.splitlines()[-1]
    assert last.startswith("error: cannot save a checkpoint in run: File too large; "), shown
    assert "run/step-00000002, is untouched" in last
    assert [p.name for p in Path("run").iterdir() if p.is_dir()] == ["step-00000002"]
    assert contents(Path("run/step-00000002")) == before
    assert pretrain.main(["--resume", "--out", "run"]) == 0
    assert checkpoint.load(Path("run")).meta["step"] == 4


def test_a_rate_that_blows_up(folder: Path) -> None:
    """float32 overflows within a few steps: the run stops, names where, and what was saved is finite."""
    flags = f"{SHAPE} --data text.txt --steps 30 --save-every 1 --lr 1e20 --out wild".split()
    shown = subprocess_error([str(ROOT / "recipes" / "pretrain.py"), *flags])
    last = shown.splitlines()[-1]
    assert "Warning" not in shown
    assert last.startswith("error: step ") and "Try a lower --lr or --clip" in last
    assert "forward of " in last or "backward of " in last or "weight " in last


def test_long_replies_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer([], ["</s>"])
    records = [Record("Go.", "", "x" * length) for length in (3, 4, 5)]  # and the token that ends each
    template = TEMPLATES["alpaca"]
    whole = sft.encode(records, tokenizer, template, 90, "training")
    assert sft.encode(records, tokenizer, template, 90, "training", max_reply=5) == whole[:2]
    assert "training: 1 left out whose reply takes more than 5 tokens (--max-reply)" in capsys.readouterr().out
    room = whole[0][1] + 3  # all three are truncated to as many tokens
    assert sft.encode(records, tokenizer, template, room, "training", max_reply=5) == [
        (ids[: room + 1], prompt) for ids, prompt in whole[:2]
    ]
