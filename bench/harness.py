"""Shared by all benchmarks: flags, contenders, turns, the machine, the table, the JSON. A benchmark adds only what it
runs and which peer."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np

from tinyforge import report
from tinyforge.backends import Backend, get_backend
from tinyforge.backends.numpy_backend import KERNELS
from tinyforge.backends.workers import cores, cpu_model
from tinyforge.config import ModelConfig
from tinyforge.errors import Parser, UserError
from tinyforge.frozen_model import frozen_model
from tinyforge.models.nanoeuler.config import Config
from tinyforge.models.nanoeuler.model import NanoEuler
from tinyforge.quantised import E4M3, FOUR_BITS
from tinyforge.registry import find_model
from tinyforge.train.metrics import peak_memory_mib
from tinyforge.train.settings import PretrainSettings, config_of

OURS, EAGER, COMPILED, GRAPH = "tinyforge", "torch eager", "torch compiled", "torch compiled, CUDA graph"
COMPILED_PARTS = "the model", "one layer, whose code all layers use (regional compilation)"
MODES = {EAGER: None, COMPILED: "default", GRAPH: "reduce-overhead"}  # of torch.compile
LOGITS_TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp8": 5e-2}
LLAMA_CPP = "llama.cpp"
GRAPHS_NEED_A_GPU = "does not apply: it replays CUDA graphs, and this runs on a CPU"
Parity = dict[str, Any] | None
LeftOut = dict[str, str]

CONVENTION = """\
How it is measured: all contenders run in one process, from the same weights, and must agree before any is timed. They
take turns, so that changes of the machine's speed affect all of them; the first run of a turn is not counted, and every
timed run begins and ends with an idle device. Use an idle machine: another busy process slows the contenders unequally.
A mode of PyTorch that fails on this machine is left out, and the reason is printed."""


# --- flags ------------------------------------------------------------------------------------------------------------

SHARED: dict[str, dict[str, Any]] = {
    "config": {"default": "", "help": "preset of the model or a JSON file (default: the model's first preset)"},
    "peer": {"choices": ("torch",), "help": "time PyTorch too"},
    "backend": {"default": "auto", "help": "ours: auto, numpy, cupy, webgpu"},
    "device": {"type": int, "help": "number of the GPU (default: 0)"},
    "precision": {"default": "fp32", "help": "fp32, fp64, and on a GPU tf32 or bf16"},
    "workers": {"type": int, "help": "processes or threads of ours, on a CPU (default: one a core)"},
    "threads": {"type": int, "help": "threads of PyTorch (default: as many as --workers)"},
}


class Flags(Parser):
    """A benchmark's flags. A default is added to the help, numbers are checked, and --json is always there."""

    def __init__(self, doc: str | None, convention: str = CONVENTION) -> None:
        super().__init__(description=doc, epilog=convention)

    def text(self, flag: str, default: Any = None, help: str = "", **more: Any) -> None:
        shown = " (default: %(default)s)" if default or default == 0 else ""
        self.add_argument(flag, default=default, help=help + shown, **more)

    def number(self, flag: str, default: Any, help: str, least: float = 1, **more: Any) -> None:
        """An integer of at least `least`; any number where the default is a float. None: may be left out."""
        self.bounds[flag] = least, math.inf
        of_one = default[0] if isinstance(default, list) else default
        self.text(flag, default, help, type=float if isinstance(of_one, float) else int, **more)

    def switch(self, flag: str, help: str) -> None:
        self.add_argument(flag, action="store_true", help=help)

    def shared(self, *names: str, **changes: dict[str, Any]) -> None:
        """Flags that several benchmarks have; changes: keywords that differ here, by name."""
        for name in [*names, *(name for name in changes if name not in names)]:
            self.text(f"--{name}", **SHARED[name] | changes.get(name, {}))
            if SHARED[name].get("type") is int and name != "device":
                self.bounds[f"--{name}"] = 1, math.inf

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The arguments, checked as far as that is possible before anything is measured. Raises UserError."""
        report.add_json_flag(self)
        args = self.parse_args(argv)
        peer = getattr(args, "peer", None)
        report.check_before(args.json, peer if str(peer).startswith(("torch", "llamacpp")) else None)
        return args


def backend_of(args: argparse.Namespace, workers: int | None = None) -> Backend:
    """The backend of the flags; `cupy` for a benchmark without --backend."""
    return get_backend(getattr(args, "backend", "cupy"), args.precision, workers, getattr(args, "device", None))


def nanoeuler_config(name: str) -> Config:
    config = config_of(PretrainSettings(config=name))
    assert isinstance(config, Config), "the default model is not NanoEuler"
    return config


def nanoeuler(config: Config, backend: Backend) -> NanoEuler:
    """A model with random weights."""
    model = NanoEuler(config, backend)
    model.initialise(seed=0)
    return model


NOISE = 1_000_003  # numbers: a prime, so that no two rows of a matrix are equal


def random_model(name: str, config: ModelConfig, backend: Backend, kind: str = "") -> Any:
    """A model of the zoo for inference with random weights. They are made on the device, by repeating some noise: a
    large model takes no memory of the host, and codes are never numbers. kind: the format of the matrices."""
    model = frozen_model(partial(find_model(name).build, config, backend), kind)
    rng = np.random.default_rng(0)
    noise = backend.asarray(rng.standard_normal(NOISE, np.float32))
    one = rng.integers(0, 256, NOISE).astype(np.uint8)
    one[one & 127 == 127] = 0  # not a number in e4m3
    four = rng.integers(1, 16, (2, NOISE)).astype(np.uint8)
    # Codes whose mean is about 0, and their standard deviation.
    codes = {"int8": (one, one.view(np.int8).std()), "fp8": (one, E4M3[one].std())}
    codes[FOUR_BITS] = four[0] | four[1] << 4, four[0].std()
    on_device = {k: (backend.asarray(of, of.dtype), float(deviation)) for k, (of, deviation) in codes.items()}

    def fill(array: Any, source: Any, first: int) -> None:
        """Every matrix begins at another number."""
        flat, start = array.reshape(-1), 0
        while start < flat.size:
            part = flat[start : start + NOISE - first]
            part[...] = source[first : first + part.size]
            start, first = start + part.size, 0

    for i, p in enumerate(model.buffer.frozen):
        if not p.weights:
            p.value.fill(p.fill)
            if p.std:
                fill(p.value, noise, 65537 * i % NOISE)
                p.value[...] *= p.std
            continue
        source, deviation = on_device[p.weights]
        fill(p.stored.codes.view(np.uint8), source, 65537 * i % NOISE)
        p.stored.scales.fill(p.std / deviation)
    return model


# --- contenders -------------------------------------------------------------------------------------------------------


def by_mode(backend: Backend, make: Callable[[str | None], Any], names: Iterable[str]) -> dict[str, Any]:
    """What makes each of PyTorch's contenders, make(mode of torch.compile), or why it does not apply here."""
    here = backend.name == "cupy"
    return {name: partial(make, MODES[name]) if here or name != GRAPH else GRAPHS_NEED_A_GPU for name in names}


