"""The settings of a recipe: each is a field with its flag's help, its check, and the effect of changing it.

    @dataclass(frozen=True)
    class MySettings(Settings):
        out: str = setting("runs/mine", "directory of the run", metavar="DIR", changes=NOTHING, card=NEVER)
        colour: str = setting("red", "what to paint", choices=("red", "blue"))

    settings, resume, _, _ = parse(MySettings, __doc__, argv)

The fields define the command line, which settings --resume may change, what makes two runs comparable, and the flags on
the model's card; a recipe has no other flags.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from tinyforge import checkpoint
from tinyforge.adapters import Adapters
from tinyforge.backends import Backend, automatic, get_backend, gpu_count, gpu_is_there
from tinyforge.backends.workers import cores
from tinyforge.config import BaseConfig, ModelConfig
from tinyforge.errors import Parser, UserError
from tinyforge.files import json_value, read_json, shown
from tinyforge.invocation import code_hash
from tinyforge.op import Recompute
from tinyforge.optim import COEFFICIENTS, AdamWConfig, MuonConfig
from tinyforge.optim.groups import RULES, WIDTH, group_rates
from tinyforge.optim.schedules import SCHEDULES, Points, held, read_points
from tinyforge.parallel.launch import (
    ProcessGroupInfo,
    assert_equal_on_ranks,
    assert_shared_filesystem,
    start,
    started_as_rank,
)
from tinyforge.quantised import FOR_TUNING
from tinyforge.registry import ModelSpec, default_classifier, default_model, find_model, models
from tinyforge.report import count_of
from tinyforge.tokenizers.chat_templates import TEMPLATES
from tinyforge.train.compiled import CHOICES, choose_kernels
from tinyforge.train.writers import WRITERS, check_writer

# The effect of another value on what a run learns: none; the last bits; a different result.
NOTHING, BITS, LEARNING = "nothing", "bits", "learning"
# The groups of --help, in this order.
BASICS, MODEL, DATA, TRAINING, OUTPUT, HARDWARE = "basics", "model", "data", "training", "output", "hardware"
OF_TEXT = ("encoding", "seq_len", "document_mask", "rate_rule")  # settings without a meaning for data that are no text
# When a model's card shows the flag.
NEVER, UNUSUAL, ALWAYS = "never", "unusual", "always"

Check = Callable[[Any], str]  # says what the value should be; empty if it is good


MOST = 10**15  # limit of any whole number, so that the forecast can multiply them


def expects(what: str, good: Callable[[Any], bool]) -> Check:
    return lambda value: "" if good(value) else what


above_zero = expects("a number above 0", lambda value: 0 < value < math.inf)
zero_or_more = expects("a number of 0 or more", lambda value: 0 <= value < math.inf)
below_one = expects("a share from 0 to below 1", lambda value: 0 <= value < 1)
below_half = expects("a share from 0 to below 0.5", lambda value: 0 <= value < 0.5)
at_least_2 = expects("at least 2", lambda value: value >= 2)
share = expects("a share above 0 and up to 1", lambda value: 0 < value <= 1)
power_of_two = expects("a power of two", lambda value: value > 0 and int(value) & (int(value) - 1) == 0)


def setting(
    default: Any,
    help: str,
    *,
    check: Check | None = None,
    changes: str = LEARNING,
    card: str = UNUSUAL,
    metavar: str | None = None,
    choices: Sequence[str] | Sequence[int] | None = None,
    adds: bool = False,
    bare: str | None = None,
    formerly: str = "",
    group: str = TRAINING,
    of: str = "",
    points: tuple[Any, ...] = (),
) -> Any:
    """A field of `Settings`.

    default: the value, or a function that returns it. changes: NOTHING, BITS or LEARNING; --resume refuses to change
    the last. card: UNUSUAL shows the flag if it is not the default; NEVER is for settings that mean nothing on another
    machine. adds: giving the flag again adds to its list instead of replacing it. bare: the value of the flag without
    an argument. formerly: the field's name in older versions: its flag is still accepted, with a warning, and so are
    checkpoints that have stored it. group: of --help. of: the flag, with its value if it takes one of several, without
    which this one means nothing, as "optimizer muon" or "objective dpo or orpo". points: for a schedule's AT:VALUE, an
    example and the bounds of the values, see `read_points`.
    """
    meta = {name: value for name, value in locals().items() if name != "default"}
    return field(default_factory=default, metadata=meta) if callable(default) else field(default=default, metadata=meta)


basic, of_model, of_data = (partial(setting, group=group) for group in (BASICS, MODEL, DATA))
start_from = partial(basic, None, metavar="MODEL", card=NEVER)
# Settings that mean nothing on another machine, and do not change what a run learns unless they say so.
output = partial(setting, group=OUTPUT, changes=NOTHING, card=NEVER)
hardware = partial(setting, group=HARDWARE, changes=NOTHING, card=NEVER)


def with_default(name: str, default: Any, help: str = "") -> Any:
    """The field `name` of `Settings` with another default, and optionally another help, for a recipe."""
    known = Settings.__dataclass_fields__[name].metadata
    return field(default=default, metadata={**known, "help": help} if help else known)


@dataclass(frozen=True)
class Settings:
    """The settings of every training run. They are stored in its checkpoints, and `--resume` reads them there.

    steps=None: the run ends after `minutes`. The help of other fields explains their None. Values are checked by
    `check`, which `parse` calls. several_ranks: whether the recipe can run on several ranks. unused: fields without a
    flag, for a recipe that ignores them, such as `OF_TEXT`.
    """

    several_ranks: ClassVar[bool] = True
    unused: ClassVar[tuple[str, ...]] = ()
    longest: ClassVar[int] = MOST  # of a default --seq-len

    backend: str = setting(
        "auto",
        "where to compute: numpy, cupy (an NVIDIA GPU), webgpu (any GPU), or auto: what finds a GPU, else numpy",
        changes=NOTHING,
        group=HARDWARE,
    )
    device: int | None = hardware(None, "number of the GPU, as CUDA counts the visible ones (default: 0)")
    recompute: Recompute = hardware(
        "",
        "save memory by recomputing in backward: blocks keeps only each block's input and is a third slower; norms,"
        " for GPT-2 and ViT, is 2 %% slower; the same bits (without a value: blocks)",
        choices=("norms", "blocks"),
        bare="blocks",
    )
    cuda_graph: str = hardware(
        "auto",
        "on: launch each step as one CUDA graph, which does not wait for a small model's, or a busy machine's, Python; "
        "bitwise identical; auto: on GPUs, for language models, where memory suffices (without a value: on)",
        choices=("auto", "on", "off"),
        bare="on",
        formerly="capture",
    )
    precision: str = setting(
        "fp32", "fp32, fp64 or fp8, and on a GPU tf32 or bf16; fp8 on a GPU needs a Hopper", group=HARDWARE
    )
    data: tuple[str, ...] = basic((), "files or folders to learn from", metavar="PATH")
    encoding: str = of_data("utf-8", "encoding of text files")
    out: str = basic("", "directory of the run", metavar="DIR", changes=NOTHING, card=NEVER)
    steps: int | None = basic(None, "optimizer steps", check=above_zero, card=ALWAYS)
    minutes: float | None = basic(
        None, "train for this many minutes instead; the schedule follows the clock", check=above_zero
    )
    batch_size: int = setting(8, "rows per micro-batch", check=above_zero)
    grad_accum: int = setting(1, "micro-batches per step", check=above_zero)
    seq_len: int | None = of_data(None, "tokens per sequence (default: the config's context)", check=above_zero)
    document_mask: str | None = of_data(
        None,
        "restrict attention to a token's own document or record; keep: positions count along the row, restart: they"
        " restart in each document (default: a token attends to its whole row before it)",
        choices=("keep", "restart"),
    )
    lr: float = setting(4e-3, "peak learning rate", check=above_zero, card=ALWAYS)
    optimizer: str = setting(
        "adamw",
        "adamw, or muon: orthogonalised momentum for the matrices between hidden layers, with the same --lr and "
        "--weight-decay, and AdamW for all other parameters",
        choices=("adamw", "muon"),
    )
    newton_schulz: str = setting(
        "quintic",
        "polynomials that make Muon's updates orthogonal: quintic, the same five times, or polar-express, five that "
        "bring the singular values nearer to 1",
        choices=tuple(COEFFICIENTS),
        of="optimizer muon",
    )
    normuon: bool = setting(
        False, "NorMuon: divide each row of Muon's updates by the root of its second moment", of="optimizer muon"
    )
    momentum_schedule: tuple[str, ...] = setting(
        (),
        "Muon's momentum on straight lines between shares of the run, e.g. 0:0.85 0.1:0.95 0.9:0.95 1:0.85 (default: "
        "0.95 throughout)",
        metavar="AT:VALUE",
        of="optimizer muon",
        points=("0:0.85 0.1:0.95", 0.0, 0.9999),
    )
    cautious_decay: bool = setting(False, "decay only the weights that the update moves towards 0")
    group_rates: tuple[str, ...] = setting(
        (),
        "multiples of --lr for matrices, embeddings, value_embeddings, heads, scalars; e.g. embeddings=10",
        metavar="GROUP=FACTOR",
        adds=True,
    )
    rate_rule: str = setting(
        "plain",
        "width-batch: --lr is meant for width 768 and steps of 524,288 tokens; all rates change with the root of a "
        "step's tokens, those of embeddings and heads also with one over the root of the width",
        choices=RULES,
    )
    schedule: str = setting("wsd", "learning-rate schedule", choices=tuple(SCHEDULES))
    warmup: float = setting(0.02, "share of the run, 0 to 1, for warm-up at its start", check=below_one)
    decay_fraction: float = setting(
        0.4,
        "fraction of training spent in the final decay of the wsd schedule (0 to 1)",
        check=share,
        formerly="lr_decay",
        of="schedule wsd",
    )
    weight_decay: float = setting(0.1, "decay of matrices, per unit of learning rate", check=zero_or_more, card=ALWAYS)
    decay_timescale: float = setting(
        0.0,
        "in place of --weight-decay: 1 / (lr x decay) as a share of the run, so that the longer a run, the less decays "
        "in a step",
        check=zero_or_more,
    )
    clip: float = setting(1.0, "limit on the gradient's norm, 0 for none", check=zero_or_more)
    seed: int = setting(0, "seed of weights, data order and samples")
    eval_every: int = output(250, "steps between evaluations on held-out data", check=above_zero)
    save_every: int = output(500, "steps between checkpoints", check=above_zero)
    keep: int = output(2, "how many of the newest checkpoints to keep, 0 for all", check=zero_or_more)
    keep_best: bool = output(
        False, "also keep the checkpoint with the lowest held-out loss, for data so small that a model overfits"
    )
    log: str = output(
        "none",
        "also send the figures to TensorBoard (into the folder tensorboard/ of --out) or to Weights & Biases",
        choices=("none", *WRITERS),
    )
    # Part of the settings because the sum of gradients depends, in its last bits, on how the batch was cut.
    workers: int | None = hardware(
        None, "shards of a batch, each in a process (default: one per core)", check=above_zero, changes=BITS
    )
    gpus: int | None = hardware(
        None,
        "number of GPUs of this machine to train on, with a rank for each (default: one GPU, no other process); "
        "mpirun -n 2 before the command starts ranks too, also on a CPU",
        check=above_zero,
        changes=BITS,
    )
    zero: int = hardware(
        0,
        "1: shard the optimizer's state over the ranks (ZeRO stage 1), which saves memory; 2: the gradients too",
        choices=(0, 1, 2),
        changes=BITS,
    )
    cpu_kernels: str = hardware(
        "auto",
        "on a CPU in fp32, numba: passes over memory compiled by numba (the extra fast), once a machine; numpy; auto: "
        "numba where it is installed; the last bits differ, and --resume keeps the choice",
        choices=CHOICES,
        changes=BITS,
    )
    reduction_shards: int | None = setting(
        None,
        "number of parts of the batch, a power of two, whose gradients are added as a tree: the same bits on 1, 2, "
        "4 ranks or workers",
        check=power_of_two,
        changes=BITS,
        formerly="shards_per_step",
        group=HARDWARE,
    )
    timeout: float = hardware(
        50.0, "seconds that a rank may keep the others waiting in a step before the run ends", check=above_zero
    )
    elastic: bool = hardware(
        False, "with --gpus: when a rank is lost, go on from the last checkpoint with those left", of="gpus"
    )

    def check(self) -> None:
        """Raise UserError for a value that is not valid."""
        for f in fields(self):
            value, check = getattr(self, f.name), f.metadata["check"]
            if type(value) is int and abs(value) > MOST:
                raise UserError(f"{_flag(f)} is {shown(value, 30)}, expected at most {MOST:,}")
            if check and value is not None and (expected := check(value)):
                raise UserError(f"{_flag(f)} is {value}, expected {expected}")
            if (of := f.metadata["of"]) and value != f.default and not self.has(of):
                raise UserError(f"{_flag(f)} is given without --{of}; add it, or leave this out")
            if f.metadata["points"]:
                self.points(f.name)
        if self.reduction_shards and self.workers and self.reduction_shards % self.workers:
            raise UserError(
                f"--workers is {self.workers}, expected a divisor of --reduction-shards {self.reduction_shards}"
            )
        if self.gpus and self.batch_size % self.gpus:
            raise UserError(f"--batch-size is {self.batch_size}, --gpus {self.gpus}; use a multiple of the GPUs")
        if self.gpus and self.device is not None:
            raise UserError("--device chooses one GPU and --gpus takes several; drop one of them")
        if self.zero and self.optimizer == "muon":
            raise UserError(
                f"--optimizer muon expects whole matrices, and --zero {self.zero} cuts them in parts; leave "
                "out --zero, or use --optimizer adamw"
            )
        self.optimizer_config()
        if self.steps is None and self.minutes is None:
            raise UserError("neither --steps nor --minutes is given; one of them must end the run")
        check_writer(self.log)

    @property
    def adapters(self) -> Adapters | None:
        """What is learned in place of the weights; None: the weights."""
        return None

    def optimizer_config(self, width: int = WIDTH) -> AdamWConfig:
        """The optimizer's config, which is Muon's for --optimizer muon. width: the model's, for --rate-rule."""
        own: dict[str, Any] = {"weight_decay": self.weight_decay, "cautious": self.cautious_decay}
        own["group_rates"] = group_rates(self.group_rates, self.rate_rule, width)
        if self.optimizer != "muon":
            return AdamWConfig(**own)
        return MuonConfig(coefficients=self.newton_schulz, normuon=self.normuon, **own)

    def has(self, flag: str) -> bool:
        """Whether a flag is given, or has one of some values: "lora", "optimizer muon", "objective dpo or orpo"."""
        name, _, value = flag.partition(" ")
        found = getattr(self, name)
        return found in value.split(" or ") if value else bool(found)

    def without_idle(self, given: Container[str] = ()) -> Self:
        """With the defaults of flags that mean nothing without others, such as a preset's --decay-fraction with
        --schedule constant; but those of `given` stay, which `check` refuses."""
        idle = (f for f in fields(self) if (of := f.metadata["of"]) and f.name not in given and not self.has(of))
        defaults: dict[str, Any] = {f.name: f.default for f in idle}
        return replace(self, **defaults)

    def points(self, name: str) -> Points:
        """The points of a schedule's flag; none for a recipe that does not have it."""
        known = self.__dataclass_fields__.get(name)
        return read_points(_flag(known), getattr(self, name), *known.metadata["points"]) if known else ()

    def micro_batches_at(self, progress: float) -> int:
        """Micro-batches of a step: --grad-accum, or what --batch-schedule says."""
        points = self.points("batch_schedule")
        return int(held(points, progress)) if points else self.grad_accum

    @property
    def most_micro_batches(self) -> int:
        """Of a step."""
        return int(max((value for _, value in self.points("batch_schedule")), default=self.grad_accum))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all steps of a run by --steps."""
        steps = self.steps or 0
        if not self.points("batch_schedule"):
            return steps * self.grad_accum
        return sum(self.micro_batches_at(step / steps) for step in range(steps))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Settings from a checkpoint: lists become tuples again, and unknown names are ignored."""
        known = {f.name for f in fields(cls)}
        renamed = {f.metadata["formerly"]: f.name for f in fields(cls) if f.metadata["formerly"]}
        stored = {renamed.get(k, k): v for k, v in stored.items()}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known}
        if isinstance(old := values.get("recompute"), bool):  # before there were blocks
            values["recompute"] = "norms" if old else ""
        if not isinstance(old := values.get("teacher", ()), tuple):  # before there were several
            values["teacher"] = (old,) if old else ()
        if "windows" in known:
            values.setdefault("windows", "full")  # before there were others
        values.setdefault("cpu_kernels", "numpy")  # likewise
        types = get_type_hints(cls)
        for name, value in values.items():
            if not _is_a(value, types[name]):
                raise UserError(f"settings of the checkpoint: {name} is {shown(value)}; use another checkpoint")
        return cls(**values)

    def differences(self, other: Settings) -> list[str]:
        """The names of settings that differ and change what a run learns."""
        learning = [f.name for f in fields(self) if f.metadata["changes"] == LEARNING]
        return [name for name in learning if getattr(self, name) != getattr(other, name)]

    def flags(self) -> list[str]:
        """The flags on a model's card; with them the recipe can be repeated."""
        usual, shown = self.usual(), []
        for f in fields(self):
            value, told = getattr(self, f.name), f.metadata["card"]
            if f.name == "weight_decay" and self.decay_timescale:
                continue
            if value is not None and (told == ALWAYS or (told == UNUSUAL and value != getattr(usual, f.name))):
                values = value if isinstance(value, tuple) else (value,)
                shown.append(" ".join([_flag(f), *(shlex.quote(str(v)) for v in values)]))
        return shown

    @classmethod
    def made(cls, given: Mapping[str, Any]) -> Self:
        """The given settings, and defaults for the rest."""
        return cls(**given)

    def usual(self) -> Self:
        """The recipe's defaults."""
        return type(self)()


