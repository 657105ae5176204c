"""Look inside a model: every head's predictions at every position of a text, and the attention of every layer.

    python -m tinyforge.inspect "Once upon a time"
    python -m tinyforge.inspect "Once upon a time" --top 3 --checkpoint runs/pretrain --out attention.png

For each token it prints the tokens that the heads predict next, with probabilities: head 0 the next token, head 1 the
one after, and so on. The token that really follows is marked with *. The picture has one panel for each layer and query
head: row t shows how the token at t distributes its attention over the tokens up to it. A model without attention has
no picture. A model with a chat template reads the text as a question in it; --template plain leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tinyforge.backends import get_backend
from tinyforge.errors import TextParser, UserError, run_command
from tinyforge.formats import add_checkpoint_flag, load, resolve_checkpoint
from tinyforge.formats.runs import add_template_flag, with_template
from tinyforge.infer.trace import trace
from tinyforge.terminal import printable
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.command import visible

LABELLED = 40  # tokens: labels of more do not fit next to a panel


def print_candidates(tokenizer: TextTokenizer, ids: Sequence[int], probabilities: np.ndarray, top: int) -> None:
    def shown(token: int) -> str:
        return f"'{visible(tokenizer.token_bytes(token))}'"

    for t, token in enumerate(ids):
        print(f"{t:>4}  {shown(token)}")
        for k, p in enumerate(probabilities[t]):
            actual = ids[t + 1 + k] if t + 1 + k < len(ids) else None
            best = np.argsort(-p, kind="stable")[:top].tolist()
            if actual is not None and actual not in best:
                best.append(actual)
            candidates = (f"{'*' if i == actual else ''}{shown(i)} {p[i]:.1%}" for i in best)
            print(f"      head {k} (+{k + 1}):  {'  '.join(candidates)}")


def plot_attention(tokenizer: TextTokenizer, ids: Sequence[int], attention: Sequence[np.ndarray], out: Path) -> None:
    """One panel for each layer (rows) and query head (columns); UserError if the file cannot be written."""
    from matplotlib.figure import Figure

    layers, heads, length = len(attention), max(map(len, attention)), len(ids)
    labels = [visible(tokenizer.token_bytes(i)).replace("$", r"\$") for i in ids] if length <= LABELLED else []
    size = max(2.0, 0.16 * length if labels else 2.5)
    figure = Figure(figsize=(size * heads + 1, size * layers + 1), layout="constrained")
    panels = figure.subplots(layers, heads, squeeze=False, sharex=True, sharey=True)
    for layer, row in enumerate(panels):
        for head, panel in enumerate(row[: len(attention[layer])]):
            image = panel.imshow(attention[layer][head], vmin=0, vmax=1, cmap="magma")
            panel.set_title(f"layer {layer}, head {head}", fontsize=8)
            if labels:
                panel.set_xticks(range(length), labels, rotation=90, fontsize=6)
                panel.set_yticks(range(length), labels, fontsize=6)
    figure.colorbar(image, ax=panels, shrink=0.5, label="share of attention")
    figure.supxlabel("token looked at")
    figure.supylabel("token that looks")
    try:
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: an unknown file suffix
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {out}: {reason}; choose another --out, a .png file") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = TextParser(prog="python -m tinyforge.inspect", description=__doc__)
    parser.add_argument("text", metavar="TEXT")
    add_checkpoint_flag(parser)
    parser.flag("--top", 5, "candidates a head and position", 1)
    parser.flag("--out", "attention.png", "the picture", metavar="FILE")
    add_template_flag(parser)
    args = parser.parse_args(argv)
    opened = load(resolve_checkpoint(args.checkpoint), get_backend("numpy", "fp32", workers=1))
    loaded = with_template(opened, args.template, args.template_variables)
    tokenizer, template = loaded.tokenizer, loaded.template
    plain = template.name == "plain"
    ids = tokenizer.encode(args.text) if plain else template.encode(tokenizer, [(args.text, None)])
    context = loaded.model.config.context
    if not 1 <= len(ids) <= context:
        raise UserError(
            f"the text has {len(ids)} tokens, expected 1 to {context}, the model's context; change the text"
        )
    print(printable(str(loaded.path)))
    found = trace(loaded.model, ids)
    print_candidates(tokenizer, ids, found.probabilities, args.top)
    if found.attention:
        plot_attention(tokenizer, ids, found.attention, Path(args.out))
        print(f"wrote {printable(args.out)}")
    return 0


if __name__ == "__main__":
    run_command(main)
