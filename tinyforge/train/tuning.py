"""What fine-tuning recipes share: opening and building the base, asking it, and recording where it came from."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tinyforge import checkpoint
from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.formats import hub, lora
from tinyforge.formats.opened import Loaded, Opened
from tinyforge.formats.runs import newest_run, open_model, resolve_checkpoint, template_meta
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import Decoder
from tinyforge.infer.generation import generate
from tinyforge.infer.sampling import Sampling
from tinyforge.invocation import as_typed
from tinyforge.parallel.launch import ProcessGroupInfo
from tinyforge.registry import default_model, find_model
from tinyforge.report import timed
from tinyforge.rng import Stream
from tinyforge.tokenizers.chat_templates import TEMPLATES, AnyTemplate, read_template
from tinyforge.train.card import write_card
from tinyforge.train.distil import Teachers
from tinyforge.train.plan import Plan, check_fits
from tinyforge.train.settings import TuneSettings, described, open_backend

S = TypeVar("S", bound=TuneSettings)
PLAIN = "plain"
# The keys of a base's meta that a run keeps.
OF_BASE = (
    "settings step elapsed data_hash source teacher average calibration corpus inputs machine tokens "
    "tokens_per_second joules"
).split()


def open_start(settings: TuneSettings, resume: bool) -> Opened:
    """The start and the reference of alignment: --base, else the newest fine-tuned run, else the repository's model. A
    resumed run opens it again, while its own weights are in its checkpoint. Raises UserError."""
    if resume:
        found = checkpoint.latest(Path(settings.out))
        meta = checkpoint.read_meta(found)
        checkpoint.require(found, meta, "reference")
        run_metadata, run = meta["reference"], found.parent
        path = hub.referenced(str(run_metadata.get("base")), run)
        if not path.exists():
            raise UserError(f"{found}: the model that it started from, {path}, is missing; put it back")
        base = open_model(path)
        if base.fingerprint() != run_metadata.get("sha256"):
            raise UserError(f"{found}: {path} is not the model that it started from, its weights differ; put that back")
        return base
    start = (
        resolve_checkpoint(settings.base)
        if settings.base
        else newest_run(("tuned",)) or find_model(default_model()).bundled
    )
    if start is None:
        raise UserError("no fine-tuned run under runs/; run python recipes/sft.py first, or give --base DIR")
    return open_model(start)


def training_template(settings: TuneSettings, base: Opened, teachers: Sequence[Opened] = ()) -> AnyTemplate:
    """The chat template that replies are learned in: that of --template, else the base's own; for a base without one a
    teacher's, else Alpaca's. UserError for a --template that is not there."""
    if settings.template:
        return read_template(settings.template, base.template)
    own = (found.template for found in (base, *teachers) if found.template.name != PLAIN)
    return next(own, TEMPLATES["alpaca"])


def build(
    settings: S,
    base: Opened,
    template: AnyTemplate,
    ranks: ProcessGroupInfo | None = None,
    each: int = 1,
    teachers: Teachers | None = None,
) -> tuple[Loaded, Backend, S, Plan]:
    """Build the base, with adapters if the settings ask for them, and print what it is and where it computes. template:
    that replies are learned in. each: rows per example of --batch-size. teachers: counted in the plan, not built.
    Returns the memory plan too. UserError if a step does not fit into memory."""
    spec, config, adapters = base.spec, base.config, settings.adapters
    with timed("opening the backend"):
        whole = "" if adapters else spec.name  # adapters have no kernels for WebGPU
        backend, settings = open_backend(settings, ranks, whole)
    plan = check_fits(spec, config, backend, settings, ranks.size if ranks else 1, each, teachers)
    with timed("making the model"):
        loaded = replace(base.build(backend, settings.recompute, adapters), template=template)
        if adapters:
            loaded.model.buffer.initialise(Stream(settings.seed, "adapters"))
    model = loaded.model
    learned = sum(p.size for p in model.buffer.params)
    count = model.buffer.count - learned if adapters else learned
    print(f"base: {hub.called(loaded.path)}, {spec.name}, {count:,} parameters")
    if base.template.name == PLAIN:
        print(f"chat template: the base has none; learning {template.name}, another with --template")
    else:
        print("chat template:", settings.template or "the base's own")
    if adapters:
        names = dict.fromkeys(name.rpartition(".")[2] for name in model.adapters)
        print(
            f"adapters: rank {adapters.rank}, alpha {adapters.alpha:g}, on {', '.join(names)}: {learned:,} "
            "parameters are learned, the base is frozen"
        )
    print(described(backend, settings, whole))
    return loaded, backend, settings, plan


def run_metadata(loaded: Loaded, base: Opened, backend: Backend, settings: TuneSettings) -> dict[str, Any]:
    """What the meta of a run's checkpoints says about the model and its base: see `Task.meta`."""
    model = loaded.model
    noted: dict[str, Any] = {
        "model": base.spec.name,
        "config": base.config.to_dict(),
        "tokenizer_hash": loaded.tokenizer.hash(),
        "machine": backend.describe(),
        **template_meta(loaded.template),
    }
    if settings.adapters:
        learned = sum(p.size for p in model.buffer.params)
        noted["lora"] = lora.describe(settings.adapters, base, model.buffer.count - learned, Path(settings.out))
    return noted


