"""A hundred mistyped or hostile invocations: exit status 2, one line, within two seconds, and nothing is written."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tinyforge.data.world import documents
from tinyforge.errors import run_command
from tinyforge.recipes import pretrain
from tinyforge.tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
SECONDS, TRIES = 2.0, 3
SCRIPTS = ("pretrain", "sft", "dpo", "grpo", "classify", "evaluate", "ablation", "calibrate")
MODULES = {
    "serve": "tinyforge.serve.__main__",
    "chat": "tinyforge.chat",
    "nanoeuler": "models.nanoeuler.chat",
    "inspect": "tinyforge.inspect",
    "gradcheck": "tinyforge.gradcheck",
    "doctor": "tinyforge.doctor",
    "convert": "tinyforge.formats.convert",
    "average": "tinyforge.formats.average",
    "text": "tinyforge.tokenizers.command",
    "local": "data.local",
    "gutenberg": "data.gutenberg",
    "world": "data.world",
    "fineweb": "data.fineweb_edu",
    "tinystories": "data.tinystories",
    "alpaca": "data.alpaca",
    "corpus": "data.corpus",
    "shards": "data.shards",
    "sets": "data.evaluation",
    "stories": "examples.storyteller.stories",
    "chats": "examples.storyteller.chats",
    "lines": "examples.storyteller.lines",
    "board": "tinyforge.board.__main__",
    "web": "tinyforge.web.__main__",
    "scaling": "tinyforge.scaling",
    "tinyforge": "tinyforge.__main__",
}
SHAPE = "dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=96 vocab=280"

INVOCATIONS = """
    pretrain --stpes 5
    pretrain --steps five
    pretrain --steps 0
    pretrain --steps -3
    pretrain --steps 1e3
    pretrain --minutes nan
    pretrain --minutes inf --steps 3
    pretrain --lr nan
    pretrain --lr inf
    pretrain --lr -1
    pretrain --batch-size 0
    pretrain --batch-size 5000000
    pretrain --batch-size 1000000000000
    pretrain --batch-size 99999999999999999999999999
    pretrain --grad-accum 0
    pretrain --seq-len 100000
    pretrain --workers 0
    pretrain --workers -1
    pretrain --keep -2
    pretrain --schedule cosin
    pretrain --out ''
    pretrain --out=
    pretrain --out text.txt
    pretrain --out text.txt/run
    pretrain --out run
    pretrain --data ''
    pretrain --data absent.txt
    pretrain --data 'no
such
error: file'
    pretrain --data empty.txt
    pretrain --data text.txt --encoding punycode
    pretrain --data text.txt --encoding klingon
    pretrain --data text.txt --encoding hex
    pretrain --data text.txt --encoding ''
    pretrain --data text.txt --tokenizer bomb.json
    pretrain --data text.txt --tokenizer doubling.json
    pretrain --data text.txt --tokenizer absent.json
    pretrain --device 3
    pretrain --device two
    pretrain --gpus 0
    pretrain --gpus two
    pretrain --gpus 2 --backend numpy
    pretrain --gpus 2 --device 1
    pretrain --gpus 3
    pretrain --gpus 1000000
    pretrain --elastic
    pretrain --zero 3
    pretrain --reduction-shards 3
    pretrain --reduction-shards 0
    pretrain --reduction-shards 4 --workers 3
    pretrain --timeout 0
    pretrain --timeout nan
    sft --gpus 2 --backend numpy
    classify --gpus -1
    pretrain --backend abacus
    pretrain --precision fp7
    pretrain --config absent
    pretrain --config deep.json
    pretrain --config bomb.json
    pretrain --config /dev/null
    pretrain --model char_mlp --set window=16777216 --plan
    pretrain --set rope_theta=NaN
    pretrain --set rope_theta=0
    pretrain --set rope_theta=-1
    pretrain --set rope_theta=Infinity
    pretrain --set norm_eps=0
    pretrain --set dim=1e9
    pretrain --set dim=99999999999999999999999999
    pretrain --set dim=4000000000
    pretrain --set layers=0
    pretrain --set layers=1000000000
    pretrain --set dim=16777216 layers=40
    pretrain --set context=16777216
    pretrain --set vocab=9000000
    pretrain --set mtp_heads=100000
    pretrain --seed 99999999999999999999999
    pretrain --set vocab=-5
    pretrain --set layers
    pretrain --set heads=3
    pretrain --mix a=1
    pretrain --model gpt9
    pretrain --resume --out absent
    pretrain --resume --out run --lr 1
    sft --base absent
    sft --base ''
    sft --base text.txt
    sft --base run --data deep.json
    sft --base run --data bomb.json
    sft --base run --data text.txt
    sft --base run --out run --data good.json
    sft --base run --max-reply 0
    sft --base run --batch-size 1000000000000 --data good.json
    sft --resume --out text.txt
    pretrain --log csv
    board absent
    board text.txt
    board run --export absent/report.html
    board run --export run
    board nothing --export report.html
    board run --port 99999
    board run --port -1
    board run --port http
    board run --host ''
    board run --host 192.0.2.1
    board run runs
    web
    web text.txt
    web DST --checkpoint absent
    web DST --checkpoint broken
    web DST --checkpoint run --context 3
    web DST --checkpoint run --context many
    web DST --checkpoint run --template absent
    web text.txt/site --checkpoint run
    pretrain --model vit
    pretrain --model bert --stateful
    pretrain --model bert --document-mask keep
    sft --base run --document-mask never
    dpo --base run --data text.txt
    dpo --base run --data empty.txt
    dpo --base run --data good.json
    dpo --base run --data absent.json
    dpo --base absent
    dpo --objective kto
    dpo --gpus 2
    dpo --document-mask keep
    dpo --label-smoothing 0.5
    dpo --beta nan
    dpo --gamma -1
    dpo --resume --out run
    grpo --base absent
    grpo --num-generations 1
    grpo --zero 1
    grpo --document-mask restart
    grpo --clip-low 1
    grpo --clip-high 0
    grpo --iterations 0
    grpo --task sums
    grpo --base run --max-tokens 90
    grpo --base run --data absent.json
    grpo --resume --out nothing
    grpo --data 'no
