"""The chat as a user meets it: in a real pseudo-terminal, from a pipe, and with one prompt.

The models here are parrots: their blocks add nothing, and the heads send each token to the one that follows it in a
given text. So a prompt, which ends in a line feed, is answered by that text.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tinyforge import chat, checkpoint
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import Loaded, load
from tinyforge.infer.conversation import Conversation
from tinyforge.infer.sampling import Sampling
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.params import named
from tinyforge.tokenizers import Tokenizer

pty = pytest.importorskip("pty", reason="pseudo-terminals are Unix's")

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = Tokenizer([], ["<|endoftext|>", "</s>"])
END = TOKENIZER.specials["</s>"]
GREEDY = Sampling(temperature=0)
WORLD = "é你🌍"  # no byte of it comes twice


def save_parrot(out: Path, says: bytes, kind: str = "sft", context: int = 300, **more: str) -> Path:
    """A run whose model answers `says`, in which each byte has one successor; one that ends as it began never ends."""
    config = Config(
        dim=264,
        heads=4,
        kv_heads=2,
        layers=1,
        context=context,
        vocab=TOKENIZER.vocab_size,
        mtp_heads=2,
        hidden=8,
        mtp_weights=(1, 0.5),
    )
    model = NanoEuler(config, get_backend("numpy", "fp32", workers=1))
    model.initialise(0)
    follows = np.full(config.vocab, END)
    chain = [10, *says, END]
    if says[0] == says[-1]:
        chain.pop()
    follows[chain[:-1]] = chain[1:]
    model.embedding.weight.value[...] = np.eye(config.vocab, config.dim)
    model.blocks[0].attention.out.weight.value[...] = model.blocks[0].mlp.down.weight.value[...] = 0
    model.heads.weight.value[...] = 0
    for k, target in enumerate((follows, follows[follows])):
        model.heads.weight.value[k, target, np.arange(config.vocab)] = 1
    weights = named(model.buffer, model.buffer.values, model.backend)
    meta = {"kind": kind, "config": config.to_dict(), "tokenizer_hash": TOKENIZER.hash()} | more
    return checkpoint.save(out, 1, weights, {"m": np.zeros(1)}, TOKENIZER, meta, keep=0)


def conversation(path: Path) -> Conversation:
    loaded = load(path, get_backend("numpy", "fp32", workers=1))
    return Conversation(loaded.model, loaded.tokenizer, loaded.template)


def say(talk: Conversation, text: str, sampling: Sampling = GREEDY) -> str:
    return "".join(talk.ask(text, sampling))


# --- the conversation


def test_turns_share_the_cache(tmp_path: Path) -> None:
    talk = conversation(save_parrot(tmp_path, WORLD.encode()))
    assert say(talk, "Hello") == WORLD
    first = talk.stats.prefilled
    assert say(talk, "again") == WORLD
    # Of the first turn, the last token of its reply and the </s> after it were not in the cache yet.
    assert talk.stats.prefilled - first == len(TOKENIZER.encode("### Instruction:\nagain\n\n### Response:\n")) + 2
    assert talk.stats.reused >= first + len(WORLD.encode()) - 2


def test_the_model_sees_the_turns_in_the_form_it_was_trained_on(tmp_path: Path) -> None:
    talk = conversation(save_parrot(tmp_path, b"ok"))
    say(talk, "one")
    say(talk, "two </s>")
    turn = "### Instruction:\n{}\n\n### Response:\n"
    seen = TOKENIZER.decode_bytes(talk.session.tokens)
    assert seen == (turn.format("one") + "ok</s>" + turn.format("two </s>") + "ok").encode()
    assert talk.session.tokens.count(END) == 1  # what was typed is text, not the token


def test_a_system_prompt_stands_before_the_turns(tmp_path: Path) -> None:
    loaded = load(save_parrot(tmp_path, b"ok"), get_backend("numpy", "fp32", workers=1))
    talk = chat.conversation_with(loaded, "Be brief.")
    say(talk, "one")
    assert TOKENIZER.decode(talk.session.tokens) == "Be brief.\n\n### Instruction:\none\n\n### Response:\nok"


def test_a_flag_takes_another_template(tmp_path: Path) -> None:
    path = save_parrot(tmp_path, b"ok")
    (path / "t.jinja").write_text("{{ messages[0].content + '</s>' }}{% if stern %}{{ '\\n' }}{% endif %}")
    flags = ("--checkpoint", str(path), "--prompt", "Hi", "--template", str(path / "t.jinja"))
    done = run_chat(*flags, "--template-variables", '{"stern": true}', cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, b"ok\n")
    for variables, message in (("{", "--template-variables"), ("[1]", "got a list, expected an object")):
        with pytest.raises(UserError, match=message) as caught:
            chat.main([*flags, "--template-variables", variables])
        assert "\n" not in str(caught.value)


def test_a_base_model_continues_the_plain_text(tmp_path: Path) -> None:
    talk = conversation(save_parrot(tmp_path, b"xyz", kind="pretrain"))
    assert say(talk, "line\n") == "xyz"
    assert TOKENIZER.decode(talk.session.tokens) == "line\nxyz"


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    talk = conversation(save_parrot(tmp_path, b"ok", context=140))
    for text in ("one", "two"):
        say(talk, text)
        assert not talk.notice
    say(talk, "three")
    assert talk.notice == "the context of 140 tokens is full: the oldest turn was left out"
    assert "one" not in TOKENIZER.decode(talk.session.tokens) and "two" in TOKENIZER.decode(talk.session.tokens)
    assert len(talk.turns) == 3
    say(talk, "begin" + "-" * 200 + "end")
    assert talk.notice == "that is 241 tokens, 105 fit: the first 136 tokens were left out"
    assert "-end\n" in TOKENIZER.decode(talk.session.tokens) and "begin" not in TOKENIZER.decode(talk.session.tokens)


def test_show_counts_what_the_model_still_sees(tmp_path: Path) -> None:
    """Also of a saved conversation that is far longer than the context, and of a reply that filled it."""
    path, file = save_parrot(tmp_path, b"ok", context=140), tmp_path / "talk.json"
    talk = conversation(path)
    assert talk.seen() == (0, 0)
    say(talk, "one")
    turn = len(TOKENIZER.encode("### Instruction:\none\n\n### Response:\nok")) + 1
    assert talk.seen() == (1, turn)
    talk.turns *= 40
    talk.save(file)
    other = conversation(path)
    other.load(file)
    assert other.seen() == (140 // turn, 140 // turn * turn) and len(other.turns) == 40
    say(other, "two")
    left_out = 40 - (105 - turn) // turn
    assert other.notice == f"the context of 140 tokens is full: the {left_out} oldest turns were left out"
    full = conversation(save_parrot(tmp_path / "endless", b"aba", context=60))
    say(full, "go")
    assert len(full.session.tokens) == 60 and full.seen() == (0, 0)


def test_a_reply_that_fills_the_context_says_so(tmp_path: Path) -> None:
    talk = conversation(save_parrot(tmp_path, b"aba", context=60))
    assert say(talk, "go").startswith("abab")
    assert len(talk.session.tokens) == 60
    assert talk.notice == "the reply ends here: the context of 60 tokens is full"


def test_a_long_prompt_and_a_reply_that_fills_the_context_are_both_said(tmp_path: Path) -> None:
    talk = conversation(save_parrot(tmp_path, b"aba", context=60))
    say(talk, "go " * 99)
    cut, ends = talk.notice.split("; ")
    assert "tokens were left out" in cut and ends == "the reply ends here: the context of 60 tokens is full"


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    talk = conversation(save_parrot(tmp_path, b"ok"))
    for text in ("", " \n"):
        with pytest.raises(UserError, match="the prompt is empty"):
            say(talk, text)
    assert talk.turns == []


def test_a_reply_that_is_cut_short_stays_as_far_as_it_came(tmp_path: Path) -> None:
    talk = conversation(save_parrot(tmp_path, b"aba"))
    pieces = talk.ask("go", GREEDY)
    assert next(pieces) + next(pieces) == "ab"
    pieces.close()
    assert talk.turns[-1].reply == "ab"
    assert say(talk, "again").startswith("abab")


def test_save_and_load(tmp_path: Path) -> None:
    path, file = save_parrot(tmp_path, WORLD.encode()), tmp_path / "talk.json"
    talk = conversation(path)
    say(talk, "Hällo \x1b[2J")
    talk.save(file)
    talk.save(file)  # its own file may be replaced
    other = conversation(path)
    other.load(file)
    assert [(turn.user, turn.reply) for turn in other.turns] == [("Hällo \x1b[2J", WORLD)]
    assert b"\x1b" not in file.read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "cannot read the saved conversation .*: it is not JSON"),
        ("[]", "got a list, expected an object"),
        ("{}", "no format tinyforge-chat"),
        ("[" * 9999, "nested too deeply"),
        ('{"x": 1' + "0" * 9999 + "}", "digits"),
        ('{"format": []}', "no format tinyforge-chat"),
        ('{"format": "tinyforge-chat", "version": 9}', "has version 9, this program reads 1"),
        ('{"format": "tinyforge-chat", "version": 1}', "got no list of turns"),
        (
            '{"format": "tinyforge-chat", "version": 1, "turns": [{"user": "x", "reply": 3}]}',
            "turn 1 expects the texts",
        ),
    ],
)
def test_a_file_that_is_no_conversation_is_neither_read_nor_replaced(
    tmp_path: Path, content: str, message: str
) -> None:
    talk, file = conversation(save_parrot(tmp_path, b"ok")), tmp_path / "file"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        talk.load(file)
    if "version" not in content:
        with pytest.raises(UserError, match=message):
            talk.save(file)
        assert file.read_text() == content
    with pytest.raises(UserError, match="cannot write .*: No such file or directory; make its folder"):
        talk.save(tmp_path / "absent" / "talk.json")
    with pytest.raises(UserError, match="cannot read .*: No such file"):
        talk.load(tmp_path / "absent.json")
    for name, cause in (
        ("", "Is a directory; it is a folder; name a file"),
        ("x" * 300, "File name too long; choose a sh"),
    ):
        with pytest.raises(UserError, match=f"cannot write .*: {cause}"):
            talk.save(tmp_path / name)


def test_a_conversation_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    talk, file = conversation(save_parrot(tmp_path, b"ok")), tmp_path / "talk.json"
    file.write_text('{"format": "nanoeuler-chat", "version": 1, "turns": [{"user": "a", "reply": "b"}]}')
    talk.load(file)
    assert say(talk, "c") == "ok" and TOKENIZER.decode(talk.session.tokens).count("### Response:\nb</s>") == 1


# --- one prompt, and a pipe


def run_chat(*flags: str, cwd: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "models.nanoeuler.chat", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, input=stdin, capture_output=True, cwd=cwd, env=environment, timeout=60)


def test_a_prompt_and_a_pipe_print_the_reply_alone(tmp_path: Path) -> None:
    save_parrot(tmp_path / "runs" / "sft", "é\x1b你".encode())
    for done in (run_chat("--prompt", "Hi", cwd=tmp_path), run_chat(cwd=tmp_path, stdin=b"Hi\n")):
        assert (done.returncode, done.stdout, done.stderr) == (0, "é你\n".encode(), b"")


def test_both_commands_are_the_same(tmp_path: Path) -> None:
    path = save_parrot(tmp_path / "run", b"ok")
    command = [sys.executable, "-m", "tinyforge.chat", "--checkpoint", str(path), "--prompt", "Hi"]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ok\n", b"")


@pytest.mark.parametrize("module", ["tinyforge.chat", "models.nanoeuler.chat"])
def test_chat_loads_nothing_of_training_and_downloading(module: str) -> None:
    """Neither when it starts nor when it answers."""
    heavy = (
        "tinyforge.train",
        "tinyforge.optim",
        "data",
        "recipes",
        "urllib.request",
        "http.client",
        "matplotlib",
        "tqdm",
        "duckdb",
        "cupy",
    )
    program = (
        f"import sys\nfrom {module} import main\nmain(['--prompt', 'Hi', '--max-tokens', '1'])\n"
        f"print([m for m in sys.modules if any(f'{{m}}.'.startswith(f'{{name}}.') for name in {heavy})])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]")


def test_a_broken_run_does_not_stop_the_default_choice(tmp_path: Path) -> None:
    save_parrot(tmp_path / "runs" / "whole", b"ok")
    broken = save_parrot(tmp_path / "runs" / "broken", b"no")
    (broken / "model.safetensors").write_bytes(b"")
    done = run_chat("--prompt", "Hi", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, b"ok\n")
    assert done.stderr.startswith(b"skipping runs/broken/step-00000001: ") and done.stderr.count(b"\n") == 1


def test_a_template_that_is_not_known_is_one_line(tmp_path: Path) -> None:
    path = save_parrot(tmp_path, b"ok", template="morse")
    done = run_chat("--checkpoint", str(path), "--prompt", "Hi", cwd=tmp_path)
    assert done.returncode == 2 and b"its chat template is 'morse'; known: plain, alpaca" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_fresh_clone_answers(tmp_path: Path) -> None:
    """Where nothing has been trained, a model that comes with the repository does."""
    done = run_chat("--prompt", "Who are you?", "--temperature", "0", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"") and b"Storyteller" in done.stdout


def test_the_small_model_is_one_flag_away(tmp_path: Path) -> None:
    """13 + 2 was held out of it."""
    done = run_chat("--checkpoint", "small", "--prompt", "How much is 13 plus 2?", "--temperature", "0", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"13 14 15, so 15\n", b"")


def test_weights_of_one_byte_answer(tmp_path: Path) -> None:
    question = ("--prompt", "Which is larger, 1 or 12?", "--temperature", "0")
    done = run_chat("--checkpoint", "small", "--weights", "int8", *question, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"12\n", b"")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", Sampling(1.0, 0, 0.8, max_tokens=7)),
        ("--temperature 0.5", Sampling(0.5, 0, 0.8, max_tokens=7)),
        ("--top-k 40 --max-tokens 9", Sampling(1.0, 40, 0.8, max_tokens=9)),
        ("--temperature 0.7 --top-k 0 --top-p 0.95", Sampling(0.7, 0, 0.95, max_tokens=7)),
    ],
)
def test_a_flag_changes_one_of_the_models_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: Sampling
) -> None:
    path, drawn = save_parrot(tmp_path, b"ok"), list[Sampling]()
    monkeypatch.setattr(chat, "once", lambda loaded, text, sampling, *more: drawn.append(sampling))
    own = {"temperature": 1, "top_k": 0, "top_p": 0.8, "max_new_tokens": 7, "eos_token_id": 2}
    (path / "generation_config.json").write_text(json.dumps(own))
    chat.main(["--checkpoint", str(path), "--prompt", "Hi", *flags.split()])
    assert drawn == [expected]


def test_the_shipped_models_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/results/storyteller.md has measured them; `small` has none."""
    drawn: list[Sampling] = []
    monkeypatch.setattr(chat, "once", lambda loaded, text, sampling, *more: drawn.append(sampling))
    for name in ("storyteller", "small"):
        chat.main(["--checkpoint", name, "--prompt", "Hi"])
    assert drawn == [Sampling(0.95, top_k=0, top_p=1.0, min_p=0.05, max_tokens=400), Sampling(max_tokens=400)]