@dataclass(frozen=True)
class ModelSettings(Settings):
    """The settings of a recipe that makes a model: which one, its config and its tokenizer."""

    model: str = basic(default_model, "which model of the zoo, as python -m models list has them")
    config: str = basic("", "preset of the model, or a JSON file with the config's fields")
    set: tuple[str, ...] = of_model(
        (),
        "override fields of the config, e.g. --set dim=192 layers=6; given again, it adds to them",
        metavar="KEY=VALUE",
        adds=True,
    )
    tokenizer: str | None = of_model(
        None,
        "tokenizer.json to use, or chars: each character is a token (default: train one on the data; chars for a "
        "preset with fewer ids than there are bytes)",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        if not self.config:
            object.__setattr__(self, "config", next(iter(find_model(self.model).presets)))

    def usual(self) -> Self:
        """The defaults of this model and preset, which a card names."""
        own = self.made({"model": self.model, "config": self.config})
        return replace(own, model=type(self)().model, config=next(iter(find_model(self.model).presets)))

    def check(self) -> None:
        super().check()
        config_of(self)
        restarts(self, find_model(self.model))
        find_model(self.model).check_recompute(self.recompute)
        find_model(self.model).check_precision(self.precision)


@dataclass(frozen=True)
class Teaching:
    """The settings of a recipe whose model can learn from a teacher, in any order with its other bases: they share no
    field."""

    # Another path to the same teacher is fine: a resumed run compares its weights' hash.
    teacher: tuple[str, ...] = setting(
        (),
        "trained model with the same tokenizer to learn from: its probabilities are part of the targets; of "
        "several, those of their mean logits",
        metavar="DIR",
        changes=NOTHING,
    )
    teacher_share: float = setting(
        0.5, "the teacher's share of the targets; the text has the rest", check=share, of="teacher"
    )


@dataclass(frozen=True)
class PretrainSettings(ModelSettings, Teaching):
    """recipes/pretrain.py: the mix of its text, and the order of its batches."""

    data: tuple[str, ...] = with_default("data", (), "files or folders to learn from (default: the built-in corpus)")
    out: str = with_default("out", "runs/pretrain")
    steps: int | None = with_default("steps", 2800)
    lr: float = with_default("lr", 4e-3, "peak learning rate; lower for larger presets, and small's AdamW with --data")
    mix: tuple[str, ...] = of_data(
        (),
        "shares of the shards' sources, e.g. --mix books=0.7 web=0.3 (default: by their tokens)",
        metavar="NAME=WEIGHT",
    )
    windows: str = of_data(
        "all",
        "all: every token of the text is a target once an epoch; full: as before version 0.3, windows with fewer "
        "targets at the ends of the text are left out; a run that was begun so goes on so",
        choices=("all", "full"),
    )
    batch_schedule: tuple[str, ...] = setting(
        (),
        "micro-batches per step from shares of the run on, in place of --grad-accum, e.g. 0:1 0.3:2 0.6:4",
        metavar="AT:COUNT",
        points=("0:1 0.5:2", 1),
    )
    window_schedule: tuple[str, ...] = setting(
        (),
        "attention window of the layers that have one, from shares of the run on, e.g. 0:256 0.5:512; it ends with the "
        "config's",
        metavar="AT:TOKENS",
        points=("0:256 0.5:512", 1),
    )
    mtp_schedule: tuple[str, ...] = setting(
        (),
        "factor of the loss weights of all heads but the first, on straight lines between shares of the run, e.g. "
        "0.5:1 0.8:0",
        metavar="AT:FACTOR",
        points=("0.5:1 0.8:0", 0.0, 100.0),
    )
    stateful: bool = of_data(
        False, "rows continue those of the batch before, and a recurrent model keeps its state", formerly="carry"
    )
    base: str | None = start_from(
        "run, checkpoint, Hugging Face directory or owner/name on the hub to go on from, with its config and its "
        "tokenizer (default: random weights)"
    )

    @classmethod
    def made(cls, given: Mapping[str, Any]) -> Self:
        spec = find_model(given.get("model", default_model()))
        own = spec.pretraining_of(given.get("config") or next(iter(spec.presets)))
        optimizer = given.get("optimizer")
        found = {**own.with_optimizer(optimizer).of("data" in given, optimizer), **given}
        if "weight_decay" in given and "decay_timescale" not in given:
            found.pop("decay_timescale", None)
        return cls(**found).without_idle(given)

    def reasons(self) -> str:
        """The defaults that this preset has of its own, as far as they are used, and where they come from."""
        own = find_model(self.model).pretraining_of(self.config).with_optimizer(self.optimizer)
        used = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {_typed(value)}")
            for name, value in own.of(bool(self.data), self.optimizer).items()
            if getattr(self, name) == value
        ]
        return f"{' '.join(used)}: {own.reason}" if used else ""

    def check(self) -> None:
        super().check()
        if self.batch_schedule and self.grad_accum != type(self).grad_accum:
            raise UserError("--batch-schedule and --grad-accum both say how many micro-batches a step has; drop one")
        if self.stateful and not hasattr(find_model(self.model).build, "state_shape"):
            able = [name for name, spec in models().items() if hasattr(spec.build, "state_shape")]
            raise UserError(f"--stateful: {self.model} has no state to carry; use --model {' or '.join(able)}")
        if self.teacher and self.stateful:
            raise UserError(
                "--stateful: a teacher keeps no state from batch to batch; leave out --stateful or --teacher"
            )


