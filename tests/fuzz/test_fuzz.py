"""The fuzzer: it repeats itself, reads good files, notices each kind of fault, and in a few seconds finds none."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.mutate import MOST, mutate
from tests.fuzz.seeds import mend_slice

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are forked, and /proc is read")

GOOD = json.dumps({"name": "a", "sizes": [1, 2.5, {"deep": True}], "text": "some words"}).encode()
# Commands with one fault each. In a process of its own: pytest's has threads.
FAULTS = """
import json, os, sys, tempfile, time
from pathlib import Path
from tests.fuzz.__main__ import Fuzzer
from tests.fuzz.child import Limits
from tests.fuzz.readers import Reader
from tinyforge.errors import UserError

def two_lines(words):
    print("error: one", file=sys.stderr)
    raise UserError("two")

mains = {
    "good": lambda words: print(Path("a.json").read_text()),
    "refused": lambda words: (_ for _ in ()).throw(UserError("a.json: no good")),
    "traceback": lambda words: json.loads("{"),
    "abort": lambda words: os.abort(),
    "status": lambda words: sys.exit(7),
    "hang": lambda words: time.sleep(60),
    "memory": lambda words: bytearray(1200 << 20),
    "two lines": two_lines,
    "escape": lambda words: print("\\x1b[2J"),
}
with tempfile.TemporaryDirectory() as folder:
    seeds = Path(folder, "seeds")
    seeds.mkdir()
    (seeds / "a.json").write_text("[]")
    fuzzer = Fuzzer(seeds, Path(folder, "work"), Path(folder, "keep"), Limits(seconds=1.0))
    found = {name: fuzzer.read(Reader(name, "a.json", main, "{}"), b"[1]")[1] for name, main in mains.items()}
print(json.dumps(found))
"""


def run(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def test_a_seed_gives_the_same_file_again_and_others_another() -> None:
    made = [mutate(GOOD, random.Random(seed), [b"other"]) for seed in range(300)]
    assert made == [mutate(GOOD, random.Random(seed), [b"other"]) for seed in range(300)]
    assert len(set(made)) > 200
    assert max(map(len, made)) <= MOST


def test_wrong_files_are_of_all_kinds() -> None:
    made = [mutate(GOOD, random.Random(seed), [b"other"]) for seed in range(1000)]
    kinds = {"deep": b"[[[[[[[[", "bomb": b"9" * 400, "empty": b"", "null": b"null", "control": b"\\u001b"}
    for name, part in kinds.items():
        assert any(part in data if part else not data for data in made), name
    values = []
    for data in made:
        try:
            values.append(json.loads(data))
        except (ValueError, RecursionError):
            continue
    assert 200 < len(values) < 950  # some are read as far as their meaning, some are not
    assert {type(value) for value in values} > {dict, list}


def test_half_a_character_in_a_record_is_no_obstacle_to_mending_its_hash(tmp_path: Path) -> None:
    (tmp_path / "slice-00000.parquet").write_bytes(b"rows")
    record = tmp_path / "slice-00000.json"
    record.write_text('{"url": "\\udcff"}', encoding="utf-8")
    mend_slice(tmp_path)
    assert json.loads(record.read_text(encoding="utf-8")) == {
        "url": "\udcff",
        "slice_sha256": hashlib.sha256(b"rows").hexdigest(),
    }


def test_each_kind_of_fault_is_noticed() -> None:
    done = run("-c", FAULTS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("good") == found.pop("refused") == ""
    words = {
        "traceback": "JSONDecodeError",
        "abort": "SIGABRT",
        "status": "status 7",
        "hang": "killed",
        "memory": "more than 1024 MiB",
        "two lines": "2 lines of error",
        "escape": "control character",
    }
    assert found.keys() == words.keys()
    for name, word in words.items():
        assert word in found[name]


def test_a_second_finds_nothing(tmp_path: Path) -> None:
    done = run("-m", "tests.fuzz", "--seconds", "1", "--first", "1", "--workers", "1", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    files = int(done.stdout.splitlines()[-1].rpartition(" s ")[2].split()[0])
    assert files >= 10


@pytest.mark.slow
def test_every_reader_reads_its_good_file() -> None:
    done = run("-m", "tests.fuzz", "--good")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_minute_finds_nothing(tmp_path: Path) -> None:
    done = run("-m", "tests.fuzz", "--seconds", "60", "--first", "1000", "--keep", str(tmp_path), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
