"""The benchmark of prompts asks the public generator for one token, and PyTorch agrees with it."""

from __future__ import annotations

import json

import pytest

from bench.harness import GRAPHS_NEED_A_GPU, OURS
from bench.prefill import Ours, Torch, main, of_length, table
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.models.nanoeuler import Config, NanoEuler

TINY = Config(
    dim=16, heads=4, kv_heads=2, layers=2, context=40, vocab=19, mtp_heads=2, hidden=24, mtp_weights=(1.0, 0.5)
)


def tiny() -> NanoEuler:
    model = NanoEuler(TINY, get_backend("numpy", "fp32", workers=1))
    model.initialise(0)
    return model


def test_it_times_prompts_and_writes_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prompt", "20", "150", "--rounds", "2", "--workers", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.rstrip("\n") == "\n".join(table(found)) and [part["prompt"] for part in found["lengths"]] == [20, 150]
    result = found["lengths"][1]["results"][OURS]
    assert len(result["clock_ms"]) == 2 and result["min_ms"] == min(result["clock_ms"]) > 0
    assert result["tokens_per_second"] == pytest.approx(150e3 / result["median_ms"])


def test_every_run_computes_the_whole_prompt() -> None:
    ours = Ours(tiny(), list(range(15)))
    first = int(ours.logits().argmax())
    for _ in range(2):
        assert ours.run() == first
    assert (ours.session.stats.prefilled, ours.session.stats.reused) == (30, 0)


def test_pytorch_gives_the_same_token() -> None:
    pytest.importorskip("torch")
    prompt = [i % 19 for i in range(37)]
    assert Torch(tiny(), prompt, threads=1).run() == Ours(tiny(), prompt).run()
    found = of_length(tiny(), 37, rounds=1, threads=1, peer="torch")
    assert found["parity"]["worst_difference"] < 1e-5 and list(found["left_out"].values()) == [GRAPHS_NEED_A_GPU]


@pytest.mark.parametrize("flags", [["--prompt", "1"], ["--rounds", "0"], ["--workers", "0"], ["--threads", "0"]])
def test_a_wrong_flag_is_one_line(flags: list[str]) -> None:
    with pytest.raises(UserError, match=rf"{flags[0]} is {flags[1]}, expected"):
        main(flags)
