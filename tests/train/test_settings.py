"""Settings describe themselves: the command line, --resume, comparisons and the card follow from their fields."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from tinyforge import checkpoint
from tinyforge.errors import UserError
from tinyforge.models.nanoeuler.config import PRESETS
from tinyforge.registry import models
from tinyforge.train.settings import (
    BITS,
    LEARNING,
    NOTHING,
    OF_TEXT,
    RECIPES,
    DpoSettings,
    PretrainSettings,
    Settings,
    SftSettings,
    Teaching,
    TuneSettings,
    config_of,
    described,
    open_backend,
    parse,
    setting,
)


@dataclass(frozen=True)
class Mine(Settings):
    """A recipe of one's own: what all have, and a field of its own."""

    out: str = setting("runs/mine", "directory of the run", changes=NOTHING)
    steps: int | None = setting(5, "optimizer steps")
    colour: str = setting("red", "what to paint", choices=("red", "blue"))


def test_the_order_of_bases_does_not_matter() -> None:
    @dataclass(frozen=True)
    class Turned(Teaching, TuneSettings):
        pass

    assert Turned().weight_decay == SftSettings().weight_decay == 0.0 != Settings().weight_decay
    with pytest.raises(UserError, match="neither --steps"):
        Turned().check()


@pytest.mark.parametrize("kind", [Settings, PretrainSettings, SftSettings, Mine])
def test_every_field_says_what_it_is(kind: type[Settings]) -> None:
    for f in fields(kind):
        assert f.metadata["help"] and f.metadata["changes"] in (NOTHING, BITS, LEARNING), f.name


@pytest.mark.parametrize("kind", RECIPES.values())
def test_a_flag_is_refused_without_the_one_that_it_is_of(kind: type[Settings]) -> None:
    others = {None: 0.25, 0.0: 0.25, 0.5: 0.25, 0.4: 0.25, "": "x", "quintic": "x", (): ("0:1",)}
    lacking = {"schedule wsd": {"schedule": "cosine"}, "objective dpo or simpo or orpo": {"objective": "ipo"}}
    known = [f for f in fields(kind) if f.metadata["of"]]
    assert {"normuon", "elastic"} <= {f.name for f in known}
    for f in known:
        flag, of = f"--{f.name.replace('_', '-')}", f.metadata["of"]
        given = replace(kind(), **{f.name: True if f.default is False else others[f.default]}, **lacking.get(of, {}))
        assert not given.has(of)
        with pytest.raises(UserError, match=f"{flag} is given without --{of}; add it, or leave this out"):
            given.check()
    lora = replace(SftSettings(), lora=8, lora_alpha=4.0, optimizer="muon", normuon=True)
    assert lora.has("lora") and lora.has("optimizer muon") and not lora.has("optimizer adamw")
    lora.check()


def test_a_run_that_has_stored_flags_without_a_meaning_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = replace(DpoSettings(), objective="ipo", label_smoothing=0.1, schedule="cosine", decay_fraction=0.9)
    meta = {"kind": "dpo", "settings": stored.to_dict(), "elapsed": 0.0}
    monkeypatch.setattr(checkpoint, "steps", lambda out: [out])
    weights: Any = {}
    monkeypatch.setattr(checkpoint, "load", lambda out: checkpoint.Checkpoint(out, meta, weights))
    found = parse(DpoSettings, "", ["--resume", "--out", str(tmp_path)]).settings
    assert found == replace(stored, label_smoothing=0.0, decay_fraction=0.4, out=str(tmp_path))


