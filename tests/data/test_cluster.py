"""A corpus and its shards made on a Ray cluster: the same bytes, whatever happens to its machines."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import contents
from tinyforge.data import cluster
from tinyforge.data.cluster import check_address
from tinyforge.data.corpus import main as make_corpus
from tinyforge.data.shards import main as make_shards
from tinyforge.data.source import Document, SourceWriter
from tinyforge.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
STORE = 100 << 20


# --- without Ray ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(answer: bytes | None) -> Iterator[int]:
    """A port that answers so; None: that takes a connection and says nothing."""
    listening = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listening.accept()[0])
                if answer is not None:
                    held[-1].sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    for connection in held:
        connection.close()
    thread.join(5)


@pytest.mark.parametrize("address", ["", "nonsense", "host", "host:", "host:0", "host:99999", "http://h:1", "a b:1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UserError, match=r"--ray is .*, expected HOST:PORT, as ray start prints it, or local"):
        check_address(address)


def test_an_address_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(UserError, match=r"does not answer \(Connection refused\); start it with ray start --head"):
        check_address(f"127.0.0.1:{port}")
    with pytest.raises(UserError, match="does not answer .*; start it"):
        check_address("no-such-host.invalid:6379")
    monkeypatch.setattr(cluster, "ANSWER", 0.2)
    with server(None) as port, pytest.raises(UserError, match="does not answer within 0 s"):
        check_address(f"127.0.0.1:{port}")
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port, pytest.raises(UserError, match="but not Ray"):
        check_address(f"127.0.0.1:{port}")


def test_a_machine_that_differs_is_named(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("word")
    seen = cluster.look(token, [tmp_path])
    cluster._judge("machine b", seen, tmp_path, "word")
    for change, expected in (
        ({"word": None}, "machine b does not see what is written to .*; give --out in a folder that all machines"),
        ({"word": "old"}, "machine b does not see what is written to"),
        ({"missing": ["/data/web"]}, "machine b does not see /data/web; put it in a folder"),
        ({"versions": seen["versions"] | {"DuckDB": "0.1"}}, "machine b has DuckDB 0.1, this one .*; make them the"),
        ({"versions": seen["versions"] | {"code": "abc"}}, "machine b has code abc"),
    ):
        with pytest.raises(UserError, match=expected):
            cluster._judge("machine b", seen | change, tmp_path, "word")
    assert cluster.look(tmp_path / "elsewhere", [tmp_path / "not-there"])["missing"] == [str(tmp_path / "not-there")]


@pytest.mark.parametrize("command", ["corpus", "shards"])
def test_a_dead_address_ends_the_command_at_once(command: str, tmp_path: Path) -> None:
    out, source = tmp_path / "out", write_source(tmp_path / "source", 3)
    inputs = [str(source)] if command == "corpus" else ["--corpus", str(tmp_path / "none")]
    call = [sys.executable, "-m", f"data.{command}", *inputs, "--out", str(out), "--ray", "127.0.0.1:1"]
    begin = time.monotonic()
    run = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (2, "") and len(run.stderr.splitlines()) == 1
    assert "--ray 127.0.0.1:1: does not answer (Connection refused)" in run.stderr
    assert time.monotonic() - begin < 20 and not out.exists()


# --- with it ----------------------------------------------------------------------------------------------------------


def write_source(folder: Path, documents: int, words: int = 300) -> Path:
    """Prose that the filters keep, with every ninth document nearly the one before it."""
    rng = random.Random(7)
    vocabulary = ["".join(rng.choices("aeiourstnlm", k=rng.randint(2, 9))) for _ in range(4000)]
    before = ""
    with SourceWriter(folder, folder.name, licence="public domain") as writer:
        for number in range(documents):
            text = (
                before + " and so on."
                if number % 9 == 8
                else " ".join(
                    rng.choice(("the", "of", "and", "to"))
                    if i % 3 == 0
                    else rng.choice(vocabulary) + (".\n\n" if i % 40 == 39 else "")
                    for i in range(words)
                )
            )
            writer.add(Document(str(number), text))
            before = text
    return folder


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A cluster of two machines on this one, without a memory monitor: others use this machine too."""
    pytest.importorskip("ray", reason='needs Ray: pip install -e ".[cluster]"')
    patch = pytest.MonkeyPatch()
    for name, value in {"memory_monitor_refresh_ms": "0", "USAGE_STATS_ENABLED": "0", "DEDUP_LOGS": "0"}.items():
        patch.setenv(f"RAY_{name}", value)
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": STORE}
    made = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    made.size = size
    yield made
    made.shutdown()
    patch.undo()


def files_of(folder: Path) -> dict[str, bytes]:
    """The bytes of a corpus or of shards, with the catalogue's tables in the place of its file."""
    import duckdb

    found = {name: content for name, content in contents(folder).items() if not name.endswith(".duckdb")}
    if (path := folder / "corpus.duckdb").exists():
        with duckdb.connect(str(path), read_only=True) as catalogue:
            for (table,) in catalogue.execute("SELECT table_name FROM information_schema.tables").fetchall():
                found[table] = repr(catalogue.execute(f"SELECT * FROM {table} ORDER BY ALL").fetchall()).encode()
    return found


@pytest.mark.slow
def test_a_cluster_makes_the_same_bytes_also_when_a_machine_is_killed(
    two_nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyforge.data.source.FILE_BYTES", 60_000)  # so that there are many tasks
    monkeypatch.chdir(tmp_path)
    write_source(Path("web"), 600)
    corpus = ["web", "--val-share", "0.1"]
    assert make_corpus([*corpus, "--out", "plain", "--workers", "1"]) == 0
    assert make_shards(["--corpus", "plain", "--out", "plain-shards", "--vocab-size", "300", "--workers", "1"]) == 0
    machine = two_nodes.add_node(**two_nodes.size)
    done, killed = threading.Event(), threading.Event()

    def kill() -> None:
        """Once the first results are there."""
        while not done.is_set() and len(list(Path("rayed/.work").glob("read-*.json"))) < 2:
            time.sleep(0.01)
        if not done.is_set():
            killed.set()
        two_nodes.remove_node(machine, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert make_corpus([*corpus, "--out", "rayed", "--ray", two_nodes.address]) == 0
    finally:
        done.set()
        killer.join()
    assert killed.is_set() and len(list(Path("web").glob("*.parquet"))) > 9
    assert files_of(Path("plain")) == files_of(Path("rayed"))
    assert (
        make_shards(["--corpus", "rayed", "--out", "rayed-shards", "--vocab-size", "300", "--ray", two_nodes.address])
        == 0
    )
    assert files_of(Path("plain-shards")) == files_of(Path("rayed-shards"))


@pytest.mark.slow
def test_a_machine_that_does_not_share_the_folder(
    two_nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one: its own view of the file system has another folder mounted there."""
    apart = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path} && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount: a machine with a file system of its own is made with unshare")
    write_source(tmp_path / "web", 3)
    command = [
        *apart,
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--address",
        two_nodes.address,
        "--num-cpus",
        "1",
        "--object-store-memory",
        str(STORE),
        "--block",
    ]
    log = tmp_path / "log"
    with open(log, "w") as file:
        node = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while "started" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        with pytest.raises(UserError, match=r"machine .* does not see what is written to .*/out/\.work; give --out in"):
            make_corpus([str(tmp_path / "web"), "--out", str(tmp_path / "out"), "--ray", two_nodes.address])
    finally:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()
