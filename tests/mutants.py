"""Mutation testing: changes of one token or statement each, which the ledger or the tests must notice.

    python -m tests.mutants                      100 mutants, half as many processes as cores
    python -m tests.mutants --number 500 --seed 3
    python -m tests.mutants --only tinyforge/ops/rope.py
    python -m tests.mutants --number 500 --log FILE    what FILE has is not run again: an ended run goes on

A mutant runs against (a) the rows of its module's ops in the gradient-check ledger, (b) in backward code, the whole
ledger, (c) the tests of its module, (d) the whole ledger, if not yet; what passes them is listed with its line and the
change. Mutants that nothing could notice are in mutants_equivalent.txt with the reason. Each process works in a copy of
the repository. The status is 1 if fewer than 99 % are noticed, or fewer than 95 % of those in backward code by the
ledger alone.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from tinyforge import ops
from tinyforge.backends import get_backend
from tinyforge.gradcheck import LARGEST_RATIO, TOLERANCE, examine, fp8_rows, known_ops  # noqa: F401
from tinyforge.op import Op

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.txt")
SECONDS = 30  # of a core, for one mutant against the rows of its module; four times that for other checks (13 without)
CAUGHT, BACKWARD = 0.99, 0.95

TRAIN = ["tests/train/test_objectives.py", "tests/train/test_alignment.py", "tests/train/test_distil.py"]
INITIAL, LANGUAGE_MODELS = "tests/models/test_initial.py", "tests/models/test_language_models.py"
TESTS = {
    "tinyforge/ops/": ["tests/ops/test_values.py", "tests/test_kernel.py", "tests/ops", "tests/test_residual.py"],
    "tinyforge/residual.py": ["tests/test_residual.py", "tests/models/test_llama.py", LANGUAGE_MODELS],
    "tinyforge/optim/": ["tests/optim"],
    "tinyforge/train/masked.py": ["tests/train/test_masked.py", "tests/train/test_classes.py"],
    "tinyforge/train/p": ["tests/train/test_alignment.py", "tests/train/test_objectives.py"],  # policy, preferences
    "tinyforge/train/": [*TRAIN, "tests/train/test_classes.py"],
    "models/bert": [INITIAL, "tests/models/test_bert.py", "tests/formats/test_encoders.py"],
    "models/vit": [INITIAL, "tests/formats/test_encoders.py", "tests/train/test_classes.py"],
    "models/llama": [INITIAL, "tests/models/test_llama.py", LANGUAGE_MODELS, "tests/ops/test_fp8.py"],
    "models/": [INITIAL, "tests/models/test_{0}.py", LANGUAGE_MODELS],
}
"""The tests of a module by the beginning of its path; {0} is the name of its folder."""
SKIPPED = ("_cuda.py", "_webgpu.py", "__init__.py", "_plan.py", "bag_of_words/model.py", "kneser_ney/model.py")
UNJUDGED = ("cases", "cases_of", "_cases", "masked_targets", "_taught", "flop_per_token", "scratch", "__repr__")
"""Functions that make the checker's cases, or forecast."""
OBJECTIVES = ("objectives", "policy", "preferences", "distil", "masked")