def by_threads(
    backend: Backend, make: Callable[[int, str | None], Any], threads: int, names: Iterable[str]
) -> dict[str, Any]:
    """The same of make(threads, mode): on a GPU in the modes called `names`, on a CPU eager with 1 and all threads."""
    if backend.name == "cupy":
        return by_mode(backend, partial(make, threads), names)
    numbers = sorted({1, threads})
    eager = {f"{EAGER}, {n} thread{'s' * (n > 1)}": partial(make, n, None) for n in numbers}
    return {**eager, GRAPH: GRAPHS_NEED_A_GPU}


def threads_of(contenders: Mapping[str, Any]) -> Callable[[str], None]:
    """For `take_turns`: give PyTorch the contender's number of threads, which belongs to the process."""

    def between(name: str) -> None:
        if (decoder := getattr(contenders[name], "decoder", None)) and hasattr(decoder, "use_threads"):
            decoder.use_threads()

    return between


def soft(
    makers: Mapping[str, Callable[[], Any] | str], first: Callable[[Any], Any]
) -> tuple[dict[str, Any], dict[str, Any], LeftOut]:
    """Build every contender and run its first piece of work, which compiles it.

    makers: functions that build each by name, or the reason why it does not apply. If torch.compile fails, the
    contender is left out with the first line of the error; other errors are raised. Returns the contenders, the results
    of `first`, and the reasons.
    """
    contenders: dict[str, Any] = {}
    results: dict[str, Any] = {}
    left_out: LeftOut = {}
    for name, make in makers.items():
        if isinstance(make, str):
            left_out[name] = make
            continue
        skipped = graphs_skipped()
        try:
            contender = make()
            result = first(contender)
            if name == GRAPH and graphs_skipped() > skipped:
                raise RuntimeError("PyTorch compiled it, and skipped its CUDA graphs")
            contenders[name], results[name] = contender, result
        except Exception as error:
            if name not in (COMPILED, GRAPH) or isinstance(error, UserError):
                raise
            lines = str(error).strip().splitlines() or [""]
            left_out[name] = f"{type(error).__name__}: {lines[0]}"[:200]
    return contenders, results, left_out


