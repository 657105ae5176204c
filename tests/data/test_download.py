"""Files come over HTTP whole and checked, through every fault of a host, or not at all."""

from __future__ import annotations

import email.utils
import errno
import hashlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tinyforge.data import download
from tinyforge.data.download import Downloader, FetchError, Job, Patience
from tinyforge.errors import UserError

ROOT = Path(__file__).parents[2]
CONTENT = random.Random(1).randbytes(300_000)
CHANGED = random.Random(2).randbytes(310_000)
DIGEST = hashlib.sha256(CONTENT).hexdigest()
QUICK = Patience(timeout=2.0, attempts=4, backoff=0.01, longest=5.0, gap=0.0)


@pytest.fixture
def out(tmp_path: Path, host: Any) -> Path:
    host.files["/a.txt"] = CONTENT
    return tmp_path / "raw" / "a.txt"


def fetch(host: Any, out: Path, patience: Patience = QUICK, **known: Any) -> download.Fetched:
    return Downloader(patience).fetch(f"{host.url}/a.txt", out, **known)


def fault(host: Any, out: Path, **known: Any) -> str:
    """The message of the FetchError, one line that names the file and the URL; nothing has the file's name."""
    with pytest.raises(FetchError) as caught:
        fetch(host, out, **known)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"a.txt: could not be downloaded from {host.url}/a.txt")
    assert not out.exists()
    return message


def test_a_file_is_fetched_recorded_and_not_fetched_again(host: Any, out: Path) -> None:
    fetched = fetch(host, out, size=len(CONTENT), sha256=DIGEST)
    assert out.read_bytes() == CONTENT
    assert (fetched.url, fetched.bytes, fetched.sha256) == (f"{host.url}/a.txt", len(CONTENT), DIGEST)
    record = json.loads((out.parent / "a.txt.json").read_text())
    assert record == {"url": fetched.url, "bytes": len(CONTENT), "sha256": DIGEST}
    assert sorted(os.listdir(out.parent)) == ["a.txt", "a.txt.json"]
    assert fetch(host, out) == fetched and len(host.log) == 1
    assert "tinyforge/" in host.log[0].headers["User-Agent"]


@pytest.mark.parametrize("spoil", [b"", CONTENT[:-1], CONTENT[:-1] + b"?"])
def test_a_file_that_is_not_as_recorded_is_fetched_again(host: Any, out: Path, spoil: bytes) -> None:
    fetch(host, out)
    out.write_bytes(spoil)
    fetch(host, out)
    assert out.read_bytes() == CONTENT
    (out.parent / "a.txt.json").unlink()
    fetch(host, out)
    assert len(host.gets()) == 3


def test_redirects_are_followed_and_keep_the_range(host: Any, out: Path, faults: Any) -> None:
    host.redirects["/b.txt"] = "/c.txt"
    host.redirects["/c.txt"] = f"{host.url}/a.txt"
    host.faults["/a.txt"] = [faults.cut(100_000)]
    Downloader(QUICK).fetch(f"{host.url}/b.txt", out)
    assert out.read_bytes() == CONTENT
    assert host.gets("/a.txt")[1].headers["Range"] == "bytes=100000-"


def test_a_circle_of_redirects_ends(host: Any, out: Path) -> None:
    host.redirects["/a.txt"] = "/a.txt"
    assert "HTTP 302" in fault(host, out)


def test_a_redirect_to_a_local_file_is_not_followed(host: Any, out: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    host.redirects["/a.txt"] = f"file://{tmp_path}/secret"
    assert "could not be downloaded" in fault(host, out)


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_passing_status_is_tried_again(host: Any, out: Path, faults: Any, code: int) -> None:
    host.faults["/a.txt"] = [faults.status(code)] * 3
    fetch(host, out)
    assert out.read_bytes() == CONTENT and len(host.gets()) == 4


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410])
def test_a_lasting_status_is_not_tried_again(host: Any, out: Path, faults: Any, code: int) -> None:
    host.faults["/a.txt"] = [faults.status(code)]
    assert f"HTTP {code}" in fault(host, out)
    assert len(host.gets()) == 1


