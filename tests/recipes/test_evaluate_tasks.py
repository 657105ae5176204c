"""recipes/evaluate.py --tasks, end to end on tiny sets: figures, what is kept, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tinyforge import checkpoint, memory
from tinyforge.backends import get_backend
from tinyforge.errors import UserError, run_command
from tinyforge.infer.figures import table_of_tasks
from tinyforge.infer.likelihood import bytes_needed, tokens_that_fit
from tinyforge.models.nanoeuler import SPEC
from tinyforge.recipes import dpo, evaluate, pretrain, sft
from tinyforge.registry import find_model

CHOICES = [{"text": "in the yard", "label": "A"}, {"text": "xq", "label": "B"}]
QUESTION = {"stem": "Where is the dog?", "choices": CHOICES}
SHAPE = "--batch-size 2 --workers 1 --steps 1 --set dim=16 heads=2 kv_heads=1 layers=1 hidden=24 context=96 vocab=280"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sets = tmp_path / "sets"
    (sets / "blimp").mkdir(parents=True)
    for name in ("causative", "passive_1"):
        pair = {"sentence_good": "The dog is in the yard.", "sentence_bad": "Yard the in is dog the.", "UID": name}
        pairs = [pair] * 3
        (sets / "blimp" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    (sets / "arc_easy-test.jsonl").write_text(json.dumps({"question": QUESTION, "answerKey": "A"}), encoding="utf-8")
    for split in ("train", "test"):
        problem = json.dumps({"question": "How much is 1 plus 1?", "answer": "#### 2"})
        (sets / f"gsm8k-{split}.jsonl").write_text(f"{problem}\n" * 6, encoding="utf-8")
    (tmp_path / "text.txt").write_text("The dog is in the yard. It saw the cat. " * 30, encoding="utf-8")
    return tmp_path


def measured(*flags: str, given: str = str(SPEC.bundled)) -> dict[str, Any]:
    asked = f"--checkpoint {given} --backend numpy --task-data sets --any-version --json found.json".split()
    assert evaluate.main([*asked, *flags]) == 0
    found: dict[str, Any] = json.loads(Path("found.json").read_text(encoding="utf-8"))
    return found


def test_tasks_of_every_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured("--tasks", "blimp,arc_easy", "gsm8k", "text", "--data", "text.txt")
    tasks = found["tasks"]
    assert list(tasks) == ["blimp", "arc_easy", "gsm8k", "text"]
    assert tasks["blimp"]["figures"] == {"acc": 1.0} and tasks["blimp"]["items"] == 6
    assert tasks["arc_easy"]["chance"] == 0.5 and 0 < tasks["text"]["figures"]["bits_per_byte"] < 20
    assert len(found["model_sha256"]) == 64 and all(len(task["set_sha256"]) == 64 for task in tasks.values())
    assert found["command"].startswith("python recipes/evaluate.py --checkpoint ") and found["limit"] is None
    shown = capsys.readouterr().out
    assert "arc_easy      acc" in shown and "43.5%" in shown and "blimp: another version" in shown


def test_finished_tasks_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second task leaves the first in the file; --resume takes it from there, and no other model's."""
    run = evaluate.run_task
    asked: list[int] = []

    def once(*arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return run(*arguments)

    monkeypatch.setattr(evaluate, "run_task", once)
    with pytest.raises(KeyboardInterrupt):
        measured("--tasks", "arc_easy,blimp", "--limit", "2")
    assert list(json.loads(Path("found.json").read_text(encoding="utf-8"))["tasks"]) == ["arc_easy"]
    found = measured("--tasks", "arc_easy,blimp", "--limit", "2", "--resume")
    assert len(asked) == 3 and list(found["tasks"]) == ["arc_easy", "blimp"]
    assert found == measured("--tasks", "arc_easy,blimp", "--limit", "2", "--resume") | {"command": found["command"]}
    assert len(asked) == 3
    with pytest.raises(UserError, match="--resume: found.json has figures of another limit"):
        measured("--tasks", "arc_easy", "--limit", "1", "--resume")


def test_large_figures_do_not_run_into_each_other() -> None:
    task = {
        "figures": {"perplexity": 1.657e9},
        "errors": {"perplexity": 5.58e8},
        "chance": 0.0,
        "items": 2,
        "variant": "",
        "note": "",
        "cut": 0,
    }
    found = {
        "checkpoint": "run",
        "model": "nanoeuler",
        "parameters": 1,
        "backend": "numpy",
        "precision": "fp32",
        "weights": None,
        "limit": None,
        "tasks": {"last_words": task},
    }
    assert "perplexity        1.657e+09  5.58e+08 " in table_of_tasks(found, {"GPT-2": {}})


@pytest.mark.slow
def test_what_a_model_has_learned_from_is_refused(folder: Path) -> None:
    """Its own --data, and that of its base; sets that it has not seen are measured."""
    shutil.copy("sets/blimp/causative.jsonl", "pairs.txt")  # under another name, and as text
    pretrain.main(f"{SHAPE} --data pairs.txt text.txt --out base".split())
    with pytest.raises(UserError, match="--tasks blimp: the model was trained on sets/blimp/causative.jsonl, so its"):
        measured("--tasks", "blimp", given="base")
    assert measured("--tasks", "arc_easy", given="base")["tasks"]["arc_easy"]["items"] == 1
    records = [{"instruction": "Say hello.", "input": "", "output": "hello"}] * 9
    Path("arc_easy-test.json").write_text(json.dumps(records), encoding="utf-8")
    sft.main("--base base --data arc_easy-test.json --steps 1 --batch-size 2 --workers 1 --out tuned".split())
    assert len(checkpoint.load(Path("tuned")).meta["inputs"]) == 1
    with pytest.raises(UserError, match="--tasks blimp: the model was trained on"):
        measured("--tasks", "blimp", given="tuned")
    pair = {"instruction": "Say hello.", "input": "", "chosen": "hello", "rejected": "no"}
    Path("pairs.json").write_text(json.dumps([pair] * 9), encoding="utf-8")
    dpo.main("--base tuned --data pairs.json --steps 1 --batch-size 2 --workers 1 --out dpo --cache kept".split())
    with pytest.raises(UserError, match="--tasks blimp: the model was trained on"):
        measured("--tasks", "blimp", given="dpo")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tasks arc_easy", "--tasks arc_easy reads files: give their folder with --task-data; docs/evaluation.md"),
        ("--tasks text", "--tasks text expects text: --data FILE"),
        ("--tasks blimb --task-data sets", "--tasks: unknown task 'blimb'; known: blimp, arc_easy"),
        ("--tasks piqa --task-data sets", "--task-data: no file for piqa; expected "),
        ("--tasks arc_easy --task-data elsewhere", "elsewhere: no such file or folder; check the path, relative to"),
        ("--tasks arc_easy --task-data sets", "sets/arc_easy-test.jsonl: another version of arc_easy (SHA-256 "),
        ("--tasks arc_easy --task-data sets --any-version --resume", "--resume reads the file of --json; name one"),
        ("--tasks arc_easy --task-data sets --limit 0", "--limit is 0, expected 1 or more"),
        ("--resume --json found.json", "--resume is for --tasks; name some tasks, or leave it out"),
        ("--task-data sets", "--task-data is for --tasks; name some tasks, or leave it out"),
        ("--tasks arc_easy --task-data sets --card", "--card says nothing of --tasks; run that without it"),
    ],
)
def test_one_line(folder: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    with pytest.raises(SystemExit) as left:
        run_command(lambda: evaluate.main([*flags.split(), "--checkpoint", str(SPEC.bundled), "--backend", "numpy"]))
    shown = capsys.readouterr().err
    assert left.value.code == 2 and shown.startswith(f"error: {message}") and shown.count("\n") == 1, shown


def test_a_model_that_is_not_causal_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_model("bert")
    opened = type("Opened", (), {"spec": spec, "path": Path("bert"), "meta": {}})()
    monkeypatch.setattr(evaluate, "open_model", lambda path: opened)
    with pytest.raises(UserError, match="score causal language models; bert is a bert, which learns masked text"):
        measured("--tasks", "arc_easy")


def test_memory_is_forecast(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    config = SPEC.config.from_dict(SPEC.presets["small"].to_dict())
    backend = get_backend("numpy", "fp32", workers=1)
    for free, expected in ((1 << 34, 2048), (24 << 20, 1024)):
        monkeypatch.setattr(memory, "free_host_memory", lambda free=free: free)
        assert 128 <= tokens_that_fit(SPEC, config, backend) <= expected
    plain, int8 = (bytes_needed(SPEC, config, "fp32", 128, weights) for weights in ("", "int8"))
    assert 2.4 * 1e6 < plain - int8 < 3.2 * 1e6  # a million weights of 4 bytes, or of 1 and one matrix of 4
    monkeypatch.setattr(memory, "free_host_memory", lambda: 1 << 20)
    with pytest.raises(UserError, match="scoring 128 tokens needs .* of memory, 1.00 MiB are free; use a"):
        tokens_that_fit(SPEC, config, backend)
