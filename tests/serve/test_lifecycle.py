"""The server as a command: it starts, drains on SIGTERM, and killed it breaks streams and never falsifies them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tinyforge.backends import get_backend
from tinyforge.models.nanoeuler import Config, NanoEuler

httpx = pytest.importorskip("httpx", reason="needs the extra [dev]")
pytest.importorskip("uvicorn", reason="needs the extra [serve]")
ROOT = Path(__file__).resolve().parents[2]
SLOW = """
import sys, time
from tinyforge.infer.scheduler import Scheduler
step = Scheduler.step
Scheduler.step = lambda self: (time.sleep(0.03), step(self))[1]
from tinyforge.serve.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
WORK = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0.8, "ignore_eos": True, "stream": True}


@contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of the shipped model that takes 30 ms for each token more than it must."""
    command = [sys.executable, "-c", SLOW, "--checkpoint", "models/nanoeuler/small", "--port", "0", *flags]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=one_thread)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving small at http://127.0.0.1:")
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()


def texts_of(streams: list[Any]) -> list[tuple[str, bool]]:
    """What each stream said, and whether it was whole."""
    found = []
    for lines in streams:
        text, whole = "", False
        try:
            for line in lines:
                whole |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    value = json.loads(line[6:])
                    text += "".join(choice["text"] for choice in value.get("choices", ()))
        except httpx.HTTPError:
            pass
        found.append((text, whole))
    return found


@contextmanager
def streams(url: str, count: int) -> Iterator[list[Any]]:
    """Streams that have begun."""
    with httpx.Client(timeout=30) as client:
        answers = []
        for seed in range(count):
            request = client.build_request("POST", f"{url}/v1/completions", json={**WORK, "seed": seed})
            answers.append(client.send(request, stream=True))
        assert [answer.status_code for answer in answers] == [200] * count
        time.sleep(0.3)
        yield [answer.iter_lines() for answer in answers]
        for answer in answers:
            answer.close()


def test_it_reads_the_models_own_settings(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "models/nanoeuler/small", tmp_path / "small")
    (tmp_path / "small/generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 3}')
    body = {"messages": [{"role": "user", "content": "How much is 13 plus 2?"}]}
    with served("--checkpoint", str(tmp_path / "small")) as (_, url):
        said = [httpx.post(f"{url}/v1/chat/completions", json=body).json() for _ in range(2)]
    assert [answer["usage"]["completion_tokens"] for answer in said] == [3, 3]
    assert {answer["choices"][0]["message"]["content"] for answer in said} == {"13 14"}


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.slow
def test_killed_and_restarted_a_stream_is_broken_and_never_wrong() -> None:
    with served() as (process, url):
        with streams(url, 4) as lines:
            expected = texts_of(lines)
        assert all(whole for _, whole in expected) and len({text for text, _ in expected}) == 4
        with streams(url, 4) as lines:
            process.kill()
            broken = texts_of(lines)
        for (text, whole), (all_of_it, _) in zip(broken, expected, strict=True):
            assert not whole and all_of_it.startswith(text) and len(text) < len(all_of_it)
        process.wait(timeout=60)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")
    with served() as (_, url), streams(url, 4) as lines:
        assert texts_of(lines) == expected


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_sigterm_lets_streams_finish_and_takes_no_more() -> None:
    with served("--drain", "20") as (process, url), streams(url, 3) as lines:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.HTTPError):
            for _ in range(100):  # until it has seen the signal
                httpx.get(url + "/health", timeout=5)
                time.sleep(0.1)
        assert all(whole and text for text, whole in texts_of(lines))
        assert process.wait(timeout=60) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.slow
def test_what_is_not_finished_when_the_drain_ends_is_told_so() -> None:
    with served("--drain", "0.5") as (process, url), streams(url, 2) as lines:
        process.send_signal(signal.SIGTERM)
        for stream in lines:
            last = [line for line in stream if line][-1]
            assert json.loads(last[6:])["error"]["message"] == "the server is shutting down"
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "--port is 70000, expected 0 to 65535"),
        (["--rows", "0"], "--rows is 0"),
        (["--host", "999.1.1.1"], "cannot listen on 999.1.1.1"),
        (["--checkpoint", "absent"], "absent"),
        (["--deadline", "nan"], "--deadline is nan"),
        (["--adapter", "absent"], "absent"),
        (["--weights", "int3"], "--weights: invalid choice: 'int3'"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], words: str) -> None:
    from tinyforge.errors import UserError
    from tinyforge.serve.__main__ import main

    with pytest.raises(UserError, match=words):
        main(["--port", "0", *flags])


def test_a_port_that_is_taken_is_told() -> None:
    from tinyforge.errors import UserError
    from tinyforge.serve.__main__ import listening

    with listening("127.0.0.1", 0) as bound:
        bound.listen()
        with pytest.raises(UserError, match="choose another --host or --port"):
            listening("127.0.0.1", bound.getsockname()[1])


def test_a_port_that_is_taken_while_the_model_is_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyforge.errors import UserError
    from tinyforge.serve import __main__ as command

    with command.listening("127.0.0.1", 0) as other:
        loaded = command.loaded_model

        def slowly(args: Any) -> Any:
            other.listen()
            return loaded(args)

        monkeypatch.setattr(command, "loaded_model", slowly)
        port = str(other.getsockname()[1])
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1, port {port}"):
            command.main(["--checkpoint", "small", "--port", port])


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_signal_before_the_server_listens_ends_it() -> None:
    import asyncio

    from tinyforge.serve.http import Server

    drained: list[int] = []

    async def interrupted() -> None:
        server = Server(None, 1, lambda: None, lambda: drained.append(1))
        with server.capture_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
        assert server.should_exit

    asyncio.run(interrupted())
    assert drained == [1]


@pytest.mark.parametrize(("options", "rows"), [({}, 8), ({"qk_scale": "learned"}, 8), ({"smear": 4}, 5)])
def test_rows_that_nobody_asked_for_fit_the_bytes_of_the_cache_at_full_length(
    options: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoders with kernels of their own and without: 4,096 positions of a key and a value in 16 numbers each."""
    from tinyforge.serve.__main__ import default_rows

    model = NanoEuler(
        Config(dim=16, heads=1, kv_heads=1, layers=1, context=4096, vocab=64, hidden=16).override(options),
        get_backend("numpy", "fp32", workers=1),
    )
    monkeypatch.setattr("tinyforge.serve.__main__.CACHE_BYTES", 8 * 4096 * 2 * 16 * 4)
    assert default_rows(model, 4096) == rows
