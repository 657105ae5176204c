"""The benchmark of the scan: what it counts, and its peer, which computes the same."""

from __future__ import annotations

import numpy as np
import pytest

from bench import scan as bench
from tinyforge.backends import get_backend
from tinyforge.errors import UserError

SHAPE = bench.Shape(batch=2, length=70, channels=5, states=4)


def test_bytes_of_a_shape_small_enough_to_count_by_hand() -> None:
    wide, narrow, kept = 2 * 70 * 5, 2 * 70 * 4, 2 * 3 * 5 * 4
    assert SHAPE.bytes("forward", 2, 4) == (4 * wide + 2 * narrow) * 2
    assert SHAPE.bytes("forward, states kept", 2, 4) == (4 * wide + 2 * narrow) * 2 + 4 * kept
    assert SHAPE.bytes("backward", 2, 4) == (7 * wide + 4 * narrow) * 2 + 4 * kept  # u, delta, z, dy; du, ddelta, dz
    assert SHAPE.exponentials("forward") == wide * (4 + 3)


def test_the_peer_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the peer is PyTorch")
    monkeypatch.setattr("bench.gpu_clock.CACHE_BYTES", 1)
    ours = bench.Ours(SHAPE, get_backend("numpy", "fp32", workers=1)).answers()
    theirs = bench.Peer(SHAPE, "fp32", compiled=False, device="cpu").answers()
    assert max(bench.check_agreement(ours, theirs, 1e-5).values()) > 0
    theirs["delta"] = np.roll(theirs["delta"], 1)
    with pytest.raises(UserError, match="ours and PyTorch's delta differ by"):
        bench.check_agreement(ours, theirs, 1e-5)


def test_a_bad_size_is_refused() -> None:
    with pytest.raises(UserError, match="--states is 0, expected 1 or more"):
        bench.main(["--states", "0"])