such' --base run
    classify --lr nan
    classify --batch-size 1000000000000
    classify --model gpt2
    classify --model lenet
    classify --card
    classify --document-mask keep
    classify --set dim=63
    classify --base absent
    classify --base run
    classify --data absent.jsonl
    classify --data text.txt
    classify --data bad.jsonl
    classify --data bad.csv
    classify --data good.json --test absent.csv
    classify --data labels.csv --tokenizer bomb.json
    classify --data labels.csv --test bad.csv
    classify --data labels.csv labels.csv
    classify --model vit
    classify --model vit --data nothing
    classify --model vit --data labels.csv
    classify --resume --out run
    evaluate --checkpoint absent
    evaluate --checkpoint run --device 3
    evaluate --checkpoint run --prompts 0
    evaluate --checkpoint run --json absent/a.json
    evaluate --checkpoint run --json nothing
    evaluate --checkpoint run --data absent.txt
    evaluate --checkpoint broken
    evaluate --checkpoint run --tasks nonsense
    evaluate --checkpoint run --tasks ,
    evaluate --checkpoint run --tasks blimp,blimp --task-data nothing
    evaluate --checkpoint run --tasks blimp
    evaluate --checkpoint run --tasks blimp --task-data nothing
    evaluate --checkpoint run --tasks blimp --task-data absent
    evaluate --checkpoint run --tasks gsm8k --task-data slip.zip
    evaluate --checkpoint run --tasks text
    evaluate --checkpoint run --tasks text --data text.txt --limit 0
    evaluate --checkpoint run --tasks text --data text.txt --resume
    evaluate --checkpoint run --tasks text --data text.txt --resume --json bomb.json
    evaluate --checkpoint run --tasks last_words --data empty.txt
    evaluate --checkpoint run --tasks last_words --data good.json --task-data text.txt
    sets absent
    sets slip.zip
    sets
    ablation
    ablation --arm nonsense
    ablation --arm 'a:' --arm 'b: --lr nan' -- --steps 1
    ablation --arm 'a:' --arm 'b:' --seeds 0
    ablation --arm 'a: --out x' --arm 'b:'
    chat --checkpoint absent --prompt hi
    chat --checkpoint broken --prompt hi
    chat --checkpoint run --prompt ''
    chat --checkpoint run --prompt hi --temperature nan
    chat --checkpoint run --prompt hi --temperature -1
    chat --checkpoint run --prompt hi --top-p 2
    chat --checkpoint run --prompt hi --max-tokens 0
    chat --checkpoint run --prompt hi --drafts -1
    chat --checkpoint run --prompt hi --backend abacus
    chat --checkpoint run --promt hi
    serve --port 70000
    serve --port http
    serve --host 999.1.1.1 --port 0
    serve --port 0 --checkpoint absent
    serve --port 0 --checkpoint broken
    serve --port 0 --checkpoint text.txt
    serve --port 0 --checkpoint run --adapter absent
    serve --port 0 --checkpoint run --adapter run
    serve --port 0 --checkpoint run --backend abacus
    serve --checkpoint run --rows 0
    serve --checkpoint run --context 1
    serve --checkpoint run --max-n 0
    serve --checkpoint run --max-tokens 0
    serve --checkpoint run --deadline nan
    serve --checkpoint run --drain -1
    serve --checkpoint run --queue -1
    serve --checkpoint ''
    serve --what
    nanoeuler --checkpoint text.txt --prompt hi
    inspect
    inspect '' --checkpoint run
    inspect hello --checkpoint run --top 0
    inspect hello --checkpoint run --out a.docx
    inspect hello --checkpoint absent
    gradcheck --op nonsense
    gradcheck --backend abacus
    gradcheck absent.module
    doctor --what
    scaling --gpus 0
    scaling --gpus many
    scaling --config 3b
    scaling --model no-such-model
    scaling --model vit
    scaling --network 0
    scaling --network nan
    scaling --rows -1
    scaling --seq-len 99999 --config 2b
    scaling --batch-tokens -5
    scaling --recompute all
    pretrain --recompute everything
    pretrain --model mamba --recompute blocks
    corpus source --out corpus --ray nowhere
    corpus source --out corpus --ray 127.0.0.1:1
    corpus source --out corpus --ray 127.0.0.1:99999
    corpus source --out corpus --ray local --workers 2
    shards --corpus corpus --out shards --ray nowhere
    shards --corpus corpus --out shards --ray 127.0.0.1:1
    shards --corpus corpus --out shards --ray local --workers 2
    convert
    convert absent DST
    convert run run
    convert run text.txt --format huggingface
    convert text.txt DST
    convert run DST --format pickle
    average run DST
    average run run run
    average run absent DST
    average run run DST --weights 1 0 0
    average run run DST --weights 1 -1
    average --weights 0.5 0.5 run run DST
    calibrate run DST
    calibrate run DST --data
    calibrate run run --data text.txt
    calibrate run DST --data text.txt
    calibrate run DST --data absent
    calibrate absent DST --data text.txt
    calibrate run DST --data text.txt --tokens many
    calibrate run DST --data text.txt --dtype q8_0
    calibrate run DST.gguf --data text.txt
    text
    text train text.txt --vocab-size 10 --out t.json
    text train text.txt --vocab-size 99999 --out t.json
    text train absent.txt --vocab-size 300 --out t.json
    text train text.txt --vocab-size 300 --out absent/t.json
    text train text.txt --vocab-size 300 --out ''
    text encode --tokenizer bomb.json text.txt
    text encode --tokenizer deep.json text.txt
    text decode --tokenizer mine.json text.txt
    text decode --tokenizer mine.json huge.ids
    text inspect --tokenizer mine.json hello --token 99999
    local absent --out DST
    local text.txt --out DST --name ../up
    local text.txt --out DST --encoding punycode
    local text.txt --out ''
    local text.txt --out text.txt
    local empty.txt --out DST
    local slip.zip --out DST
    local text.txt
    gutenberg absent --out DST
    gutenberg text.txt --out DST
    gutenberg slip.zip --out DST
    gutenberg --numbers 0 --out DST
    gutenberg --base-url ftp://a --out DST
    gutenberg --base-url 'http://a
