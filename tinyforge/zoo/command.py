"""The registered models, and what a trained one is.

    python -m models list                           all models, with the parameters of each preset
    python -m models show gpt2 --config 355m        one model: shapes by layer, parameters, memory of a training step
    python -m models show runs/sft                  a trained model, a path or owner/name on the hub: what its files say
    python -m models record                         check gradients, and parity with other libraries; takes minutes
    python -m models page                           write docs/models.md from the registry and docs/results

`show` with a registered name runs a step on arrays without memory: it needs no GPU and takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tinyforge.errors import Parser, UserError, run_command
from tinyforge.formats.runs import resolve_checkpoint, shipped_models
from tinyforge.registry import ModelSpec, find_model, models
from tinyforge.train.plan import size_of
from tinyforge.zoo import page, published
from tinyforge.zoo.shapes import count_parameters, trace

MOST_TOKENS = 1024  # of a sequence, unless --seq-len says otherwise


def list_models() -> None:
    for spec in models().values():
        print(f"{spec.name:<12} {spec.title}: {spec.summary}")
        for name, config in spec.presets.items():
            print(f"{'':<12}   {name:<16} {count_parameters(spec, config):>15,} parameters")


def show(spec: ModelSpec, name: str, precision: str, batch_size: int, seq_len: int | None) -> None:
    """Print the model of a preset, by default the first. UserError for an unknown preset, and for a batch that the
    config cannot take."""
    name = name or next(iter(spec.presets))
    if name not in spec.presets:
        raise UserError(f"{spec.name} has no preset {name!r}; known: {', '.join(spec.presets)}")
    config = spec.presets[name]
    context = getattr(config, "context", None)
    if context is None and seq_len is not None:
        raise UserError(f"--seq-len: {spec.title} reads no sequences of tokens; leave it out")
    context = context or 1
    seq_len = min(context, MOST_TOKENS) if seq_len is None else seq_len
    if batch_size < 1 or not 1 <= seq_len <= context:
        raise UserError(
            f"--batch-size {batch_size}, --seq-len {seq_len}: expects a batch of at least 1, and a length of "
            f"1 to the config's context, {context}"
        )
    layers, plan = trace(spec, config, precision, batch_size, seq_len)
    print(f"{spec.title}, {name}: {spec.summary}")
    if spec.source:
        print(f"  {spec.source}")
    print(f"  {', '.join(f'{key} {value}' for key, value in config.to_dict().items())}")
    print(f"\n{'op':<24} {'class':<20} {'output':<24} parameters")
    for layer in layers:
        if layer.name and layer.count > 1:
            stem, _, first = layer.name.rpartition(".")
            prefix = f"{stem}." if stem else ""
            print(f"{layer.name} to {prefix}{int(first) + layer.count - 1}, {layer.count} alike:")
        elif layer.name:
            print(f"{layer.name}:")
        for step in layer.steps:
            label = f"  {step.name}" if layer.name else step.name
            params = "  ".join(f"{name} {shape} = {math.prod(shape):,}" for name, shape in step.params)
            print(f"{label:<24} {step.kind:<20} {step.output!s:<24} {params}".rstrip())
    print(f"\n{count_parameters(spec, config):,} parameters")
    print(f"a training step of {size_of(config, batch_size, seq_len)} in {precision} on a GPU:\n{plan}")


def is_trained(name: str) -> bool:
    """Whether `name` is of a trained model: a path, a name on the hub or of a model of the repository."""
    return "/" in name or Path(name).exists() or bool(Path(name).suffix) or name in shipped_models()


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|show|record|page")
    commands.add_parser("list", help="all models and presets")
    one = commands.add_parser("show", help="one model, layer by layer, or a trained one")
    one.add_argument("name", metavar="NAME|PATH", help="as in `list`; a path or owner/name[@revision] on the hub")
    one.add_argument("--config", default="", metavar="PRESET", help="(default: the first)")
    one.flag("--precision", "bf16", "fp32, tf32, bf16 or fp8")
    one.flag("--batch-size", 8, "sequences in the step")
    one.flag("--seq-len", int, f"(default: the context, at most {MOST_TOKENS})")
    commands.add_parser("record", help=f"measure and write {page.RECORD}")
    write = commands.add_parser("page", help=f"write {page.PAGE}")
    write.flag("--check", False, "only check that it is up to date; status 1 if not")
    args = parser.parse_args(argv)
    if args.command == "list":
        list_models()
    elif args.command == "show" and args.name not in models() and is_trained(args.name):
        published.show(resolve_checkpoint(args.name))
    elif args.command == "show":
        show(find_model(args.name), args.config, args.precision, args.batch_size, args.seq_len)
    elif args.command == "record":
        page.record(Path())
    else:
        return page.write(Path(), check=args.check)
    return 0


if __name__ == "__main__":
    run_command(main)
