"""Write a folder of static files: a page that runs a model in the browser, without a server.

    python -m tinyforge.web site --checkpoint storyteller
    python -m http.server --directory site                  then open http://localhost:8000

Any static host serves the folder: GitHub Pages, a bucket, a web server. It has the chat page, the model's tokenizer,
its weights in int8, and what runs them: kernels in WGSL where the browser has a GPU for them, else JavaScript. Nothing
is fetched from elsewhere, nothing that is typed leaves the browser, and from the second visit on it works offline.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.backends import get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import folder_written_whole, writing
from tinyforge.formats import Loaded, Opened, add_checkpoint_flag, hub, open_model, resolve_checkpoint
from tinyforge.formats.runs import add_template_flag, short_name, with_template
from tinyforge.infer.causal_lm import FusedWeights
from tinyforge.quantised import Quantised, quantise
from tinyforge.terminal import one_line
from tinyforge.tokenizers import Tokenizer
from tinyforge.web.conversation import fixed_parts, pattern

HERE = Path(__file__).parent
CHAT, OWN = HERE.parent / "serve" / "page", HERE / "page"  # of the server's page all but api.js, which OWN has
PARTS = ("ops/float32.wgsl", "ops/group.wgsl", "infer/codes_int8.wgsl", "infer/decode.wgsl")
KERNELS = [HERE.parent / name for name in PARTS]
CONTEXT = 2048
"""Positions of which the page keeps keys and values, at most, unless --context says otherwise."""
PART = 8 << 20
"""Bytes of a file of weights: some hosts take no large ones, and a broken connection costs one of them."""
MOST = 2000 << 20
"""Bytes of weights that a browser holds in one array."""
ATTENTION_TOKENS = 512
POLICY = (
    "default-src 'none'; script-src 'self' '{hash}'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
FROM_DISK = 'if (location.protocol === "file:") document.getElementById("disk").hidden = false;'
DISK_TEXT = "This page needs a web server. In its folder type <code>python -m http.server</code>, then open http://localhost:8000"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tinyforge.web", description=__doc__)
    parser.add_argument("out", metavar="OUT", help="the folder to write; it must not be there yet")
    add_checkpoint_flag(parser)
    add_template_flag(parser)
    parser.flag("--name", str, "name of the model on the page (default: that of its file or folder)")
    parser.flag(
        "--context", int, f"tokens of a conversation at most (default: the model's, up to {CONTEXT})", 16, metavar="N"
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    if out.exists():
        raise UserError(f"{out} exists already; remove it, or choose another name")
    path = resolve_checkpoint(args.checkpoint, for_chat=True)
    opened = open_model(path)
    check(opened)
    loaded = opened.build(get_backend("numpy", "fp32", workers=1), frozen=True, weights="int8")
    loaded = with_template(loaded, args.template, args.template_variables)
    name = args.name or short_name(path)
    size = write(out, loaded, name, min(args.context or CONTEXT, loaded.model.config.context))
    serve = f"python -m http.server --directory {shlex.quote(str(out))}"
    print(one_line(f"wrote {out}: {name}, {size / 1e6:.1f} MB; try it: {serve}"))
    return 0


def check(opened: Opened) -> None:
    """UserError, before the weights are read, for a model that the page cannot run."""
    called = f"{hub.called(opened.path)} is a {opened.spec.title}"
    model = opened.spec.build(opened.config, MetaBackend("fp32"))
    if getattr(model, "fused_weights", lambda: None)() is None:
        shape = getattr(model, "shape", None)
        more = [option for option in shape.options() if option != "rotary_dim"] if shape else []
        options = f" with {', '.join(more)}" if more else ""
        raise UserError(f"{called}{options}; the page runs NanoEuler and Llama without options: use another model")
    c = model.fused_weights()
    if any(width % 4 for width in (c.dim, c.hidden, c.heads * c.head_dim)):
        raise UserError(f"{called} with a width that 4 does not divide, as the page's kernels need: use another model")
    if not isinstance(opened.tokenizer, Tokenizer) or opened.tokenizer.joint:
        kind = type(opened.tokenizer).__name__
        raise UserError(f"{called} with a tokenizer of kind {kind}; the page reads merges of bytes: use another model")
    if (size := sum(p.size for p in model.buffer.params)) > MOST:
        raise UserError(f"{called} of {size:,} parameters; a browser holds {MOST:,} of one byte: use a smaller model")


def write(out: Path, loaded: Loaded, name: str, context: int) -> int:
    """Write the page's folder, whole or not at all; returns its size in bytes. UserError if it cannot be written."""
    weights = loaded.model.fused_weights()
    tensors, places = lay_out(weights, context, bool(getattr(loaded.model.config, "tied", False)))
    parts = fixed_parts(loaded)
    manifest: dict[str, Any] = {
        "name": name,
        "about": about(loaded, context) | {"system_prompt": parts["system"] is not None},
        "shape": shape(weights, context),
        "template": parts,
        "pattern": pattern(loaded.tokenizer),
        "tensors": places,
    }
    with writing(out), folder_written_whole(out) as partial:
        manifest["parts"] = list(write_parts(partial, tensors))
        loaded.tokenizer.save(partial / "tokenizer.json")
        (partial / "model.json").write_text(json.dumps(manifest), encoding="utf-8")
        write_page(partial)
        size = sum(file.stat().st_size for file in partial.iterdir())
    return size


