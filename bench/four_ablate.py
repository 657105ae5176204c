"""Temporary: times of parts of the fused decoder for one row."""

import sys, time
from concurrent.futures import ThreadPoolExecutor
import checkout  # noqa
import cupy, numpy as np
from bench import harness
from bench.decode import by_own_ops, Options
from tinyforge.backends import get_backend, compile as kernels
from tinyforge.infer.cuda.decode_single import RowDecoder
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import scalar
from tinyforge.train.settings import PretrainSettings, config_of

ADD = "if (unit < units) add_unit<Product>(taken[unit], (first + unit) * Product::SPANNED, x, sum);"
AWAIT = "                queue.await(units);\n"
FILL = "            block.queue.fill<FILLERS>("
THERE = "for (int i = 0; i < N; i++) all &= there(p.v[i]);"
NOC, NOW, NOX = (
    [(ADD, "sum[0][0] += taken[unit].words.v[0] == 77;")],
    [(AWAIT, ""), (FILL, "            if (args.passes < 0) block.queue.fill<FILLERS>(")],
    [(THERE, ";")],
)
WIDE = [("if constexpr (COUNT <= 8) return request(got, at);", "return request(got, at);")]
VARIANTS = {0: [], 1: NOC, 2: NOW, 3: NOC + NOW, 4: NOX, 5: NOX + NOC, 6: NOX + NOW, 7: WIDE}
NAMES = ["full", "no compute", "no weights", "neither", "no exchange", "only weights", "only compute", "polls all"]
plain = kernels.specialise


def specialise(file, macros):
    m = dict(macros)
    k = m.pop("ABLATE", 0)
    text = plain(file, tuple(sorted(m.items())))
    for a, b in VARIANTS[k]:
        assert a in text, a
        text = text.replace(a, b)
    return text


kernels.specialise = specialise


def timed(launcher, cache, passes=16, n=5):
    best = []
    for _ in range(n):
        a, b = cupy.cuda.Event(), cupy.cuda.Event()
        a.record()
        launcher._launch(cache, 256, passes, 1, None, None)
        b.record()
        b.synchronize()
        best.append(cupy.cuda.get_elapsed_time(a, b) / passes * 1e3)
    return min(best)


def case(config, sets, kinds, ablate):
    c = config_of(PretrainSettings(model="llama", config=config, set=sets))
    backend = get_backend("cupy", "bf16", 1)
    for kind in kinds:
        t = time.time()
        model = harness.random_model("llama", c, backend, kind)
        o = Options(c, 1, 256, 8, 1, 1, "llama")
        d = RowDecoder(model, 300)
        text = o.text()
        d.prefill(0, text[0, :-1].tolist())
        found = d.step(text[:, -1:].tolist())[0, 0, 0]
        own = by_own_ops(o, model)[0]
        d.rewind([0])
        stepped = np.concatenate([d.step([[int(x)]])[0, 0] for x in text[0]])[-1]
        share = [float(np.abs(x - own).max() / np.abs(own).max()) for x in (found, stepped)]
        rms = float(np.sqrt(((found - own) ** 2).mean() / (own**2).mean()))
        launcher = d.launcher(1)
        print(
            config,
            kind or "bf16",
            "share",
            share,
            "rms",
            rms,
            "logits",
            float(np.abs(own).max()),
            float(own.std()),
            "us",
            round(timed(launcher, d.cache), 1),
            f"({time.time() - t:.0f} s)",
            flush=True,
        )
        if ablate and kind == "int4":
            plan = launcher.plan
            once = int(launcher.weights.matrices.nbytes > cupy.cuda.Device().attributes["L2CacheSize"])
            macros = {"SCALAR": scalar(launcher.weights.dtype), "ONCE": once, **plan.macros}
            make = lambda k: load(
                "infer/cuda/decode_single.cu",
                "decode",
                plan.shared_bytes,
                cooperative=True,
                arch="sm_90a",
                ABLATE=k,
                **macros,
            )
            with ThreadPoolExecutor(8) as pool:
                made = list(pool.map(make, VARIANTS))
            for k, kernel in zip(VARIANTS, made):
                launcher.kernel = kernel
                try:
                    print("  ", NAMES[k], round(timed(launcher, d.cache), 1), flush=True)
                except Exception as error:
                    print("  ", NAMES[k], "failed", error, flush=True)
                    raise
        del d, model, launcher
        cupy.get_default_memory_pool().free_all_blocks()


case("TinyLlama-1.1B", [], ["", "int8", "int4"], False)
case("Llama-3.1-8B", ["layers=8", "vocab=32000", "context=4096"], ["int4", ""], True)
case("TinyLlama-1.1B", [], ["int4"], True)