def test_a_wrong_generation_config_is_one_line(tmp_path: Path) -> None:
    path = save_parrot(tmp_path / "runs" / "sft", b"ok")
    (path / "generation_config.json").write_text('{"top_p": 7}')
    done = run_chat("--prompt", "Hi", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert done.stderr == (
        b"error: runs/sft/step-00000001/generation_config.json: top_p is 7, expected a number above 0 "
        b"and at most 1; correct it, or remove the file\n"
    )


@pytest.mark.parametrize(
    ("flags", "stdin", "message"),
    [
        ((), b"caf\xe9", b"standard input is not utf-8 text at byte 3"),
        ((), b"", b"the prompt is empty"),
        (("--prompt", " "), b"", b"the prompt is empty"),
        (("--prompt", "x", "--top-p", "0"), b"", b"--top-p is 0.0, expected"),
        (("--prompt", "x", "--temperature", "nan"), b"", b"--temperature is nan, expected"),
        (("--prompt", "x", "--checkpoint", "absent"), b"", b"no checkpoint in absent"),
        (("--prompt", "x", "--weights", "int3"), b"", b"argument --weights: invalid choice: 'int3' (choose from"),
    ],
)
def test_a_fault_is_one_line(tmp_path: Path, flags: tuple[str, ...], stdin: bytes, message: bytes) -> None:
    save_parrot(tmp_path / "runs" / "sft", b"ok")
    done = run_chat(*flags, cwd=tmp_path, stdin=stdin)
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.startswith(b"error: " + message) and done.stderr.count(b"\n") == 1


# --- a terminal


class Terminal:
    """A chat in a pseudo-terminal of 24 lines and `width` columns."""

    def __init__(self, path: Path, *flags: str, width: int = 80, **environment: str) -> None:
        import fcntl
        import struct
        import termios

        self.fd, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        command = [sys.executable, "-m", "models.nanoeuler.chat", "--checkpoint", str(path), *flags]
        self.process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=child,
            cwd=path,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "LC_ALL": "C.UTF-8", **environment},
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(child)
        self.seen = b""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str, seconds: float = 30.0) -> str:
        """What has come since the last wait, up to and with `text`."""
        expected, end = text.encode(), time.monotonic() + seconds
        while expected not in self.seen:
            if not select.select([self.fd], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError(f"{text!r} did not come; on the screen: {self.seen[-2000:]!r}")
            self.seen += self._read() or b"[end of output]" + expected
        before, found, self.seen = self.seen.partition(expected)
        assert b"[end of output]" not in before, before
        return (before + found).decode()

    def _read(self) -> bytes:
        try:
            return os.read(self.fd, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            return b""

    def leave(self) -> int:
        while select.select([self.fd], [], [], 30)[0] and self._read():
            pass
        return self.process.wait(30)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal() -> Iterator[type[Terminal]]:
    opened: list[Terminal] = []

    class Kept(Terminal):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            opened.append(self)

    yield Kept
    for each in opened:
        each.close()


@pytest.mark.parametrize("width", [80, 12])
def test_whole_characters_in_a_terminal(tmp_path: Path, terminal: type[Terminal], width: int) -> None:
    """Wide ones, several bytes each, in a narrow window too; every read is text by itself."""
    t = terminal(save_parrot(tmp_path, WORLD.encode()), width=width)
    t.wait_for("> ")
    t.type("Hi\r")
    assert WORLD in t.wait_for(WORLD)
    t.wait_for("> ")
    t.type("\x04")
    assert t.leave() == 0


def test_ctrl_c_stops_the_reply_and_keeps_the_session(tmp_path: Path, terminal: type[Terminal]) -> None:
    t = terminal(save_parrot(tmp_path, b"aba", context=30_000), "--max-tokens", "30000")
    t.wait_for("> ")
    t.type("go\r")
    t.wait_for("ababab")
    t.type("\x03")
    t.wait_for("[stopped]")
    t.wait_for("> ")
    time.sleep(0.5)  # a Ctrl-C between the prompt and Python's wait for a key is seen at the next key only
    t.type("\x03")
    t.wait_for("Ctrl-D or /bye leaves")
    t.wait_for("> ")
    t.type("/show\r")
    t.wait_for("turns               1:")
    t.wait_for("> ")
    t.type("/set max_tokens 7\r")
    t.type("/retry\r")
    t.wait_for("abababa")
    t.wait_for("> ")
    t.type("/bye\r")
    assert t.leave() == 0


def test_commands(tmp_path: Path, terminal: type[Terminal]) -> None:
    t = terminal(save_parrot(tmp_path, b"xyz", context=120), "--temperature", "0", NO_COLOR="1")
    for typed, shown in (
        ("one", "xyz"),
        ("/stats", "3 tokens at"),
        ("/save talk.json", "saved 1 turn to talk.json"),
        ("/undo", "taken back: one"),
        ("/undo", "error: there is no turn to undo"),
        ("/load talk.json", "> one"),
        ("/retry", "the reply will be the same"),
        ("/set top_k 5", "> "),
        ("/show", "top_k               5 "),
        ("/set top_k many", "error: /set top_k: got 'many', expected a number"),
        ("/set top_p 7", "error: --top-p is 7.0, expected"),
        ("/set colour 1", "error: /set colour: no such setting"),
        ("/system Don't rhyme", "system prompt: Don't rhyme"),
        ("/system", "system prompt: Don't rhyme"),
        ('/system Say "yes"', 'system prompt: Say "yes"'),
        ('/system "Be brief."', "system prompt: Be brief."),
        ('/system "yes" or "no"', 'system prompt: "yes" or "no"'),
        ('/system ""', "system prompt: none is given"),
        ("/dance", "error: /dance is not a command; /help lists them"),
        ("/save", "error: /save expects one file name"),
        ('/save "x', "close the quotation mark"),
        ("/load talk.jsn", "error: cannot read the saved conversation talk.jsn"),
        ("/help", "/retry   answer the last question again"),
        ("two", "xyz"),
        ("three", "xyz"),
        ("four", "oldest turn"),
        ("/clear", "forgotten"),
        ("/show", "turns               0: 0 of 120 tokens"),
        ('"""/five', ". "),
        ("", ". "),
        ('six"""', "xyz"),
        ("/save talk.json", "saved 1 turn"),
    ):
        t.type(typed + "\r")
        t.wait_for(shown)
    t.type("/bye\r")
    assert t.leave() == 0
    path = next(tmp_path.glob("step-*/talk.json"))
    assert json.loads(path.read_text())["turns"] == [{"user": "/five\n\nsix", "reply": "xyz"}]


def test_a_line_that_is_not_text_is_told_and_the_session_goes_on(tmp_path: Path, terminal: type[Terminal]) -> None:
    t = terminal(save_parrot(tmp_path, b"xyz"), PYTHONIOENCODING="ascii")
    t.wait_for("> ")
    t.type("caf\u00e9\r")
    t.wait_for("error: standard input is not ascii text at byte 3")
    t.wait_for("> ")
    t.type("Hi\r")
    t.wait_for("xyz")


def test_the_terminal_says_what_the_model_sets(tmp_path: Path, terminal: type[Terminal]) -> None:
    path = save_parrot(tmp_path, b"xyz")
    (path / "generation_config.json").write_text('{"top_k": 9, "min_p": 0.05}')
    t = terminal(path, "--top-k", "5", width=200, NO_COLOR="1")
    t.wait_for("bye leaves.\r\nmin_p 0.05: from its generation_config.json\r\n> ")
    t.type("/show\r")
    t.wait_for("\r\n  min_p 0.05: from its generation_config.json\r\n")
    t.type("/set min_p 0.1\r")
    t.type("/show\r")
    assert "generation_config" not in t.wait_for("turns ")
    t.type("/bye\r")
    assert t.leave() == 0


def test_arrow_up_brings_the_last_line_back(tmp_path: Path, terminal: type[Terminal]) -> None:
    pytest.importorskip("readline")
    t = terminal(save_parrot(tmp_path, b"xyz"))
    t.wait_for("> ")
    t.type("hello\r")
    t.wait_for("xyz")
    t.wait_for("> ")
    t.type("\x1b[A")
    t.wait_for("hello")
    t.type("\r")
    t.wait_for("xyz")


def test_colour_only_where_it_is_wanted(tmp_path: Path, terminal: type[Terminal]) -> None:
    path = save_parrot(tmp_path, b"xyz")
    assert "\x1b[1;32m" in terminal(path).wait_for("> ")
    assert "\x1b[1;32m" not in terminal(path, NO_COLOR="1").wait_for("> ")


def test_a_reply_cannot_steer_the_terminal(tmp_path: Path, terminal: type[Terminal]) -> None:
    t = terminal(save_parrot(tmp_path, b"a\x1b[2J\x07b"), NO_COLOR="1")
    t.wait_for("> ")
    t.type("Hi\r")
    assert t.wait_for("a[2Jb").count("\x1b[2J") == 0


def test_sigterm_ends_it(tmp_path: Path, terminal: type[Terminal]) -> None:
    t = terminal(save_parrot(tmp_path, b"xyz"))
    t.wait_for("> ")
    t.process.send_signal(signal.SIGTERM)
    assert t.leave() == -signal.SIGTERM


def test_loaded_models_are_what_they_say(tmp_path: Path) -> None:
    loaded: Loaded = load(save_parrot(tmp_path, b"xyz"), get_backend("numpy", "fp32", workers=1))
    assert loaded.tokenizer.hash() == TOKENIZER.hash()
