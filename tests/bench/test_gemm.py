"""The benchmark of matrix products: which products a step has, which variants it tries, what the backend gets."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench import gemm
from bench.gemm import Product, line, main, products, splits_for, summary, table, written
from tinyforge.errors import UserError

needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy, not a GPU")


def test_a_step_of_base_has_fifteen_shapes() -> None:
    found = [p for p in products("base", 16384) if not p.instead]
    assert len({p.key for p in found}) == 15
    by_name = {p.name: (p.m, p.n, p.k, p.count) for p in found}
    assert by_name["qkv forward"] == (16384, 1280, 768, 16) and by_name["qkv dX"] == (16384, 768, 1280, 16)
    assert by_name["gate|up dW"] == (4096, 768, 16384, 16) and by_name["down dW"] == (768, 2048, 16384, 16)
    assert by_name["head forward"] == (4096, 16384, 768, 4) and by_name["head dW"] == (16384, 768, 16384, 1)


def test_any_shape_and_number_of_tokens_has_products() -> None:
    """A preset's, or as 384x1024 a width and a hidden width; RoPE ends a product for heads of 64."""
    found = {p.name: p for p in products("384x1024", 2048)}
    assert found["gate|up, SwiGLU"].key == "SWIGLU 2048 2048 384" and found["qkv, RoPE"].key == "ROPE 2048 768 384"
    assert {p.tokens for p in found.values()} == {2048}
    assert "qkv, RoPE" not in {p.name for p in products("small", 2048)}  # heads of 32


def test_gpt2_leaves_its_product_with_a_bias_to_cublaslt() -> None:
    found = {p.name: p for p in products("124m", 16384)}
    assert "qkv forward" not in found and found["qkv dX"].k == 2304
    assert found["head forward"].n % 64 == 0 and found["head forward"].n >= 50257  # padded


def test_a_steps_products_are_six_flop_a_weight_and_token() -> None:
    from tinyforge.models.nanoeuler.config import PRESETS

    c = PRESETS["base"]
    weights = c.layers * (c.dim * (c.dim + 2 * c.kv_heads * c.head_dim) + c.dim * c.dim + 3 * c.dim * c.hidden)
    weights += c.mtp_heads * c.vocab * c.dim
    assert sum(p.flop * p.count for p in products("base", 16384) if not p.instead) == 6 * 16384 * weights


@needs_cupy
def test_the_parts_of_a_sum_fill_the_multiprocessors() -> None:
    from tinyforge.backends.gemm import Variant

    small = Product("base", "out dW", "WEIGHT", 768, 768, 16384, 16)
    assert splits_for(small, Variant(128, 256, 4, 0, 1), 132)[0] == 7  # 18 tiles: 126 of 132
    wide = Product("base", "gate|up dW", "WEIGHT", 4096, 768, 16384, 16)
    assert splits_for(wide, Variant(128, 192, 5, 0, 1), 132)[0] == 1  # 128 tiles
    tried = Counter(v.band for v in gemm.candidates(Product("base", "", "FORWARD", 8, 8, 8, 1), 132))
    assert tried == {1: 8, 8: 8}


def test_products_that_end_with_an_op_stand_for_others() -> None:
    found = list(products("base", 16384))
    by_name = {p.name: p for p in found}
    assert {p.instead: p.key for p in found if p.instead} == {
        "qkv forward": "ROPE 16384 1280 768",
        "gate|up forward": "SWIGLU 16384 4096 768",
        "down dX": "SWIGLU_BACKWARD 16384 2048 768",
    }
    assert all(by_name[p.instead].flop == p.flop and by_name[p.instead].count == p.count for p in found if p.instead)
    measured = {"rows": [row(p, 100 if p.instead else 70, 80 if p.instead else 90) for p in found]}
    (text,) = summary(measured)  # 12 products by cuBLAS, 3 and their passes by ours
    replaced = {p.instead for p in found}
    cublas = sum(p.count * (100 if p.instead else 70) for p in found if p.name not in replaced)
    chosen = sum(p.count * (80 if p.instead else 70) for p in found if p.name not in replaced)
    assert f"by cuBLAS {cublas / 1e3:.2f} ms" in text and f"each by the faster {chosen / 1e3:.2f}" in text


