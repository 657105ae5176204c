"""docs/models.md, generated from the registry, the models, and the measurements in docs/results.

Nothing here names a model. The page's figures come from three sources:

- parameters are counted;
- docs/results/models.json, written by `record`, has the worst gradient error of each model in the ledger, and the
  errors found by the parity tests (those with the fixture `parity` of tests/conftest.py);
- other files of docs/results have speed (every file that times a model and PyTorch) and training (the places in
  `ModelSpec.trained`).

A dash means not measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.files import read_json, write_whole
from tinyforge.gradcheck import check_op
from tinyforge.registry import ModelSpec, default_model, models
from tinyforge.zoo.shapes import count_parameters

PAGE, RESULTS = "docs/models.md", "docs/results"
RECORD = f"{RESULTS}/models.json"
GPU_LEDGER = f"{RESULTS}/gpu-gradcheck.json"
PARITY = "TINYFORGE_PARITY"
"""The environment variable that names the file to which the fixture `parity` appends its errors, as lines of JSON."""
NONE = "-"

HEAD = """# The models

Every model that is registered in this checkout, with what has been checked and measured of it. The page is written by
`python -m models page` from the registry ([`models/`](../models)), the models, and the files in [`results/`](results);
a test checks that it is up to date. A dash is what has not been measured.

`python -m models list` prints the sizes, `python -m models show NAME` one model layer by layer, with the memory of a
training step.

## Sizes
"""


def write(root: Path, check: bool = False) -> int:
    """Write the page of the checkout at `root`; with `check` only report whether it is stale. Returns 1 if so."""
    path = root / PAGE
    wanted = text(root)
    stale = not path.is_file() or path.read_text(encoding="utf-8") != wanted
    if stale and not check:
        write_whole(path, wanted)
    if stale:
        print(f"{'stale' if check else 'wrote'}: {PAGE}")
    return int(stale and check)


def text(root: Path) -> str:
    if not (root / RESULTS).is_dir():
        raise UserError(f"{root.resolve()} has no folder {RESULTS}; run it from the root of the repository")
    found = read_json(root / RECORD, "the record of checks") if (root / RECORD).is_file() else {}
    specs = list(models().values())
    parts = [HEAD, _sizes(specs, root), _checks(specs, found, root), _training(specs, root), _speed(specs, root)]
    return "\n".join([*parts, _backwards(specs, root)])


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def _linked(spec: ModelSpec, root: Path) -> str:
    page = f"models/{spec.name}.md"
    return f"[{spec.title}]({page})" if (root / "docs" / page).is_file() else spec.title


# --- sizes ------------------------------------------------------------------------------------------------------------


def _sizes(specs: list[ModelSpec], root: Path) -> str:
    rows = []
    for spec in specs:
        sizes = [f"`{name}` {count_parameters(spec, config):,}" for name, config in spec.presets.items()]
        rows.append([_linked(spec, root), spec.summary, "<br>".join(sizes), spec.source or NONE])
    return _table(["model", "what it is", "presets, parameters", "source"], rows)


def _backwards(specs: list[ModelSpec], root: Path) -> str:
    lines = [f"- **{_linked(spec, root)}.** {spec.backward or NONE}" for spec in specs]
    return "\n".join(["## What is new in the backward", "", *lines, ""])


# --- checks -----------------------------------------------------------------------------------------------------------


def _checks(specs: list[ModelSpec], found: Mapping[str, Any], root: Path) -> str:
    on_gpu = read_json(root / GPU_LEDGER, "the ledger")["rows"] if (root / GPU_LEDGER).is_file() else []
    rows = []
    for spec in specs:
        ledger, parity = found.get("ledger", {}).get(spec.name), found.get("parity", {}).get(spec.name, {})
        cells = [NONE, NONE] if ledger is None else [str(ledger["gradients"]), f"{ledger['error']:.1e}"]
        kernels = [row["error"] for row in on_gpu if row["op"] == spec.build.__name__]
        cells.append(f"{max(kernels):.1e}" if kernels else NONE)
        rows.append([spec.title, *cells, *(_parity(parity.get(what)) for what in ("logits", "gradients"))])
    head = ["model", "gradients", "ledger, worst", "with CUDA kernels", "parity: logits", "parity: gradients"]
    words = (
        "## What is checked\n\nThe ledger compares each parameter's gradient with finite differences in float64; the "
        "bound is 1e-8.\nParity is the largest difference from another library's model with the same weights, in "
        "float64, relative to the\nlargest value. `python -m models record` measures both, the CUDA kernels aside.\n"
    )
    return f"{words}\n{_table(head, rows)}"


def _parity(entry: Mapping[str, Any] | None) -> str:
    return f"{entry['error']:.1e}, {entry['peer']}" if entry else NONE


def record(root: Path) -> None:
    """Measure the ledger of every registered model, run the parity tests, and write both to docs/results.

    Raises UserError if a test fails, and if `root` has no tests.
    """
    if not (root / "tests").is_dir():
        raise UserError(f"{root.resolve()} has no folder tests; run it from the root of the repository")
    backend = get_backend("numpy", "fp64", workers=1)
    ledger = {}
    for spec in models().values():
        rows = check_op(spec.build, backend)  # type: ignore[arg-type]
        ledger[spec.name] = {"error": max(row.error for row in rows), "gradients": len(rows)}
        print(f"{spec.name:<12} {ledger[spec.name]['error']:.1e} over {len(rows)} gradients", flush=True)
    parity = _run_parity(root)
    peers = sorted({entry["peer"] for entries in parity.values() for entry in entries.values()})
    versions = {name: version(name) for name in ("numpy", *peers)}
    found = {"ledger": ledger, "parity": parity, "versions": versions}
    write_whole(root / RECORD, json.dumps(found, indent=1) + "\n")
    print(f"wrote {RECORD}; now python -m models page")


def _run_parity(root: Path) -> dict[str, dict[str, Any]]:
    """The worst errors that the tests find, by model and quantity."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "parity"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
        done = subprocess.run(command, cwd=root, env={**os.environ, PARITY: str(target)})
        if done.returncode:
            raise UserError(f"the parity tests ended with pytest's status {done.returncode}, see above, and nothing is "
                            "written; they need PyTorch and transformers: pip install -e '.[peers]'")  # fmt: skip
        lines = target.read_text(encoding="utf-8").splitlines() if target.is_file() else []
    found: dict[str, dict[str, Any]] = {}
    for line in map(json.loads, lines):
        entries = found.setdefault(line["model"], {})
        worst = entries.setdefault(line["what"], {"error": 0.0, "peer": line["peer"], "tests": 0})
        worst["error"], worst["tests"] = max(worst["error"], line["error"]), worst["tests"] + 1
    return found


