"""The model card: what a model is, its training data and settings, its scores, and what it is not for.

    write_card(Path("runs/sft"))        README.md next to the checkpoints, from the newest of them
    card(checkpoint.load(path))         its text

Nothing is typed by hand: all figures come from the checkpoint's meta.json and the run's scores.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tinyforge import checkpoint
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.files import write_whole, writing
from tinyforge.invocation import as_typed
from tinyforge.registry import default_model, find_model
from tinyforge.report import count_of
from tinyforge.tensors import CALLED
from tinyforge.train.metrics import NOISE, read_scores
from tinyforge.train.settings import RECIPES, Settings, sequence_length

CARD = """---
license: {license}
language: en
library_name: tinyforge
pipeline_tag: text-generation
tags: [{name}]
---

# {title}, {size} parameters, {kind}

{summary}. Every gradient was written by hand; the model was trained without automatic differentiation.
Weights are {weights}.

## How to use it

    python -m tinyforge.chat --checkpoint DIR{prompt}

or in Python:

    import tinyforge

    print(tinyforge.load("DIR").generate({text}))

## Intended use and limits

{use}

{limits}

## The model

{shape}
## Training data

{corpus}
## Training

{runs}
## Scores

{scores}
"""
USE = """The model is for learning how a language model is made, and for experiments with small models. Do not use it
for advice or facts: nothing was done to make it truthful, polite or safe."""
WORLD = """It knows only the small world of `data/world.py`: a few dozen patterns of English sentences about people,
things, places and small numbers. Fine-tuned, it declines most other requests (`data/talk.py`), and answers some in
the same patterns, wrongly. These files generate its training text, which contains no personal data."""
COMMANDS = {kind: f"python recipes/{kind}.py" for kind in ("pretrain", "sft", "dpo", "grpo", "classify")}
OWN = """It was trained only on the text named below and repeats that text's errors and opinions. At this size it states
falsehoods fluently. Do not rely on anything it says."""


def card(found: checkpoint.Checkpoint) -> str:
    """The model card of a checkpoint.

    Raises UserError for a checkpoint that lacks what a card needs; those of early versions do not name the machine.
    """
    meta = found.meta
    spec = find_model(meta.get("model", default_model()))
    config = spec.config.from_dict(meta["config"])
    if not {"kind", "step", "settings", "elapsed", "machine", "data_hash"} <= meta.keys():
        raise UserError(f"{found.path} lacks what a card needs, as do checkpoints of early versions; train it again")
    # A base from another program has no settings.
    runs = [("pretrain", meta["base"])] if "settings" in meta.get("base", {}) else []
    imported = "base" in meta and not runs
    runs += [(str(stage.get("kind")), stage) for stage in meta.get("stages", ()) if "settings" in stage]
    runs.append((meta["kind"], meta))
    built_in, tuned = not (imported or any(_settings(*run).data for run in runs)), meta["kind"] != "pretrain"
    return as_typed(
        CARD.format(
            name=spec.name,
            title=spec.title,
            summary=spec.summary or "A language model",
            size=f"{_parameters(found):,}",
            weights=CALLED[found.weights.dtype],
            # A program cannot decide the licence of a model that was trained on other people's text.
            license="mit" if built_in else "other",
            kind="fine-tuned to answer" if tuned else "a base model: it continues text",
            prompt="" if tuned else ' --prompt "Once upon a time"',
            text='"### Instruction:\\nWho is here?\\n\\n### Response:\\n"' if tuned else '"Once upon a time"',
            use=USE,
            limits=WORLD if built_in else OWN,
            shape=_table([_numbers(config)]),
            corpus="\n".join(_learned_from(kind, run) for kind, run in runs),
            runs="\n".join(_trained(kind, run, config) for kind, run in runs),
            scores=_scores(read_scores(found.path.parent, meta["step"])),
        )
    )


def _parameters(found: checkpoint.Checkpoint) -> int:
    """The parameters of the whole model; a checkpoint of adapters holds only those."""
    own = sum(weight.size for weight in found.weights.values())
    return int(found.meta["lora"]["parameters"]) if "lora" in found.meta else own


def write_card(run: Path) -> Path:
    """Write the card of a run's newest checkpoint as README.md into the run's directory; returns its path."""
    path = run / "README.md"
    content = card(checkpoint.load(run))
    with writing(path, "the checkpoints are untouched"):
        write_whole(path, content)
    return path


def _settings(kind: str, run: Mapping[str, Any]) -> Settings:
    return RECIPES.get(kind, Settings).from_dict(run["settings"])


def _learned_from(kind: str, run: Mapping[str, Any]) -> str:
    named = ", ".join(_settings(kind, run).data)
    what = {"pretrain": "Text", "dpo": "Preferences", "grpo": "Rewards for replies to questions"}
    head = f"{what.get(kind, 'Instructions')}, by `{COMMANDS[kind].removeprefix('python ')}`"
    rows = run.get("corpus")
    if not rows:
        return f"{head}: {named or 'the text that ships with the repository (`data/world.py`)'}.\n"
    return f"{head}:\n\n{_table(rows)}"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |".replace("_", " "), "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(_cell(row[name]) for name in columns)} |" for row in rows), ""])


def _numbers(config: ModelConfig) -> dict[str, Any]:
    return {name: f"{value:g}" if isinstance(value, float) else value for name, value in config.to_dict().items()}


def _cell(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(f"{v:g}" for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _trained(kind: str, run: Mapping[str, Any], config: ModelConfig) -> str:
    settings = _settings(kind, run)
    rows, length = settings.batch_size * settings.grad_accum, sequence_length(config, settings)
    told = f"{count_of(run['step'], 'step')} in {run['elapsed']:,.0f} s on {run['machine']}"
    unit = next((name.removesuffix("_per_second") for name in run if name.endswith("_per_second")), "tokens")
    told += f": {run[unit]:,} {unit}" if unit in run else ""
    if f"{unit}_per_second" in run:
        told += f", {run[f'{unit}_per_second']:,} {unit}/s while training"
    if "joules" in run:
        told += f"; {run['joules'] / 3.6e6:.3f} kWh"
    optimizer = {"adamw": "AdamW", "muon": "Muon"}[settings.optimizer]
    decay = f"timescale {settings.decay_timescale:g}" if settings.decay_timescale else f"{settings.weight_decay:g}"
    numbers = (f"{settings.lr:g}", settings.schedule, decay, f"{settings.clip:g}")
    cells = (optimizer, *numbers, f"{rows} x {length}", settings.precision)
    return (
        f"    {' '.join([COMMANDS[kind], *settings.flags(), *_gone(run['settings'])])}\n\n{told}; seed "
        f"{settings.seed}, data SHA-256 `{run['data_hash'][:16]}`.\n\n"
        "| optimizer | peak learning rate | schedule | weight decay | clip | batch, tokens | precision |\n"
        f"|---|---|---|---|---|---|---|\n| {' | '.join(cells)} |\n"
    )


def _gone(stored: Mapping[str, Any]) -> list[str]:
    """Flags of settings that an earlier version had."""
    known = {f.name for kind in RECIPES.values() for f in fields(kind)}
    return [
        f"--{name.replace('_', '-')} {value}"
        for name, value in stored.items()
        if name not in known and value is not None
    ]


def _scores(scores: Mapping[str, float]) -> str:
    if not scores:
        return "None yet; `python recipes/evaluate.py --checkpoint DIR --card` measures them."
    lines = ["| on held-out data | |", "|---|---|"]
    for name, value in scores.items():
        # Bits and counts are numbers, all other scores are shares.
        form = ".3f" if "bits per byte" in name else ".2f" if name.startswith("tokens") else ".1%"
        noise = f" ± {scores[name + NOISE]:{form}}" if name + NOISE in scores else ""
        lines += [] if name.endswith(NOISE) else [f"| {name} | {value:{form}}{noise} |"]
    if any(name.endswith(NOISE) for name in scores):
        lines += [
            "",
            "± is the standard error; for sampled replies, the standard deviation over seeds. "
            "`docs/evaluation.md` says what each figure means.",
        ]
    return "\n".join(lines)
