"""SmolLM2-135M-Instruct as it is published, in GGUF of type Q4_1, next to transformers on its dequantised weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.hub_server import Hub
from tests.world.conftest import ROOT, SHARED
from tinyforge import cli
from tinyforge.backends import get_backend
from tinyforge.chat import conversation_with
from tinyforge.formats import Loaded, load
from tinyforge.infer.causal_lm import logits
from tinyforge.infer.generation import generate
from tinyforge.infer.sampling import Sampling

torch: Any = pytest.importorskip("torch", reason="the peer is transformers, on torch")
transformers: Any = pytest.importorskip("transformers", reason="the peer is transformers")

TEXTS = (
    "Paris is the capital and largest city of France, with 2,102,650 residents in January 2023.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\nprint(10)",
    "Die Würde des Menschen ist unantastbar. 人人生而自由,在尊严和权利上一律平等。 🤗 naïve",
    "It was the best of times, it was the worst of times, it was the age of wisdom. " * 30,
)
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How much is 12 times 12?",
    "Name three colours of the rainbow.",
)
FIVE = ("Hi, I am Ada.", "What is the capital of Italy?", "And of Spain?", "Which is larger?", "What is my name?")


@dataclass(frozen=True)
class Peer:
    model: Any
    tokenizer: Any

    def logits(self, ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].numpy()

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Loaded:
    return load(smollm2, get_backend("numpy", "fp32", workers=2), frozen=True)


@pytest.fixture(scope="module")
def theirs(smollm2_directory: Path) -> Peer:
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32)
    return Peer(model.eval(), transformers.AutoTokenizer.from_pretrained(smollm2_directory))


def test_it_names_the_capital_of_france_and_stops(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--checkpoint", str(smollm2), "--prompt", QUESTIONS[0]]) == 0
    said = capsys.readouterr()
    assert "Paris" in said.out and all(line.startswith("note: ") for line in said.err.splitlines())
    assert len(said.out.split()) < 60 and "<|" not in said.out  # it ended by itself, well below the 400 tokens allowed


def test_logits(ours: Loaded, theirs: Peer) -> None:
    for text in TEXTS:
        ids = ours.tokenizer.encode(text)
        assert ids == theirs.tokenizer.encode(text, add_special_tokens=False)
        got, expected = logits(ours.model, np.array([ids]))[0], theirs.logits(ids)
        assert np.abs(got - expected).max() < 1e-3


def test_greedy_replies_are_the_same_tokens(ours: Loaded, theirs: Peer) -> None:
    """The default system prompt of the template is part of both prompts."""
    conversation = conversation_with(ours)
    for question in QUESTIONS:
        prompt = theirs.prompt([{"role": "user", "content": question}])
        assert conversation.template.encode(ours.tokenizer, [(question, None)]) == prompt
        ends = conversation.template.stop_ids(ours.tokenizer)
        got = generate(ours.model, prompt, Sampling(temperature=0, max_tokens=100), ends)
        with torch.no_grad():
            out = theirs.model.generate(torch.tensor([prompt]), max_new_tokens=100, do_sample=False)
        expected = out[0, len(prompt) :].tolist()
        assert list(got) == [id for id in expected if id not in ends]
        assert set(expected) & ends or len(expected) == 100


def test_a_conversation_of_five_turns_is_encoded_alike(ours: Loaded, theirs: Peer) -> None:
    conversation = conversation_with(ours)
    messages: list[dict[str, str]] = []
    for question in FIVE:
        messages.append({"role": "user", "content": question})
        text = "".join(conversation.ask(question, Sampling(temperature=0, max_tokens=40)))
        turn = conversation.turns[-1]
        assert turn.tokens is not None
        seen = list(conversation.session.tokens)
        prompt = seen[: len(seen) - len(turn.tokens)]
        assert prompt == theirs.prompt(messages), question
        messages.append({"role": "assistant", "content": text})


def test_arc_easy_has_the_score_that_transformers_has(
    smollm2: Path, theirs: Peer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first 200 questions, asked as lm-evaluation-harness asks them."""
    archive = SHARED / "eval" / "multiple-choice.zip"
    if not archive.is_file():
        pytest.skip(f"no {archive}: real sets lie next to the repository")
    with zipfile.ZipFile(archive) as opened:
        opened.extract("arc_easy-test.jsonl", tmp_path)
    name = "arc_easy-test.jsonl"
    questions = [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()[:200]]
    flags = ["--tasks", "arc_easy", "--task-data", str(archive), "--limit", "200", "--json", str(tmp_path / "scores")]
    assert cli.main(["evaluate", "--checkpoint", str(smollm2), *flags]) == 0
    scores = json.loads((tmp_path / "scores").read_text())["tasks"]["arc_easy"]["figures"]
    acc, acc_norm = (
        sum(found) / len(questions) for found in zip(*(theirs_is_right(theirs, q) for q in questions), strict=True)
    )
    assert scores["acc"] == acc and scores["acc_norm"] == acc_norm


def theirs_is_right(peer: Peer, question: dict[str, Any]) -> tuple[bool, bool]:
    """Whether transformers' model finds the right answer most likely: by its sum, and by its mean over characters."""
    context = peer.tokenizer.encode(f"Question: {question['question']['stem']}\nAnswer:", add_special_tokens=False)
    choices = question["question"]["choices"]
    right = [choice["label"] for choice in choices].index(question["answerKey"])
    sums = []
    for choice in choices:
        ids = peer.tokenizer.encode(
            f"Question: {question['question']['stem']}\nAnswer: {choice['text']}", add_special_tokens=False
        )
        log = torch.log_softmax(torch.from_numpy(peer.logits(ids)), -1)
        sums.append(float(sum(log[i - 1, ids[i]] for i in range(len(context), len(ids)))))
    means = [total / len(choice["text"]) for total, choice in zip(sums, choices, strict=True)]
    return int(np.argmax(sums)) == right, int(np.argmax(means)) == right


def test_readme_s_commands_with_its_name_on_the_hub(smollm2_directory: Path, tmp_path: Path) -> None:
    """As they are typed; the hub is a local server, from which a stranger's empty cache is filled."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.partition("#")[0].split() for line in readme.splitlines() if "HuggingFaceTB/" in line]
    records = [{"instruction": f"How much is {n} plus 1?", "input": "", "output": f"{n + 1}."} for n in range(20)]
    (tmp_path / "records.json").write_text(json.dumps(records))
    more = {
        "tinyforge.chat": ["--prompt", QUESTIONS[0]],
        "recipes/sft.py": [
            *("--data", str(tmp_path / "records.json"), "--out", str(tmp_path / "run")),
            *("--steps", "1", "--batch-size", "1", "--seq-len", "64"),
        ],
    }
    hub = Hub()
    files = {file.name: file.read_bytes() for file in smollm2_directory.iterdir()}
    for name in {word for command in commands for word in command if word.startswith("HuggingFaceTB/")}:
        hub.add(name, files)
    with hub.running() as address:
        for command in commands:
            (flags,) = [flags for name, flags in more.items() if name in command]
            given = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
            command = [sys.executable, *command[1:], *flags]
            done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            assert "Paris" in done.stdout or "tinyforge.chat" not in command
    assert list((tmp_path / "run").glob("step-*"))