@dataclass(frozen=True)
class TuneSettings(Settings):
    """The settings of a recipe that starts from a trained model: which one, and its adapters."""

    # Records are short, and a step at the 8,192 tokens of a published model's context takes tens of gigabytes.
    longest: ClassVar[int] = 1024
    seq_len: int | None = with_default("seq_len", None, "tokens per sequence (default: the base's context, up to 1024)")

    weight_decay: float = with_default("weight_decay", 0.0)
    base: str | None = start_from(
        "trained model to start from: a run, a checkpoint, a Hugging Face directory, owner/name on the hub, a .gguf or "
        ".bin file (default: the newest fine-tuned run under runs/, else the model that comes with the repository)"
    )
    template: str = of_data(
        "",
        f"chat template to learn replies in: {', '.join(name for name in TEMPLATES if name != 'plain')}, or a file "
        "with a Jinja program (default: the base's own, else a teacher's, else alpaca)",
        metavar="NAME|FILE",
    )
    lora: int | None = of_model(
        None,
        "learn LoRA adapters of this rank on the base's linear maps, and freeze the base",
        check=above_zero,
        metavar="RANK",
    )
    lora_alpha: float | None = of_model(
        None,
        "adapters are scaled by ALPHA / RANK (default: twice the rank)",
        check=above_zero,
        metavar="ALPHA",
        of="lora",
    )
    lora_dropout: float = setting(0.0, "dropout on the adapters' inputs", check=below_one, metavar="SHARE", of="lora")
    lora_targets: str = of_model(
        "",
        "linear maps that get an adapter, e.g. qkv,out,gate_up,down (default: all but routers)",
        check=expects("names with commas between them", lambda value: not value or value.strip(" ,") != ""),
        metavar="NAMES",
        of="lora",
    )
    weights: str = of_model(
        "",
        "with --lora, keep the frozen matrices in nf4 (QLoRA, 4.5 bits a weight), nf4-double (4.13), int8 or fp8 "
        "(default: the precision)",
        choices=FOR_TUNING,
        metavar="FORMAT",
        of="lora",
    )

    @property
    def adapters(self) -> Adapters | None:
        if self.lora is None:
            return None
        targets = tuple(name.strip() for name in self.lora_targets.split(",") if name.strip())
        return Adapters(self.lora, self.lora_alpha or 2.0 * self.lora, self.lora_dropout, targets, self.weights)


