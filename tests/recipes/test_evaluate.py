"""recipes/evaluate.py end to end: on shards and on other text, a base and a fine-tuned model, and what is wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyforge import chat, checkpoint, inspect
from tinyforge.data.alpaca import encode_example, read_split
from tinyforge.data.world import documents, instructions
from tinyforge.errors import UserError, run_command
from tinyforge.infer import Sampling, figures
from tinyforge.models.kneser_ney.model import KneserNey
from tinyforge.models.nanoeuler import SPEC
from tinyforge.recipes import evaluate, pretrain, sft
from tinyforge.report import NOISE
from tinyforge.shards import SEPARATOR, Shards
from tinyforge.tokenizers import Tokenizer
from tinyforge.tokenizers.chat_templates import TEMPLATES
from tinyforge.train import metrics
from tinyforge.train.card import card, write_card
from tinyforge.train.metrics import save_scores
from tinyforge.train.settings import PretrainSettings, SftSettings, parse

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "--batch-size 4 --workers 1 --set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=160"
QUICK = ["--sentences", "20", "--prompts", "4", "--max-tokens", "8", "--seeds", "2", "--backend", "numpy"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_shards: Callable[..., None]) -> Path:
    """Shards, a base of a few steps on them with its printed figures, a model fine-tuned from it, and records."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = Tokenizer.train(list(documents("train", 60)), 300, progress=False)
    make_shards(folder / "shards", tokenizer, {"books": (40, 30), "web": (15, 6)})
    make_shards(folder / "other", Tokenizer([], [SEPARATOR, "</s>"]), {"books": (9, 2)})
    records = [{"instruction": e.instruction, "input": e.input, "output": e.output} for e in instructions("train", 80)]
    files: dict[str, Any] = {
        "records.json": records,
        "none.json": [],
        "long.json": [record | {"input": "and so on " * 99} for record in records],
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "text.txt").write_text("\n".join(documents("train", 60, 7)), encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    try:
        pretrain.main(f"{SHAPE} --data shards --mix books=1 web=2 --steps 6 --out base --card".split())
        sft.main("--base base --data records.json --steps 3 --batch-size 4 --workers 1 --out tuned --card".split())
    finally:
        os.chdir(before)
    return folder


def measured(*flags: str) -> dict[str, Any]:
    assert evaluate.main([*flags, *QUICK, "--json", "found.json"]) == 0
    found: dict[str, Any] = json.loads(Path("found.json").read_text(encoding="utf-8"))
    return found


def test_a_base_model_on_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figures of pretrain.py come out again, the n-grams are those of the training text, and scores are merged."""
    printed = json.loads(Path("base/scores.json").read_text(encoding="utf-8"))
    save_scores(Path("base"), 6, {"of another kind": 0.5})
    found = measured("--checkpoint", "base", "--data", "shards", "--kneser-ney", "--card")
    shown = capsys.readouterr()
    text = found["text"]
    assert text["own"] and text["bits_per_byte"] == pytest.approx(printed["held-out text, bits per byte"], rel=1e-6)
    for name in ("books", "web"):
        heads = text["sources"][name]["bits_per_byte"]
        assert heads[0] == pytest.approx(printed[f"held-out text of {name}, bits per byte"], rel=1e-6)
        assert len(set(heads)) == 4
    sizes = {name: source["bytes"] for name, source in text["sources"].items()}
    overall = sum(text["sources"][n]["bits_per_byte"][0] * size for n, size in sizes.items()) / sum(sizes.values())
    assert text["bits_per_byte"] == pytest.approx(overall, rel=1e-12)

    shards = Shards([Path("shards")])
    training = np.concatenate([shards.sequence(name, "train")[:] for name in ("books", "web")])
    web = shards.sequence("web", "val")[:]
    bits = -KneserNey(training, 300).log_probs(web)[1:].sum() / np.log(2) / shards.tokenizer.byte_lengths[web[1:]].sum()
    assert text["sources"]["web"]["kneser_ney"] == pytest.approx(bits, rel=1e-12)
    assert sizes["web"] == shards.tokenizer.byte_lengths[web[1:]].sum()  # what is shown is what is divided by
    assert "the model is NOT below a 5-gram Kneser-Ney model of the same training text" in shown.out
    assert re.search(r"  web +\d\.\d{3}.*  \d\.\d{3}", shown.out)

    cloze = text["sources"]["books"]["cloze"]
    assert cloze["sentences"] == 20 and 0 <= cloze["right"] <= 1 and 0 <= cloze["by_frequency"] <= 1
    assert found["replies"]["skipped"].startswith("a base model continues a text")
    assert f"replies: skipped; {found['replies']['skipped']}" in shown.out
    speculation = found["speculation"]
    assert speculation["tokens"] == 3200 >= speculation["passes"] > 0 and len(speculation["acceptance"]) == 3
    scores = json.loads(Path("base/scores.json").read_text(encoding="utf-8"))
    assert scores["of another kind"] == 0.5
    assert scores["held-out text of web, head 3, bits per byte"] == text["sources"]["web"]["bits_per_byte"][3]
    written = Path("base/README.md").read_text(encoding="utf-8")
    assert f"| held-out text of web, a 5-gram model, bits per byte | {bits:.3f} |" in written
    assert re.search(r"\| last word of a sentence among ten, books \| \d+\.\d% ± \d+\.\d% \|", written)
    assert "± is the standard error" in written


def test_windows_of_another_length(folder: Path) -> None:
    """Those of the run give its figures; shorter ones predict more tokens from little, and leave no scores."""
    own, same, short = (
        measured("--checkpoint", "base", "--data", "shards", *flags)["text"]
        for flags in ([], ["--seq-len", "160"], ["--seq-len", "3"])
    )
    assert same == own and short["bits_per_byte"] != pytest.approx(own["bits_per_byte"], rel=1e-4)
    assert {name: part["bytes"] for name, part in short["sources"].items()} == {
        name: part["bytes"] for name, part in own["sources"].items()
    }
    shutil.copytree("base", "unscored")
    Path("unscored/scores.json").unlink()
    measured("--checkpoint", "unscored", "--data", "shards", "--seq-len", "160")
    assert not Path("unscored/scores.json").exists()


def test_a_fine_tuned_model_is_asked_what_it_was_not_taught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ids = evaluate.prompt_ids
    monkeypatch.setattr(evaluate, "prompt_ids", lambda loaded, *text: asked.append(text[0]) or ids(loaded, *text))
    found = measured("--checkpoint", "tuned", "--data", "shards", "--instructions", "records.json")
    _, (held_out,) = read_split(["records.json"])
    assert asked == [record.instruction for record in held_out] and len(asked) == 4
    replies = found["replies"]
    assert replies["prompts"] == 4 and replies["left_out"] == 0 and replies["seeds"] == 2
    headings = [figures._replies({**replies, "seeds": seeds})[1].split(maxsplit=1) for seeds in (1, 2)]
    assert headings == [["greedy", "sampled, 1 seed"], ["greedy", "sampled, 2 seeds"]]
    for how in ("greedy", "sampled"):
        shares = replies[how]
        assert shares["all_three"] <= min(shares["ended"], shares["not_empty"], shares["no_line_repeated"])
        assert 0 <= shares["tokens"] <= 8
    assert set(replies["spread"]) == set(replies["greedy"])
    scores = json.loads(Path("tuned/scores.json").read_text(encoding="utf-8"))
    assert scores["replies that end by themselves, greedy"] == replies["greedy"]["ended"]
    assert scores["replies that do all three, sampled +-"] == replies["spread"]["all_three"]


def test_replies_are_sampled_by_the_models_own_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Sampling] = []
    monkeypatch.setattr(evaluate, "measure_replies", lambda *given: drawn.append(given[3]) or {"skipped": "seen"})
    (checkpoint.latest(Path("tuned")) / "generation_config.json").write_text('{"top_k": 3, "max_new_tokens": 99}')
    measured("--checkpoint", "tuned", "--data", "shards", "--instructions", "records.json")
    assert drawn == [Sampling(top_k=3, max_tokens=8)]  # QUICK's


def test_instructions_in_several_files_are_held_out_as_fine_tuning_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last 20th of each file, at least one record."""
    records = json.loads(Path("records.json").read_text(encoding="utf-8"))
    for name, part in (("first.json", records[:78]), ("second.json", records[78:])):
        Path(name).write_text(json.dumps(part), encoding="utf-8")
    asked: list[str] = []
    ids = evaluate.prompt_ids
    monkeypatch.setattr(evaluate, "prompt_ids", lambda loaded, *text: asked.append(text[0]) or ids(loaded, *text))
    found = measured("--checkpoint", "tuned", "--data", "shards", "--instructions", "first.json", "second.json")
    assert asked == [record["instruction"] for record in records[75:78] + records[79:]]
    assert found["instructions"] == ["first.json", "second.json"]


def test_prompts_begin_as_those_that_were_learned(folder: Path) -> None:
    """With bos, where the tokenizer has one: the ids are those of fine-tuning up to the reply."""
    tokenizer = Tokenizer([], ["<s>", "</s>"])
    tokenizer.bos = tokenizer.specials["<s>"]
    model = SimpleNamespace(config=SimpleNamespace(context=1000))
    loaded = SimpleNamespace(tokenizer=tokenizer, model=model, template=TEMPLATES["plain"])
    _, (held_out,) = read_split(["records.json"])
    prompts, left_out = evaluate.held_out_prompts(loaded, ["records.json"], "utf-8", len(held_out), 0)
    examples = [encode_example(tokenizer, record, 1000) for record in held_out]
    assert prompts == [ids[:length] for ids, length in examples] and left_out == 0
    chat = {"system": "Be brief.", "instruction": "And 1?", "input": "", "output": "2", "history": [["Is 1?", "1"]]}
    Path("chats.json").write_text(json.dumps([chat] * 2), encoding="utf-8")
    _, ((record,),) = read_split(["chats.json"])
    ids, length = encode_example(tokenizer, record, 1000)
    assert evaluate.held_out_prompts(loaded, ["chats.json"], "utf-8", 1, 0) == ([ids[:length]], 0)
    assert all(prompt[0] == tokenizer.bos for prompt in prompts)


def test_other_text_than_the_runs_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --data the run's own held-out text, the built-in world where that is gone; another text's figure does not
    replace the run's own."""
    before = metrics.read_scores(Path("base"), 6)["held-out text, bits per byte"]
    own = measured("--checkpoint", "base")["text"]
    assert own["own"] and own["bits_per_byte"] == pytest.approx(before, rel=1e-6)
    Path("shards").rename("elsewhere")
    found = measured("--checkpoint", "base")
    Path("elsewhere").rename("shards")
    assert list(found["text"]["sources"]) == ["built-in world"] and not found["text"]["own"]
    assert "the model learned from shards, which is not here; give --data" in capsys.readouterr().err
    other = measured("--checkpoint", "base", "--data", "text.txt")
    assert list(other["text"]["sources"]) == ["text"]
    assert other["text"]["bits_per_byte"] != found["text"]["bits_per_byte"]
    assert metrics.read_scores(Path("base"), 6)["held-out text, bits per byte"] == pytest.approx(before, rel=1e-6)


def test_a_run_on_plain_text_and_one_output_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last tenth of the text is its own held-out text; nothing is guessed ahead; one sentence is too few."""
    Path("text.txt").write_text("A cat sat on the mat and saw the sea. " * 200, encoding="utf-8")
    pretrain.main(f"{SHAPE} mtp_heads=1 vocab=270 --data text.txt --steps 2 --out plain".split())
    printed = json.loads(Path("plain/scores.json").read_text(encoding="utf-8"))
    found = measured("--checkpoint", "plain", "--data", "text.txt", "--kneser-ney")
    assert found["text"]["own"] and len(found["text"]["sources"]["text"]["bits_per_byte"]) == 1
    assert found["text"]["bits_per_byte"] == pytest.approx(printed["held-out text, bits per byte"], rel=1e-6)
    shown = capsys.readouterr().out
    assert "speculation: skipped; the model has one output head" in shown
    assert "skipped: too few different last words of sentences" in shown

    with open("text.txt", "a", encoding="utf-8") as text:
        text.write("A dog sat on it too. " * 20)
    changed = measured("--checkpoint", "plain", "--data", "text.txt")
    assert not changed["text"]["own"] and changed["text"]["bits_per_byte"] != found["text"]["bits_per_byte"]
    assert "text.txt: changed since the model learned from it" in capsys.readouterr().err
    kept = metrics.read_scores(Path("plain"), 2)["held-out text, bits per byte"]
    assert kept == pytest.approx(printed["held-out text, bits per byte"], rel=1e-6)


def test_both_cloze_figures_are_of_the_same_sentences(folder: Path) -> None:
    """The commonest last word ends only sentences that are too long for the context, so no scored one has it."""
    long = [f"Number {i} {' '.join('zyxwvu' for _ in range(36))} sea." for i in range(11)]
    short = [f"They all went to the {word}." for word in "lake hill door barn yard park pond gate tree".split()]
    tail = " ".join([*long, *short]) + " "
    Path("sentences.txt").write_text("and so on " * len(tail) + tail, encoding="utf-8")
    found = measured("--checkpoint", "base", "--data", "sentences.txt")
    cloze = found["text"]["sources"]["text"]["cloze"]
    assert cloze["sentences"] == 9 and cloze["by_frequency"] == 0


def test_weights_of_one_byte_stand_beside_the_models_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = Path("base/scores.json").read_bytes()
    plain = measured("--checkpoint", "base", "--data", "shards")
    Path("base/scores.json").write_bytes(scores)
    capsys.readouterr()
    found = measured("--checkpoint", "base", "--data", "shards", "--weights", "int8", "--card")
    shown = capsys.readouterr()
    text, before = found["text"], plain["text"]
    assert text["bits_per_byte_plain"] == pytest.approx(before["bits_per_byte"], rel=1e-12)
    loss = text["bits_per_byte"] / text["bits_per_byte_plain"] - 1
    assert 0 < abs(loss) < 0.01
    for name, source in text["sources"].items():
        assert source["bits_per_byte_plain"] == pytest.approx(before["sources"][name]["bits_per_byte"], rel=1e-12)
    assert found["weight_bytes"] < 0.5 * found["weight_bytes_plain"] == 0.5 * plain["weight_bytes"]
    row = next(line for line in shown.out.splitlines() if line.endswith("%") and "over all" in line)
    assert row.split()[2:] == [
        f"{text['bits_per_byte']:.4f}",
        f"{before['bits_per_byte']:.4f}",
        f"{text['bits_per_byte'] - before['bits_per_byte']:+.4f}",
        f"{loss:+.2%}",
    ]
    first, second = (line.split()[:3] for line in shown.out.splitlines() if "over all" in line)
    assert first[2] == f"{text['bits_per_byte']:.3f}" and second == row.split()[:3]  # each in the table of its columns
    assert "weights in int8" in shown.out and plain["weights"] is None
    assert "figures of int8 weights are not the run's: no scores.json and no card written" in shown.err
    assert Path("base/scores.json").read_bytes() == scores


def test_a_run_that_cannot_be_written_to_is_evaluated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--checkpoint", "base", *QUICK, "--data", "text.txt", "--json"]
    with monkeypatch.context() as context:
        context.setattr(evaluate.os, "access", lambda path, mode: False)
        assert evaluate.main(flags) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["text"] and "base is not writable: no scores.json written" in shown.err
    monkeypatch.setattr(evaluate, "save_scores", lambda *_: Path("base/nothing/scores.json").touch())
    with pytest.raises(FileNotFoundError):  # as where the disk is full: the figures are there by then
        evaluate.main(flags)
    assert json.loads(capsys.readouterr().out)["text"]


def test_what_is_no_run_gets_no_scores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that was given away has no run around it; the figures go to stdout, the rest to stderr."""
    shutil.copytree(SPEC.bundled, "given")
    before = {path: path.read_bytes() for path in Path("given").iterdir()}
    flags = [*QUICK, "--data", "text.txt", "--max-tokens", "40", "--card", "--json"]
    assert evaluate.main(["--checkpoint", "given", *flags]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["replies"]["greedy"]["ended"] == 1.0 and found["replies"]["prompts"] == 4
    assert "given is not the newest checkpoint of a run: no scores.json and no card written" in shown.err
    assert {path: path.read_bytes() for path in Path("given").iterdir()} == before
    assert not Path("scores.json").exists()


def test_without_duckdb(folder: Path) -> None:
    """As on a machine that has only a GPU: whatever imports duckdb fails."""
    program = (
        "import sys; sys.modules['duckdb'] = None; from recipes import evaluate; "
        f"sys.exit(evaluate.main(['--checkpoint', 'tuned', '--data', 'shards', *{QUICK}]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "replies to 4 held-out instructions, up to 8 tokens" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--checkpoint absent", "no checkpoint in absent; train one first"),
        ("--checkpoint base --data absent", "absent: no such file or folder"),
        ("--checkpoint base --data other", "--data: other was made with the tokenizer "),
        ("--checkpoint base --data shards text.txt", "--data: shards holds token shards, text.txt does not"),
        ("--checkpoint tuned --instructions absent.json", "absent.json: no such file"),
        ("--checkpoint tuned --instructions none.json", "none.json: is empty, expected Alpaca records"),
        ("--checkpoint tuned --instructions text.txt", "text.txt: record 0"),
        ("--checkpoint tuned --instructions long.json", "--instructions: no held-out prompt has at most"),
        ("--checkpoint base --seeds -1", "--seeds is -1, expected 0 or more"),
        ("--checkpoint base --seq-len 0", "--seq-len is 0, expected 1 or more"),
        ("--checkpoint base --data shards --seq-len 161", "--seq-len is 161, the config's context is 160; use at most"),
        ("--checkpoint base --sentences 0", "--sentences is 0, expected 1 or more"),
        ("--checkpoint base --backend abacus", "unknown backend 'abacus'"),
        ("--checkpoint base --precision fp7", "precision 'fp7' is not available"),
        ("--checkpoint base --json absent/found.json", "--json: absent/found.json is in a folder that does not exist"),
    ],
)
def test_one_line(folder: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    with pytest.raises(SystemExit) as left:
        run_command(lambda: evaluate.main(flags.split()))
    shown = capsys.readouterr().err
    assert left.value.code == 2 and shown.rstrip().rpartition("\n")[2].startswith(f"error: {message}"), shown


def test_the_card_of_a_run(folder: Path) -> None:
    """Both recipes write it from the run: what was read, under which licence, how fast; energy where it is known."""
    base, tuned = (Path(f"{name}/README.md").read_text(encoding="utf-8") for name in ("base", "tuned"))
    manifest = json.loads(Path("shards/manifest.json").read_text(encoding="utf-8"))
    for source, share in zip(manifest["sources"], ("33.3%", "66.7%"), strict=True):
        train, val = source["train"], source["val"]
        row = f"| {source['name']} | not stated | {share} | {train['documents']} | {train['bytes']:,} | "
        row += f"{train['tokens']:,} | {val['documents']} | {val['bytes']:,} |"
        assert row in base and row in tuned
    assert "| records | not stated | 76 | 4 |" in tuned and "Instructions" not in base
    assert "license: other" in base and "It was trained only on the text named below" in base
    assert f"6 steps in {checkpoint.load(Path('base')).meta['elapsed']:,.0f} s on " in base
    assert f": {6 * 4 * 160:,} tokens, " in base and "kWh" not in base
    assert "| AdamW | 0.002 | wsd | 0.1 | 1 | 4 x 160 | fp32 |" in base
    assert "| AdamW | 0.002 | wsd | 0 | 1 | 4 x 160 | fp32 |" in tuned
    assert '--prompt "Once upon a time"' in base and "### Response" in tuned
    assert str(folder) not in base + tuned
    path = checkpoint.latest(Path("base"))
    found = checkpoint.load(path)
    found.meta["joules"] = 7.2e6
    assert "; 2.000 kWh; seed 0" in card(found)
    del found.meta["machine"]
    with pytest.raises(UserError, match="lacks what a card needs, as do checkpoints of early versions; train it again"):
        card(found)


def test_a_card_says_what_the_file_holds(folder: Path) -> None:
    pretrain.main(f"{SHAPE} --data text.txt --precision fp64 --steps 1 --backend numpy --out wide --card".split())
    # One document, cut into a part of the training text and the held-out text, is counted once.
    (row,) = (line for line in Path("wide/README.md").read_text("utf-8").splitlines() if line.startswith("| text |"))
    assert row.split("|")[4].strip() == "1" and row.split("|")[7].strip() == "0"
    assert SPEC.bundled and SPEC.bundled_for_chat
    for text, expected in (
        (Path("base/README.md").read_text(encoding="utf-8"), "float32"),
        (Path("wide/README.md").read_text(encoding="utf-8"), "float64"),
        (card(checkpoint.load(SPEC.bundled)), "bfloat16"),
        (card(checkpoint.load(SPEC.bundled_for_chat)), "int8, with a float32 scale for each row of a matrix"),
    ):
        assert f"Weights are {expected}." in text


@pytest.mark.parametrize(
    ("recipe", "step", "flags"),
    [
        (sft, "tuned", "--steps 3 --lr 4e-3 --weight-decay 0.1"),
        (sft, "tuned", "--minutes 2"),
        (pretrain, "base", "--steps 6 --lr 2e-3 --data 'a file' b"),
    ],
)
def test_the_command_on_the_card_means_what_was_run(folder: Path, recipe: Any, step: str, flags: str) -> None:
    """Read by the recipe that it names it gives the same settings, whatever that recipe's own defaults are."""
    kind = SftSettings if recipe is sft else PretrainSettings
    expected = parse(kind, "", shlex.split(flags)).settings
    found = checkpoint.load(Path(step))
    found.meta["settings"] = json.loads(json.dumps(expected.to_dict()))
    told = re.findall(rf"    python recipes/{recipe.__name__.rpartition('.')[2]}\.py (.*)", card(found))
    assert len(told) == 1
    assert parse(kind, "", shlex.split(told[0])).settings == expected


def test_the_card_of_a_run_with_settings_that_are_gone(folder: Path) -> None:
    found = checkpoint.load(Path("base"))
    found.meta["settings"] |= {"momentum": 0.5, "shuffle": None}
    assert "--momentum 0.5" in card(found) and "shuffle" not in card(found)


def test_scores_are_merged_and_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    save_scores(tmp_path, 6, {"a": 1.0, "b": 2.0})
    save_scores(tmp_path, 6, {"b": 3.0})
    assert metrics.read_scores(tmp_path, 6) == {"a": 1.0, "b": 3.0}
    (tmp_path / "scores.json").write_text("{", encoding="utf-8")
    save_scores(tmp_path, 6, {"b": 4.0})
    assert metrics.read_scores(tmp_path, 6) == {"b": 4.0}


def test_noise_goes_with_the_score_that_it_was_of(tmp_path: Path) -> None:
    save_scores(tmp_path, 6, {"a": 1.0, f"a{NOISE}": 0.1, "b": 2.0, f"b{NOISE}": 0.2, f"c{NOISE}": 0.3})
    save_scores(tmp_path, 6, {"a": 1.5, "b": 2.5, f"b{NOISE}": 0.4})
    expected = {"a": 1.5, "b": 2.5, f"b{NOISE}": 0.4, f"c{NOISE}": 0.3}
    assert metrics.read_scores(tmp_path, 6) == expected


def test_scores_are_of_one_step(tmp_path: Path) -> None:
    """Those of a step that the run has left after go; a file without a step, as there once were, is taken as it is."""
    (tmp_path / "scores.json").write_text('{"a": 1.0}', encoding="utf-8")
    assert metrics.read_scores(tmp_path, 6) == {"a": 1.0}
    save_scores(tmp_path, 6, {"b": 2.0})
    assert metrics.read_scores(tmp_path, 6) == {"a": 1.0, "b": 2.0} and metrics.read_scores(tmp_path, 8) == {}
    save_scores(tmp_path, 8, {"c": 3.0})
    assert metrics.read_scores(tmp_path, 8) == {"c": 3.0} and metrics.read_scores(tmp_path, 6) == {}


@pytest.mark.slow
def test_a_run_that_goes_on_leaves_its_scores_behind(folder: Path) -> None:
    """Measured when it was stopped, on what its end does not measure again: neither file nor card has that."""
    pretrain.main(f"{SHAPE} --data shards --steps 4 --save-every 2 --out half".split())
    shutil.rmtree("half/step-00000004")
    measured("--checkpoint", "half", "--data", "shards", "--card")
    word = "last word of a sentence among ten, books"
    assert word in metrics.read_scores(Path("half"), 2) and word in Path("half/README.md").read_text(encoding="utf-8")
    pretrain.main("--resume --out half --card".split())
    scores = metrics.read_scores(Path("half"), 4)
    assert "held-out text, bits per byte" in scores and word not in scores
    assert word not in Path("half/README.md").read_text(encoding="utf-8")
    sft.main("--base base --data records.json --steps 4 --save-every 2 --batch-size 4 --workers 1 --out asked".split())
    save_scores(Path("asked"), 2, {word: 0.5})  # fine-tuning on records takes no scores of its own
    assert word not in write_card(Path("asked")).read_text(encoding="utf-8")


def test_a_write_that_breaks_off_leaves_the_old_scores_and_card(folder: Path) -> None:
    """No file may grow beyond 100 bytes, as on a disk that is full in the middle of a write."""
    save_scores(Path("tuned"), 3, {"a": 1.0})
    kept = [Path("tuned/scores.json"), Path("tuned/README.md")]
    before = [path.read_bytes() for path in kept]
    program = """
import resource
from pathlib import Path
from tinyforge.train.card import write_card
from tinyforge.errors import UserError
from tinyforge.train.metrics import save_scores
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for write in (lambda run: save_scores(run, 3, {"b" * 200: 1.0}), write_card):
    try:
        write(Path("tuned"))
    except UserError as error:
        print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "cannot write tuned/scores.json: File too large; the checkpoint is saved. Free some space",
        "cannot write tuned/README.md: File too large; the checkpoints are untouched",
    ]
    assert [path.read_bytes() for path in kept] == before


@pytest.mark.parametrize("command", [chat, evaluate, inspect])
def test_help_says_which_model_is_taken(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    flag = " ".join(capsys.readouterr().out.rpartition("--checkpoint MODEL")[2].split())
    assert flag.startswith(
        "a run, one of its checkpoints, another program's model, owner/name[@revision] on the Hugging Face hub, or a "
        "model of the repository: small, storyteller (default: the newest run under runs/, fine-tuned before "
        "pretrained; else a model of the repository)"
    )


@pytest.mark.parametrize(("backend", "precision"), [("numpy", "fp32"), ("cupy", "bf16")])
def test_a_run_in_fp8_is_not_measured_in_it(
    tmp_path: Path, backend: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert pretrain.main([*SHAPE.split(), "--precision", "fp8", "--steps", "1", "--out", str(run)]) == 0
    monkeypatch.setattr(evaluate, "get_backend", lambda name, precision, device: (name, precision))
    args: Any = SimpleNamespace(checkpoint=str(run), backend=backend, precision=None, device=None)
    assert evaluate.backend_of(args) == (backend, precision)