def test_a_recipe_refuses_what_it_does_not_use() -> None:
    assert parse(Mine, "", ["--colour", "blue"]).settings.colour == "blue"
    for flags in ("--config small", "--set dim=3", "--mix a=1", "--base x", "--max-reply 3", "--tokenizer t.json"):
        with pytest.raises(UserError, match="unrecognized arguments: --"):
            parse(Mine, "", flags.split())
    with pytest.raises(UserError, match="unrecognized arguments: --card"):
        parse(Mine, "", ["--card"], actions=("resume", "plan"))
    with pytest.raises(UserError, match="argument --colour: invalid choice: 'green'"):
        parse(Mine, "", ["--colour", "green"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--config nonsense", "--config: 'nonsense' is not a preset"),
        ("--set dims=3", "config: unknown key 'dims'"),
        ("--model nonsense", "unknown model 'nonsense'; known: nanoeuler"),
    ],
)
def test_a_wrong_model_or_config_is_refused_by_the_command_line(flags: str, message: str) -> None:
    """Before the recipe does anything, and so also in one that forgets to look."""
    with pytest.raises(UserError, match=message):
        parse(PretrainSettings, "", flags.split())


def test_the_defaults_are_the_recipes() -> None:
    assert parse(PretrainSettings, "", []).settings == PretrainSettings()
    assert (PretrainSettings().model, PretrainSettings().config) == ("nanoeuler", "small")
    assert config_of(PretrainSettings(config="base")) == PRESETS["base"]
    assert (SftSettings().lr, SftSettings().out) == (2e-3, "runs/sft")


def test_a_model_may_have_defaults_of_its_own() -> None:
    usual = parse(PretrainSettings, "", ["--model", "bert"]).settings
    assert (usual.lr, usual.warmup, usual.steps) == (5e-4, 0.1, 2800)
    assert usual.usual() == replace(usual, model="nanoeuler")
    assert not any(flag.startswith("--warmup") for flag in usual.flags())
    given = parse(PretrainSettings, "", "--model bert --lr 1e-3 --warmup 0.02".split()).settings
    assert (given.lr, given.warmup) == (1e-3, 0.02) and "--warmup 0.02" in given.flags()


def test_a_preset_has_defaults_of_its_own_and_says_where_they_come_from() -> None:
    char = parse(PretrainSettings, "", "--model gpt2 --config char".split()).settings
    assert (char.lr, char.batch_size, char.steps) == (1e-3, 64, 5000)
    assert char.reasons() == (
        "--lr 0.001 --schedule cosine --batch-size 64 --steps 5000 --keep-best: as nanoGPT's train_shakespeare_char"
    )
    assert set(char.flags()) == {"--model gpt2", "--steps 5000", "--lr 0.001", "--weight-decay 0.1"}
    given = parse(PretrainSettings, "", "--model gpt2 --config char --lr 2e-3 --steps 10".split()).settings
    assert given.reasons().startswith("--schedule cosine --batch-size 64 --keep-best: ")
    assert [parse(PretrainSettings, "", ["--config", name]).settings.lr for name in ("small", "base")] == [4e-3, 6e-4]


def test_a_preset_that_was_measured_with_muon_has_those_settings_with_muon_only() -> None:
    measured = parse(PretrainSettings, "", "--config fast".split()).settings
    assert (measured.optimizer, measured.lr, measured.batch_size) == ("muon", 24e-4, 32)
    assert measured.reasons() == (
        "--optimizer muon --lr 0.0024 --group-rates embeddings=3 value_embeddings=3 --decay-timescale 0.26 --warmup "
        "0.05 --decay-fraction 0.6 --batch-size 32 --document-mask keep: as measured in docs/results/fast.md"
    )
    assert parse(PretrainSettings, "", "--config fast --optimizer muon".split()).settings == measured
    other = parse(PretrainSettings, "", "--config fast --optimizer adamw".split()).settings
    assert (other.lr, other.group_rates, other.batch_size, other.document_mask) == (6e-4, (), 8, None)
    assert other.reasons() == "--lr 0.0006 --warmup 0.05: as GPT-3's model of 125 million parameters"