ADAPTERS_LR = 3e-4
"""Peak rate of adapters on a published model, as is usual for LoRA: at 2e-3 SmolLM2's replies began to repeat."""


@dataclass(frozen=True)
class SftSettings(TuneSettings, Teaching):
    """recipes/sft.py: fine-tuning on replies."""

    out: str = with_default("out", "runs/sft")
    data: tuple[str, ...] = with_default(
        "data",
        (),
        "records in .json, .jsonl (.gz, .zst) or .parquet: instruction, input, output; or chats, messages of role and "
        "content (default: the built-in instructions)",
    )
    steps: int | None = with_default("steps", 2200)
    lr: float = with_default("lr", 2e-3, f"peak learning rate, with --lora {ADAPTERS_LR:g}")
    base: str | None = start_from(
        "trained model to start from: a run, a checkpoint, a Hugging Face directory, owner/name on the hub, a .gguf"
        " or .bin file (default: the newest pretrained run under runs/)"
    )
    max_reply: int | None = of_data(
        None,
        "leave out training records with longer replies: a model answers as briefly as its training data",
        check=above_zero,
        metavar="TOKENS",
    )

    replay: tuple[str, ...] = of_data(
        (),
        "token shards of the text that the base has read: some rows of each step, so that it is not forgotten; with "
        "--teacher, the teacher has its share in these rows alone",
        metavar="DIR",
    )
    replay_share: float = of_data(0.5, "share of the rows that are of --replay", check=below_one, of="replay")
    mix: tuple[str, ...] = of_data(
        (), "shares of the sources of --replay, as in pretrain.py", metavar="NAME=WEIGHT", of="replay"
    )

    @classmethod
    def made(cls, given: Mapping[str, Any]) -> Self:
        return cls(**{**({"lr": ADAPTERS_LR} if "lora" in given else {}), **given})

    @property
    def replayed_rows(self) -> int:
        """The rows of a micro-batch that are of --replay: one at least, and not all."""
        return min(max(1, round(self.batch_size * self.replay_share)), self.batch_size - 1) if self.replay else 0

    def check(self) -> None:
        super().check()
        if self.replay and self.batch_size < 2:
            raise UserError("--replay: a micro-batch of 1 row has no room for records and text; use --batch-size 2")


