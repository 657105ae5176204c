"""Generation: the cache computes what the whole sequence would; sampling cuts what it says; chat shows clean text."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.nanoeuler import Config, NanoEuler, chat
from models.nanoeuler.generate import KVCache, Sampling, advance, generate, sample
from models.nanoeuler.runs import Loaded, load_model, newest_run
from tinyforge.backends import get_backend
from tinyforge.errors import UserError, run_command
from tinyforge.text import Tokenizer
from tinyforge.train import checkpoint
from tinyforge.train.loop import named

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = Tokenizer([(104, 105)], ["<|endoftext|>", "</s>"])
CONFIG = Config(dim=16, heads=4, kv_heads=2, layers=2, context=150, vocab=TOKENIZER.vocab_size, mtp_heads=2, hidden=10,
                mtp_weights=(1, 0.5))  # fmt: skip
GREEDY = Sampling(temperature=0.0, max_tokens=12)


def tiny(precision: str = "fp64") -> NanoEuler:
    """A model with weights large enough that its choices differ from place to place."""
    model = NanoEuler(CONFIG, get_backend("numpy", precision, workers=1))
    model.initialise(0)
    model.buffer.values[: model.buffer.decay_end] *= 8
    return model


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 256, length).tolist()


def save_run(out: Path, kind: str, step: int = 1) -> Path:
    model = tiny("fp32")
    weights = named(model.buffer, model.buffer.values, model.backend)
    meta = {"kind": kind, "config": CONFIG.to_dict(), "tokenizer_hash": TOKENIZER.hash()}
    return checkpoint.save(out, step, weights, {"m": np.zeros(1)}, TOKENIZER, meta, keep=0)


# --- the cache


@pytest.mark.parametrize(
    "chunks", [[150], [1] * 150, [127, 1, 1, 1, 20], [128, 1, 21], [129, 21], [100, 50], [3, 130, 17], [60, 69, 1, 20]]
)
def test_the_cache_gives_the_logits_of_the_whole_sequence(chunks: list[int]) -> None:
    """In every position and across the attention's tile border at 128, however the prompt is cut."""
    model = tiny()
    ids = np.array([prompt(150)], np.int32)
    whole = model.heads.logits(model.hidden(ids))
    cache, parts = KVCache(model), []
    for end, size in zip(np.cumsum(chunks), chunks, strict=True):
        parts.append(model.heads.logits(advance(model, ids[:, end - size : end], cache)))
    assert cache.length == 150 and np.abs(whole).max() > 1
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=0, atol=1e-10)


def test_greedy_takes_the_most_likely_token_of_head_0() -> None:
    model, ids = tiny(), prompt(120)
    tokens = list(generate(model, ids, GREEDY))
    assert len(set(tokens)) > 3  # not one token over and over, which would prove little
    for i, token in enumerate(tokens):
        logits = model.heads.logits(model.hidden(np.array([ids + tokens[:i]], np.int32)))
        assert token == logits[0, -1].argmax()


# --- what is generated


def test_the_same_seed_gives_the_same_text() -> None:
    model = tiny()

    def text(seed: int, temperature: float = 1.0) -> list[int]:
        return list(generate(model, prompt(5), Sampling(temperature, max_tokens=30, seed=seed)))

    assert text(1) == text(1) != text(2)
    assert text(1, 0.0) == text(2, 0.0)


def test_generation_ends_at_a_stop_token_at_max_tokens_and_at_a_full_context() -> None:
    model = tiny()
    tokens = list(generate(model, prompt(5), GREEDY))
    assert len(tokens) == 12
    stop = tokens[6]
    assert list(generate(model, prompt(5), GREEDY, frozenset({stop}))) == tokens[: tokens.index(stop)]
    assert len(list(generate(model, prompt(147), GREEDY))) == 3
    assert len(list(generate(model, prompt(149), GREEDY))) == 1