@pytest.mark.parametrize("flags", ["--weight-decay 0.1", "--weight-decay 0.2", "--decay-timescale 0.5", ""])
def test_weight_decay_replaces_the_timescale_of_a_preset(flags: str) -> None:
    """And the flags on a card give the same settings again."""
    settings = parse(PretrainSettings, "", ["--config", "fast", *flags.split()]).settings
    decay = float(flags.split()[1]) if "weight" in flags else 0.1
    timescale = 0 if "weight" in flags else 0.5 if flags else 0.26
    assert (settings.weight_decay, settings.decay_timescale) == (decay, timescale)
    again = parse(PretrainSettings, "", ["--config", "fast", *shlex.split(" ".join(settings.flags()))]).settings
    assert again == settings


@pytest.mark.parametrize("decay", ["0.3", "0.1", "0"])
def test_two_flags_for_weight_decay_are_refused(decay: str) -> None:
    with pytest.raises(UserError, match="--decay-timescale and --weight-decay both say"):
        parse(PretrainSettings, "", f"--weight-decay {decay} --decay-timescale 0.3".split())


def test_a_preset_s_flags_that_another_flag_makes_idle_are_left_out() -> None:
    settings = parse(PretrainSettings, "", "--config fast --schedule constant".split()).settings
    assert settings.decay_fraction == PretrainSettings().decay_fraction and settings.optimizer == "muon"
    with pytest.raises(UserError, match="--decay-fraction is given without --schedule wsd"):
        parse(PretrainSettings, "", "--config fast --schedule constant --decay-fraction 0.6".split())


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        ("", 4e-3),
        ("--minutes 2", 4e-3),
        ("--data notes.txt", 2e-3),
        ("--data shards --set dim=192 --minutes 2", 2e-3),
        ("--data notes.txt --optimizer muon", 4e-3),
        ("--data notes.txt --lr 4e-3", 4e-3),
        ("--data notes.txt --config base", 6e-4),
        ("--data notes.txt --model moe", 2e-3),
        ("--data notes.txt --model lstm", 4e-3),
    ],
)
def test_adamw_has_a_lower_rate_on_a_text_of_your_own(flags: str, rate: float) -> None:
    settings = parse(PretrainSettings, "", flags.split()).settings
    assert settings.lr == rate and f"--lr {rate}" in settings.flags()
    assert (settings.reasons() == "--lr 0.002: better on real text than 0.004") == (rate == 2e-3)


def test_the_rate_falls_as_models_grow() -> None:
    """A next-token model wider than 512 has a peak rate of at most 6e-4 with AdamW."""
    wide = [
        (spec.name, name)
        for spec in models().values()
        if spec.learns == "text"
        for name, config in spec.presets.items()
        if getattr(config, "dim", 0) > 512
    ]
    asked = {row: {"model": row[0], "config": row[1], "optimizer": "adamw"} for row in wide}
    rates = {row: PretrainSettings.made(given).lr for row, given in asked.items()}
    assert len(wide) > 10 and max(rates.values()) <= 6e-4, rates


def test_a_float_that_was_given_as_a_whole_number_may_become_another() -> None:
    config = config_of(PretrainSettings(model="bert", set=("dropout=0",)))
    assert config.override({"dropout": 0.1}).to_dict()["dropout"] == 0.1


def test_what_makes_two_runs_comparable() -> None:
    run = PretrainSettings()
    same = replace(run, out="x", workers=3, device=1, backend="numpy", eval_every=1, save_every=1, recompute="blocks")
    assert run.differences(same) == []
    assert run.differences(replace(run, lr=1.0, seed=2)) == ["lr", "seed"]


def test_settings_survive_a_checkpoint() -> None:
    run = PretrainSettings(data=("a", "b"), set=("dim=32",), minutes=2.0, steps=None)
    assert PretrainSettings.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_a_backend_that_is_named_asks_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing WebGPU's adapters loads a library and drivers."""
    monkeypatch.setattr("tinyforge.train.settings.automatic", None)
    settings = PretrainSettings(backend="numpy", workers=1)
    backend, settings = open_backend(settings, model=settings.model)
    assert described(backend, settings, settings.model).startswith("backend numpy, fp32, ")