@dataclass(frozen=True)
class AlignSettings(TuneSettings):
    """The settings of a recipe that learns from replies, one per row."""

    def check(self) -> None:
        super().check()
        if self.document_mask:
            raise UserError("--document-mask is for rows of several records, and here a row has one; leave it out")
        if self.cuda_graph == "on":
            raise UserError(
                "--cuda-graph: the loss is weighed on the host, which no graph can repeat; use --cuda-graph off"
            )


@dataclass(frozen=True)
class DpoSettings(AlignSettings):
    """recipes/dpo.py: preference pairs, and the objective."""

    out: str = with_default("out", "runs/dpo")
    steps: int | None = with_default("steps", 100)
    lr: float = with_default("lr", 1e-4, "peak learning rate; of all weights of 100 million or more rather 1e-5")
    eval_every: int = with_default("eval_every", 25)
    schedule: str = with_default("schedule", "cosine")
    data: tuple[str, ...] = with_default(
        "data",
        (),
        "preference pairs in .json, .jsonl (.gz, .zst) or .parquet: prompt, chosen, rejected, each text or messages "
        "(default: pairs of the built-in world)",
    )
    batch_size: int = with_default("batch_size", 16, "pairs per micro-batch")
    objective: str = setting(
        "dpo",
        "dpo and ipo use a reference model; simpo (length-normalised) and orpo do not",
        choices=("dpo", "ipo", "simpo", "orpo"),
    )
    beta: float | None = setting(None, "weight of the objective's scores (default: 0.1; simpo: 2)", check=above_zero)
    label_smoothing: float = setting(
        0.0,
        "assumed share of pairs that are labelled the wrong way round",
        check=below_half,
        of="objective dpo or simpo or orpo",
    )
    gamma: float = setting(0.5, "simpo: the margin to beat", check=zero_or_more, of="objective simpo")
    cache: str = setting(
        "runs/reference", "directory for the reference's log-probabilities", metavar="DIR", changes=NOTHING, card=NEVER
    )