def graphs_skipped() -> int:
    """CUDA graphs that torch.compile has given up so far: it only warns, and continues without them."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("inductor", {}).get("cudagraph_skips", 0))


def check_parity(results: Mapping[str, Any], tolerance: float, what: str) -> dict[str, Any]:
    """Raise if a contender's numbers differ from ours. what: beginning of the message, with its verb."""
    # np.max propagates a NaN, which is then not within the tolerance.
    worst = float(np.max([np.abs(np.subtract(theirs, results[OURS])) for theirs in results.values()]))
    if not worst <= tolerance:
        raise RuntimeError(f"parity: {what} {worst:.2g}, expected at most {tolerance:g}")
    return {"worst_difference": worst, "tolerance": tolerance}


# --- time and memory --------------------------------------------------------------------------------------------------


def take_turns(
    contenders: Mapping[str, Callable[[int], Any]],
    runs: int,
    synchronize: Callable[[], Any] = lambda: None,
    *,
    turn: int = 1,
    together: bool = False,
    warm_up: int = 1,
    between: Callable[[str], Any] = lambda _: None,
    clock: Callable[[], Any] = time.perf_counter,
) -> dict[str, list[Any]]:
    """Seconds of each of `runs` counted runs, by contender; a contender is called with the number of its run.

    turn: counted runs until the next contender's turn, each after `warm_up` that are not counted. together: time a turn
    from beginning to end, and return its mean, as steps on a GPU follow each other without waiting. synchronize: waits
    until the device is idle; timed. between(name): called before a contender's turn and around what is timed, untimed.
    clock: may return an array, of several clocks.
    """
    seconds: dict[str, list[Any]] = {name: [] for name in contenders}
    index = 0
    for done in range(0, runs, turn):
        counted = min(turn, runs - done)
        size = counted if together else 1
        for name, run in contenders.items():
            between(name)
            # Finds its data in no cache, and the last contender's threads perhaps still spinning.
            for i in range(warm_up):
                run(index + i)
            for first in range(index + warm_up, index + warm_up + counted, size):
                synchronize()
                between(name)
                start = clock()
                for i in range(first, first + size):
                    run(i)
                synchronize()
                seconds[name].append((clock() - start) / size)
                between(name)
        index += warm_up + counted
    return seconds