@pytest.mark.parametrize(("length", "message"), [(0, "prompt is empty"), (150, "150 tokens, .* is 150; shorten")])
def test_a_prompt_that_cannot_be_continued_is_refused(length: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        next(generate(tiny(), prompt(length), GREEDY))


# --- sampling

LOGITS = np.log(np.array([0.1, 0.5, 0.05, 0.3, 0.05]))


def frequencies(sampling: Sampling) -> list[float]:
    """How often each of the five tokens is drawn, over 1000 evenly spaced uniforms."""
    drawn = [sample(LOGITS, sampling, (i + 0.5) / 1000) for i in range(1000)]
    return (np.bincount(drawn, minlength=5) / 1000).tolist()


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(1.0, top_k=0, top_p=1.0), [0.1, 0.5, 0.05, 0.3, 0.05]),
        (Sampling(1.0, top_k=99, top_p=1.0), [0.1, 0.5, 0.05, 0.3, 0.05]),
        (Sampling(1.0, top_k=2, top_p=1.0), [0, 0.625, 0, 0.375, 0]),
        (Sampling(1.0, top_k=1, top_p=1.0), [0, 1, 0, 0, 0]),
        (Sampling(1.0, top_k=0, top_p=0.4), [0, 1, 0, 0, 0]),
        (Sampling(1.0, top_k=0, top_p=0.79), [0, 0.625, 0, 0.375, 0]),
        (Sampling(1.0, top_k=0, top_p=0.81), [1 / 9, 5 / 9, 0, 3 / 9, 0]),
        (Sampling(1.0, top_k=2, top_p=0.6), [0, 1, 0, 0, 0]),  # the nucleus of the two that are left
        (Sampling(0.5, top_k=2, top_p=1.0), [0, 0.25 / 0.34, 0, 0.09 / 0.34, 0]),
        (Sampling(0.0), [0, 1, 0, 0, 0]),
    ],
)
def test_top_k_top_p_and_temperature(sampling: Sampling, wanted: list[float]) -> None:
    assert frequencies(sampling) == pytest.approx(wanted, abs=1.1e-3)


def test_large_logits_do_not_overflow_and_the_last_uniform_stays_inside() -> None:
    assert sample(np.array([1e4, -1e4, 9990.0]), Sampling(1.0), 1 - 2**-53) in (0, 2)
    assert sample(LOGITS, Sampling(1.0, top_k=0, top_p=1.0), 1 - 2**-53) == 4


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("max_tokens", 0)]
)
def test_impossible_sampling_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"--{field.replace('_', '-')} is {value}, wants"):
        Sampling(**{field: value})


# --- runs


def test_the_newest_fine_tuned_run_comes_first(tmp_path: Path) -> None:
    runs = (("a", "sft", 3), ("b", "sft", 1), ("c", "pretrain", 1))
    paths = [save_run(tmp_path / name, kind, step) for name, kind, step in runs]
    for age, path in zip((20, 30, 10), paths, strict=True):  # seconds ago
        stamp = (path / "hashes.json").stat().st_mtime_ns - age * 10**9
        os.utime(path / "hashes.json", ns=(stamp, stamp))
    assert newest_run(("sft", "pretrain"), tmp_path) == paths[0]
    assert newest_run(("pretrain",), tmp_path) == paths[2]
    assert newest_run(("pretrain",), tmp_path / "absent") is None


# --- chat


