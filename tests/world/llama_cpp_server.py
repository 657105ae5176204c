"""llama.cpp's server, from the package xllamacpp: python llama_cpp_server.py MODEL [THREADS] prints its address.

It ends with its standard input.
"""

from __future__ import annotations

import sys

import xllamacpp

if __name__ == "__main__":
    wish = xllamacpp.CommonParams()
    wish.model.path, wish.port, wish.n_ctx, wish.n_parallel = sys.argv[1], 0, 16384, 8
    wish.cpuparams.n_threads = wish.cpuparams_batch.n_threads = int((*sys.argv, "1")[2])
    server = xllamacpp.Server(wish)
    print(server.listening_address, flush=True)
    sys.stdin.read()
