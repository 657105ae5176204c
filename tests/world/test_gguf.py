"""GGUF files as they are published: every tensor, and what opening one costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.errors import UserError
from tinyforge.formats import gguf_file, open_model
from tinyforge.tokenizers.gguf_vocabulary import from_gguf

# Times the weights in float32: the peak of a process's own memory from the command to the end of a reply. The pages of
# libraries, LLVM's among them, are files' that processes share and the system can drop.
MOST = {"": 1.25, "int8": 0.5}


@pytest.mark.parametrize("name", ["gemma3", "smollm2"])
def test_tensors_are_the_package_s(name: str, request: pytest.FixtureRequest) -> None:
    """Gemma 3's Q4_K_M holds Q4_K, Q5_0, Q6_K, Q8_0 and F32; SmolLM2's Q4_1 holds Q4_1, Q8_0 and F32."""
    gguf: Any = pytest.importorskip("gguf")
    file: Path = request.getfixturevalue(name)
    ours, theirs = gguf_file.read(file).tensors, gguf.GGUFReader(file).tensors
    assert ours.keys() == {tensor.name for tensor in theirs}
    for tensor in theirs:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = ours[tensor.name].read()
        assert found.dtype == np.float32 and np.array_equal(found, expected), tensor.name


def test_an_architecture_that_is_not_known_is_refused_by_name(gemma3: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gemma3.read_bytes().replace(b"gemma3", b"gemma9"))
    with pytest.raises(UserError, match="its architecture is 'gemma9'; supported: llama, .*; choose one of these"):
        open_model(tmp_path / "m.gguf")


def test_gemma3_s_vocabulary(gemma3: Path) -> None:
    tokenizer = from_gguf(gguf_file.read(gemma3).metadata, gemma3)
    ids = tokenizer.encode("Hello\n\n  <table> 123")
    assert tokenizer.decode(ids) == "Hello\n\n  <table> 123" and tokenizer.user_defined["\n\n"] in ids


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("name", "kind"), [("gemma3", ""), ("smollm2", ""), ("smollm2", "int8")])
def test_a_reply_needs_little_more_memory_than_the_weights(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    file: Path = request.getfixturevalue(name)
    weights = 4 * sum(int(np.prod(tensor.shape)) for tensor in gguf_file.read(file).tensors.values())
    # The package gguf imports mistral_common where that is installed, 33 MB of modules; here it is a peer of the tests.
    start = "import sys; sys.modules['mistral_common'] = None; from tinyforge import chat; chat.run_command(chat.main)"
    command = [sys.executable, "-c", start, "--checkpoint", str(file), "--prompt", "Where is Paris?"]
    command += ["--max-tokens", "40", *(["--weights", kind] if kind else [])]
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as run:
        while run.poll() is None:
            status = Path(f"/proc/{run.pid}/status").read_text()  # of a process that has ended without these lines
            peak = max(peak, 1024 * sum(map(int, re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))))
            time.sleep(0.01)
        assert run.stdout is not None and run.stdout.read().strip()
    assert run.returncode == 0
    least = weights / 4 if kind else weights
    assert least < peak < MOST[kind] * weights, f"{peak / 1e6:.0f} MB for weights of {weights / 1e6:.0f} MB"