b' --out DST
    fineweb --out DST --bytes many
    fineweb --out DST --rows 0
    fineweb --out DST --base-url nonsense
    tinystories --out DST --base-url file:///etc
    world --n -1
    world --split test
    alpaca deep.json --out DST
    alpaca bomb.json --out DST
    alpaca absent.json --out DST
    alpaca slip.zip --out DST
    alpaca --out DST --base-url gopher://a
    corpus absent --out DST
    corpus nothing --out DST
    corpus nothing --out DST --val-share 2
    corpus nothing --out DST --val-share books=many
    corpus nothing --out DST --max-bytes 3
    corpus nothing --out DST --memory-limit lots
    corpus nothing --out DST --workers 0
    corpus nothing --out text.txt
    corpus nothing --out DST --decontaminate absent
    corpus nothing --out DST --decontaminate text.txt
    corpus report nothing
    stories retell nothing --out DST
    stories retell absent --out DST --copies 0
    stories instruct text.txt --out DST
    stories instruct nothing --out DST --others absent
    stories tell nothing --out DST
    chats nothing --out DST
    chats text.txt --out DST --records 0
    lines small storyteller
    lines small --pairs 2 --key DST
    lines --key absent --judged text.txt
    shards --corpus nothing --out DST
    shards --corpus absent --out DST
    shards --corpus nothing --out DST --vocab-size 300 --tokenizer mine.json
    shards --corpus nothing --out DST --workers 0
    shards --out DST
    tinyforge nonsense
    tinyforge --nonsense
    tinyforge ''
    tinyforge data nonsense
    tinyforge data --out DST
    tinyforge data local absent --out DST
    tinyforge train --stpes 5
    tinyforge chat --checkpoint absent
    tinyforge completion
    tinyforge completion tcsh
