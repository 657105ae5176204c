"""Serve a model over HTTP, in OpenAI's protocol, with a page to chat in at /.

    python -m tinyforge.serve                                     the newest run, else the storyteller
    python -m tinyforge.serve --checkpoint SmolLM2-135M-Instruct  a run, a Hugging Face directory, a .gguf file
    python -m tinyforge.serve --checkpoint base --adapter lora    a base with its adapter
    TINYFORGE_API_KEY=secret python -m tinyforge.serve --host 0.0.0.0 --allow-host my.name

What a request leaves out about sampling is taken from the generation_config.json next to the model's weights, as in
vLLM, else from OpenAI's defaults.

It listens on this machine only, unless --host says otherwise. After Ctrl-C or SIGTERM it finishes running replies.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyforge.backends import get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.formats import Loaded, add_checkpoint_flag, add_computing_flags, open_model, resolve_checkpoint
from tinyforge.formats.runs import add_template_flag, short_name, with_template
from tinyforge.hosts import add_allow_host_flag
from tinyforge.infer.cache import array_bytes
from tinyforge.infer.causal_lm import check_causal_lm
from tinyforge.infer.embeddings import is_encoder, takes_first
from tinyforge.infer.scheduler import Scheduler
from tinyforge.requirements import needs
from tinyforge.terminal import one_line

KEY = "TINYFORGE_API_KEY"
CACHE_BYTES = 2 << 30
MOST_ROWS = {"numpy": 64, "cupy": 256, "webgpu": 64}
LOCAL = ("127.0.0.1", "localhost", "::1")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def default_rows(model: Any, capacity: int) -> int:
    """The rows whose caches fit CACHE_BYTES, at most 64 on a CPU and 256 on a GPU."""
    weights = model.fused_weights()
    if weights is not None:
        numbers = 2 * len(weights.layers) * weights.kv_heads * weights.head_dim * capacity
        size = numbers * model.backend.dtype.itemsize
    else:
        # The difference is one position more: a new cache has room for the first 512 alone.
        one, two = (array_bytes(vars(model.make_cache(1, length))) for length in (1, 2))
        size = one + (two - one) * (capacity - 1)
    return max(1, min(MOST_ROWS.get(model.backend.name, 64), CACHE_BYTES // max(1, size)))


def flags() -> Parser:
    parser = Parser(prog="python -m tinyforge.serve", description=__doc__)
    add_checkpoint_flag(parser)
    parser.flag("--adapter", str, "a LoRA adapter, merged into the checkpoint", metavar="DIR")
    add_template_flag(parser)
    parser.flag("--name", str, "name of the model (default: that of its file or folder)")
    parser.flag("--host", "127.0.0.1", "address to listen on")
    parser.flag("--port", 8000, "port, 0 for any free one", 0, 65535)
    add_computing_flags(parser)
    parser.flag(
        "--rows",
        int,
        "texts decoded together (default: up to 64 on a CPU and 256 on a GPU, as many as fit 2 GiB of cache)",
        *(1, 4096),
        metavar="N",
    )
    parser.flag("--queue", 256, "texts that may wait", 0, 1_000_000, metavar="N")
    parser.flag("--context", int, "tokens of a text (default: the model's)", 2, metavar="N")
    parser.flag("--max-tokens", int, "longest reply (default: the context)", 1, metavar="N")
    parser.flag("--max-n", 8, "texts per prompt", 1, 1024, metavar="N")
    parser.flag("--max-body", 1 << 20, "largest request body", 1, 1 << 30, metavar="BYTES")
    parser.flag("--deadline", 600.0, "for a request, waiting included", 0.001, 10_000_000, metavar="SECONDS")
    parser.flag("--drain", 30.0, "for running replies after SIGTERM", 0, 10_000_000, metavar="SECONDS")
    parser.flag("--prefix-mib", 256, "cache for shared beginnings of prompts", 0, 1 << 20, metavar="N")
    parser.flag(
        "--reasoning-format",
        "auto",
        "none leaves a reply's thoughts in its text; else they are its reasoning_content",
        choices=("auto", "deepseek", "none"),
    )
    add_allow_host_flag(parser)
    origin = "origin of a page that may call it, e.g. http://localhost:5173; * for any"
    parser.flag("--cors-origin", [], origin, action="append", metavar="ORIGIN")
    return parser


def check(args: argparse.Namespace) -> None:
    for origin in args.cors_origin:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise UserError(
                f"--cors-origin is {origin}, expected * or scheme://host[:port] in lower case, without a path, "
                "e.g. http://localhost:5173"
            )


def loaded_model(args: argparse.Namespace) -> tuple[Loaded, str]:
    """The model, and the name of its registered spec."""
    path = resolve_checkpoint(args.checkpoint, for_chat=True) if args.checkpoint or not args.adapter else None
    backend = get_backend(args.backend, args.precision, workers=1)
    opened = open_model(resolve_checkpoint(args.adapter), base=path) if args.adapter else open_model(path or Path())
    loaded = opened.build(backend, frozen=True, weights=args.weights)
    if not is_encoder(loaded.model):
        check_causal_lm(loaded.model)
    loaded = with_template(loaded, args.template, args.template_variables)
    if loaded.template.name == "plain" and not is_encoder(loaded.model):
        print("note: the model has no chat template and continues the text; --template takes one", file=sys.stderr)
    return loaded, opened.spec.name


def cannot_listen(host: str, port: int, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(f"cannot listen on {host}, port {port}: {reason}; choose another --host or --port")


def listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, UnicodeError, OverflowError) as error:
        raise cannot_listen(host, port, error) from error
    return bound


def main(argv: Sequence[str] | None = None) -> int:
    args = flags().parse_args(argv)
    check(args)
    for package in ("starlette", "uvicorn", "pydantic", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise UserError(needs("the server", package, "serve"))
    bound = listening(args.host, args.port)
    loaded, spec = loaded_model(args)
    # Not at the top: they take a second to import, and a wrong flag should be reported at once.
    from tinyforge.serve.app import App
    from tinyforge.serve.engine import Engine, NoTexts
    from tinyforge.serve.http import Server
    from tinyforge.serve.protocol import Limits

    model, context = loaded.model, loaded.model.config.context
    capacity = min(args.context or context, context)
    if capacity < 2:
        raise UserError(f"{loaded.path}: its context of {capacity} token has no room for a reply; use another model")
    if is_encoder(model):
        rows, engine = 1, Engine(NoTexts(capacity), loaded.tokenizer)
    else:
        rows = args.rows or default_rows(model, capacity)
        model.mostly_decodes = True  # attention pictures and embeddings may take longer
        scheduler = Scheduler(model, rows, capacity=capacity, queue=args.queue, prefix_bytes=args.prefix_mib << 20)
        engine = Engine(scheduler, loaded.tokenizer)
    limits = Limits(
        max_tokens=args.max_tokens or capacity,
        n=min(args.max_n, rows + args.queue),
        body=args.max_body,
        seconds=args.deadline,
    )
    where = resolve_checkpoint(args.adapter) if args.adapter else loaded.path
    name = args.name or short_name(where)
    host = f"[{args.host}]" if ":" in args.host else args.host
    app = App(
        engine,
        loaded.template,
        name,
        model,
        spec,
        limits,
        os.environ.get(KEY, ""),
        [args.host, *args.allow_host],
        args.cors_origin,
        generation=loaded.generation,
        first=is_encoder(model) and takes_first(loaded.path),
        separate_thoughts=args.reasoning_format != "none",
    )

    def ready() -> None:
        engine.start()
        print(one_line(f"serving {name} at http://{host}:{bound.getsockname()[1]}"), flush=True)
        if args.host not in LOCAL and not os.environ.get(KEY):
            print(f"warning: anyone who can reach {host} can use it; set {KEY} to require a key", file=sys.stderr)

    def drain() -> None:
        engine.draining = True
        asyncio.get_running_loop().call_later(args.drain, engine.cancel_all)

    gc.freeze()  # the model and the libraries stay: collections during a request need not look at them
    server = Server(app.asgi, args.drain, ready, drain)
    try:
        server.run(sockets=[bound])
    except OSError as error:  # another server has begun to listen there while the model was read
        raise cannot_listen(args.host, args.port, error) from error
    finally:
        engine.stop()
    return 0


if __name__ == "__main__":
    run_command(main)
