"""Check the answers to the exercises of the course.

    python docs/course/check.py            all ten
    python docs/course/check.py 3          the third

Each check compares your function with finite differences or with the op of the repository, on random data.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge import Param, Stash, get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.gradcheck import TOLERANCE, check, check_op
from tinyforge.infer.sampling import Sampling, probabilities
from tinyforge.kernel import override
from tinyforge.op import Op
from tinyforge.ops import CrossEntropy, Linear, RMSNorm, Softmax
from tinyforge.ops.softmax import softmax_bwd, softmax_fwd
from tinyforge.optim.adamw import AdamWConfig, adamw_, step_rates
from tinyforge.params import with_buffer

EXERCISES = Path(__file__).resolve().parent / "exercises"
FP64 = get_backend("numpy", "fp64", workers=1)


def near(what: str, got: Any, expected: Any, bound: float = 1e-10) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"{what}: got shape {got.shape}, expected {expected.shape}"
    error = float(np.abs(got - expected).max(initial=0.0) / max(1.0, float(np.abs(expected).max(initial=0.0))))
    assert error <= bound, f"{what}: off by {error:.1e}, expected at most {bound:.0e}"


def softmax(answer: Any, rng: np.random.Generator) -> None:
    with override(softmax_bwd, "numpy", answer.softmax_backward):
        for row in check_op(Softmax, FP64):
            assert row.error <= TOLERANCE, f"softmax_backward: relative error {row.error:.1e}, expected {TOLERANCE:.0e}"


def linear(answer: Any, rng: np.random.Generator) -> None:
    x, dy = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 3, 4))
    op = with_buffer(Linear(Param("w", (4, 5), std=1.0), FP64), FP64, rng)
    stash = Stash()
    op.forward(x, stash)
    expected, start = op.backward(dy, stash), rng.normal(size=(4, 5))
    mine = start.copy()
    near("dx", answer.linear_backward(mine, dy, x, op.weight.value), expected)
    near("dweight, which is added to", mine, start + np.einsum("bto,bti->oi", dy, x))


def cross_entropy(answer: Any, rng: np.random.Generator) -> None:
    logits, dnll = rng.normal(size=(6, 7)) * 3, rng.normal(size=6)
    targets = np.array([0, 6, -1, 3, -1, 2])
    op, stash = CrossEntropy(FP64), Stash()
    op.forward(logits[:, None], targets[:, None], stash)
    expected = op.backward(dnll[:, None], stash)[0][:, 0]
    near("dlogits", answer.cross_entropy_backward(dnll, logits, targets), expected)


def rmsnorm(answer: Any, rng: np.random.Generator) -> None:
    x, dy = rng.normal(size=(5, 8)) * 3, rng.normal(size=(5, 8))
    op = with_buffer(RMSNorm(Param("gain", (8,), std=1.0), FP64), FP64, rng)
    stash = Stash()
    op.forward(x, stash)
    op.weight.grad[...] = 0
    expected = op.backward(dy, stash)
    dx, dgain = answer.rmsnorm_backward(dy, op.weight.value, x, op.eps)
    near("dx", dx, expected)
    near("dgain", dgain, op.weight.grad)


def rope(answer: Any, rng: np.random.Generator) -> None:
    angles = rng.normal(size=(6, 4))
    x, dy = rng.normal(size=(6, 8)), rng.normal(size=(6, 8))
    cos, sin = np.cos(angles), np.sin(angles)
    dx = answer.rotate_backward(dy, cos, sin)
    a, b = np.split(x, 2, axis=-1)
    turned = np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    near("<dy, R x> = <R^T dy, x>", (dx * x).sum(-1), (dy * turned).sum(-1))
    near("the length of dy", (dx**2).sum(-1), (dy**2).sum(-1))


def online_softmax(answer: Any, rng: np.random.Generator) -> None:
    for scale in (1.0, 800.0, -800.0):  # the largest score in the last tile, and in the first
        scores, values = np.sort(rng.normal(size=12)) * scale, rng.normal(size=(12, 3))
        expected = softmax_fwd(scores[None])[0] @ values
        state = None
        for tile in (slice(0, 5), slice(5, 6), slice(6, 12)):
            m = scores[tile].max()
            weights = np.exp(scores[tile] - m)
            part = (m, weights.sum(), weights @ values[tile])
            with np.errstate(over="raise", invalid="raise"):
                state = part if state is None else answer.merge(state, part)
        assert state is not None
        near("the output", state[2] / state[1], expected)


def block(answer: Any, rng: np.random.Generator) -> None:
    class Checked(Op):
        def __init__(self) -> None:
            super().__init__(FP64)
            self.norm = RMSNorm(Param("gain", (6,), std=1.0), FP64)
            self.down = Linear(Param("down", (6, 6), std=0.5), FP64)

        def params(self) -> list[Param]:
            return [*self.norm.params(), *self.down.params()]

        def forward(self, x: Any, stash: Stash | None = None) -> Any:  # type: ignore[override]
            return x + self.down.forward(self.norm.forward(x, stash), stash)

        def backward(self, dy: Any, stash: Stash) -> Any:
            dx = answer.block_backward(self.norm, self.down, dy, stash)
            assert len(stash) == 0, f"{len(stash)} records are left on the stash"
            return dx

    for name, error in check(with_buffer(Checked(), FP64, rng), [rng.normal(size=(4, 6))], rng).items():
        assert error <= TOLERANCE, f"{name}: relative error {error:.1e}, expected {TOLERANCE:.0e}"


def adamw(answer: Any, rng: np.random.Generator) -> None:
    config = AdamWConfig()
    mine = [rng.normal(size=9), np.zeros(9), np.zeros(9)]
    theirs = [a.copy() for a in mine]
    for step in range(1, 5):
        grad = rng.normal(size=9)
        mine = list(answer.adamw(*mine, grad, step, 0.01, config))
        adamw_(theirs[0], *theirs, grad, step_rates(step, 0.01, config)[0], 1.0, config)
        for what, got, expected in zip(("w", "m", "v"), mine, theirs, strict=True):
            near(f"{what} after step {step}", got, expected)


def nucleus(answer: Any, rng: np.random.Generator) -> None:
    for top_p in (0.1, 0.5, 0.9, 1.0):
        z = rng.normal(size=20) * 2
        p = softmax_fwd(z[None])[0]
        expected = probabilities(z[None], Sampling(temperature=1.0, top_k=0, top_p=top_p))[0]
        near(f"top_p {top_p}", answer.nucleus(p, top_p), expected)


def own_op(answer: Any, rng: np.random.Generator) -> None:
    for row in check_op(answer.SquaredReLU, FP64):
        assert row.error <= TOLERANCE, f"{row.name}: relative error {row.error:.1e}, expected {TOLERANCE:.0e}"
    print("  the op is right; now its kernel")
    kernel(Path(answer.__file__).with_suffix(".cu"), rng)


def kernel(file: Path, rng: np.random.Generator) -> None:
    """Compile the kernel for every precision, and run it in float64 where there is a GPU."""
    from tinyforge.backends.compile import KernelError, compile_to_cubin, load

    assert 'extern "C"' in file.read_text(encoding="utf-8"), f"{file.name} has no kernel"
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError):
        print('  not compiled: CuPy is not installed; pip install "cupy-cuda13x[ctk]" ml_dtypes')
        return
    for scalar in ("double", "float", "bf16"):
        try:
            compile_to_cubin(file, {"SCALAR": scalar}, "sm_80")
        except KernelError as error:
            raise AssertionError(str(error)) from None
    import cupy

    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        print("  compiled; there is no GPU here to run it")
        return
    x, dy = rng.normal(size=1000), rng.normal(size=1000)
    dx = cupy.empty(1000)
    launch = load(file, "squared_relu_bwd", SCALAR="double")
    launch((4,), (256,), (dx, cupy.asarray(dy), cupy.asarray(x), np.uint32(1000)))
    near("the kernel", dx.get(), 2 * dy * np.maximum(x, 0))


CHECKS: dict[str, Callable[[Any, np.random.Generator], None]] = {
    "e01_softmax": softmax,
    "e02_linear": linear,
    "e03_cross_entropy": cross_entropy,
    "e04_rmsnorm": rmsnorm,
    "e05_rope": rope,
    "e06_online_softmax": online_softmax,
    "e07_block": block,
    "e08_adamw": adamw,
    "e09_nucleus": nucleus,
    "e10_own_op": own_op,
}


def examine(name: str, folder: Path = EXERCISES) -> None:
    """Raises AssertionError, or what the answer raises, where it is wrong."""
    file = folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"course_{name}", file)
    assert spec is not None and spec.loader is not None, f"{file} is not there"
    answer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answer)
    CHECKS[name](answer, np.random.default_rng(0))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python docs/course/check.py", description="Check the answers to the exercises of the course.")
    parser.add_argument("lessons", nargs="*", type=int, metavar="LESSON", help="1 to 10 (default: all)")
    lessons = parser.parse_args(argv).lessons or range(1, 11)
    names = list(CHECKS)
    if wrong := [n for n in lessons if not 1 <= n <= len(names)]:
        raise UserError(f"there is no lesson {wrong[0]}; lessons are 1 to {len(names)}")
    failed = 0
    for name in (names[n - 1] for n in lessons):
        try:
            examine(name)
            print(f"{name}: right")
        except NotImplementedError:
            failed += 1
            print(f"{name}: not written yet; it is docs/course/exercises/{name}.py")
        except Exception as error:  # whatever a learner's code raises
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}")
    return int(failed > 0)


if __name__ == "__main__":
    run_command(main)
