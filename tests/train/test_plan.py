"""The plan of a step's memory: what is known of it without a GPU. tests/gpu compares it with the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tinyforge import memory
from tinyforge.adapters import Adapters
from tinyforge.backends import Backend, get_backend
from tinyforge.backends.meta import METER, MetaArray, empty
from tinyforge.config import BaseConfig
from tinyforge.errors import UserError
from tinyforge.kernel import Array, kernel
from tinyforge.memory import OUTSIDE, free_host_memory, gib
from tinyforge.model import Model
from tinyforge.models.nanoeuler import PRESETS, Config, NanoEuler
from tinyforge.op import Op, Stash
from tinyforge.ops import Linear
from tinyforge.params import ParamBuffer
from tinyforge.registry import ModelSpec, find_model, models
from tinyforge.train.plan import Plan, Split, check_fits, plan_step, print_plan
from tinyforge.train.settings import ClassifySettings, PretrainSettings, SftSettings, config_of

SPEC = find_model("nanoeuler")
TINY = Config(
    dim=64, heads=4, kv_heads=2, layers=2, context=256, vocab=128, mtp_heads=2, hidden=96, mtp_weights=(1, 0.5)
)
# Per token and layer, in elements: qkv, attention's result, gate and up, two norms' results; statistics float32.
SAVED = 8 * 16 + 64 + 2 * 96 + 2 * 64
STATISTICS = 4 + 2  # the log-sum-exp of 4 heads, 2 norms


def test_memory_counts_while_anything_refers_to_it() -> None:
    start = METER.now
    array = empty((1000, 100), np.float32)
    assert METER.now - start == 400_384  # in granules of 512 bytes
    view = array[10:20].reshape(-1)
    del array
    assert METER.now - start == 400_384
    total = view + view  # arithmetic makes another
    assert isinstance(total, MetaArray) and METER.now - start == 400_384 + 4_096
    del view, total
    assert METER.now == start


@pytest.mark.parametrize(
    ("precision", "size", "wide"), [("bf16", 2, 4), ("fp32", 4, 4), ("tf32", 4, 4), ("fp64", 8, 8)]
)
def test_the_parts_are_what_the_formulas_say(precision: str, size: int, wide: int) -> None:
    plan = plan_step(SPEC, TINY, precision, 8, 256)
    tokens = 8 * 256
    count = NanoEuler(TINY, get_backend("numpy", "fp64", workers=1)).buffer.values.size
    masters = 0 if size == wide else wide
    tables = 3 * 256 * 8 * wide  # RoPE's, which the layers share: cos, sin, -sin
    assert plan.weights == pytest.approx(count * (size + masters + wide) + tables, rel=0.02)
    assert plan.moments == pytest.approx(count * 2 * wide, rel=0.02)
    layers = TINY.layers * (SAVED * size + STATISTICS * wide)
    # Outside the layers: ids and targets, the last normed stream, the heads' residual.
    rest = 4 * (1 + 2) + (64 + 2 * 128) * size + wide
    assert plan.saved == pytest.approx(tokens * (layers + rest), rel=0.02)
    assert plan.peak > plan.weights + plan.moments + plan.saved


def test_normuon_keeps_a_number_for_each_row() -> None:
    settings = PretrainSettings(config="base", optimizer="muon")
    config = PRESETS["base"]
    muon, by_row = (
        plan_step(SPEC, config, "bf16", 1, 64, split=Split.of(replace(settings, normuon=normuon), 1)).moments
        for normuon in (False, True)
    )
    rows = config.layers * (768 + 2 * 256 + 768 + 2 * 2048 + 768)
    assert 0 <= by_row - muon - 4 * rows <= 512


def test_norms_that_are_recomputed_are_not_kept() -> None:
    """GPT-2 keeps two a layer. Llama's kin keep them in place of the stream, and there is nothing to recompute."""
    for name, norms in (("nanoeuler", 0), ("gpt2", 2)):
        spec = find_model(name)
        config = next(iter(spec.presets.values())).override({"layers": 3, "context": 128})
        kept, less = (plan_step(spec, config, "bf16", 4, 128, recompute=how).saved for how in ("", "norms"))
        assert kept - less == norms * 3 * 4 * 128 * config.to_dict()["dim"] * 2, name


@pytest.mark.parametrize("name", ["nanoeuler", "llama", "gpt2", "moe"])
def test_of_a_block_that_is_run_again_only_the_input_is_kept(name: str) -> None:
    spec = find_model(name)
    small = next(iter(spec.presets.values())).override({"layers": 2, "context": 128})
    plans = [
        plan_step(spec, small.override({"layers": layers}), "bf16", 4, 128, recompute="blocks") for layers in (2, 6)
    ]
    dim = small.to_dict()["dim"]
    assert plans[1].saved - plans[0].saved == 4 * 4 * 128 * dim * 2
    # The peak has one block's records whatever the number of layers: no more than the inputs and the weights grow.
    weights = plans[1].weights + plans[1].moments - plans[0].weights - plans[0].moments
    assert plans[1].peak - plans[0].peak <= weights + plans[1].saved - plans[0].saved + 4096
    assert plans[1].peak < plan_step(spec, small.override({"layers": 6}), "bf16", 4, 128).peak