# --- measurements -----------------------------------------------------------------------------------------------------


def _training(specs: list[ModelSpec], root: Path) -> str:
    rows = []
    for spec in specs:
        figures = spec.trained or {NONE: ""}
        for number, (what, place) in enumerate(figures.items()):
            name = place.partition("#")[0]
            value = f"[{_value(root, place):.3f}](results/{name})" if place else NONE
            rows.append([spec.title if number == 0 else "", what, value])
    return f"## What was trained\n\n{_table(['model', 'what', 'figure'], rows)}"


def _value(root: Path, place: str) -> float:
    """The number at FILE#a/b/c, where a number among a, b, c is an index into a list. UserError if there is none."""
    name, _, keys = place.partition("#")
    found: Any = read_json(root / RESULTS / name, "the results")
    try:
        for key in keys.split("/"):
            found = found[int(key) if isinstance(found, list) else key]
        return float(found)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise UserError(f"{RESULTS}/{name} has no number at {keys}; correct the model's `trained`") from error


@dataclass(frozen=True)
class Timed:
    """A model's time and PyTorch's best, from a file of docs/results."""

    model: str
    what: str
    machine: str
    ours: float
    theirs: float
    peer: str
    unit: str
    file: str


def timings(root: Path) -> Iterator[Timed]:
    """The timings of registered models and PyTorch, in training or decoding, in docs/results."""
    for path in sorted((root / RESULTS).glob("*.json")):
        found = read_json(path, "the results")
        results, config = found.get("results"), found.get("config")
        spec = models().get(str(found.get("model", default_model())))  # early files do not name it
        if spec is None or not isinstance(results, dict) or not isinstance(config, dict):
            continue
        ours, unit = results.get("tinyforge", {}), "ms" if "seq_len" in found else "us"
        if f"median_{unit}" not in ours or not config.keys() <= {field.name for field in fields(spec.config)}:
            continue
        peers = {name: times[f"median_{unit}"] for name, times in results.items() if name.startswith("torch")}
        if not peers:
            continue
        batch, preset = found["batch_size"], _preset(spec, config)
        texts = f"a token for each of {batch} texts" if batch > 1 else "a token"
        what = f"training step, {batch} x {found['seq_len']} tokens" if unit == "ms" else f"decoding {texts}"
        device = found["device"]
        place = str(device["gpu"]).partition(" (")[0] if "gpu" in device else f"{device['cores']} CPU cores"
        peer = min(peers, key=peers.__getitem__)
        yield Timed(spec.name, f"{preset}: {what}" if preset else what, f"{place}, {found['precision']}",
                    ours[f"median_{unit}"], peers[peer], peer.removeprefix("torch "), unit, path.name)  # fmt: skip


def _preset(spec: ModelSpec, config: Mapping[str, Any]) -> str:
    """The preset of a config, whatever its context and vocabulary; "" for none. Files without a dropout mean 0."""

    def shape(values: Mapping[str, Any]) -> dict[str, Any]:
        own = json.loads(json.dumps({"dropout": 0.0, **values}))  # tuples are lists in a file
        return {name: value for name, value in own.items() if name not in ("context", "vocab")}

    return next((name for name, preset in spec.presets.items() if shape(preset.to_dict()) == shape(config)), "")


def _speed(specs: list[ModelSpec], root: Path) -> str:
    found = list(timings(root))
    rows = []
    for spec in specs:
        own = [timed for timed in found if timed.model == spec.name]
        rows += [[spec.title, t.what, t.machine, f"[{_number(t.ours)} {t.unit}](results/{t.file})",
                  f"{_number(t.theirs)} {t.unit} ({t.peer})", f"**{t.ours / t.theirs:.2f}**"] for t in own]  # fmt: skip
        if not own:
            rows.append([spec.title, *[NONE] * 5])
    head = ["model", "what", "machine", "tinyforge", "PyTorch", "ratio"]
    return f"## Speed beside PyTorch\n\n{_table(head, rows)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
