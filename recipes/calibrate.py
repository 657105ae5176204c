"""Calibrate a trained language model: scale its logits so that held-out text is most likely.

    python recipes/calibrate.py runs/base calibrated --data shards
    python recipes/calibrate.py runs/sft calibrated --data shards --source tinystories --dtype int8

A model that has read a small corpus many times is too sure of itself elsewhere. One number repairs that, the scale s of
its logits z, or the temperature 1/s:

    s = argmin over s > 0 of the mean over tokens of  log(sum_v exp(s z_v)) - s z_y,    y being the next token

It is fitted to every second window of the held-out text, and measured on the others. OUT is a tinyforge checkpoint with
s in its weights: the gain of the final norm, and its bias, are multiplied by s. So whatever reads OUT is calibrated, on
every output head. It is written even if s is close to 1.

Source: Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks" (2017).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge.backends import get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import shown
from tinyforge.formats.convert import card_of, megabytes
from tinyforge.formats.opened import Opened
from tinyforge.formats.pretrained import FORMATS, check_target, next_command, save_opened, short_card
from tinyforge.formats.runs import open_model, resolve_checkpoint
from tinyforge.kernel import Array
from tinyforge.op import Op
from tinyforge.ops import CappedCrossEntropy, LayerNorm, LinearCrossEntropy, RMSNorm
from tinyforge.shards import Shards
from tinyforge.train import corpus
from tinyforge.train.objectives import LN2, Batch
from tinyforge.train.settings import PretrainSettings, sequence_length

LOGITS = 1 << 20  # of a chunk
STEPS, TOLERANCE = 20, 1e-6  # of Newton's method; the relative change of s that ends it
CARD = """
## Calibration

One number was fitted on half of the held-out text of {names}: all logits are multiplied by {scale:.4f}, a temperature
of {temperature:.4f}. Figures in the rest of this card are of the model before.