def figures(seconds: Mapping[str, Sequence[float]], unit: str, each: str, tokens: float) -> dict[str, dict[str, Any]]:
    """Of each contender the median, the minimum, tokens a second, and ours over this by medians; all runs as `each`.
    unit: "ms" or "us"; tokens: of a run."""
    scale = {"ms": 1e3, "us": 1e6}[unit]
    return {
        name: {
            f"median_{unit}": scale * median(times),
            f"min_{unit}": scale * min(times),
            "tokens_per_second": tokens / median(times),
            **({"ours_over_this": median(seconds[OURS]) / median(times)} if OURS in seconds else {}),
            f"{each}_{unit}": [scale * t for t in times],
        }
        for name, times in seconds.items()
    }


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """The function's result in a process of its own, so that its memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(function, *args).result()


@contextmanager
def peak_mib(backend: Backend | None) -> Iterator[Callable[[], float]]:
    """A function that returns the peak memory so far, in MiB: of our arrays on a GPU, elsewhere of the process."""
    if backend is None or backend.name != "cupy":
        yield peak_memory_mib
        return
    from tinyforge.backends.cupy_backend import PeakMemory

    with PeakMemory() as peak:
        yield lambda: peak.bytes / 2**20


# --- what is reported -------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The CPU and its load; call it before anything is measured."""
    return {"cpu": cpu_model(), "cores": cores(), "load_average_before": os.getloadavg()[0]}


def environment(backend: Backend, peer: str | None, before: dict[str, Any]) -> dict[str, Any]:
    """before: the `machine` at the start."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    if peer:
        package = "xllamacpp" if peer == "llamacpp" else "torch"
        versions[package] = sys.modules[package].__version__
    if kernels := os.environ.get(KERNELS):  # else OpenBLAS chooses by the CPU; AVX-512 is up to twice as fast as AVX2
        versions[KERNELS] = kernels
    return {
        "device": before | ({"gpu": backend.describe()} if backend.name == "cupy" else {}),
        "versions": versions,
        "backend": backend.name,
        "precision": backend.precision.name,
    }


def heading(found: dict[str, Any], *more: tuple[str, str] | None) -> list[str]:
    """The lines about machine and versions, the benchmark's own (None: left out), and an empty one."""
    device = found["device"]
    lines = [
        ("device", f"{device['cpu']}, {device['cores']} cores" + (f"; {device['gpu']}" if "gpu" in device else "")),
        ("load average", f"{device['load_average_before']:.2f} over the minute before the start"),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("precision", f"{found['precision']}, backend {found['backend']}"),
        *(line for line in more if line),
    ]
    return [*(f"{name:<13} {value}" for name, value in lines), *agreement(found), ""]


def agreement(found: dict[str, Any]) -> list[str]:
    """The line about the check of results, where there was one."""
    if not (parity := found.get("parity")):
        return []
    worst, most = parity["worst_difference"], parity["tolerance"]
    return [f"{'parity':<13} results agree to {worst:.1e} (expected: at most {most:g})"]


UNITS = {"gb": "GB", "gflop": "GFLOP", "tflop": "TFLOP", "mib": "MiB", "mbu": "MBU"}


def rows(
    columns: str,
    named: Mapping[str, Mapping[str, Any]] | Iterable[tuple[str, Mapping[str, Any]]],
    title: str = "",
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """A line of headings, a line for each of the named figures, and one for each contender that was left out.

    columns: "KEY:FORMAT" or "KEY=HEADING:FORMAT", with " | " between; the key "gb_per_second" has the heading "GB/s". A
    figure that is missing is a dash.
    """
    parts = [re.fullmatch(r"(\w+)(?:=([^:]*))?(?::(.*))?", column) for column in columns.split(" | ")]
    keys = [part.groups("") for part in parts if part]
    cells = [[title, *(head or heading_of(key) for key, head, _ in keys)]]
    for name, found in named.items() if isinstance(named, Mapping) else named:
        cells.append([name, *("-" if found.get(key) is None else format(found[key], spec) for key, _, spec in keys)])
    first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in cells]
    return lines + [f"{name:<{first}}  left out: {why}" for name, why in left_out.items()]


def heading_of(key: str) -> str:
    words = key.replace("_per_second", "/s").replace("_over_", "/").split("_")
    return " ".join(re.sub(r"^\w+", lambda word: UNITS.get(word[0], word[0]), word) for word in words)


def publish(found: dict[str, Any], lines: Iterable[str], args: argparse.Namespace) -> int:
    """Print the table, and write the JSON, with date and command, if --json asks for it; a command's exit status."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    found = {"date": date.today().isoformat(), "command": command} | found
    report.publish(found, "\n".join(lines), args.json)
    return 0