def run_chat(*flags: str, cwd: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "models.nanoeuler.chat", *flags, "--max-tokens", "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, input=stdin, capture_output=True, cwd=cwd, env=environment, timeout=60)


def test_chat_from_the_command_line(tmp_path: Path) -> None:
    """The newest fine-tuned run answers a --prompt and, to the letter the same, a prompt that is piped in."""
    save_run(tmp_path / "runs" / "sft", "sft")
    save_run(tmp_path / "runs" / "pretrain", "pretrain")
    asked = run_chat("--prompt", "Say hi.", "--temperature", "0", cwd=tmp_path)
    assert asked.returncode == 0 and b"(fine-tuned)" in asked.stderr
    assert len(asked.stdout.decode("utf-8").strip()) > 3
    piped = run_chat("--temperature", "0", cwd=tmp_path, stdin=b"Say hi.\n")
    assert piped.stdout == asked.stdout
    base = run_chat("--prompt", "Say hi.", "--temperature", "0", "--checkpoint", "runs/pretrain", cwd=tmp_path)
    assert base.returncode == 0 and b"a base model, not fine-tuned: it continues your text" in base.stderr
    assert base.stdout != asked.stdout


def test_a_pipe_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    save_run(tmp_path / "runs" / "sft", "sft")
    done = run_chat(cwd=tmp_path, stdin=b"caf\xe9")
    assert done.returncode == 2 and b"Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(b"error: standard input is not utf-8 text at byte 3")


def test_a_prompt_too_long_for_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_run(tmp_path, "pretrain")
    with pytest.raises(SystemExit) as left:
        run_command(lambda: chat.main(["--checkpoint", str(path), "--prompt", "word" * 99]))
    assert left.value.code == 2
    assert capsys.readouterr().err.endswith("error: the prompt takes 396 tokens, the model's context is 150; "
                                            "shorten the prompt\n")  # fmt: skip


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    return load_model(save_run(tmp_path, "pretrain"), get_backend("numpy", "fp32", workers=1))


def speak(monkeypatch: pytest.MonkeyPatch, data: bytes, then: type[BaseException] | None = None) -> None:
    """Make the model say these bytes, a token each, and then raise."""

    def tokens(*args: Any) -> Iterator[int]:
        yield from data
        if then is not None:
            raise then

    monkeypatch.setattr(chat, "generate", tokens)


def test_no_piece_holds_half_a_character(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "naïve 小美 🦊👩‍🚀 end"
    speak(monkeypatch, text.encode())
    pieces = list(chat.reply(loaded, "x", GREEDY))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece and len(piece) == 1 for piece in pieces)


def test_bytes_that_are_no_text_become_replacement_characters(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    speak(monkeypatch, b"a\xffb\xf0\x9f")
    assert "".join(chat.reply(loaded, "x", GREEDY)) == "a\ufffdb\ufffd"


def test_control_characters_do_not_reach_the_terminal(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    speak(monkeypatch, "a\x1b[2J\rb\x07\x9bc\n\td\x7f".encode())
    assert "".join(chat.reply(loaded, "x", GREEDY)) == "a[2Jbc\n\td"


def test_a_base_model_gets_the_text_and_a_fine_tuned_one_the_template(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def listen(model: Any, ids: list[int], sampling: Sampling, stop: frozenset[int]) -> Iterator[int]:
        seen.append(TOKENIZER.decode(ids))
        assert stop == set(TOKENIZER.specials.values())
        return iter(())

    monkeypatch.setattr(chat, "generate", listen)
    for kind in ("pretrain", "sft"):
        list(chat.reply(dataclasses.replace(loaded, meta={"kind": kind}), "Say hi.", GREEDY))
    assert seen == ["Say hi.", "### Instruction:\nSay hi.\n\n### Response:\n"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_ends_the_reply_and_not_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two replies are cut short, a Ctrl-C at the prompt is shrugged off, and /bye still ends it in order."""
    path = save_run(tmp_path, "sft")
    typed = iter(["one", KeyboardInterrupt, "", "two", "/bye", "never read"])

    def read(prompt: str) -> str:
        line = next(typed)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return str(line)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", Terminal())
    speak(monkeypatch, b"half a re", then=KeyboardInterrupt)
    assert chat.main(["--checkpoint", str(path)]) == 0
    assert capsys.readouterr().out == "half a re [stopped]\n\nhalf a re [stopped]\n"
    assert next(typed) == "never read"


def test_a_session_survives_a_prompt_that_is_too_long_and_ends_with_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_run(tmp_path, "sft")
    monkeypatch.setattr(sys, "stdin", Terminal("word" * 99 + "\nSay hi.\n"))
    assert chat.main(["--checkpoint", str(path), "--max-tokens", "5"]) == 0
    shown = capsys.readouterr()
    assert "error: the prompt takes" in shown.err
    assert len(shown.out.strip("> \n")) > 0