| bits per byte of {tokens:,} held-out tokens | before | after |
|---|---|---|
| the half that it was fitted on | {fitted[0]:.4f} | {fitted[1]:.4f} |
| the other half | {rest[0]:.4f} | {rest[1]:.4f} |
"""


@dataclass(frozen=True)
class Predicted:
    """What a model predicts of held-out text. hidden: (n, C), of the n tokens with a next one; targets: (n,), that
    token; bytes: of the targets."""

    model: Any
    hidden: Array
    targets: Array
    bytes: int

    def loss(self, scale: float) -> tuple[float, float, float]:
        """Mean nats per token at this scale of the logits, with the first and the second derivative in the scale. With
        p = softmax(s z) and x = z - z_y, these are the means of log(sum_v exp(s x_v)), E_p[x] and Var_p[x]. float64.
        """
        xp, sums = self.model.backend.xp, np.zeros(3)
        rows = max(1, LOGITS // self.model.config.vocab)
        for start in range(0, len(self.targets), rows):
            x = self.model.logits(self.hidden[start : start + rows]).astype(np.float64)
            x -= x[xp.arange(len(x)), self.targets[start : start + rows]][:, None]
            top = x.max(axis=1)
            p = xp.exp(scale * (x - top[:, None]))
            total = p.sum(axis=1)
            p *= x
            mean = p.sum(axis=1) / total
            p *= x
            variance = p.sum(axis=1) / total - mean**2
            sums += [float(part.sum()) for part in (scale * top + xp.log(total), mean, variance)]
        value, slope, curvature = sums / len(self.targets)
        return value, slope, curvature

    def bits(self, nats: float) -> float:
        """Bits per byte at so many nats per token."""
        return nats * len(self.targets) / LN2 / self.bytes


def fit_scale(loss: Callable[[float], tuple[float, float, float]]) -> float | None:
    """Where a convex function of a positive scale is least, by Newton's method from 1; None if STEPS do not get there.

    loss: the value, and the first and the second derivative. No step more than doubles or halves the scale, and a step
    on which the value rises is halved.
    """
    scale, found = 1.0, loss(1.0)
    for _ in range(STEPS):
        value, slope, curvature = found
        if not np.isfinite(found).all():
            return None
        step = min(max(-slope / max(curvature, 1e-300), -scale / 2), scale)
        while not (found := loss(scale + step))[0] <= value:
            step /= 2
            if abs(step) < TOLERANCE * scale:
                return scale
        scale += step
        if abs(step) < TOLERANCE * scale:
            return scale
    return None


def calibrate(
    model: Opened, data: Sequence[str], source: str = "", tokens: int = 65536, backend: str = "auto"
) -> tuple[Opened, Any]:
    """The model with its logits scaled: as opened, and as built on the backend. Its meta has as `calibration` the
    `scale`, the `sources` of the text with the shards' `data_hash`, the number of `tokens`, and bits per byte before
    and after, of the half that was `fitted` and of the `rest`.

    data: folders of token shards. source: of the shards; all by default. tokens: to read at most, in windows of the
    length of pretraining, evenly spaced. Raises UserError for a model whose logits no norm scales, for shards that do
    not fit it or have less than two windows of held-out text, and where no scale is best.
    """
    if model.spec.learns != "text":
        raise UserError(
            f"{model.path} is a {model.spec.title}, which learns {model.spec.learns}; give a model of next tokens"
        )
    device = get_backend(backend, "fp32", workers=1)
    shards, parts = _held_out_text(model, data, source)
    windows = _evenly(parts, tokens)
    plain = model.build(device, frozen=True).model
    norm = _final_norm(plain, model)
    names, less = [p.name for p in norm.params()], float(getattr(norm, "plus_one", False))  # a gain of 1 + w
    fitted, rest = (_predict(plain, model, half) for half in (windows[0::2], windows[1::2]))
    loss = cache(fitted.loss)  # the fit has computed it at 1 and at the result, each a pass over the text
    if (scale := fit_scale(loss)) is None:
        raise UserError(
            f"{model.path}: no scale of its logits is best for this text; give a model that has learned from such text"
        )

    def scaled(name: str) -> np.ndarray:
        return (model.tensors[name]().astype(np.float64) + less) * scale - less

    noted = {
        "scale": scale,
        "sources": [part.source for part in parts],
        "data_hash": shards.hash,
        "tokens": len(fitted.targets) + len(rest.targets),
        "fitted": [fitted.bits(loss(at)[0]) for at in (1.0, scale)],
        "rest": [rest.bits(rest.loss(at)[0]) for at in (1.0, scale)],
    }
    found = replace(
        model,
        meta={**model.meta, "calibration": noted},
        tensors={**model.tensors, **{name: partial(scaled, name) for name in names}},
    )
    made = found.build(device).model
    ids = device.asarray(windows[0].ids[:, :16])
    for head in range(model.config.prediction_heads):
        before, after = (device.to_numpy(m.logits(m.hidden(ids), head)) for m in (plain, made))
        if not np.abs(after - scale * before).max() <= 1e-4 * np.abs(after).max():
            raise UserError(
                f"{model.path}: its last norm, {names[0]}, does not scale its logits; it cannot be calibrated"
            )
    return found, made


def _held_out_text(model: Opened, data: Sequence[str], source: str) -> tuple[Shards, list[corpus.HeldOut]]:
    """The text that evaluation measures, in its windows."""
    run = PretrainSettings.from_dict(model.meta.get("base", model.meta).get("settings", {}))
    settings = replace(run, data=tuple(data), mix=())
    shards = corpus.shards_for(model.tokenizer, model.path, settings)
    if shards is None:
        raise UserError(f"--data: {data[0]} holds no token shards; make some: python -m data.shards")
    length = sequence_length(model.config, run)
    parts = corpus.held_out_text(shards, settings, length, model.config.prediction_heads)
    known = [part.source for part in parts]
    if source and source not in known:
        raise UserError(f"--source: the shards have no held-out text of {shown(source)}; they have {', '.join(known)}")
    return shards, [part for part in parts if source in ("", part.source)]


def _evenly(parts: Sequence[corpus.HeldOut], tokens: int) -> list[Batch]:
    """Windows of up to so many tokens, evenly spaced in the text."""
    lengths = [(len(part.windows.tokens) - 1, part.windows.seq_len) for part in parts]
    total, longest = sum(-(-length // window) for length, window in lengths), max(window for _, window in lengths)
    count = min(total, tokens // longest)
    if count < 2:
        got, fix = (
            (f"--tokens is {tokens}", "raise it")
            if total > 1
            else (f"the held-out text has {lengths[0][0]}", "give more text")
        )
        raise UserError(f"{got}, expected two windows of {longest} tokens; {fix}")
    expected = {number * total // count for number in range(count)}
    every = chain.from_iterable(part.windows.in_order(1, len(part.windows.tokens)) for part in parts)
    return [window for number, window in enumerate(every) if number in expected]


def _final_norm(model: Any, opened: Opened) -> Op:
    """The last norm before the output head."""
    before = takewhile(lambda op: not isinstance(op, LinearCrossEntropy), model.ops())
    norms = [op for op in before if isinstance(op, (RMSNorm, LayerNorm))]
    capped = any(isinstance(op, CappedCrossEntropy) or getattr(op, "cap", 0) for op in model.ops())
    if capped or not norms:
        why = "caps its logits" if capped else "has no norm before its output head that could scale its logits"
        raise UserError(f"{opened.path}: {opened.spec.title} {why}; it cannot be calibrated")
    return norms[-1]


def _predict(model: Any, opened: Opened, windows: Sequence[Batch]) -> Predicted:
    backend, states, known = model.backend, [], []
    for window in windows:
        options = {"documents": window.documents.on(backend)} if window.documents else {}
        hidden = model.hidden(backend.asarray(window.ids), **options)
        targets = window.targets[0, :, 0]
        states.append(hidden[0, : np.count_nonzero(targets >= 0)])  # only the end of a text has none
        known.append(targets[targets >= 0])
    targets = np.concatenate(known)
    size = max(1, int(opened.tokenizer.byte_lengths[targets].sum()))  # the separator of documents has no bytes
    return Predicted(model, backend.xp.concatenate(states), backend.asarray(targets), size)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("model", metavar="SRC", help="a model in any form that convert reads")
    parser.add_argument("target", metavar="OUT", help="the directory to write")
    parser.add_argument("--data", nargs="+", required=True, metavar="SHARDS", help="folders of token shards")
    parser.add_argument("--source", default="", metavar="NAME", help="only this source of the shards (default: all)")
    parser.flag("--tokens", 65536, "held-out tokens to read, at most")
    parser.flag("--dtype", "f32", "type of the stored weights", choices=FORMATS["tinyforge"])
    parser.add_argument("--backend", default="auto", help="numpy, cupy, webgpu, or auto: cupy if CUDA is there")
    args = parser.parse_args(argv)
    target = Path(args.target)
    check_target(target, "tinyforge", args.dtype)
    opened = open_model(resolve_checkpoint(args.model))
    found, model = calibrate(opened, args.data, args.source, args.tokens, args.backend)
    noted = found.meta["calibration"]
    scale, fitted, rest = noted["scale"], noted["fitted"], noted["rest"]
    card = card_of(opened.path, args.dtype) or short_card(model, "tinyforge", args.dtype)
    card = card.rstrip() + "\n" + CARD.format(names=", ".join(noted["sources"]), temperature=1 / scale, **noted)
    save_opened(found, model, target, card, dtype=args.dtype)
    print(
        f"logits x {scale:.3f} (temperature {1 / scale:.3f}): {fitted[0]:.4f} -> {fitted[1]:.4f} bits per byte of "
        f"held-out text; not used for the fit: {rest[0]:.4f} -> {rest[1]:.4f}"
    )
    if round(rest[0] - rest[1], 4) <= 0:
        print("the text not used for the fit gains nothing: the model was calibrated already")
    print(f"wrote {target}, {megabytes(target):.1f} MB; {next_command(found.spec, target)}")
    return 0


if __name__ == "__main__":
    run_command(main)