"""


def invocations() -> Iterator[str]:
    """A line each, and those that a quoted line break continues."""
    held = ""
    for line in INVOCATIONS.strip().split("\n"):
        held = f"{held}\n{line}" if held else line.strip()
        if held.count("'") % 2 == 0:
            yield held
            held = ""


LINES = list(invocations())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the invocations name: good files and bad ones, a run, and one that is broken."""
    path = tmp_path_factory.mktemp("invocations")
    text = "\n".join(documents("train", 40))
    record = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    doubling = [[97, 97], *([256 + n, 256 + n] for n in range(60))]
    files: dict[str, bytes] = {
        "text.txt": text.encode(),
        "empty.txt": b"",
        "deep.json": b"[" * 100_000,
        "bomb.json": b'{"dim": ' + b"9" * 100_000 + b"}",
        "good.json": json.dumps([record] * 20).encode(),
        "huge.ids": b"9" * 100_000,
        "bad.jsonl": b"[" * 100_000,
        "bad.csv": b"text,label\nfine,\n",
        "labels.csv": b"text,label\ngood,1\nbad,0\n" * 10,
    }
    for name, data in files.items():
        (path / name).write_bytes(data)
    (path / "nothing").mkdir()
    mine = Tokenizer.train([text[:3000]], 280, progress=False)
    mine.save(path / "mine.json")
    content = json.loads((path / "mine.json").read_text(encoding="utf-8"))
    (path / "doubling.json").write_text(json.dumps(content | {"merges": doubling}), encoding="utf-8")
    with zipfile.ZipFile(path / "slip.zip", "w") as archive:
        archive.writestr("../../slipped.txt", "x" * 999)
    before = os.getcwd()
    os.chdir(path)
    try:
        flags = f"--set {SHAPE} --batch-size 2 --workers 1 --data text.txt --steps 1 --tokenizer mine.json --out"
        for name in ("run", "broken"):
            pretrain.main([*flags.split(), name])
    finally:
        os.chdir(before)
    next((path / "broken").glob("step-*/meta.json")).write_text("[]", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[Path, bytes | None]:
    """What is in the folder before any invocation."""
    return contents(folder)


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def main_of(program: str) -> Callable[[list[str]], int | None]:
    return importlib.import_module(f"tinyforge.recipes.{program}" if program in SCRIPTS else MODULES[program]).main


def test_there_are_a_hundred_and_every_command_has_some() -> None:
    assert len(LINES) >= 100 and len(set(LINES)) == len(LINES)
    assert {line.split()[0] for line in LINES} == {*SCRIPTS, *MODULES}


@pytest.mark.parametrize("line", LINES, ids=ascii)
def test_in_this_process(
    line: str,
    folder: Path,
    whole: dict[Path, bytes | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    slowness: Callable[[], float],
) -> None:
    monkeypatch.chdir(folder)
    program, *flags = shlex.split(line)
    main = main_of(program)

    def run() -> tuple[object, str, float]:
        began, clock = time.process_time(), time.perf_counter()
        with pytest.raises(SystemExit) as left:
            run_command(lambda: main(flags))
        seconds = time.process_time() - began
        clock = time.perf_counter() - clock
        # What sleeps or waits takes no processor time.
        assert clock < 10 * SECONDS or clock < 10 * SECONDS * slowness()
        return left.value.code, capsys.readouterr().err, seconds

    check(run, slowness)
    assert contents(folder) == whole


def check(run: Callable[[], tuple[object, str, float]], slowness: Callable[[], float]) -> None:
    """run: gives the exit status, what was printed, and the seconds of processor time. Other processes do not count in
    those, but they slow them down: they take the caches, the memory and the core's other thread. So what took too long
    runs again, three times at most, and the least time counts."""
    for _ in range(TRIES):
        status, shown, seconds = run()
        assert status == 2, shown
        assert shown.startswith("error: ") and shown.count("\n") == 1 and shown.endswith("\n"), shown
        assert len(shown) < 3000 and shown.rstrip("\n").isprintable(), shown
        if seconds < SECONDS or seconds < (limit := SECONDS * slowness()):
            return
    pytest.fail(f"took {seconds:.1f} s of processor time in the last of {TRIES} tries, expected less than {limit:.1f}")


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES, ids=ascii)
def test_as_a_user_types_it(
    line: str, folder: Path, whole: dict[Path, bytes | None], slowness: Callable[[], float]
) -> None:
    program, *flags = shlex.split(line)
    hub = dict.fromkeys(("convert", "average"), "tinyforge.formats")
    where = {"text": "tinyforge.tokenizers", **hub}.get(program, MODULES.get(program, ""))
    command = [str(ROOT / "recipes" / f"{program}.py")] if program in SCRIPTS else ["-m", where]
    if where == "tinyforge.formats":
        command.append(program)

    def run() -> tuple[object, str, float]:
        before = os.times()
        done = subprocess.run(
            [sys.executable, *command, *flags],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        return done.returncode, done.stderr, seconds

    check(run, slowness)
    assert contents(folder) == whole
