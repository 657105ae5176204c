"""The cost model of a step on many GPUs, against measurements, and where its formulas can be checked by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tinyforge.errors import UserError
from tinyforge.registry import find_model
from tinyforge.scaling import (
    CALIBRATION,
    RESULTS,
    TOLL,
    Job,
    all_reduce,
    compared,
    cost,
    fastest,
    job_of,
    main,
    one_gpu,
    read_machine,
)

H200 = read_machine()
BASE = Job("nanoeuler", find_model("nanoeuler").presets["base"], 32, 512)
TWO_B = Job("nanoeuler", find_model("nanoeuler").presets["2b"], 8, 1024, "blocks", zero=True)


def test_the_forecast_is_within_five_percent_of_what_was_measured() -> None:
    rows = list(compared(H200))
    assert {row.gpus for row in rows} >= {1} and len(rows) >= 4
    # These plain steps waited for Python: six turns took 27.6 to 34.5 ms (docs/scaling.md).
    noisy = [row for row in rows if row.file == "gpu-ranks-base.json" and "ZeRO" in row.what]
    assert len(noisy) == 1 and -0.12 < noisy[0].error < -0.05
    for row in rows:
        assert row in noisy or abs(row.error) < 0.05, row
    assert {"nanoeuler xl, 16 x 1024", "nanoeuler large, 16 x 1024", "gpt2 124m, 16 x 1024"} <= {
        row.what for row in rows
    }
    assert sum(row.file != CALIBRATION for row in rows) >= 3  # forecasts, not what the model was made from


def test_a_file_of_several_gpus_is_compared(tmp_path: Path) -> None:
    for path in RESULTS.glob("gpu-*.json"):
        if "ranks" not in path.name:
            shutil.copy(path, tmp_path)
    alone = 26.3
    found = {
        "ranks": 2,
        "precision": "bf16",
        "rows_a_gpu": 32,
        "seq_len": 512,
        "model": "nanoeuler",
        "config": "base",
        "results": {
            "1 GPU": {"median_ms": alone},
            "ranks": {"median_ms": 27.7},
            "ranks, ZeRO": {"median_ms": 27.0},
            "torch DDP, compiled": {"median_ms": 35.8},
        },
    }
    (tmp_path / "gpu-ranks.json").write_text(json.dumps(found))
    plain, zero = [row for row in compared(H200, tmp_path) if row.gpus == 2]
    assert (plain.measured, zero.measured) == (pytest.approx(0.0277), pytest.approx(0.027))
    # The last bucket, the embedding's, and the toll of a sum with few blocks under backward.
    sums = 4 * 116_417_280 / H200.windows + 2 * H200.hop
    added = 4 * 4096 * 768 / H200.windows + 2 * H200.hop + TOLL * H200.crowded[0] * sums
    assert plain.forecast == pytest.approx(alone / 1e3 + added, rel=1e-6)
    assert abs(plain.error) < 0.05 and abs(zero.error) < 0.05
    of_another = found | {"device": "NVIDIA H100 80GB HBM3 (GPU 0), 79 GiB, CUDA 13.2"}
    (tmp_path / "gpu-ranks-h100.json").write_text(json.dumps(of_another))
    assert len([row for row in compared(H200, tmp_path) if row.gpus == 2]) == 2
    found["results"]["ranks"]["median_ms"] = 40.0  # type: ignore[index]
    (tmp_path / "gpu-ranks.json").write_text(json.dumps(found))
    assert max(abs(row.error) for row in compared(H200, tmp_path)) > 0.05


def test_a_sum_that_backward_cannot_hide_is_done_the_fast_way() -> None:
    """A few tokens a GPU: the links at their full rate, and nothing hidden."""
    few = replace(BASE, rows=1)
    assert cost(few, 2, H200).exposed == pytest.approx(all_reduce(4 * 116_417_280, 2, H200))
    assert cost(BASE, 2, H200).exposed < all_reduce(4 * 116_417_280, 2, H200)


def test_the_links_give_the_measured_all_reduces_back() -> None:
    for row in json.loads((RESULTS / "gpu-all-reduce.json").read_text())["rows"]:
        assert all_reduce(row["bytes"], 2, H200) == pytest.approx(row["ms"] / 1e3, rel=1e-9)


def test_rings_and_trees() -> None:
    machine = replace(H200, link=100e9, hop=1e-6, network=10e9, far_hop=1e-5, per_host=8)
    assert all_reduce(1e9, 1, machine) == 0
    assert all_reduce(1e9, 4, machine) == pytest.approx(2 * 3 / 4 * 0.01 + 6e-6)
    near = 2 * 7 / 8 * 0.01 + 14e-6
    # Two hosts: a ring's 2 (m - 1) / m of an eighth of the bytes.
    assert all_reduce(1e9, 16, machine) == pytest.approx(near + 0.0125 + 2e-5)
    # Few bytes over many hosts: a tree has 2 log2 m hops, a ring 2 (m - 1).
    few = all_reduce(8.0, 8 * 128, machine)
    assert few == pytest.approx(14e-6 + 2 * 7 * 1e-5, rel=1e-3)
    assert all_reduce(1e9, 8 * 128, machine) < near + 0.025 + 2 * 127 * 1e-5


def test_the_parts_of_a_step() -> None:
    alone = one_gpu(BASE, H200)
    assert alone.seconds == pytest.approx(one_gpu(replace(BASE, rows=64), H200).seconds / 2, rel=0.05)
    again = one_gpu(replace(BASE, recompute="blocks"), H200)
    assert again.again == pytest.approx((alone.seconds - alone.optimizer) / 3)
    assert again.memory < alone.memory
    # More GPUs: the same work, communication on top, the optimizer's memory shared out.
    one, many = cost(TWO_B, 1, H200), cost(TWO_B, 64, H200)
    assert many.products == one.products and many.exposed > 0 == one.exposed
    assert many.optimizer == pytest.approx(one.optimizer / 64)
    state = 12 * 1_971_488_768
    assert one.memory - many.memory == pytest.approx(state * 63 / 64, rel=1e-3)
    # A slower network hides less.
    assert cost(TWO_B, 64, replace(H200, network=5e9)).exposed > many.exposed


def test_a_split_that_pays() -> None:
    """With rows in plenty none does; a large step of few rows a GPU is faster where fewer gradients are summed."""
    assert fastest(TWO_B, 256, H200) == (TWO_B, cost(TWO_B, 256, H200))
    few = fastest(replace(TWO_B, rows=0.25), 1024, H200)
    assert few and few[0].tensor * few[0].stages >= 4 and few[1].exposed < cost(TWO_B, 1024, H200).exposed
    small = replace(H200, memory=16 * 2**30)
    tight = fastest(TWO_B, 8, small)
    assert cost(TWO_B, 8, small).memory > small.memory and tight and tight[1].memory <= small.memory
    assert fastest(replace(TWO_B, rows=0.25), 2, H200) is None  # half a row for both


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "1024", "--config", "2b", "--recompute", "blocks"]) == 0
    printed = capsys.readouterr().out
    assert "1,971,488,768 parameters" in printed and "assumed:" in printed
    assert [line.split()[0] for line in printed.splitlines()[4:]][-1] == "1024"
    assert main(["--compare"]) == 0
    assert "gpu-train-32x512.json" in capsys.readouterr().out
    for wrong, said in (
        (["--gpus", "0"], "--gpus is 0, expected 1 to"),
        (["--config", "3b"], "nanoeuler has small, base"),
        (["--model", "vit"], "use one of nanoeuler, gpt2, llama$"),
        (["--model", "moe"], "moe: the cost model does not count MixtureOfExperts, .*; use one of nanoeuler, gpt2"),
        (["--model", "lstm", "--config", "wide"], "lstm: the cost model does not count LSTM; use one of"),
        (["--network", "0"], "expected GB/s above 0"),
        (["--seq-len", "9999", "--config", "2b"], "context is 1024"),
        (["--batch-tokens", "-1"], "is -1, expected a row"),
        (["--batch-tokens", "1000", "--config", "2b"], "is 1000, expected a row of 1024 tokens or more"),
        (["--model", "mamba", "--recompute", "blocks"], "no blocks that can be recomputed"),
    ):
        with pytest.raises(UserError, match=said):
            main(wrong)


@pytest.mark.slow
def test_the_page_has_what_the_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter((RESULTS.parent / "scaling.md").read_text(encoding="utf-8").splitlines())
    checked = []
    for line in lines:
        if not line.startswith("    python -m tinyforge.scaling "):
            continue
        arguments, block = line.split()[3:], []
        while (line := next(lines, "")).startswith("    ") and "python" not in line:
            block.append(line[4:])
        if block:
            main(arguments)
            printed = capsys.readouterr().out.splitlines()
            # More measurements may come: the page has a part of the comparison.
            assert block == printed if arguments != ["--compare"] else set(block) <= set(printed)
            checked.append(arguments)
    assert len(checked) == 2


def test_a_checkout_without_measurements(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the cost model reads docs/results, which only the repository has"):
        read_machine(tmp_path)


def test_every_measured_file_names_its_job() -> None:
    job = job_of(json.loads((RESULTS / CALIBRATION).read_text()))
    assert (job.model, job.rows, job.seq_len) == ("nanoeuler", 16, 1024)