@dataclass(frozen=True)
class GrpoSettings(AlignSettings):
    """recipes/grpo.py: how many replies are sampled, and how far one step may go. One process with workers."""

    several_ranks: ClassVar[bool] = False

    out: str = with_default("out", "runs/grpo")
    steps: int | None = with_default("steps", 120)
    lr: float = with_default("lr", 4e-4)
    eval_every: int = with_default("eval_every", 20)
    data: tuple[str, ...] = with_default(
        "data", (), "Alpaca records whose output ends in the right number (default: the questions of --task)"
    )
    batch_size: int = with_default("batch_size", 16, "questions per micro-batch")
    task: str = basic(
        "harder-sums",
        "the questions without --data: sums that are not in the fine-tuning data, or word problems with one "
        "addition or subtraction",
        choices=("harder-sums", "one-step"),
    )
    num_generations: int = setting(
        8, "replies to each question; each is compared with their mean reward", check=at_least_2, formerly="group"
    )
    max_tokens: int = setting(32, "the longest reply", check=above_zero)
    iterations: int = setting(
        1, "steps on the same replies; the ratio is clipped from the second step on", check=above_zero
    )
    beta: float = setting(0.02, "weight of the KL to the starting model, 0 for none", check=zero_or_more)
    clip_low: float = setting(0.2, "clip the ratio at 1 minus this", check=below_one)
    clip_high: float = setting(0.2, "clip the ratio at 1 plus this", check=above_zero)
    normalise: str = setting(
        "dapo",
        "dapo: every token has the same weight; grpo: every reply; dr_grpo: tokens are divided by --max-tokens, and"
        " advantages not by the group's deviation",
        choices=("dapo", "grpo", "dr_grpo"),
    )
    format_weight: float = setting(0.1, "reward for the right format; a right answer earns 1 more", check=zero_or_more)

    def check(self) -> None:
        super().check()
        if self.gpus or self.zero:
            flag = "gpus" if self.gpus else "zero"
            raise UserError(f"--{flag} is for pretrain, sft, dpo and classify; leave it out here")


@dataclass(frozen=True)
class ClassifySettings(ModelSettings):
    """recipes/classify.py: labelled examples, and the model to start from."""

    out: str = with_default("out", "runs/classify")
    steps: int | None = with_default("steps", 2000)
    lr: float = with_default("lr", 5e-4)
    batch_size: int = with_default("batch_size", 32)
    model: str = basic(default_classifier, "which model of the zoo: bert for texts, vit for images")
    test: str | None = basic(
        None, "test data, in the form of --data (default: a tenth of it is held out)", metavar="PATH"
    )
    base: str | None = start_from(
        "run, checkpoint, Hugging Face directory or owner/name on the hub to start from (default: random weights)"
    )
    shift: int = of_data(0, "shift each training image at random by up to this many pixels", check=zero_or_more)


RECIPES: dict[str, type[Settings]] = {
    "pretrain": PretrainSettings,
    "sft": SftSettings,
    "dpo": DpoSettings,
    "grpo": GrpoSettings,
    "classify": ClassifySettings,
}
"""The settings of a checkpoint by its `kind`."""

S = TypeVar("S", bound=Settings)


class Command(NamedTuple, Generic[S]):
    """A parsed command line. plan: only print the memory plan. card: write a model card too."""

    settings: S
    resume: bool
    plan: bool
    card: bool


_ACTIONS = {
    "resume": "continue the run in --out from its newest checkpoint",
    "plan": "print the memory that a step needs, and exit",
    "card": "write a model card, README.md, into --out at the end",
}
EVERY_ACTION = tuple(_ACTIONS)


def parse(
    kind: type[S],
    description: str,
    argv: Sequence[str] | None,
    *,
    actions: Sequence[str] = ("resume",),
    prog: str | None = None,
) -> Command[S]:
    """Parse and check the command line of a recipe with settings `kind`. actions: which of --resume, --plan and --card
    the recipe acts on; it has no other flag of these. Raises UserError."""
    given = {
        name: value
        for name, value in vars(_parser(kind, description, actions, prog).parse_args(argv)).items()
        if value is not None
    }
    expected = {name: bool(given.pop(name, False)) for name in _ACTIONS}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if expected["resume"]:
        settings = _resumed(kind, given, Path(given.get("out", kind().out)))
    else:
        if "minutes" in given and "steps" in given:
            raise UserError("--steps and --minutes are both given, and a run ends by one of them; drop the other")
        if "minutes" in given:
            given["steps"] = None
        settings = kind.made(given)
    if given.get("decay_timescale") and "weight_decay" in given:
        raise UserError("--decay-timescale and --weight-decay both say how much the weights decay; drop one")
    settings.check()
    rows = settings.batch_size * getattr(settings, "num_generations", 1)
    if given.get("workers", 1) > (most := max(rows, cores())):
        raise UserError(f"--workers is {given['workers']}, a batch has {rows} rows to share; use at most {most}")
    return Command(settings, **expected)