SWAPS: dict[type, tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.Pow: ("**", "*"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}


@dataclass(unsafe_hash=True)
class Mutant:
    """One change: source[start:stop] = new."""

    path: str
    line: int
    start: int
    stop: int
    new: str
    before: str
    after: str
    backward: bool
    result: str = ""


def files() -> list[str]:
    found = [*ROOT.glob("tinyforge/ops/*.py"), *ROOT.glob("tinyforge/optim/*.py"), *ROOT.glob("models/*/model.py")]
    found += [ROOT / "tinyforge/residual.py", *(ROOT / "tinyforge/train" / f"{n}.py" for n in OBJECTIVES)]
    return sorted(str(p.relative_to(ROOT)) for p in found if not str(p).endswith(SKIPPED))


def mutants(path: str) -> list[Mutant]:
    """Every mutant of a file, but for annotations, messages, the checker's cases and what only forecasts memory."""
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    raw, found, free = source.encode(), [], set[int]()

    def place(node: ast.AST) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def between(left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[tuple[int, int, str]]:
        first, last = place(left)[1], place(right)[0]
        at = raw[first:last].find(old.encode())
        if at >= 0:
            yield first + at, first + at + len(old), new

    def changes(node: ast.AST) -> Iterator[tuple[int, int, str]]:
        start, stop = place(node) if hasattr(node, "lineno") else (0, 0)
        match node:
            case ast.BinOp(left, op, right) if type(op) in SWAPS:
                yield from between(left, right, *SWAPS[type(op)])
            case ast.Compare(left, [op], [right]) if type(op) in SWAPS:
                yield from between(left, right, *SWAPS[type(op)])
            case ast.BoolOp(op, [left, right, *_]):
                words = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield from between(left, right, *words)
            case ast.UnaryOp(ast.USub() | ast.Not() as op):
                yield start, start + (1 if isinstance(op, ast.USub) else 4), ""
            case ast.Call(ast.Attribute(attr="reshape"), args):
                # Any negative length is the one that NumPy computes.
                free.update(id(a.operand) for a in args if isinstance(a, ast.UnaryOp))
            case ast.Constant(value) if type(value) in (int, float) and id(node) not in free:
                yield start, stop, repr(value + 1 if isinstance(value, int) or value in (0, 1) else value * 1.1)
            case ast.AugAssign(target, op, value) if type(op) in SWAPS:
                old, new = SWAPS[type(op)]
                yield from between(target, value, f"{old}=", "=")
                yield from between(target, value, f"{old}=", f"{new}=")
                yield start, stop, "pass"
            case ast.Expr(ast.Call()):
                yield start, stop, "pass"
            case ast.Slice(lower, upper):
                for bound in (lower, upper):
                    if isinstance(bound, (ast.Name, ast.Attribute)):
                        yield place(bound)[1], place(bound)[1], " + 1" if bound is lower else " - 1"

    def walk(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            if node.name in UNJUDGED or any(map(is_meta, node.decorator_list)):
                return
            function = node.name
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)) or (isinstance(node, ast.Expr) and is_meta(node)):
            return
        for start, stop, new in changes(node):
            line = raw.count(b"\n", 0, start) + 1
            first, last = raw.rfind(b"\n", 0, start) + 1, raw.find(b"\n", stop)
            before, after = raw[first:last].decode(), (raw[first:start] + new.encode() + raw[stop:last]).decode()
            backward = function.endswith("bwd") or "backward" in function or "gradient" in function
            found.append(
                Mutant(path, line, start, stop, new, " ".join(before.split()), " ".join(after.split()), backward)
            )
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        walk(child, function)

    walk(ast.parse(source), "")
    return found


def is_meta(node: ast.AST) -> bool:
    """`kernel.on("meta")`, or a call of it."""
    return '.on("meta")' in ast.unparse(node).replace("'", '"')


def tests_of(path: str) -> list[str]:
    names = next(tests for start, tests in TESTS.items() if path.startswith(start))
    folder = Path(path).parent.name
    return [name for name in (n.format(folder) for n in names) if (ROOT / name).exists()]


def refused(kind: type[Op]) -> bool:
    """Whether the ledger has a row of the op that is above the tolerance, or a rule that it breaks."""
    found = examine(kind, get_backend("numpy", "fp64", workers=1))
    rounded = fp8_rows(kind, "numpy") if kind.__name__.startswith("FP8") else ()
    wrong = [row for row in found.rows if not row.error <= TOLERANCE]
    return bool(found.refused or wrong or any(not row.error <= LARGEST_RATIO for row in rounded))


def passes(seconds: int, check: Callable[..., bool], *args: Any) -> bool:
    """Whether a check is true in a forked process, which has nothing to import, within so many seconds of a core."""

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        right = False
        try:
            right = check(*args)
        finally:
            os._exit(0 if right else 3)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60 * seconds)
    process.kill()
    process.join()
    return process.exitcode == 0


def own_rows_pass(mutant: Mutant) -> bool:
    """The rows of the ops of the mutant's module, without a copy of the repository."""
    warnings.simplefilter("ignore")
    name = mutant.path.removesuffix(".py").replace("/", ".")
    raw = (ROOT / mutant.path).read_bytes()
    kinds = [kind.__name__ for kind in (*ops.ALL, *ops.IN_FP8) if kind.__module__ == name]
    sys.modules[name] = changed = types.ModuleType(name)
    exec(compile(raw[: mutant.start] + mutant.new.encode() + raw[mutant.stop :], name, "exec"), vars(changed))
    return not any(refused(getattr(changed, kind)) for kind in kinds)


