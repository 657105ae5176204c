"""Every command that writes, killed a few times; and a chaos that would not notice a difference would be no test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are forked, and /proc is read")

# Commands that lose something by a kill. In a process of its own: pytest's has threads.
FAULTS = """
import json, sys, tempfile, time
from multiprocessing import RLock
from pathlib import Path
from tests.chaos.__main__ import Chaos, Failure
from tests.chaos.commands import Command
from tests.fuzz.child import Patience

shared = RLock()  # by all that are forked

def half(words):  # writes in place: what a kill leaves is taken for whole
    out = Path("out")
    out.mkdir(exist_ok=True)
    if not (out / "a").exists():
        with open(out / "a", "w") as file:
            for number in range(20):
                file.write(f"{number} ")
                file.flush()
                time.sleep(0.001)

def rest(words):  # leaves what it wrote there
    out = Path("out")
    out.mkdir(exist_ok=True)
    beside = out / f".partial-{time.monotonic_ns()}"
    beside.write_text("whole")
    beside.replace(out / "a")

def sound(words):
    out = Path("out")
    out.mkdir(exist_ok=True)
    (out / ".partial-a").write_text("whole")
    (out / ".partial-a").replace(out / "a")

def stuck(words):  # takes what a kill has left for another's
    out = Path("out")
    out.mkdir(exist_ok=True)
    if (out / "lock").exists():
        sys.exit(3)
    (out / "lock").write_text("")
    (out / "a").write_text("whole")
    (out / "lock").unlink()

def hung(words):  # waits for what a kill has left locked
    with shared:
        sound(words)

def busy(words):  # does not end where a kill has left something
    Path("out").mkdir(exist_ok=True)
    while (Path("out") / ".partial-a").exists():
        pass
    sound(words)

def slow(words):  # waits for longer than others may be idle, but does something now and then
    for _ in range(6):
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        time.sleep(0.2)
    sound(words)

found = {}
for main, lives in {half: 15, rest: 15, sound: 8, stuck: 15, hung: 30, busy: 30, slow: 1}.items():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "work").mkdir()
        chaos = Chaos(Path(folder, "work"), Path(folder, "keep"), Patience(idle=1.0, work=1.0))
        command, kills = Command(main.__name__, main, ""), 0
        try:
            chaos.measure(command)
            for seed in range(lives):
                kills += chaos.live(command, seed)
            found[main.__name__] = f"{kills} kills"
        except Failure as failure:
            found[main.__name__] = str(failure)
print(json.dumps(found))
"""


def run(*arguments: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_what_a_kill_spoils_is_noticed() -> None:
    done = run("-c", FAULTS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert int(found["sound"].removesuffix(" kills")) >= 5
    assert "these differ from an undisturbed run: a" in found["half"]
    assert "these differ from an undisturbed run: .partial-" in found["rest"]
    assert "ended with status 3" in found["stuck"]
    assert "hangs" in found["hung"] and "waiting: python" in found["hung"] and "in hung" in found["hung"]
    assert re.search(r"used \d+ s of a processor and did not end.* in busy", found["busy"], re.DOTALL)
    assert found["slow"].endswith(" kills")


@pytest.mark.slow
def test_a_few_kills_of_every_command(tmp_path: Path) -> None:
    done = run("-m", "tests.chaos", "--seconds", "60", "--first", "1", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.rsplit(maxsplit=3) for line in done.stdout.splitlines()[2:]]
    assert sum(int(lives) >= 1 for _, lives, _, _ in rows) >= 10  # a slow machine does not reach all of them
    assert int(rows[-1][2]) >= 20