def _parser(kind: type[Settings], description: str, actions: Sequence[str], prog: str | None) -> Parser:
    """A parser with a flag for every field. Defaults are applied later, so that it shows which flags were given."""
    p = Parser(prog=prog, description=description)
    usual, types = kind(), get_type_hints(kind)
    groups = {name: p.add_argument_group(name) for name in (BASICS, MODEL, DATA, TRAINING, OUTPUT, HARDWARE)}
    for f in (f for f in fields(kind) if f.name not in kind.unused):
        default, options = getattr(usual, f.name), {k: f.metadata[k] for k in ("metavar", "choices") if f.metadata[k]}
        shown = "" if default is False or default in (None, (), "") else f" (default: {default})"
        plain = types[f.name]
        if isinstance(plain, UnionType):
            plain = next(t for t in get_args(plain) if t is not NoneType)
        if plain is bool:
            options["action"] = "store_true"
        elif isinstance(default, tuple):
            options |= {"nargs": "+", "action": "extend" if f.metadata["adds"] else "store"}
        else:
            options["type"] = str if get_origin(plain) is Literal else plain
        if f.metadata["bare"]:
            options |= {"nargs": "?", "const": f.metadata["bare"]}
        groups[f.metadata["group"]].add_argument(_flag(f), default=None, help=f.metadata["help"] + shown, **options)
        if f.metadata["formerly"]:
            p.add_former(f"--{f.metadata['formerly'].replace('_', '-')}", _flag(f))
    for action in actions:
        groups[BASICS].add_argument(f"--{action}", action="store_true", default=None, help=_ACTIONS[action])
    return p


def _is_a(value: Any, hint: Any) -> bool:
    """Whether what a checkpoint has stored for a field is of the field's type; an integer will do for a float."""
    if isinstance(hint, UnionType):
        return any(_is_a(value, kind) for kind in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(v, str) for v in value)
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint if hint in (int, str, bool, NoneType) else True


def _flag(f: Field[Any]) -> str:
    return f"--{f.name.replace('_', '-')}"


def _typed(value: Any) -> str:
    """A setting's value as a command line has it."""
    words = value if isinstance(value, tuple) else () if value is None else (value,)
    return " ".join(map(str, words)) or "none"


def _resumed(kind: type[S], given: dict[str, Any], out: Path) -> S:
    if not checkpoint.steps(out):
        raise UserError(f"--resume: nothing to resume in {out}; start the run without --resume")
    found = checkpoint.load(out)
    checkpoint.require(found.path, found.meta, "settings", "elapsed")
    recipe = found.meta["kind"]
    if kind in RECIPES.values() and RECIPES.get(recipe, kind) is not kind:
        raise UserError(f"--resume: the run in {out} is one of {recipe}.py; resume it with that, or give another --out")
    stored = kind.from_dict(found.meta["settings"])
    stored = stored.without_idle()  # earlier versions stored such flags
    for f in fields(kind):
        name = f.name
        if f.metadata["changes"] == NOTHING or name not in given or getattr(stored, name) == given[name]:
            continue
        if f.metadata["changes"] == LEARNING:
            longer = name in ("steps", "minutes") and hasattr(stored, "base")
            on = f" and --base {shlex.quote(str(out))}, which trains on from its weights" if longer else ""
            raise UserError(
                f"--resume: {_flag(f)} is {_typed(given[name])}, the run in {out} has {_typed(getattr(stored, name))}; "
                f"drop {_flag(f)}, or start a new run with another --out{on}"
            )
    if not gpu_is_there():  # the run was begun on another machine
        stored = replace(stored, device=None)
    if stored.gpus and (given.get("backend") == "numpy" or gpu_count() < stored.gpus):
        stored = replace(stored, gpus=None)
    return replace(stored, **{**given, "out": str(out)})


# --- what follows from settings ---------------------------------------------------------------------------------------


def config_of(settings: ModelSettings) -> ModelConfig:
    """The preset or JSON file of --config with the fields of --set replaced. Raises UserError."""
    spec = find_model(settings.model)
    config = spec.presets.get(settings.config)
    if config is None:
        path = Path(settings.config)
        if not path.is_file():
            raise UserError(f"--config: {settings.config!r} is not a preset ({', '.join(spec.presets)}) or a file")
        config = spec.config.from_dict(read_json(path, "--config", fix="check the file"))
    return with_fields(config, settings.set)


def on_base(base: ModelConfig, settings: ModelSettings, resume: bool) -> ModelConfig:
    """The config of a base with the fields of --set replaced, or of the run itself, which has them. Raises UserError
    for flags that change its tokenizer."""
    if resume:
        return base
    if settings.tokenizer:
        raise UserError("--tokenizer: the model gets that of --base; leave out --tokenizer or --base")
    config = with_fields(base, settings.set)
    if getattr(config, "vocab", 0) != (known := getattr(base, "vocab", 0)):
        raise UserError(f"--set vocab={config.vocab}: the model gets the tokenizer of --base, vocab {known}; drop it")
    return config


def with_fields(config: ModelConfig, items: Sequence[str]) -> ModelConfig:
    """The config with the fields that the KEY=VALUE `items` of --set name. Raises UserError."""
    changes: dict[str, Any] = {}
    for item in items:
        key, _, value = item.partition("=")
        if isinstance(getattr(config, key, None), str):
            changes[key] = value
            continue
        try:
            changes[key] = json_value(value)
        except ValueError as error:
            raise UserError(f"--set: {item!r} expects KEY=VALUE with a number, e.g. --set dim=192") from error
    return config.override(changes)