@pytest.mark.parametrize("as_date", [False, True])
@pytest.mark.parametrize("code", [429, 503])
def test_retry_after_is_waited_for(
    host: Any, out: Path, faults: Any, code: int, as_date: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(Downloader, "_sleep", lambda _, seconds: waits.append(seconds))
    until = time.time() + 4.0
    value = email.utils.formatdate(until, usegmt=True) if as_date else "1"
    host.faults["/a.txt"] = [faults.status(code, Retry_After=value)]
    fetch(host, out)
    assert out.read_bytes() == CONTENT
    assert 1.0 <= max(waits) <= (4.0 if as_date else 1.0)  # a date has whole seconds, and some pass before it is read


def test_a_retry_after_of_an_hour_is_reported_instead(host: Any, out: Path, faults: Any) -> None:
    host.faults["/a.txt"] = [faults.status(429, Retry_After="3600")]
    assert "HTTP 429" in (message := fault(host, out)) and "3600 s," in message
    assert len(host.gets()) == 1


def test_a_retry_after_that_is_no_number_is_ignored(host: Any, out: Path, faults: Any) -> None:
    host.faults["/a.txt"] = [faults.status(503, Retry_After=words) for words in ("\xb2", "soon")]
    fetch(host, out)
    assert out.read_bytes() == CONTENT


def test_pauses_double_with_jitter(host: Any, out: Path, faults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host.faults["/a.txt"] = [faults.status(503)] * 9
    downloader = Downloader(Patience(2.0, attempts=6, backoff=1.0, longest=5.0, gap=0.0))
    pauses: list[float] = []
    monkeypatch.setattr(downloader, "_sleep", pauses.append)
    with pytest.raises(FetchError, match="HTTP 503"):
        downloader.fetch(f"{host.url}/a.txt", out)
    waits = [pause for pause in pauses if pause > 0]
    assert len(waits) == 5 and all(n / 2 <= wait <= n for n, wait in zip((1, 2, 4, 5, 5), waits, strict=True))
    assert len(set(waits)) == 5


def test_a_cut_connection_is_gone_on_with(host: Any, out: Path, faults: Any) -> None:
    host.faults["/a.txt"] = [faults.cut(120_000), faults.status(503)]
    fetch(host, out)
    assert out.read_bytes() == CONTENT
    first, _, third = host.gets()
    assert third.headers["Range"] == "bytes=120000-" and third.headers["If-Range"].startswith('"')
    assert third.status == 206 and third.sent <= len(CONTENT) - first.sent  # the host may still count


def test_the_next_run_goes_on_where_the_last_one_ended(host: Any, out: Path, faults: Any) -> None:
    host.faults["/a.txt"] = [faults.cut(120_000), *[faults.status(503)] * 3]
    assert "HTTP 503" in fault(host, out)
    fetch(host, out)
    assert out.read_bytes() == CONTENT and host.gets()[-1].sent == len(CONTENT) - 120_000


def test_a_part_of_a_file_that_has_all_bytes_needs_no_request(host: Any, out: Path) -> None:
    fetch(host, out)
    etag = f'"{DIGEST[:12]}"'
    state = {"url": f"{host.url}/a.txt", "validator": etag, "length": len(CONTENT)}
    out.rename(out.parent / "a.txt.part")  # as after a kill between the last byte and the name
    (out.parent / "a.txt.part.json").write_text(json.dumps(state))
    fetch(host, out)
    assert out.read_bytes() == CONTENT and len(host.log) == 1


def test_a_server_without_ranges_starts_over(host: Any, out: Path, faults: Any) -> None:
    host.faults["/a.txt"] = [faults.cut(120_000), faults.other(b"", ranges=False)]
    fetch(host, out)
    assert out.read_bytes() == CONTENT and host.gets()[1].status == 200


def test_without_a_validator_nothing_is_gone_on_with(host: Any, out: Path, faults: Any) -> None:
    host.etags = False
    host.faults["/a.txt"] = [faults.stalled(0.0)]
    fetch(host, out)
    assert out.read_bytes() == CONTENT and "Range" not in host.gets()[1].headers


@pytest.mark.parametrize("if_range", [True, False])
def test_a_file_that_changes_between_two_tries_is_not_spliced(
    host: Any, out: Path, faults: Any, if_range: bool
) -> None:
    """The second time the server may ignore If-Range, so that only its ETag and length tell."""

    def cut_and_change(handler: Any, content: bytes) -> None:
        faults.cut(120_000)(handler, content)
        host.files["/a.txt"] = CHANGED

    host.faults["/a.txt"] = [cut_and_change, faults.other(CHANGED, if_range=if_range)]
    fetch(host, out)
    assert out.read_bytes() == CHANGED
    assert host.gets()[1].headers["Range"] == "bytes=120000-"
    assert [request.status for request in host.gets()] == ([200, 200] if if_range else [200, 206, 200])


def test_a_part_of_another_address_is_not_gone_on_with(host: Any, out: Path, faults: Any) -> None:
    host.files["/b.txt"] = CHANGED
    host.faults["/a.txt"] = [faults.cut(120_000), *[faults.status(404)] * 3]
    urls = [f"{host.url}/a.txt", f"{host.url}/b.txt"]
    assert Downloader(QUICK).fetch(urls, out).url == urls[1]
    assert out.read_bytes() == CHANGED and "Range" not in host.gets("/b.txt")[0].headers


def test_a_part_longer_than_the_file_is_thrown_away(host: Any, out: Path, faults: Any) -> None:
    out.parent.mkdir()
    host.files["/a.txt"] = CONTENT[:1000]
    state = {"url": f"{host.url}/a.txt", "validator": '"x"', "length": 9999}
    (out.parent / "a.txt.part").write_bytes(b"?" * 5000)
    (out.parent / "a.txt.part.json").write_text(json.dumps(state))
    host.faults["/a.txt"] = [faults.status(416)]
    fetch(host, out)
    assert out.read_bytes() == CONTENT[:1000]


def test_a_damaged_state_of_a_part_is_ignored(host: Any, out: Path) -> None:
    out.parent.mkdir()
    (out.parent / "a.txt.part").write_bytes(b"?" * 5000)
    (out.parent / "a.txt.part.json").write_text('{"url": ')
    fetch(host, out)
    assert out.read_bytes() == CONTENT


def test_a_wrong_length_is_refused_and_tried_again(host: Any, out: Path, faults: Any) -> None:
    host.faults["/a.txt"] = [faults.other(CHANGED)]
    fetch(host, out, size=len(CONTENT))
    assert out.read_bytes() == CONTENT
    host.files["/a.txt"] = CHANGED
    out.unlink()
    assert "is 310,000 bytes long, expected 300,000" in fault(host, out, size=len(CONTENT))


def test_a_wrong_hash_is_refused_and_tried_again(host: Any, out: Path, faults: Any) -> None:
    flipped = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    host.faults["/a.txt"] = [faults.other(flipped)] * 2
    fetch(host, out, sha256=DIGEST)
    assert out.read_bytes() == CONTENT and len(host.gets()) == 3
    out.unlink()
    host.files["/a.txt"] = flipped
    assert f"expected {DIGEST[:16]}" in fault(host, out, sha256=DIGEST)
    assert sorted(os.listdir(out.parent)) == ["a.txt.json"]


def test_a_host_that_says_too_long_a_length(host: Any, out: Path, faults: Any) -> None:
    def lie(handler: Any, content: bytes) -> None:
        handler.start(200, {"Content-Length": str(len(content) + 5), "ETag": '"lie"'})
        handler.body(content)
        handler.close_connection = True

    host.faults["/a.txt"] = [lie]
    fetch(host, out)
    assert out.read_bytes() == CONTENT


def test_a_body_of_unknown_length_needs_a_known_size_or_hash(host: Any, out: Path) -> None:
    def endless(handler: Any, content: bytes) -> None:
        handler.start(200, {"Connection": "close"})
        handler.body(content)
        handler.close_connection = True

    host.faults["/a.txt"] = [endless]
    assert "has no length" in fault(host, out)
    host.faults["/a.txt"] = [endless]
    fetch(host, out, sha256=DIGEST)
    assert out.read_bytes() == CONTENT


def test_chunks_are_read_to_their_end(host: Any, out: Path) -> None:
    def chunked(whole: bool) -> Any:
        def answer(handler: Any, content: bytes) -> None:
            handler.start(200, {"Transfer-Encoding": "chunked"})
            for at in range(0, len(content) if whole else 50_000, 10_000):
                handler.wfile.write(b"%x\r\n%s\r\n" % (10_000, content[at : at + 10_000]))
            handler.wfile.write(b"0\r\n\r\n" if whole else b"")
            handler.close_connection = True

        return answer

    host.faults["/a.txt"] = [chunked(whole=False), chunked(whole=True)]
    fetch(host, out)
    assert out.read_bytes() == CONTENT and len(host.gets()) == 2


def test_a_body_in_an_encoding_nobody_asked_for(host: Any, out: Path) -> None:
    def squeezed(handler: Any, content: bytes) -> None:
        handler.start(200, {"Content-Encoding": "gzip", "Content-Length": "3"})
        handler.body(b"abc")

    host.faults["/a.txt"] = [squeezed]
    assert "encoding gzip" in fault(host, out)
    assert host.gets()[0].headers["Accept-Encoding"] == "identity"


def test_a_host_that_falls_silent_is_tried_again(host: Any, out: Path, faults: Any) -> None:
    host.faults["/a.txt"] = [faults.stalled(2.0)]
    fetch(host, out, Patience(timeout=1.0, attempts=2, backoff=0.01, gap=0.0))
    assert out.read_bytes() == CONTENT and len(host.gets()) == 2


def test_progress_forgives_failures(host: Any, out: Path, faults: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PROGRESS", 20_000)

    def cut_again(handler: Any, content: bytes) -> None:
        begin = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        etag = f'"{DIGEST[:12]}"'
        place = {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"} if begin else {}
        handler.start(206 if begin else 200, {"ETag": etag, "Content-Length": str(len(content) - begin)} | place)
        handler.body(content[begin : begin + 30_000])
        handler.close_connection = True

    host.faults["/a.txt"] = [cut_again] * 9  # more than the attempts, each with something new
    fetch(host, out)
    assert out.read_bytes() == CONTENT and len(host.gets()) == 10


# --- mirrors, several files ------------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_mirrors_are_tried_in_turn(host: Any, out: Path, faults: Any) -> None:
    host.faults["/broken.txt"] = [faults.status(503)] * 9
    dead = f"http://127.0.0.1:{closed_port()}/a.txt"
    urls = [dead, f"{host.url}/none.txt", f"{host.url}/broken.txt", f"{host.url}/a.txt"]
    assert Downloader(QUICK).fetch(urls, out).url == urls[3]
    assert [request.path for request in host.gets()] == ["/none.txt", *["/broken.txt"] * 4, "/a.txt"]


def test_all_mirrors_failing_is_one_line(out: Path) -> None:
    urls = [f"http://127.0.0.1:{closed_port()}/a.txt"] * 2
    with pytest.raises(FetchError, match=r"and 1 more URL\).*no answer .*refused.*check the network") as caught:
        Downloader(QUICK).fetch(urls, out)
    assert "\n" not in str(caught.value)


def test_a_silent_host_is_not_asked_for_the_next_file(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.files["/1"] = host.files["/2"] = b"text"
    dead = f"http://127.0.0.1:{closed_port()}"
    downloader = Downloader(QUICK)
    asked, send = [], downloader._opener.open
    monkeypatch.setattr(downloader._opener, "open", lambda r, **rest: asked.append(r.full_url) or send(r, **rest))
    downloader.fetch([f"{dead}/1", f"{host.url}/1"], tmp_path / "1")
    downloader.fetch([f"{dead}/2", f"{host.url}/2"], tmp_path / "2")
    assert asked == [f"{dead}/1"] * QUICK.attempts + [f"{host.url}/1", f"{host.url}/2"]


def test_several_files_on_two_connections_with_a_gap(host: Any, tmp_path: Path, faults: Any) -> None:
    for i in range(6):
        host.files[f"/{i}"] = b"text %d" % i
    del host.files["/3"]
    jobs = [Job((f"{host.url}/{i}",), tmp_path / str(i)) for i in range(6)]
    began = time.monotonic()
    got = Downloader(Patience(2.0, attempts=2, backoff=0.01, gap=0.1)).fetch_all(jobs)
    assert time.monotonic() - began >= 0.5  # six requests, five gaps
    assert [getattr(item, "bytes", None) for item in got] == [6, 6, 6, None, 6, 6]
    assert isinstance(got[3], FetchError) and "HTTP 404" in str(got[3])


def test_a_fault_of_the_disk_stops_all_files(host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(6):
        host.files[f"/{i}"] = b"text"
    monkeypatch.setattr(os, "fsync", full_disk)
    jobs = [Job((f"{host.url}/{i}",), tmp_path / str(i)) for i in range(6)]
    with pytest.raises(UserError, match="the disk is full"):
        Downloader(QUICK).fetch_all(jobs)


@pytest.mark.parametrize(
    "url", ["", "a.txt", "ftp://host/a", "file:///etc/passwd", "http://", "https:///a", "http://h:x/a", "http://h/a b"]
)
def test_what_is_no_url_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="not a URL that can be fetched"):
        Downloader(QUICK).fetch(url, tmp_path / "a")


# --- the disk, and kills ---------------------------------------------------------------------------------------------


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_what_has_come(host: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full_disk)
        with pytest.raises(UserError, match="the disk is full; free space and run again") as caught:
            fetch(host, out)
        assert "\n" not in str(caught.value) and not isinstance(caught.value, FetchError)
    assert not out.exists()
    fetch(host, out)
    assert out.read_bytes() == CONTENT


SCRIPT = """
import sys
from pathlib import Path
from tinyforge.data.download import Downloader, Patience
from tinyforge.errors import run_command
url, out = sys.argv[1:]
patience = Patience(timeout=5.0, attempts=3, backoff=0.01, gap=0.0)
run_command(lambda: print(Downloader(patience).fetch(url, Path(out)).sha256))
"""


def run(host: Any, out: Path, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, f"{host.url}/a.txt", str(out)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def test_a_disk_that_fills_in_the_middle(host: Any, out: Path) -> None:
    """No file may grow beyond 100 KB; what has arrived is kept and continued."""
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))}
    process = run(host, out, **limit)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2 and errors.startswith("error: ") and errors.count("\n") == 1
    assert not out.exists()
    fetch(host, out)
    assert out.read_bytes() == CONTENT and host.gets()[-1].status == 206


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(host: Any, out: Path) -> None:
    out.parent.mkdir(mode=0o500)
    with pytest.raises(UserError, match="not writable .*choose another --out"):
        fetch(host, out)


def test_a_file_where_the_folder_should_be(host: Any, out: Path) -> None:
    out.parent.write_text("a file")
    with pytest.raises(UserError, match="cannot be created"):
        fetch(host, out)


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(host: Any, out: Path) -> None:
    host.pace = 0.02  # 0.4 s for the file
    moments = random.Random(3)
    kills = 0
    for _ in range(4):
        process = run(host, out)
        host.kill(process, moments.uniform(0.0, 0.3))
        kills += process.returncode == -signal.SIGKILL
        assert not out.exists() or out.read_bytes() == CONTENT
    assert kills >= 2
    fetch(host, out)
    assert out.read_bytes() == CONTENT
    assert sum(request.status == 206 for request in host.gets()) >= 1
    assert sorted(os.listdir(out.parent)) == ["a.txt", "a.txt.json"]