def lay_out(weights: FusedWeights, context: int, tied: bool) -> tuple[list[np.ndarray], dict[str, dict[str, Any]]]:
    """The arrays of the weights in the order of the file, and the place of each: "at", a number of bytes, "shape", and
    "scales", the place of a matrix's scales."""
    gains = [np.asarray(gain, np.float32) for gain in weights.gains]
    floats = {"cos": weights.cos[:context], "sin": weights.sin[:context], "final_gain": gains[-1][None]}
    codes: dict[str, np.ndarray] = {}

    def add(name: str, matrix: Any, row: int | None = None) -> None:
        held, scales = (matrix.codes, matrix.scales) if isinstance(matrix, Quantised) else quantise(matrix, "int8")
        codes[name] = held if row is None else held[row]
        floats[f"{name} scales"] = (scales if row is None else scales[row])[None]

    if tied:
        add("embedding", weights.lm_heads, 0)
    else:
        add("embedding", weights.embedding)
        add("head", weights.lm_heads, 0)
    for i, layer in enumerate(weights.layers):
        floats[f"{i}.gain1"], floats[f"{i}.gain2"] = gains[2 * i][None], gains[2 * i + 1][None]
        for name, matrix in layer._asdict().items():
            add(f"{i}.{name}", matrix)
    arrays: list[np.ndarray] = []
    places: dict[str, dict[str, Any]] = {}
    at = 0
    for name, array in [*floats.items(), *codes.items()]:
        array = np.ascontiguousarray(array, np.int8 if name in codes else "<f4")
        places[name] = {"at": at, "shape": list(array.shape)}
        padding = -array.nbytes % 4
        arrays += [array.reshape(-1).view(np.uint8), np.zeros(padding, np.uint8)]
        at += array.nbytes + padding
    for name in codes:
        places[name]["scales"] = places.pop(f"{name} scales")["at"]
    return arrays, places


def shape(weights: FusedWeights, context: int) -> dict[str, Any]:
    names = ("dim", "hidden", "heads", "kv_heads", "head_dim", "vocab", "norm_eps")
    return {name: getattr(weights, name) for name in names} | {"context": context, "layers": len(weights.layers)}


def about(loaded: Loaded, context: int) -> dict[str, Any]:
    """What the server says of its model, for the chat page. local: nothing is sent anywhere."""
    c = loaded.model.fused_weights()
    return {
        "local": True,
        "parameters": int(loaded.model.buffer.count),
        "context": context,
        "vocab": c.vocab,
        "template": loaded.template.name,
        "chat": loaded.template.name != "plain",
        "most_drafts": 0,
        "layers": len(c.layers),
        "heads": c.heads,
        "attention": True,
        "attention_tokens": min(ATTENTION_TOKENS, context),
        "limits": {"max_tokens": context},
        "sampling": dict(loaded.generation.fields),
    }


def write_parts(folder: Path, arrays: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
    """Write the weights in files of PART bytes, named by their content: browsers keep them for ever."""
    data = np.concatenate(arrays)
    for start in range(0, len(data), PART):
        part = data[start : start + PART].tobytes()
        file = f"weights-{hashlib.sha256(part).hexdigest()[:16]}.bin"
        (folder / file).write_bytes(part)
        yield {"file": file, "bytes": len(part)}


def write_page(folder: Path) -> None:
    """The page: the server's, with its own api.js and what that needs."""
    for file in [*CHAT.iterdir(), *OWN.iterdir()]:
        if file.name not in ("index.html", "sw.js"):
            shutil.copyfile(file, folder / file.name)
    (folder / "index.html").write_text(index(), encoding="utf-8")
    kernels = "".join(file.read_text(encoding="utf-8") for file in KERNELS)
    (folder / "decode.wgsl").write_text(f"alias real = f32;\nalias word = u32;\n{kernels}", encoding="utf-8")
    files = sorted(file.name for file in folder.iterdir() if file.suffix != ".bin")
    version = hashlib.sha256(b"\0".join((folder / name).read_bytes() for name in files)).hexdigest()[:16]
    worker = (OWN / "sw.js").read_text(encoding="utf-8")
    filled = f"const VERSION = {json.dumps(version)}, FILES = {json.dumps(['./', *files])};"
    (folder / "sw.js").write_text(worker.replace('const VERSION = "", FILES = [];', filled), encoding="utf-8")


def index() -> str:
    """The server's page with a content security policy of its own, and a line for those who open it from disk."""
    page = (CHAT / "index.html").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(FROM_DISK.encode()).digest()).decode()
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(hash=f"sha256-{digest}")}">'
    disk = (
        f'<p id="disk" class="problem" role="alert" hidden><span>{DISK_TEXT}</span></p>\n<script>{FROM_DISK}</script>\n'
    )
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{policy}').replace(
        "<body>\n", f"<body>\n{disk}<noscript>This page needs JavaScript.</noscript>\n"
    )


if __name__ == "__main__":
    run_command(main)
