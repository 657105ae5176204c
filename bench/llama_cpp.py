"""llama.cpp, from PyPI's xllamacpp: in this process, or as a server that ends with its standard input.

    python bench/llama_cpp.py MODEL.gguf [THREADS]       prints its address

An environment that has xllamacpp need not have what tinyforge needs: only the command imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def started(file: str, threads: int = 1, rows: int = 8, context: int = 16384) -> Any:
    import xllamacpp  # a peer, which few have

    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_parallel, params.n_ctx = file, 0, rows, context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = -1
    return xllamacpp.Server(params)


def serve(file: str, threads: int = 1) -> None:
    server = started(file, threads)
    print(server.listening_address, flush=True)
    sys.stdin.read()


def main(argv: Sequence[str] | None = None) -> int:
    from tinyforge.errors import Parser

    parser = Parser(prog="python bench/llama_cpp.py", description=__doc__)
    parser.add_argument("model", metavar="MODEL.gguf")
    parser.add_argument("threads", nargs="?", type=int, default=1, metavar="THREADS")
    args = parser.parse_args(argv)
    serve(args.model, args.threads)
    return 0


if __name__ == "__main__":
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

    from tinyforge.errors import run_command

    run_command(main)
