"""--teacher of recipes/pretrain.py and recipes/sft.py: runs that learn from a trained model."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyforge import checkpoint
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.formats import open_model
from tinyforge.recipes import pretrain, sft
from tinyforge.tokenizers import Tokenizer
from tinyforge.train.batches import Replayed
from tinyforge.train.objectives import Batch
from tinyforge.train.settings import PretrainSettings

TEACHER = "--set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=96 vocab=280"
STUDENT = (
    "--data text.txt --set dim=16 heads=2 kv_heads=1 layers=1 hidden=24 context=32 --batch-size 2 --workers 1 "
    "--backend numpy --steps 4 --save-every 2 --teacher-share 0.7"
)
TUNED = "--base teacher-1 --data good.json --batch-size 2 --workers 1 --backend numpy --steps 4 --save-every 2"
RECORDS = [{"instruction": f"Add {a}.", "input": f"{b}", "output": f"{a + b}"} for a in range(5) for b in range(8)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text("\n".join(documents("train", 40)))
    (folder / "read.txt").write_text("\n".join(documents("train", 50)))
    (folder / "good.json").write_text(json.dumps(RECORDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for seed in (0, 1):
            run(
                f"--data read.txt {TEACHER} --batch-size 2 --workers 1 --backend numpy --steps 2 --seed {seed} "
                f"--out teacher-{seed}"
            )
        run(f"{STUDENT} --teacher teacher-0 --out whole")
    return folder


@pytest.fixture(autouse=True)
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(flags: str) -> None:
    assert pretrain.main(flags.split()) == 0


def weights(out: str) -> bytes:
    return (checkpoint.latest(Path(out)) / "model.safetensors").read_bytes()


def hashes(*names: str) -> list[str]:
    return [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in names]


def stopped_after_two_steps() -> None:
    shutil.rmtree("whole/step-00000004")


def test_the_student_has_the_teachers_tokenizer_and_goes_on_to_the_same_bytes(folder: Path) -> None:
    before, meta = weights("whole"), checkpoint.read_meta(checkpoint.latest(Path("whole")))
    assert meta["tokenizer_hash"] == checkpoint.read_meta(checkpoint.latest(Path("teacher-0")))["tokenizer_hash"]
    assert len(meta["teacher"]) == 64 and meta["inputs"] == hashes("text.txt", "read.txt")
    stopped_after_two_steps()
    run("--resume --out whole")
    assert weights("whole") == before


def test_a_fine_tuned_teacher_brings_what_its_base_has_read(folder: Path) -> None:
    assert sft.main([*TUNED.split(), "--out", "tuned"]) == 0
    run(f"{STUDENT} --teacher tuned --out taught")
    meta = checkpoint.read_meta(checkpoint.latest(Path("taught")))
    assert meta["inputs"] == hashes("text.txt", "good.json", "read.txt")
    assert sft.main([*TUNED.replace("teacher-1", "tuned").split(), "--out", "again"]) == 0
    meta = checkpoint.read_meta(checkpoint.latest(Path("again")))
    before = checkpoint.read_meta(checkpoint.latest(Path("tuned")))
    assert meta["base"] == before["base"] and meta["base"]["inputs"] == hashes("read.txt")
    assert [(one["kind"], one["inputs"], one["step"]) for one in meta["stages"]] == [("sft", hashes("good.json"), 4)]
    assert open_model(Path("again")).inputs() == hashes("good.json", "read.txt")


def test_a_tuning_of_a_tuned_model_keeps_its_stages_when_it_goes_on(folder: Path) -> None:
    for name, base in (("first", "teacher-1"), ("second", "first"), ("third", "second")):
        flags = f"{TUNED.replace('teacher-1', base)} --save-every 2 --card --out {name}"
        assert sft.main(flags.split()) == 0
    noted, made = checkpoint.read_meta(checkpoint.latest(Path("third"))), weights("third")
    assert [one["settings"]["out"] for one in noted["stages"]] == ["first", "second"]
    assert noted["base"]["settings"]["out"] == "teacher-1"
    assert Path("third/README.md").read_text().count("python recipes/sft.py") == 3
    shutil.rmtree("third/step-00000004")
    assert sft.main(["--resume", "--out", "third"]) == 0
    again = checkpoint.read_meta(checkpoint.latest(Path("third")))
    assert (again["base"], again["stages"]) == (noted["base"], noted["stages"]) and weights("third") == made


def test_a_run_from_a_base_brings_what_that_has_read(folder: Path) -> None:
    flags = f"--data text.txt --base teacher-0 {TEACHER} --batch-size 2 --workers 1 --backend numpy --steps 4"
    run(f"{flags} --save-every 2 --teacher teacher-1 --out more")
    before = checkpoint.read_meta(Path("more/step-00000004"))["inputs"]
    assert before == hashes("text.txt", "read.txt")
    shutil.rmtree("more/step-00000004")
    run("--resume --out more")
    assert checkpoint.read_meta(Path("more/step-00000004"))["inputs"] == before


def test_a_moved_teacher_is_the_same_one(folder: Path) -> None:
    before = weights("whole")
    stopped_after_two_steps()
    Path("teacher-0").rename("elsewhere")
    run("--resume --out whole --teacher elsewhere")
    assert weights("whole") == before


def test_another_teacher_is_refused(folder: Path) -> None:
    stopped_after_two_steps()
    with pytest.raises(UserError, match="was made with another teacher; give the same teacher"):
        run("--resume --out whole --teacher teacher-1")


def test_a_run_without_a_teacher_gets_none_when_it_goes_on(folder: Path) -> None:
    run(f"{STUDENT.replace('--teacher-share 0.7', '--base teacher-1')} --out alone")
    shutil.rmtree("alone/step-00000004")
    with pytest.raises(UserError, match="step-00000002 was made without a teacher; leave out --teacher"):
        run("--resume --out alone --teacher teacher-0")


def test_several_teachers_and_a_resumed_run(folder: Path) -> None:
    """The same ones in the same order."""
    run(f"{STUDENT} --teacher teacher-0 teacher-1 --out both")
    before, meta = weights("both"), checkpoint.read_meta(checkpoint.latest(Path("both")))
    assert before != weights("whole") and [len(one) for one in meta["teacher"].split()] == [64, 64]
    shutil.rmtree("both/step-00000004")
    with pytest.raises(UserError, match="was made with another teacher"):
        run("--resume --out both --teacher teacher-0")
    run("--resume --out both")
    assert weights("both") == before


def test_a_run_from_before_there_were_several_teachers() -> None:
    for old, new in ((None, ()), ("runs/large", ("runs/large",))):
        assert PretrainSettings.from_dict({"teacher": old}).teacher == new


def test_the_teacher_changes_what_is_learned(folder: Path) -> None:
    run(f"{STUDENT} --teacher teacher-1 --out other")
    assert weights("other") != weights("whole")


def test_a_base_with_another_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="has another tokenizer than .*storyteller"):
        run(f"{STUDENT} --teacher teacher-0 --base storyteller --out other")


def test_what_does_not_fit_the_first_teacher_is_named(folder: Path) -> None:
    run(f"--data read.txt {TEACHER.replace('280', '290')} --batch-size 2 --workers 1 --backend numpy --steps 1 --out t")
    with pytest.raises(UserError, match="t/step-00000001 has another tokenizer than teacher-0/step-00000002; give"):
        run(f"{STUDENT} --teacher teacher-0 t --out other")
    with pytest.raises(UserError, match="--set vocab=300: the model gets its teacher's tokenizer, vocab 280; drop it"):
        run(f"{STUDENT} --set vocab=300 --teacher teacher-0 --out other")


def test_the_plan_counts_the_teacher(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for more in ("", " --teacher-share 0.5 --teacher teacher-0"):
        capsys.readouterr()
        run(f"{TEACHER} --data text.txt --plan{more}")
        peaks.append(capsys.readouterr().out.splitlines()[-1])
    assert peaks[0] != peaks[1]


def test_fine_tuning_learns_from_a_teacher_and_goes_on_to_the_same_bytes(folder: Path) -> None:
    assert sft.main(f"{TUNED} --out plain".split()) == 0
    assert sft.main(f"{TUNED} --teacher teacher-0 --out taught".split()) == 0
    before, meta = weights("taught"), checkpoint.read_meta(checkpoint.latest(Path("taught")))
    assert before != weights("plain") and len(meta["teacher"]) == 64
    shutil.rmtree("taught/step-00000004")
    with pytest.raises(UserError, match="was made with another teacher"):
        sft.main("--resume --out taught --teacher teacher-1".split())
    assert sft.main("--resume --out taught".split()) == 0
    assert weights("taught") == before


def test_adapters_learn_from_a_teacher(folder: Path) -> None:
    assert sft.main(f"{TUNED} --lora 2 --out plain".split()) == 0
    assert sft.main(f"{TUNED} --lora 2 --teacher teacher-0 --out taught".split()) == 0
    assert weights("taught") != weights("plain")


def test_replayed_text_is_learned_beside_the_records(
    folder: Path, make_shards: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a teacher, from it: the records' rows have none. A resumed run reads the same rows."""
    make_shards(
        folder / "shards",
        Tokenizer.load(checkpoint.latest(Path("teacher-1")) / "tokenizer.json"),
        {"books": (20, 2), "web": (20, 2)},
    )
    replay = f"{TUNED} --batch-size 4 --replay shards --mix books=1 --replay-share 0.25"
    read: list[Batch] = []
    batch = Replayed.batch
    monkeypatch.setattr(Replayed, "batch", lambda self, *place: read.append(batch(self, *place)) or read[-1])
    assert sft.main(f"{replay} --out plain".split()) == 0
    assert "replay: 1 of 4 rows, of books" in capsys.readouterr().out
    assert {given.taught for given in read} == {None}
    text, examples = ((part.targets[..., 0] >= 0).mean() for part in (read[0][:1], read[0][1:]))
    assert text > 0.9 and 0 < examples < text
    assert sft.main(f"{replay} --teacher teacher-0 --teacher-share 1 --out taught".split()) == 0
    assert read[-1].taught == 1
    before = weights("taught")
    assert before != weights("plain")
    shutil.rmtree("taught/step-00000004")
    assert sft.main("--resume --out taught".split()) == 0
    assert weights("taught") == before
    make_shards(folder / "others", Tokenizer([], ["<|endoftext|>"]), {"books": (20, 2)})
    for flags, said in (
        ("--replay others", "--replay: others has another tokenizer than .*teacher-1"),
        ("--mix books=1", "--mix is given without --replay; add it, or leave this out"),
        ("--replay shards --batch-size 1", "--replay: a micro-batch of 1 row has no room"),
    ):
        with pytest.raises(UserError, match=said):
            sft.main(f"{TUNED} {flags} --out refused".split())


def test_fine_tuning_refuses_a_teacher_with_another_tokenizer(folder: Path) -> None:
    with pytest.raises(UserError, match="--teacher: .*storyteller has another tokenizer than teacher-1"):
        sft.main(f"{TUNED} --teacher storyteller --out taught".split())