def restarts(settings: Settings, spec: ModelSpec) -> bool | None:
    """--document-mask: None without it, else whether positions restart. Raises UserError if the model has no mask."""
    if settings.document_mask is not None and not spec.documents:
        able = ", ".join(known.name for known in models().values() if known.documents)
        raise UserError(f"--document-mask: {spec.name} does not keep documents apart; drop the flag, or use {able}")
    return None if settings.document_mask is None else settings.document_mask == "restart"


def sequence_length(config: BaseConfig, settings: Settings) -> int:
    """Tokens per sequence: --seq-len, or the context up to `settings.longest`; 1 for a model that reads none."""
    asked = settings.seq_len
    if not isinstance(config, ModelConfig):
        return 1
    if asked is not None and asked > config.context:
        raise UserError(f"--seq-len is {asked}, the config's context is {config.context}; use at most that")
    return asked or min(config.context, settings.longest)


def described(backend: Backend, settings: Settings, model: str = "") -> str:
    """The line that a run begins with: "backend numpy (auto: CuPy finds no GPU), fp32, ..."."""
    auto = ""
    if settings.backend == "auto":
        _, why = automatic(settings.precision, model, backend.group.size if backend.group else 1)
        auto = f" (auto: {why})"
    return f"backend {backend.name}{auto}, {settings.precision}, {backend.describe()}"


def open_backend(settings: S, ranks: ProcessGroupInfo | None = None, model: str = "") -> tuple[Backend, S]:
    """The backend of the settings, and the settings with its number of workers and choice of kernels, on which a run's
    last bits depend.

    ranks: the ranks of this run; each has a GPU of its own, or one worker, and the backend gets their group. model: its
    name in the zoo, for `automatic`.
    """
    ranks = ranks or ProcessGroupInfo()
    shards = settings.reduction_shards or 0
    if shards and (shards % ranks.size or ranks.size & (ranks.size - 1)):
        raise UserError(f"--reduction-shards is {shards}, the run has {ranks.size} ranks; their number must divide it")
    device, workers = settings.device, settings.workers
    _check_gpus(settings)  # ranks that mpirun has started were not asked yet
    if ranks.local_rank is not None:
        if device is not None:
            raise UserError("--device chooses one GPU, and each rank takes its own; drop --device")
        device = _gpu_of(ranks) if settings.backend != "numpy" and gpu_is_there() else None
    if ranks.size > 1:
        workers = 1
    elif shards and workers is None:
        workers = min(shards, 1 << (cores().bit_length() - 1))
    name = settings.backend
    if name == "auto":
        name, _ = automatic(settings.precision, model, ranks.size)
    backend = get_backend(name, settings.precision, workers, device)
    settings = replace(settings, cpu_kernels=choose_kernels(backend, settings.cpu_kernels))
    if settings.cuda_graph == "on" and backend.name != "cupy":
        backend.graphs()  # refused where there are none
    if ranks.size > 1:
        backend.group = ranks.group(backend)
        flags = settings.to_dict()
        facts = {f"flag {_flag(f)}": flags[f.name] for f in fields(settings)}
        facts |= {"code": code_hash(), "kind of processor or GPU": backend.describe().partition(" (GPU")[0]}
        facts["versions"] = (sys.version.split()[0], np.__version__)
        assert_equal_on_ranks(backend.group, facts)
        if settings.zero:
            assert_shared_filesystem(backend.group, Path(settings.out))
    return backend, replace(settings, workers=backend.workers)


def _gpu_of(ranks: ProcessGroupInfo) -> int:
    number, count = ranks.local_rank or 0, gpu_count()
    if number >= count:
        raise UserError(
            f"more ranks than GPUs: this is number {number + 1} of its machine, which has {count}; start fewer ranks"
        )
    return number


def _check_gpus(settings: Settings) -> None:
    """Raise UserError if --gpus is given and the run computes on the CPU."""
    if settings.gpus and (settings.backend == "numpy" or not gpu_count()):
        cause = "the backend is numpy" if settings.backend == "numpy" else "no GPU is found"
        raise UserError(
            f"--gpus is {settings.gpus}, and {cause}; leave it out, and on a CPU use --workers, or mpirun "
            "-n 2 before the command"
        )


def start_ranks(settings: Settings, recipe: str, argv: Sequence[str] | None) -> int | None:
    """With --gpus, unless this process is a rank already: run the recipe as that many ranks; returns its exit status.

    recipe: its file. argv: its arguments, if they are not this process's. Raises UserError.
    """
    if settings.gpus is None or started_as_rank():
        return None
    _check_gpus(settings)
    if settings.gpus > (count := gpu_count()):
        raise UserError(f"--gpus is {settings.gpus}, this machine has {count}; use at most that")
    command = [sys.executable, *sys.orig_argv[1:]] if argv is None else [sys.executable, recipe, *argv]

    def saved() -> bool:
        return bool(checkpoint.steps(Path(settings.out)))

    def go_on(left: int) -> tuple[int, list[str]]:
        count = next((n for n in range(left, 0, -1) if settings.batch_size % n == 0), 0)
        resumes = saved() and "--resume" not in command
        return count, ["--resume"] if resumes else []

    return start(command, settings.gpus, go_on if settings.elastic else None, saved)


def print_schedule(settings: Settings, step: str, steps_a_pass: float, data: str) -> None:
    """Print how long a run is, and how often it reads its data. step: describes one; steps_a_pass: steps per epoch."""
    length = count_of(settings.steps, "step") if settings.steps else f"{settings.minutes:g} min"
    step += " on average" * bool(settings.points("batch_schedule"))
    passes = f", {settings.steps / steps_a_pass:.1f} times through the {data}" if settings.steps else ""
    print(f"plan: {length} of {step}{passes}; {settings.schedule} schedule, peak rate {settings.lr:g}")
    if isinstance(settings, PretrainSettings) and (reasons := settings.reasons()):
        print(f"defaults of this preset: {reasons}")
