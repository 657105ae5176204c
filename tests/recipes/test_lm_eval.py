"""Scores next to lm-evaluation-harness: the same models, exported, on the same files, give the same figures."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.data.evaluation import detokenised, find_sets, first_of_each, pages_of, read_set
from tinyforge.formats import load_pretrained, save_pretrained
from tinyforge.infer.likelihood import Scorer
from tinyforge.infer.tasks import Problem, run_task

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"
MODELS = {
    "small": (ROOT / "models/nanoeuler/small", None),
    "stories260K": (SHARED / "llama2c/stories260K.bin", SHARED / "llama2c/tok512.bin"),
}
# Pairs of each phenomenon and questions of each other task; a tenth as many articles of Simple English next to PAGES.
# docs/evaluation.md has what LM_EVAL_PAIRS=100 LM_EVAL_QUESTIONS=500 printed.
PAIRS, QUESTIONS = int(os.environ.get("LM_EVAL_PAIRS", "5")), int(os.environ.get("LM_EVAL_QUESTIONS", "60"))
GOALS = 60  # of PIQA: lm_eval takes no choice that is longer than the context, and a later one is
PLAIN = {"training_split": None, "validation_split": None, "test_split": "test", "fewshot_split": None}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"),
    pytest.mark.skipif(not (SHARED / "eval").exists(), reason="real sets (shared/data/eval next to the repository)"),
]

PAGES = """ = Robert Boulter =

 Robert Boulter is an English film , television and theatre actor . He had a guest @-@ starring role in 2000 , and a
 part in the play " Herons " ( by Simon Stephens ) at the Royal Court Theatre ; it paid 2 @,@ 500 pounds .

 = = Career = =

 In 2006 , Boulter 's friends said : ' he starred in the play Citizenship ' . It was 40 ° warm .
 = Plain maskray =

 The plain maskray ( Neotrygon annotata ) is a species of stingray . It grows to a length of 24 cm ( 9 @.@ 4 in ) .
