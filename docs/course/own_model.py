"""Train a small language model whose gradients are your answers to the exercises.

    python docs/course/own_model.py                   a minute of training, the loss as a picture, and a sample
    python docs/course/own_model.py --text book.txt   on your own text
    python docs/course/own_model.py --seconds 600     for longer
    python docs/course/own_model.py --prompt "Nita "  what the trained model writes after this

The model reads characters. It is NanoEuler in miniature: an embedding, two layers of attention and a small network, a
norm, a head. Each backward below, but the embedding's, calls the function that you wrote in the lesson; where your
answer is not right yet, the solution of the course takes its place, and the script says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

COURSE = Path(__file__).resolve().parent
sys.path.insert(0, str(COURSE))
import check  # noqa: E402

from tinyforge import Stash  # noqa: E402
from tinyforge.data.world import documents  # noqa: E402
from tinyforge.errors import Parser, UserError, run_command  # noqa: E402
from tinyforge.optim.adamw import AdamWConfig  # noqa: E402

SOLUTIONS = COURSE.parents[1] / "tests" / "course" / "solutions"
WRITTEN = {
    "e01_softmax": "softmax_backward",
    "e02_linear": "linear_backward",
    "e03_cross_entropy": "cross_entropy_backward",
    "e04_rmsnorm": "rmsnorm_backward",
    "e05_attention": "attention_backward",
    "e06_rope": "rotate_backward",
    "e07_online_softmax": "merge",
    "e08_block": "block_backward",
    "e09_adamw": "adamw",
    "e10_nucleus": "nucleus",
    "e11_own_op": "squared_relu_bwd",
    "e12_own_model": "model_backward",
}
"""The function of each exercise."""
EPS = 1e-6
Array = Any


def functions(folder: Path = check.EXERCISES, say: Callable[[str], None] = print) -> SimpleNamespace:
    """The function of each exercise: yours if the check finds no fault in it, else the solution's."""
    chosen, missing = {}, []
    for name, function in WRITTEN.items():
        try:
            if name == "e11_own_op":  # without its kernel for a GPU
                check.squared_relu(check.load_answer(name, folder), check.Report())
            else:
                check.examine(name, folder)
            place = folder
        except Exception:  # not written, or wrong: check.py says what
            place = SOLUTIONS
            missing.append(function)
        chosen[function] = getattr(check.load_answer(name, place), function)
    replaced = f"; the course's take the place of {', '.join(missing)}" if missing else ""
    say(f"{len(WRITTEN) - len(missing)} of {len(WRITTEN)} functions are right{replaced}")
    return SimpleNamespace(**chosen)


# --- the ops: forward is here, backward is yours


class Part:
    """What all ops have: a name, for the stash, and the functions."""

    def __init__(self, f: SimpleNamespace, name: str) -> None:
        self.f, self.name = f, name


class Embedding(Part):
    """A row of the table for each token."""

    def __init__(self, f: SimpleNamespace, name: str, table: Array, grad: Array) -> None:
        super().__init__(f, name)
        self.weight, self.grad = table, grad

    def forward(self, ids: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, ids)
        return self.weight[ids]

    def backward(self, dy: Array, stash: Stash) -> None:
        (ids,) = stash.pop(self)
        np.add.at(self.grad, ids, dy)


class Linear(Embedding):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, x)
        return x @ self.weight.T

    def backward(self, dy: Array, stash: Stash) -> Array:
        (x,) = stash.pop(self)
        return self.f.linear_backward(self.grad, dy, x, self.weight)


class RMSNorm(Embedding):
    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, x)
        return self.weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (x,) = stash.pop(self)
        width = x.shape[-1]
        dx = self.f.rmsnorm_backward(self.grad, dy.reshape(-1, width), self.weight, x.reshape(-1, width), EPS)
        return dx.reshape(x.shape)


