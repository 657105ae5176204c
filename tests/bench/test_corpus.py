"""What the benchmark of the corpus makes is what it says, and its memory is that of the whole process tree."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from bench.corpus import KEPT_WORDS, Rewriter, memory_of, plant, shingles
from tinyforge.data.dedup import Words

RNG = random.Random(0)
VOCABULARY = ["".join(RNG.choices("abcdefghij", k=6)) for _ in range(2000)]
TEXTS = [", ".join(RNG.choices(VOCABULARY, weights=range(2000, 0, -1), k=800)) + ".\n" for _ in range(5)]


def test_copies_keep_the_frequent_words_and_share_few_shingles() -> None:
    rewriter = Rewriter(TEXTS)
    assert list(rewriter.copy(0)) == TEXTS
    copy = list(rewriter.copy(1))
    assert copy == list(rewriter.copy(1)) != list(rewriter.copy(2))
    frequent = set(np.array(rewriter.pieces, object)[: KEPT_WORDS // 2].tolist())
    for text, other in zip(TEXTS, copy, strict=True):
        assert len(text.split()) == len(other.split())
        a, b = shingles(text, 5), shingles(other, 5)
        assert len(a & b) / len(a | b) < 0.1
        assert [w in frequent for w in text.split(", ")] == [w in frequent for w in other.split(", ")]


def test_planted_duplicates_are_as_alike_as_they_say() -> None:
    for text in TEXTS:
        exact, said = plant("x", text, "exact", RNG)
        a, b = Words([text, exact.text]).normal_forms()
        assert exact.text != text and a == b and said.similarity == 1.0
        near, said = plant("x", text, "near", RNG)
        a, b = shingles(text, 5), shingles(near.text, 5)
        assert 0.6 < said.similarity == len(a & b) / len(a | b) < 1.0


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="reads /proc/PID/smaps_rollup, as on Linux")
def test_memory_counts_children() -> None:
    before = memory_of(os.getpid())
    command = "import sys; block = bytearray(b'x') * 100_000_000; print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert memory_of(os.getpid()) - before > 95_000_000
    finally:
        child.communicate()
    time.sleep(0.1)
    assert memory_of(os.getpid()) - before < 50_000_000