"""


@pytest.fixture(scope="module")
def wiki() -> str:
    """PAGES, and articles of Simple English as pages; some are longer than a model's context."""
    rows = duckdb.execute(
        "SELECT title, text FROM read_parquet(?) ORDER BY id::BIGINT LIMIT ?",
        [str(SHARED / "text" / "simple-wikipedia.parquet"), QUESTIONS // 10],
    ).fetchall()
    return PAGES + "".join(f" = {title} = \n\n {text} \n" for title, text in rows)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, wiki: str) -> Path:
    """lm_eval's own tasks, reading the published files in the forms in which its data sets have them."""
    import lm_eval.tasks

    folder, own = tmp_path_factory.mktemp("tasks"), Path(lm_eval.tasks.__file__).parent
    members: dict[str, bytes] = {}
    for archive in (SHARED / "eval").glob("*.zip"):
        with zipfile.ZipFile(archive) as opened:
            members |= {Path(name).name: opened.read(name) for name in opened.namelist()}

    def records(name: str) -> list[Any]:
        return [json.loads(line) for line in members[name].decode().splitlines() if line.strip()]

    def task(name: str, yaml: Path, rows: list[Any], **more: Any) -> None:
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = {
            "include": str(yaml),
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "tag": None,
            **PLAIN,
            **more,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML

    science = [
        {
            "question": r["question"]["stem"],
            "answerKey": r["answerKey"],
            "choices": {key: [c[key] for c in r["question"]["choices"]] for key in ("text", "label")},
        }
        for r in records("arc_easy-test.jsonl")
    ]
    task("arc_easy", own / "arc/arc_easy.yaml", science[:QUESTIONS])
    labels = members["piqa-valid-labels.lst"].decode().split()
    goals = [r | {"label": int(label)} for r, label in zip(records("piqa-valid.jsonl"), labels, strict=True)]
    task("piqa", own / "piqa/piqa.yaml", goals[:GOALS])
    for yaml in sorted((own / "blimp").glob("*.yaml")):
        name = yaml.stem
        if not name.startswith("_"):
            task(f"blimp_{name}", yaml, records(f"{name}.jsonl")[:PAIRS])
    task("wikitext", own / "wikitext/wikitext.yaml", [{"page": page} for page in pages_of(wiki)])
    return folder


def lm_eval_scores(model: Path, tasks: Path, names: list[str]) -> dict[str, Any]:
    """By task, in float64: so that a tie is a tie in both."""
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    peer = HFLM(
        pretrained=exported,
        tokenizer=AutoTokenizer.from_pretrained(model),
        batch_size=64,
        device="cpu",
        softmax_dtype="float64",
    )
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(peer, tasks=names, task_manager=manager, bootstrap_iters=2, log_samples=False)
    assert found is not None
    return dict(found["results"])


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_lm_eval(
    name: str, tasks: Path, wiki: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ARC-Easy, PIQA and all 67 phenomena of BLiMP: the same accuracies and errors; WikiText: the same bits."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path, vocabulary = MODELS[name]
    model, tokenizer = load_pretrained(path, get_backend("numpy", "fp64", workers=1), vocabulary)
    save_pretrained(model, tokenizer, tmp_path / "exported")
    files = find_sets([SHARED / "eval"])
    ours, limits = {}, {"arc_easy": QUESTIONS, "blimp": PAIRS}
    if model.config.context >= 512:
        limits["piqa"] = GOALS
    for task, limit in limits.items():
        ours[task] = run_task(Scorer(model, tokenizer), first_of_each(read_set(task, files).items, limit))
    (tmp_path / "wiki.test.raw").write_text(wiki, encoding="utf-8")
    ours["wikitext"] = run_task(Scorer(model, tokenizer), read_set("wikitext", find_sets([tmp_path])).items)

    names = [file.stem for file in sorted(tasks.glob("*.yaml")) if file.stem != "piqa" or "piqa" in ours]
    theirs = lm_eval_scores(tmp_path / "exported", tasks, [f"local_{task}" for task in names])
    for task in limits.keys() - {"blimp"}:
        for metric in ("acc", "acc_norm"):
            print(task, metric, ours[task].figures[metric], theirs[f"local_{task}"][f"{metric},none"])
            assert ours[task].figures[metric] == theirs[f"local_{task}"][f"{metric},none"]
            assert math.isclose(ours[task].errors[metric], theirs[f"local_{task}"][f"{metric}_stderr,none"])
    phenomena = {task.removeprefix("blimp_"): theirs[f"local_{task}"]["acc,none"] for task in names if "blimp" in task}
    assert len(phenomena) == 67 and len(set(phenomena.values())) > 5
    print("blimp acc", ours["blimp"].figures["acc"], np.mean(list(phenomena.values())))
    assert np.mean(list(phenomena.values())) == pytest.approx(ours["blimp"].figures["acc"], abs=1e-12)
    assert sorted(phenomena.values()) == pytest.approx(sorted(ours["blimp"].groups.values()), abs=1e-12)
    for metric, tolerance in (("bits_per_byte", 1e-6), ("word_perplexity", 1e-5)):  # RoPE is float32 there
        expected = theirs["local_wikitext"][f"{metric},none"]
        print(metric, ours["wikitext"].figures[metric], expected)
        assert ours["wikitext"].figures[metric] == pytest.approx(expected, rel=tolerance)


def test_wikitext_is_detokenised_as_lm_eval_does() -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    odd = PAGES + " ( a ) [ b ] { c } ( [ d ) ] ' e ' \" f ) ( N N 's '' = = = = = x @-@ @,@ \n \n : ; . ! ? , s ' "
    for text in (PAGES, odd, *pages_of(PAGES), "( ( x ) )", "'s 's", "  "):
        assert detokenised(text) == wikitext_detokenizer({"page": text})


def test_problems_are_shown_and_judged_as_lm_eval_does(tmp_path: Path) -> None:
    """The prompts of GSM8K with their five examples; both readings of an answer."""
    import lm_eval.tasks
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    from tinyforge.infer.tasks import flexible_answer, same_answer, strict_answer

    files = find_sets([SHARED / "eval"])
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_bytes(files[f"eval/multiple-choice/gsm8k-{split}.jsonl"].read())
    own = Path(lm_eval.tasks.__file__).parent
    data = {"data_files": {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}}
    config = {
        "include": str(own / "gsm8k/gsm8k.yaml"),
        "task": "local_gsm8k",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": data,
        "tag": None,
    }
    (tmp_path / "gsm8k.yaml").write_text(json.dumps(config), encoding="utf-8")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    task = next(iter(lm_eval.tasks.get_task_dict(["local_gsm8k"], manager).values()))
    task.set_fewshot_seed(seed=1234)
    task.build_all_requests(limit=20, rank=0, world_size=1)
    problems = [item for item in read_set("gsm8k", files).items[:20] if isinstance(item, Problem)]
    for problem, request in zip(problems, task.instances, strict=True):
        told = [f"Question: {question}\nAnswer: {answer}" for question, answer in problem.shown]
        assert "\n\n".join([*told, f"Question: {problem.question}\nAnswer:"]) == request.args[0]

    answers = [
        "She has 3.\n#### 1,200",
        "#### -7.",
        "It is $18.50.",
        "nothing",
        "4 and 5",
        "#### 5 #### 6",
        "18.",
        "$5",
    ]
    task_filters = {f.name: f for f in task._filters}
    for text in answers:
        for name, ours in (("strict-match", strict_answer), ("flexible-extract", flexible_answer)):
            instance = Instance("generate_until", {}, ("", {}), 0)
            instance.resps = [text]
            task_filters[name].apply([instance])
            assert ours(text) == instance.filtered_resps[name], (text, name)
            for expected in ("so #### 1200", "#### 18", "#### 5", "#### -7"):
                theirs = task.process_results({"question": "", "answer": expected}, [instance.filtered_resps[name]])
                assert same_answer(ours(text), expected) == bool(theirs["exact_match"]), (text, expected)