class Rotate(Part):
    """RoPE on (rows, T, D)."""

    def __init__(self, f: SimpleNamespace, dim: int, length: int) -> None:
        super().__init__(f, "rotate")
        angles = np.arange(length)[:, None] * 100.0 ** (-np.arange(dim // 2) / (dim // 2))
        self.cos, self.sin = np.cos(angles), np.sin(angles)

    def forward(self, x: Array, at: slice) -> Array:
        a, b = np.split(x, 2, axis=-1)
        cos, sin = self.cos[at], self.sin[at]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def backward(self, dy: Array) -> Array:
        rows, length, dim = dy.shape
        cos, sin = (np.tile(a[:length], (rows, 1)) for a in (self.cos, self.sin))
        return self.f.rotate_backward(dy.reshape(-1, dim), cos, sin).reshape(dy.shape)


class Attention(Part):
    """Causal attention with several heads; the cache has the keys and values of the text so far."""

    TILE, WINDOW = 16, 64  # a position sees the last 64: training had rows of this length

    def __init__(self, f: SimpleNamespace, name: str, heads: int, qkv: Linear, out: Linear, rotate: Rotate) -> None:
        super().__init__(f, name)
        self.heads, self.qkv, self.out, self.rotate = heads, qkv, out, rotate

    def split(self, x: Array) -> Array:
        """(B, T, 3 C) to q, k, v of (3, B heads, T, D)."""
        batch, length, width = x.shape
        x = x.reshape(batch, length, 3, self.heads, width // (3 * self.heads))
        return x.transpose(2, 0, 3, 1, 4).reshape(3, batch * self.heads, length, -1)

    def join(self, x: Array, batch: int) -> Array:
        """The reverse for n arrays, (n, B heads, T, D) to (B, T, n C)."""
        n, _, length, dim = x.shape
        x = x.reshape(n, batch, self.heads, length, dim).transpose(1, 3, 0, 2, 4)
        return x.reshape(batch, length, n * self.heads * dim)

    def forward(self, x: Array, stash: Stash) -> Array:
        q, k, v = self.split(self.qkv.forward(x, stash))
        length = x.shape[1]
        q, k = (self.rotate.forward(a, slice(length)) for a in (q, k))
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        s[:, np.triu(np.ones((length, length), bool), k=1)] = -np.inf
        s -= s.max(-1, keepdims=True)
        p = np.exp(s, out=s)
        p /= p.sum(-1, keepdims=True)
        stash.push(self, q, k, v, p)
        return self.out.forward(self.join((p @ v)[None], len(x)), stash)

    def backward(self, dy: Array, stash: Stash) -> Array:
        do = self.split(np.tile(self.out.backward(dy, stash), 3))[0]
        q, k, v, p = stash.pop(self)
        dq, dk, dv = self.f.attention_backward(do, q, k, v, p, self.f.softmax_backward)
        dqkv = np.stack([self.rotate.backward(dq), self.rotate.backward(dk), dv])
        return self.qkv.backward(self.join(dqkv, len(dy)), stash)

    def step(self, x: Array, cache: list[Array], at: int) -> Array:
        """One new position, (1, 1, C): its query goes over the keys in tiles, merged by the online softmax."""
        q, k, v = self.split(self.qkv.forward(x))
        q, k = (self.rotate.forward(a, slice(at, at + 1)) for a in (q, k))
        both = [np.concatenate(pair, axis=1) for pair in zip(cache, (k, v), strict=True)] if cache else [k, v]
        cache[:] = [a[:, -self.WINDOW :] for a in both]
        o = np.empty_like(q)
        for head in range(self.heads):
            keys, values = cache[0][head], cache[1][head]
            s, state = keys @ q[head, 0] / np.sqrt(keys.shape[-1]), None
            for first in range(0, len(s), self.TILE):
                tile = slice(first, first + self.TILE)
                m = s[tile].max()
                weights = np.exp(s[tile] - m)
                part = m, weights.sum(), weights @ values[tile]
                state = part if state is None else self.f.merge(state, part)
            assert state is not None
            o[head, 0] = state[2] / state[1]
        return self.out.forward(self.join(o[None], 1))


class Network(Part):
    """down(max(up(x), 0)^2)."""

    def __init__(self, f: SimpleNamespace, name: str, up: Linear, down: Linear) -> None:
        super().__init__(f, name)
        self.up, self.down = up, down

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        h = self.up.forward(x, stash)
        if stash is not None:
            stash.push(self, h)
        return self.down.forward(np.maximum(h, 0) ** 2, stash)

    def backward(self, dy: Array, stash: Stash) -> Array:
        dy = self.down.backward(dy, stash)
        (h,) = stash.pop(self)
        return self.up.backward(self.f.squared_relu_bwd(dy, h), stash)

    def step(self, x: Array, cache: list[Array], at: int) -> Array:
        return self.forward(x)


class Block(Part):
    """x + inner(norm(x)): half a layer."""

    def __init__(self, f: SimpleNamespace, name: str, norm: RMSNorm, inner: Any) -> None:
        super().__init__(f, name)
        self.norm, self.inner = norm, inner

    def forward(self, x: Array, stash: Stash) -> Array:
        return x + self.inner.forward(self.norm.forward(x, stash), stash)

    def backward(self, dy: Array, stash: Stash) -> Array:
        return self.f.block_backward(self.norm, self.inner, dy, stash)

    def step(self, x: Array, cache: list[Array], at: int) -> Array:
        return x + self.inner.step(self.norm.forward(x), cache, at)


class Loss(Part):
    def forward(self, logits: Array, targets: Array, stash: Stash) -> Array:
        """The negative log-likelihood of each target."""
        stash.push(self, logits, targets)
        z = logits - logits.max(-1, keepdims=True)
        return np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, targets[..., None], -1)[..., 0]

    def backward(self, dnll: Array, stash: Stash) -> Array:
        logits, targets = stash.pop(self)
        rows = logits.reshape(-1, logits.shape[-1])
        return self.f.cross_entropy_backward(dnll.ravel(), rows, targets.ravel()).reshape(logits.shape)


class Model:
    """embedding, blocks, norm, head, loss. All weights are views into one flat array, as are their gradients."""

    def __init__(
        self, f: SimpleNamespace, vocab: int, width: int = 64, layers: int = 2, heads: int = 4, room: int = 1024
    ) -> None:
        rng = np.random.default_rng(0)
        shapes = {"embedding": (vocab, width), "head": (vocab, width), "norm": (width,)}
        for i in range(layers):
            shapes |= {f"{i}.norm": (width,), f"{i}.qkv": (3 * width, width), f"{i}.out": (width, width)}
            shapes |= {f"{i}.norm 2": (width,), f"{i}.up": (4 * width, width), f"{i}.down": (width, 4 * width)}
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self.weights, self.grads = np.empty(sum(sizes)), np.zeros(sum(sizes))
        cuts = np.cumsum([0, *sizes])
        self.params: dict[str, tuple[Array, Array]] = {}
        for (name, shape), a, b in zip(shapes.items(), cuts, cuts[1:], strict=False):
            self.params[name] = self.weights[a:b].reshape(shape), self.grads[a:b].reshape(shape)
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.0
            self.params[name][0][...] = scale * rng.normal(size=shape) + (len(shape) == 1)

        def made(kind: Any, name: str) -> Any:
            return kind(f, name, *self.params[name])

        self.embedding, self.head, self.norm = made(Embedding, "embedding"), made(Linear, "head"), made(RMSNorm, "norm")
        rotate = Rotate(f, width // heads, room)
        self.blocks: list[Block] = []
        for i in range(layers):
            attention = Attention(
                f, f"{i}.attention", heads, made(Linear, f"{i}.qkv"), made(Linear, f"{i}.out"), rotate
            )
            network = Network(f, f"{i}.network", made(Linear, f"{i}.up"), made(Linear, f"{i}.down"))
            self.blocks.append(Block(f, f"{i}.first half", made(RMSNorm, f"{i}.norm"), attention))
            self.blocks.append(Block(f, f"{i}.second half", made(RMSNorm, f"{i}.norm 2"), network))
        self.loss, self.f = Loss(f, "loss"), f

    def forward(self, ids: Array, targets: Array, stash: Stash) -> Array:
        x = self.embedding.forward(ids, stash)
        for block in self.blocks:
            x = block.forward(x, stash)
        return self.loss.forward(self.head.forward(self.norm.forward(x, stash), stash), targets, stash)

    def backward(self, dnll: Array, stash: Stash) -> None:
        self.f.model_backward(self, dnll, stash)

    def step(self, token: int, caches: list[list[Array]], at: int) -> Array:
        """The logits after one more token."""
        x = self.embedding.forward(np.array([[token]]))
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block.step(x, cache, at)
        return self.head.forward(self.norm.forward(x))[0, 0]


# --- training and sampling


def train(model: Model, ids: Array, stop: Callable[[int], bool], batch: int = 8, length: int = 64) -> Iterator[float]:
    """The loss of each step, in nats per character, until stop(steps)."""
    rng, config = np.random.default_rng(1), AdamWConfig()
    m, v, step = np.zeros_like(model.weights), np.zeros_like(model.weights), 0
    while not stop(step):
        step += 1
        starts = rng.integers(0, len(ids) - length, batch)
        rows = ids[starts[:, None] + np.arange(length + 1)]
        model.grads[...] = 0
        stash = Stash()
        nll = model.forward(rows[:, :-1], rows[:, 1:], stash)
        model.backward(np.full(nll.shape, 1 / nll.size), stash)
        rate = 3e-3 * min(1, step / 20)
        w, m, v = model.f.adamw(model.weights, m, v, model.grads, step, rate, config)
        model.weights[...] = w  # in place: the ops have views of it
        yield float(nll.mean())


def sample(model: Model, start: Sequence[int], count: int, top_p: float = 0.9, seed: int = 0) -> list[int]:
    """`count` tokens after `start`."""
    rng, out = np.random.default_rng(seed), list(start)
    caches: list[list[Array]] = [[] for _ in model.blocks]
    for at in range(len(start) + count - 1):
        z = model.step(out[at], caches, at)
        if at + 1 >= len(out):
            p = np.exp(z - z.max())
            p = model.f.nucleus(p / p.sum(), top_p)
            out.append(int(rng.choice(len(p), p=p)))
    return out[len(start) :]


def draw(losses: Sequence[float], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(losses, color="#d9542b", linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss, nats per character", title="Your own model")
    figure.savefig(file, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python docs/course/own_model.py", description="Train a model on your answers' gradients.")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text in UTF-8 (default: the built-in corpus)")
    parser.add_argument("--seconds", type=float, default=60, help="of training (default: 60)")
    parser.add_argument("--out", type=Path, default=Path("runs/course"), help="the folder of the model and its loss")
    parser.add_argument("--prompt", metavar="TEXT", help="do not train: write on after TEXT with the model in --out")
    args = parser.parse_args(argv)
    if args.prompt:
        return write_on(args.out / "model.npz", args.prompt)
    if find_spec("matplotlib") is None:  # before the minute of training, not after it
        raise UserError("matplotlib, which draws the loss, is not installed: python -m pip install matplotlib")
    try:
        text = args.text.read_text(encoding="utf-8") if args.text else "\n".join(documents("train", 2000))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--text {args.text}: {error}; expected a file of text in UTF-8") from None
    letters = sorted(set(text))
    if len(text) < 1000:
        raise UserError(f"{args.text} has {len(text)} characters; at least 1000 are needed")
    ids = np.searchsorted(letters, list(text))
    model = Model(functions(), len(letters))
    print(f"{len(text):,} characters, {len(letters)} of them different; {model.weights.size:,} weights")
    print(f"an untrained model has a loss of log {len(letters)} = {np.log(len(letters)):.2f}")
    end, losses = time.monotonic() + args.seconds, []
    for loss in train(model, ids, lambda step: time.monotonic() > end and step > 0):
        losses.append(loss)
        if len(losses) == 1 or len(losses) % 50 == 0:
            print(f"step {len(losses)}: loss {np.mean(losses[-50:]):.3f}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    np.savez(args.out / "model.npz", weights=model.weights, letters=np.array(letters))
    draw(losses, args.out / "loss.png")
    start = "\n" if "\n" in letters else text[0]
    print(f"{len(losses)} steps; the loss is drawn in {args.out / 'loss.png'}. A sample:\n")
    print("".join(letters[i] for i in sample(model, [letters.index(c) for c in start], 300)))
    print(f'\nWith a beginning of your own: python docs/course/own_model.py --prompt "{text.split()[0]} "')
    return 0


def write_on(file: Path, prompt: str) -> int:
    """Print `prompt` and 300 characters after it, by the model in `file`."""
    if not file.is_file():
        raise UserError(f"{file} is not there; train a model first, without --prompt")
    with np.load(file) as saved:
        weights, letters = saved["weights"], saved["letters"].tolist()
    if unknown := sorted(set(prompt) - set(letters)):
        raise UserError(f"--prompt: the model's text had no {unknown[0]!r}; use other characters")
    model = Model(functions(say=lambda text: None), len(letters))
    model.weights[...] = weights
    print(prompt + "".join(letters[i] for i in sample(model, [letters.index(c) for c in prompt], 300)))
    return 0


if __name__ == "__main__":
    run_command(main)