def test_a_model_without_blocks_says_so() -> None:
    spec = find_model("mamba")
    with pytest.raises(UserError, match="Mamba has no blocks that can be recomputed; leave it out, or use one of"):
        plan_step(spec, next(iter(spec.presets.values())), "bf16", 1, 16, recompute="blocks")


@kernel
def first_column(x: Array) -> Array:
    return x[:, :1].copy()


class FirstColumn(Op):
    fwd = first_column

    def forward(self, x: Array, stash: Stash | None = None) -> Array:  # type: ignore[override]
        return self.fwd(x)


class Pairs(BaseConfig):
    float_inputs = (0,)

    def input_shapes(self, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
        return ((batch, 2),)


class OfFirstColumn(Model):
    def __init__(self, config: Pairs, backend: Backend, *, values: Any = None, recompute: str = "") -> None:
        super().__init__(backend)
        self.first, self.map = FirstColumn(backend), Linear(1, 1, backend, "map")
        self.buffer = ParamBuffer(self.params(), backend, values)

    def ops(self) -> list[Op]:
        return [self.first, self.map]

    def forward(self, x: Array, stash: Stash | None = None) -> Array:  # type: ignore[override]
        return self.map.forward(self.first.forward(x, stash), stash)


def test_a_kernel_that_needs_a_function_on_meta_is_asked_for_one() -> None:
    spec = ModelSpec("pairs", "Pairs", OfFirstColumn, Pairs, {"small": Pairs()})
    with pytest.raises(
        UserError, match=r"^pairs: .* ValueError: map: .* needs a function on \"meta\" \(docs/add-an-op.md"
    ):
        plan_step(spec, Pairs(), "fp32", 4, 1)


def test_what_is_frozen_takes_its_weights_alone() -> None:
    adapters = Adapters(4, 8.0, 0.1)
    base = NanoEuler(TINY, get_backend("numpy", "fp64", workers=1)).buffer.count
    learned = TINY.layers * 4 * sum(a + b for a, b in ((64, 128), (64, 64), (64, 192), (96, 64)))
    tables = 3 * 256 * 8 * 4
    plan, whole = plan_step(SPEC, TINY, "bf16", 8, 256, adapters=adapters), plan_step(SPEC, TINY, "bf16", 8, 256)
    assert plan.weights == pytest.approx(2 * base + (2 + 4 + 4) * learned + tables, rel=0.02)
    assert plan.moments == pytest.approx(8 * learned, rel=0.02)
    # Next to what all weights need: U of each adapter. The loss keeps R W for its two heads, and not R.
    more, less = TINY.layers * 4 * 4, 2 * 128 - 2 * 64
    assert plan.saved - whole.saved == pytest.approx(8 * 256 * (more - less) * 2, rel=0.02)
    assert plan.peak < whole.peak


def test_smollm2_takes_less_than_half_the_memory_with_adapters() -> None:
    spec = find_model("llama")
    config = spec.presets["SmolLM2-135M"]
    for precision, rows in (("bf16", 4), ("fp32", 1)):
        plan = plan_step(spec, config, precision, rows, 512, adapters=Adapters(8, 16.0, 0.05))
        assert plan.peak < 0.5 * plan_step(spec, config, precision, rows, 512).peak


def test_memory_grows_with_the_tokens_alone() -> None:
    one, two, three = (plan_step(SPEC, PRESETS["base"], "bf16", rows, 512) for rows in (8, 16, 24))
    assert three.saved - two.saved == two.saved - one.saved
    assert one.weights == three.weights


class Small:
    """A device with so much free memory."""

    precision = get_backend("numpy", "fp32", workers=1).precision
    workers = 1

    def __init__(self, free: int | None) -> None:
        self.free = free

    def memory(self) -> dict[str, int]:
        return {} if self.free is None else {"free": self.free}


def rows(count: int) -> PretrainSettings:
    return PretrainSettings(batch_size=count)


def test_what_does_not_fit_is_refused_with_the_batch_that_does() -> None:
    fits = plan_step(SPEC, TINY, "fp32", 5, 256).peak
    device: Any = Small(fits + OUTSIDE)
    check_fits(SPEC, TINY, device, rows(5))
    with pytest.raises(UserError) as refusal:
        check_fits(SPEC, TINY, device, rows(64))
    needed = gib(plan_step(SPEC, TINY, "fp32", 64, 256).peak)
    assert str(refusal.value) == (
        f"64 x 256 tokens in fp32 need {needed} on the GPU, {gib(fits)} are free; --batch-size 5 fits, with "
        "--grad-accum for as large a step"
    )
    check_fits(SPEC, TINY, device, rows(2), each=2)
    with pytest.raises(UserError, match="128 x 256 tokens in .*; --batch-size 2 fits"):  # pairs, as in dpo.py
        check_fits(SPEC, TINY, device, rows(64), each=2)
    with_recomputation = plan_step(SPEC, TINY, "fp32", 64, 256, recompute="blocks").peak + OUTSIDE
    with pytest.raises(UserError, match="; --recompute blocks makes it fit"):
        check_fits(SPEC, TINY, Small(with_recomputation), rows(64))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not even --batch-size 1 fits"):
        check_fits(SPEC, TINY, Small(OUTSIDE), rows(64))  # type: ignore[arg-type]


def test_a_plan_has_one_unit() -> None:
    for peak, unit in ((3 << 30, "GiB"), (90 << 20, "MiB")):
        lines = str(Plan(1 << 20, 2 << 20, 40 << 20, peak, 1 << 10)).splitlines()
        assert {line.split()[-1] for line in lines} == {unit}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (PretrainSettings(group_rates=("value_embeddings=3",)), "--group-rates: this model has no value_embeddings"),
        (PretrainSettings(window_schedule=("0:256",)), "--window-schedule: it ends with 256, the window of the config"),
        (PretrainSettings(model="gpt2", mtp_schedule=("0.5:1", "0.8:0")), "--mtp-schedule: the model has one output"),
        (ClassifySettings(model="vit", rate_rule="width-batch"), "--rate-rule width-batch is for models of tokens"),
    ],
)
def test_a_plan_refuses_what_the_run_refuses(settings: Any, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = find_model(settings.model)
    with pytest.raises(UserError, match=said):
        print_plan(spec, config_of(settings), settings)
    assert capsys.readouterr().out == ""


def test_the_plan_of_adapters_knows_their_groups(capsys: pytest.CaptureFixture[str]) -> None:
    settings = SftSettings(lora=2, group_rates=("matrices=2",))
    print_plan(SPEC, TINY, settings)
    with pytest.raises(UserError, match="this model has no embeddings, only matrices"):
        print_plan(SPEC, TINY, replace(settings, group_rates=("embeddings=2",)))


def test_an_unknown_precision() -> None:
    with pytest.raises(UserError, match="'fp4' is not one of: fp64, fp32, tf32, bf16, fp8"):
        plan_step(SPEC, TINY, "fp4", 1, 8)


def test_a_cpu_refuses_what_its_memory_cannot_hold_at_once(takes_less_than: Any) -> None:
    backend = get_backend("numpy", "fp32", workers=2)
    check_fits(SPEC, TINY, backend, rows(4))
    said = r"5000000 x 256 tokens in fp32 need [\d.]+ GiB of memory, [\d.]+ GiB are free"

    def refused() -> None:
        with pytest.raises(UserError, match=said):
            check_fits(SPEC, TINY, backend, rows(5_000_000))

    takes_less_than(5.0, refused)


def test_the_free_memory_of_this_machine() -> None:
    free = free_host_memory()
    assert free is None or 1 << 20 < free < 1 << 50


def test_more_workers_need_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has gradients of its own."""
    alone = plan_step(SPEC, TINY, "fp32", 4, 256)
    monkeypatch.setattr(memory, "free_host_memory", lambda: alone.peak)
    check_fits(SPEC, TINY, get_backend("numpy", "fp32", workers=1), rows(4))
    with pytest.raises(UserError, match="--batch-size 3 fits|--recompute blocks makes it fit"):
        check_fits(SPEC, TINY, get_backend("numpy", "fp32", workers=2), rows(4))


def test_dropout_is_part_of_the_forecast() -> None:
    spec = find_model("gpt2")
    config = spec.presets["char"].override({"dim": 32, "heads": 2, "layers": 1, "dropout": 0.5})
    with_dropout, without = (plan_step(spec, c, "bf16", 4, 64) for c in (config, config.override({"dropout": 0.0})))
    assert with_dropout.peak > without.peak


@pytest.mark.parametrize("spec", models().values(), ids=lambda spec: spec.name)
def test_every_preset_is_planned_at_once(spec: ModelSpec, takes_less_than: Any) -> None:
    """As is the largest of what a config may have one by one."""
    longest = {"char_mlp": {"window": 1024}}.get(spec.name, {})
    configs = [*spec.presets.values(), next(iter(spec.presets.values())).override(longest)]
    takes_less_than(2.0, lambda: [plan_step(spec, config, "bf16", 1, config.context) for config in configs])
