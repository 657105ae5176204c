"""llama.cpp, from PyPI's xllamacpp: in this process, or as a server that ends with its standard input.

python bench/llama_cpp.py MODEL.gguf [THREADS]       prints its address
"""

from __future__ import annotations

import sys
from typing import Any

import xllamacpp


def started(file: str, threads: int = 1, rows: int = 8, context: int = 16384) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_parallel, params.n_ctx = file, 0, rows, context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = -1
    return xllamacpp.Server(params)


if __name__ == "__main__":
    server = started(sys.argv[1], *map(int, sys.argv[2:]))
    print(server.listening_address, flush=True)
    sys.stdin.read()