def row(product: Product, cublas: float, ours: float | None) -> dict[str, Any]:
    found = [] if ours is None else [{"variant": [128, 256, 4, 0, 2, 8, 1], "name": "a variant", "us": ours}]
    return vars(product) | {"cublas_us": cublas, "ours": found, "wrong": []}


def test_the_table_holds_what_is_faster() -> None:
    first, second, third = list(products("base", 16384))[:3]
    found = {"gpu": "A GPU", "rows": [row(first, 64, 50), row(second, 59, 60), row(third, 69, None)]}
    expected = {"A GPU": {first.key: [128, 256, 4, 0, 2, 8, 1]}}
    assert table(found | {"rows": [*found["rows"], row(second, 61, 60)]}) == expected  # 2 % do not count
    assert table(found) == expected and json.loads(written(expected)) == expected
    (text,) = summary(found)
    assert "base, 16384 tokens: by cuBLAS 3.07 ms a step, by ours 2.86 (0.93), each by the faster 2.85 (0.93)" in text
    assert "0.78  a variant" in line(found["rows"][0])


@needs_cupy
@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_rules_gain_where_they_were_measured(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all products that a rule sends to our kernel none loses 5 % to cuBLAS and the op's pass; most gain 10."""
    from tinyforge.backends import gemm as backend

    found = json.loads((Path(__file__).parents[2] / f"docs/results/gpu-gemm-rule-{gpu}.json").read_text("utf-8"))
    monkeypatch.setattr(backend, "processors", lambda: 132)
    monkeypatch.setattr(backend, "_gpu", lambda: found["gpu"])
    for product in backend.RULES:
        ratios = []
        for row in (r for r in found["rows"] if r["product"] == product):
            tile = backend.by_rule(product, row["m"], row["n"], row["k"])
            if tile is not None:
                (us,) = (ours["us"] for ours in row["ours"] if ours["variant"] == list(astuple(tile)))
                ratios.append(us / row["cublas_us"])
        assert len(ratios) >= 4 and max(ratios) < 1.05 and median(ratios) < 0.9, product


def some_child(pipe: Any, device: Any, todo: list[Product], left_out: set[Any], until: float) -> None:
    """Stands for the measuring process: of its three variants the first hangs and the second crashes."""
    from tinyforge.backends.gemm import compiled

    pipe.send(("device", "a GPU", "A GPU", 783.0))
    for product in todo:
        for i, variant in enumerate(compiled()[:6:2]):
            if gemm.tile(product.product, variant) in left_out:
                continue
            pipe.send(("trying", product.product, variant))
            if i == 0:
                time.sleep(60)
            if i == 1:
                os._exit(1)
        pipe.send(("row", product, row(product, 64, 50)))
    pipe.send(("done",))


@needs_cupy
@pytest.mark.slow
def test_a_variant_that_hangs_or_crashes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "child", some_child)
    monkeypatch.setattr(gemm, "SILENCE", 5.0)
    args = argparse.Namespace(tokens=16384, device=None, seconds=100)
    said: list[str] = []
    expected = [p for p in products("base", 16384) if p.product == "WEIGHT"]
    found = gemm.measure(args, list(expected), said.append)
    assert [r["name"] for r in found["rows"]] == [p.name for p in expected] and found["gpu"] == "A GPU"
    assert [text.split(",")[0] for text in found["left_out"]] == [
        "WEIGHT 128 x 256 cooperative",
        "WEIGHT 128 x 192 cooperative",
    ]
    assert sum("left out, it hung or crashed" in text for text in said) == 2


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyforge.backends.gpu_is_there", lambda: False)
    with pytest.raises(UserError, match="CuPy finds no GPU"):
        main([])
    with pytest.raises(UserError, match="--models: 100x300, huge not among small, base, .*, 124m, nor a width in"):
        main(["--models", "huge,base,100x300,384x1024"])
    with pytest.raises(UserError, match="--tokens is 5000, expected at most 4096, or a multiple of it"):
        main(["--tokens", "5000"])