def stages_before(base: Opened, resumed: bool = False) -> dict[str, Any]:
    """The runs before this one: the pretraining run as "base" and the tunings since then as "stages". With `resumed`
    the base is the run itself, stopped, which has noted them."""
    if resumed:
        return {key: base.meta[key] for key in ("base", "stages") if key in base.meta}
    kept = {key: base.meta[key] for key in OF_BASE if key in base.meta}
    if "base" not in base.meta:
        return {"base": kept}
    stages = [*base.meta.get("stages", ()), {"kind": base.meta["kind"], **kept}]
    return {"base": base.meta["base"], "stages": stages}


def provenance(base: Opened, out: Path, inputs: Sequence[str]) -> dict[str, Any]:
    """The history of an alignment run: the model it started from, by relative path and hash, the runs before it, and
    the hashes of its own training files."""
    reference = {"base": hub.reference(base.path, out), "sha256": base.fingerprint()}
    return {"reference": reference, "inputs": list(inputs), **stages_before(base)}


def print_next_steps(settings: TuneSettings, with_card: bool) -> None:
    """End a run that made a chat model: write its card, if asked for, and print the command to chat."""
    if with_card:
        print(f"wrote {write_card(Path(settings.out))}")
    print(as_typed(f"next: python -m tinyforge.chat --checkpoint {shlex.quote(settings.out)}"))


def chat_template_of(loaded: Loaded) -> AnyTemplate:
    """The chat template of a model, and Alpaca's for a base model."""
    return TEMPLATES["alpaca"] if loaded.template.name == PLAIN else loaded.template


def prompt_ids(
    loaded: Loaded, instruction: str, input: str, history: Sequence[tuple[str, str]] = (), system: str = ""
) -> list[int]:
    """The ids of a prompt in the model's chat template. history: earlier turns."""
    template = chat_template_of(loaded)
    return template.encode(loaded.tokenizer, [*history, (template.question(instruction, input), None)], system)


def answer(
    loaded: Loaded,
    instruction: str,
    input: str,
    max_tokens: int = 40,
    decoder: Decoder | None = None,
    history: Sequence[tuple[str, str]] = (),
    system: str = "",
) -> str:
    """The greedy reply; "" if the prompt leaves no room for one."""
    tokenizer, prompt = loaded.tokenizer, prompt_ids(loaded, instruction, input, history, system)
    if len(prompt) >= loaded.model.config.context:
        return ""
    stop = chat_template_of(loaded).stop_ids(tokenizer)
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    decoder = decoder or make_decoder(loaded.model, spare_memory=True)
    return tokenizer.decode(generate(loaded.model, prompt, sampling, stop, decoder))
