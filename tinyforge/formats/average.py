"""Average the weights of trained models of one shape.

    python -m tinyforge.formats average runs/a runs/b runs/c soup  fine-tuned from one base: a soup
    python -m tinyforge.formats average runs/base runs/sft between --weights 0.3 0.7  between a base and its fine-tuning
    python -m tinyforge.formats average runs/base/step-* smooth  the checkpoints of one run

With weights w and models W, every tensor of OUT is sum_i w_i W_i / sum_i w_i. A negative w goes beyond the others:
`--weights -0.3 1.3` of a base and its fine-tuning goes further in the direction of fine-tuning.

OUT is a tinyforge checkpoint. Tokenizer, chat template, generation_config.json and training record are those of the
last SRC, so a fine-tuned model goes last.

Sources: Wortsman et al., "Model soups" (2022), and "Robust fine-tuning of zero-shot models" (2022), WiSE-FT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path

import numpy as np

from tinyforge.backends import get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import shown
from tinyforge.formats.convert import megabytes
from tinyforge.formats.opened import Opened
from tinyforge.formats.pretrained import FORMATS, check_target, next_command, save_opened, short_card
from tinyforge.formats.runs import open_model, resolve_checkpoint

CARD = """
## An average

The weights are the weighted mean of those of {count} models. The tokenizer and the chat template are the last one's.
What the models learned from, and under which licence, is in their own cards.

| model | share | SHA-256 of its weights |
|---|---|---|
{rows}
"""


def average(models: Sequence[Opened], weights: Sequence[float] = ()) -> Opened:
    """The model whose tensors are sum_i w_i W_i / sum_i w_i, computed in float64, and whose tokenizer, config and meta
    are those of the last. The meta also has each model's share w_i / sum_j w_j with its fingerprint, and as `inputs`
    what any of them has read. Tensors are read and averaged on access, one at a time.

    weights: by default equal. Raises UserError for fewer than two models, for weights of another number or without a
    finite sum above 0, and for models of another config or tokenizer than the last.
    """
    if len(models) < 2:
        raise UserError(f"got {len(models)} model to average, expected two or more; give them before OUT")
    weights = weights or [1.0] * len(models)
    if len(weights) != len(models):
        raise UserError(f"--weights: got {len(weights)} for {len(models)} models, expected one for each")
    if not 0 < sum(weights) < math.inf:
        raise UserError(f"--weights: their sum is {sum(weights):g}, expected a finite one above 0; change one of them")
    last = models[-1]
    for other in models:
        _check_same(other, last)
    shares = [weight / sum(weights) for weight in weights]
    made = [{"share": share, "sha256": model.fingerprint()} for model, share in zip(models, shares, strict=True)]
    read = dict.fromkeys(digest for model in models for digest in model.inputs())

    def mean(name: str) -> np.ndarray:
        parts = zip(shares, models, strict=True)
        return reduce(np.add, (share * model.tensors[name]().astype(np.float64) for share, model in parts))

    return replace(
        last,
        meta={**last.meta, "average": made, "inputs": list(read)},
        tensors={name: partial(mean, name) for name in last.tensors},
    )


def _check_same(model: Opened, expected: Opened) -> None:
    if model.spec.name != expected.spec.name:
        raise UserError(
            f"{model.path} is a {model.spec.title}, {expected.path} a {expected.spec.title}; expected one model"
        )
    theirs, ours = model.config.to_dict(), expected.config.to_dict()
    if field := next((name for name in ours if theirs[name] != ours[name]), ""):
        raise UserError(
            f"{model.path} has {field} {shown(theirs[field])}, expected {shown(ours[field])} as in "
            f"{expected.path}; give models of one config"
        )
    if model.tokenizer.hash() != expected.tokenizer.hash():
        raise UserError(f"{model.path} has another tokenizer than {expected.path}; give models with the same one")


def main(argv: Sequence[str] | None = None) -> int:
    # argparse would show --weights first, where it takes the models for numbers.
    parser = Parser(
        prog="python -m tinyforge.formats average",
        description=__doc__,
        usage="%(prog)s [-h] SRC SRC [SRC ...] OUT [--weights W W [W ...]] [--dtype {f32,bf16,int8}]",
    )
    parser.add_argument("sources", nargs="+", metavar="SRC", help="two or more models, in any form that convert reads")
    parser.add_argument("target", metavar="OUT", help="the directory to write")
    weights = "one number for each SRC, divided by their sum (default: all the same)"
    parser.flag("--weights", [], weights, type=float, metavar="W")
    parser.flag("--dtype", "f32", "type of the stored weights", choices=FORMATS["tinyforge"])
    args = parser.parse_args(argv)
    target = Path(args.target)
    check_target(target, "tinyforge", args.dtype)
    found = average([open_model(resolve_checkpoint(source)) for source in args.sources], args.weights)
    made = found.meta["average"]
    rows = "\n".join(
        f"| {name} | {one['share']:g} | `{one['sha256'][:16]}` |" for name, one in zip(args.sources, made, strict=True)
    )
    model = found.build(get_backend("numpy", "fp32", workers=1)).model
    card = short_card(model, "tinyforge", args.dtype) + CARD.format(count=len(made), rows=rows)
    save_opened(found, model, target, card, dtype=args.dtype)
    mean = " + ".join(f"{one['share']:g} {name}" for name, one in zip(args.sources, made, strict=True))
    print(f"wrote {target}, {megabytes(target):.1f} MB: {mean}; {next_command(found.spec, target)}")
    return 0


if __name__ == "__main__":
    run_command(main)