EARLIER = {
    "config": "small",
    "set": [],
    "backend": "cupy",
    "device": None,
    "recompute": False,
    "precision": "fp32",
    "data": [],
    "mix": [],
    "encoding": "utf-8",
    "tokenizer": None,
    "base": None,
    "out": "runs/pretrain",
    "steps": 12000,
    "minutes": None,
    "batch_size": 16,
    "grad_accum": 1,
    "seq_len": None,
    "lr": 0.004,
    "schedule": "wsd",
    "weight_decay": 0.1,
    "clip": 1.0,
    "seed": 0,
    "eval_every": 3000,
    "save_every": 12000,
    "keep": 2,
    "workers": 1,
}
"""Those of version 0.1: every recipe had all fields, and none named the model."""


@pytest.mark.parametrize("kind", ["sft", "pretrain"])
def test_settings_of_earlier_versions_are_read(kind: str) -> None:
    stored = EARLIER
    read = RECIPES[kind].from_dict(stored)
    read.check()
    assert read.seed == stored["seed"] and read.lr == stored["lr"]
    if isinstance(read, PretrainSettings):
        assert (read.model, read.config) == ("nanoeuler", stored["config"])
        assert (read.windows, PretrainSettings().windows) == ("full", "all")


FORMER = [
    (PretrainSettings, "--lr-decay", ["0.6"], "--decay-fraction", "decay_fraction", 0.6),
    (PretrainSettings, "--carry", [], "--stateful", "stateful", True),
    (PretrainSettings, "--capture", [], "--cuda-graph", "cuda_graph", "on"),
    (PretrainSettings, "--shards-per-step", ["4"], "--reduction-shards", "reduction_shards", 4),
    (RECIPES["grpo"], "--group", ["6"], "--num-generations", "num_generations", 6),
]


@pytest.mark.parametrize(("kind", "old", "value", "new", "name", "expected"), FORMER)
def test_a_former_flag_is_accepted_and_says_what_to_write(
    kind: type[Settings],
    old: str,
    value: list[str],
    new: str,
    name: str,
    expected: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the value after it or joined by "=", and under its old name in a checkpoint; help shows the new one only."""
    model = ["--model", "lstm"] if name == "stateful" else []
    for words in ([old, *value], [f"{old}={value[0]}"] if value else [old]):
        assert getattr(parse(kind, "", [*model, *words]).settings, name) == expected
        assert capsys.readouterr().err == f"warning: {old} is deprecated; write {new}\n"
    stored = kind().to_dict()
    del stored[name]
    assert getattr(kind.from_dict({**stored, old[2:].replace("-", "_"): expected}), name) == expected
    with pytest.raises(SystemExit):
        parse(kind, "", ["--help"])
    shown = capsys.readouterr().out
    assert new in shown and f"{old} " not in shown


@dataclass(frozen=True)
class OfNumbers(Settings):
    unused = OF_TEXT


def test_a_recipe_without_text_or_a_card_has_no_such_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(OfNumbers, "", ["--help"])
    shown = capsys.readouterr().out
    assert not re.search(r"text|token|sequence|corpus|bits per|attention|--card|--plan", shown)
    for flag in ("--card", "--document-mask=keep"):
        with pytest.raises(UserError, match="unrecognized"):
            parse(OfNumbers, "", [flag])


def test_help_names_every_flag_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(PretrainSettings, "a recipe", ["--help"])
    shown = capsys.readouterr().out
    assert all(f"--{f.name.replace('_', '-')}" in shown for f in fields(PretrainSettings))
    assert "order and samples (default: 0)" in " ".join(shown.split())
    assert "(default: 0.004)" in shown and "(default: runs/pretrain)" in shown
    groups = [line[:-1] for line in shown.splitlines() if line in ("basics:", "model:", "data:", "hardware:")]
    assert groups == ["basics", "model", "data", "hardware"]
    listed = shown[shown.index("basics:") :]
    assert listed.index("--resume") < listed.index("\nmodel:") < listed.index("--set ") < listed.index("\ndata:")
    assert "2 % slower" in " ".join(shown.split()) and "and samples (default: 0)" in " ".join(shown.split())