def go_to(folder: Path) -> None:
    """Import what follows from a copy of the repository."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] in ("tinyforge", "tests")]:
        del sys.modules[name]


def ledger_passes(folder: Path, path: str, whole: bool) -> bool:
    """The rows of the ops of a module; with `whole` then those of all others."""
    go_to(folder)
    there = importlib.import_module("tests.mutants")
    module = path.removesuffix(".py").replace("/", ".").removeprefix("tinyforge.")
    kinds = sorted((*there.known_ops(), *there.ops.IN_FP8), key=lambda k: not k.__module__.endswith(module))
    return not any(there.refused(kind) for kind in kinds if whole or kind.__module__.endswith(module))


def tests_pass(folder: Path, tests: Sequence[str]) -> bool:
    go_to(folder)
    return not pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow", *tests])


def judge(mutant: Mutant, folder: Path) -> None:
    """Apply a mutant in a copy of the repository; result: who noticed it."""
    target = folder / mutant.path
    if mutant.path.startswith("tinyforge/ops/") and not passes(SECONDS, own_rows_pass, mutant):
        mutant.result = "ledger"
        return
    right, before = target.read_bytes(), target.stat().st_mtime_ns
    target.write_bytes(right[: mutant.start] + mutant.new.encode() + right[mutant.stop :])
    try:
        in_ledger = mutant.backward or mutant.path.startswith("models/")
        if in_ledger and not passes(4 * SECONDS, ledger_passes, folder, mutant.path, mutant.backward):
            mutant.result = "ledger"
        elif not passes(4 * SECONDS, tests_pass, folder, tests_of(mutant.path)):
            mutant.result = "tests"
        elif not mutant.backward and not passes(4 * SECONDS, ledger_passes, folder, mutant.path, True):
            mutant.result = "ledger"  # by the rows of ops that call it
        else:
            mutant.result = "survived"
    finally:
        target.write_bytes(right)
        os.utime(target, ns=(before, before))  # bytecode of the mutant would pass for this file's in the same second


def equivalents() -> set[tuple[str, str, str]]:
    """(path, before, after) of the mutants that nothing could notice: blocks of three lines after a reason."""
    blocks = EQUIVALENT.read_text(encoding="utf-8").split("\n\n") if EQUIVALENT.exists() else []
    rows = [[line for line in block.splitlines() if not line.startswith("#")] for block in blocks]
    return {(path, before.removeprefix("- "), after.removeprefix("+ ")) for path, before, after in filter(None, rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100, help="mutants (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="processes")
    parser.add_argument("--only", default="", metavar="PATH", help="mutate files whose path begins with this")
    parser.add_argument("--log", type=Path, metavar="FILE", help="add every mutant and its result, a line of JSON each")
    args = parser.parse_args()
    known = equivalents()
    everything = [m for path in files() if path.startswith(args.only) for m in mutants(path)]
    stale = {m for m in known if m[0].startswith(args.only)} - {(m.path, m.before, m.after) for m in everything}
    if stale:
        rows = "\n".join(map(" ".join, sorted(stale)))
        sys.exit(f"mutants_equivalent.txt: no mutants any more, write them anew:\n{rows}")
    sample = random.Random(args.seed).sample(everything, min(args.number, len(everything)))
    chosen = [m for m in sample if (m.path, m.before, m.after) not in known]
    done = finished(args.log, chosen)
    left = [m for m in chosen if m.result == ""]
    print(
        f"{len(everything)} mutants; {len(sample)} sampled, {len(sample) - len(chosen)} of them equivalent, "
        f"{len(done)} already run",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copies: Queue[Path] = Queue()
        for i in range(args.jobs):
            copies.put(Path(scratch, str(i)))
            ignored = shutil.ignore_patterns(".git", "__pycache__", "runs", "build", ".venv", ".*_cache")
            shutil.copytree(ROOT, Path(scratch, str(i)), symlinks=True, ignore=ignored)

        def check(tests: tuple[str, ...]) -> None:
            folder = copies.get()
            if not passes(4 * SECONDS, tests_pass, folder, tests):
                os.write(2, f"{' '.join(tests)} fail without a mutant; mend them first\n".encode())
                failing.append(tests)
            copies.put(folder)

        failing: list[tuple[str, ...]] = []
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(check, sorted({tuple(tests_of(m.path)) for m in left})))
        if failing:
            return 2

        def work(mutant: Mutant) -> None:
            folder = copies.get()
            try:
                judge(mutant, folder)
            finally:
                copies.put(folder)
            done.append(mutant)
            if args.log:
                with args.log.open("a", encoding="utf-8") as log:
                    log.write(json.dumps(asdict(mutant)) + "\n")
            if len(done) % 25 == 0:
                print(f"{len(done)} of {len(chosen)}", file=sys.stderr, flush=True)
            if mutant.result == "survived":
                print(f"{mutant.path}:{mutant.line}\n- {mutant.before}\n+ {mutant.after}\n", flush=True)

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(work, left))
    return report(done)


def finished(log: Path | None, chosen: list[Mutant]) -> list[Mutant]:
    """Those of the mutants that the log has, with their results."""
    lines = log.read_text(encoding="utf-8").splitlines() if log and log.exists() else []
    results = {Mutant(**{**row, "result": ""}): row["result"] for row in map(json.loads, lines)}
    for mutant in chosen:
        mutant.result = results.get(mutant, "")
    return [m for m in chosen if m.result]


def report(done: list[Mutant]) -> int:
    """Print the shares; 0 if both are high enough."""
    results = Counter(m.result for m in done)
    backward = [m.result == "ledger" for m in done if m.backward and m.result != "survived"]
    caught, by_ledger = 1 - results["survived"] / max(1, len(done)), sum(backward) / max(1, len(backward))
    print(
        f"{len(done)} mutants: {results['ledger']} noticed by the ledger, {results['tests']} more by tests, "
        f"{results['survived']} survived ({caught:.1%} noticed)"
    )
    print(f"{len(backward)} of them in backward code: {by_ledger:.1%} noticed by the ledger alone")
    return 0 if caught >= CAUGHT and by_ledger >= BACKWARD else 1


if __name__ == "__main__":
    sys.exit(main())
