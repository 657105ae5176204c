"""Kernels are found, specialised and compiled without a GPU: NVRTC comes from pip, and needs no driver."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.on_host import same_layout
from tinyforge.backends import compile as kernels
from tinyforge.backends.variants import MAY_SPILL, VARIANTS, every, smallest
from tinyforge.infer.cuda.arguments import batched_arguments, single_arguments

FILES = sorted(VARIANTS)


def nvrtc() -> Any:
    """CuPy's door to NVRTC, if CUDA's compiler is installed after it."""
    found = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed")
    try:
        found.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f'NVRTC is not installed (pip install "cupy-cuda13x[ctk]"): {error}')
    return found


@pytest.fixture
def compiler() -> Any:
    return nvrtc()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("file", FILES)
def test_every_variant_compiles_and_spills_no_register(file: str, arch: str, compiler: Any) -> None:
    listed, spilled = VARIANTS[file], []
    for macros in (*listed, *({**v, "DROP": 2} for v in listed if "DROP" in v)):
        if str(macros.get("arch", arch)).rstrip("a") != arch:  # made for another architecture
            continue
        log = kernels.compile_to_cubin(file, macros, arch)
        assert "Used" in log, f"no report on registers: {log}"
        if macros.get("DROP") != 2 and any(map(int, re.findall(r"(\d+) bytes spill", log))):
            spilled.append(kernels.describe(file, macros))
    assert not spilled or file in MAY_SPILL


@pytest.mark.parametrize("file", [name for name in FILES if name.startswith("ops/attention")])
def test_no_function_of_attention_forgets_a_parameter(file: str, compiler: Any) -> None:
    """In the last variant of each part, the one with the most options: NVRTC's warning 826, made an error."""
    for macros in ({**v} for v in {v.get("PART"): v for v in VARIANTS[file]}.values()):
        arch = str(macros.pop("arch", "sm_90")).replace("sm", "compute")  # to PTX only: faster
        code = kernels.specialise(file, tuple(sorted(macros.items())))
        program = compiler.createProgram(code, file, (), ())
        try:
            compiler.compileProgram(program, (*kernels.OPTIONS, f"-arch={arch}", "--diag-error=826"))
        except compiler.NVRTCError:
            pytest.fail(compiler.getProgramLog(program))
        finally:
            compiler.destroyProgram(program)


QUERY_TILES = """
#include <cstdio>
#include <cstdlib>
#define __device__
typedef long long i64;
typedef unsigned u32;
typedef float Number;
struct float2 { float x, y; };
constexpr int TILE = 64, THREADS = 128, D = 32, TILE_BYTES = 0, GROUP = 3;
Number numbers[GROUP * D];
float2 pairs[GROUP * 256];
template <int COUNT, int BY> void load_rows(u32, const Number *from, i64, int first, int, int) {
    printf("%d %d ", int(from - numbers) / D, first);
}
void copy_async_8(u32, const void *from, bool) { printf("%d\\n", int(static_cast<const float2 *>(from) - pairs)); }
void copy_commit() {}
STRUCT
int main(int, char **x) {
    QueryTiles tiles(numbers, numbers, pairs, D, D, atoi(x[1]), atoi(x[2]), atoi(x[3]));
    while (tiles.head < GROUP) tiles.load_next(0, 0, 0, 0);
}
"""


def test_queries_are_loaded_up_to_where_the_kernels_stop_reading_them(tmp_path: Path) -> None:
    """The kernels that own keys read tiles from `start` to `stop`, head after head; QueryTiles, run on the host here,
    loads them ahead. Documents let them stop before the last query."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    struct = re.search(
        r"^struct QueryTiles \{.*?^\};", kernels.read("ops/attention_stream.cuh"), re.MULTILINE | re.DOTALL
    )
    assert struct is not None
    source, program = tmp_path / "tiles.cpp", tmp_path / "tiles"
    source.write_text(QUERY_TILES.replace("STRUCT", struct[0]), encoding="utf-8")
    subprocess.run([compiler, "-std=c++17", "-o", program, source], check=True)
    for queries, start, stop in ((200, 0, 200), (200, 128, 200), (200, 0, 65), (200, 64, 128), (70, 64, 70)):
        done = subprocess.run([program, *map(str, (queries, start, stop))], capture_output=True, text=True, check=True)
        expected = [(h, t, h, t, h * queries + t) for h in range(3) for t in range(start, stop, 64)]
        assert [tuple(map(int, line.split())) for line in done.stdout.splitlines()] == expected, (queries, start, stop)


@pytest.mark.parametrize("scalar", ["float", "double"])
@pytest.mark.parametrize(("file", "struct"), [("single", single_arguments), ("batched", batched_arguments)])
def test_a_decoding_kernel_and_its_launcher_agree_on_the_arguments(
    file: str, struct: Callable[[np.dtype], np.dtype], scalar: str, compiler: Any
) -> None:
    file = f"infer/cuda/decode_{file}.cu"
    macros = next(v for v in VARIANTS[file] if v["SCALAR"] == scalar and "WEIGHT" not in v)
    code = kernels.specialise(file, tuple(sorted(macros.items()))) + same_layout(
        struct(np.dtype({"float": "f4", "double": "f8"}[scalar]))
    )
    program = compiler.createProgram(code, file, (), ())
    try:
        compiler.compileProgram(program, (*kernels.OPTIONS, "-arch=compute_80"))
    except compiler.NVRTCError:
        pytest.fail(compiler.getProgramLog(program))
    finally:
        compiler.destroyProgram(program)


def test_the_table_has_every_file_of_the_package() -> None:
    assert kernels.kernel_files() == FILES


def test_headers_are_pasted_in_and_lines_keep_their_numbers() -> None:
    text = kernels.specialise("ops/rope.cu", (("SCALAR", "float"), ("VEC", 4)))
    assert text.startswith('#define SCALAR float\n#define VEC 4\n#line 1 "tinyforge/ops/rope.cu"\n')
    assert "#include" not in text and '#line 1 "tinyforge/ops/common.cuh"' in text
    source = (kernels.files("tinyforge") / "ops/rope.cu").read_text(encoding="utf-8").split("\n")
    number, after = re.search(r'#line (\d+) "tinyforge/ops/rope.cu"\n(?!//|#line)([^\n]*)', text).groups()  # type: ignore
    assert source[int(number) - 1] == after


def test_variants_are_every_combination() -> None:
    assert every(SCALAR=("float", "bf16"), VEC=(1, 4), PER=0) == [
        {"SCALAR": scalar, "VEC": vec, "PER": 0} for scalar in ("float", "bf16") for vec in (1, 4)
    ]
    for file, variants in VARIANTS.items():
        assert len({tuple(sorted(v.items())) for v in variants}) == len(variants) > 0, file


def test_the_smallest_value_that_is_compiled_is_chosen() -> None:
    row = {"SCALAR": "bf16", "VEC": 8}
    assert [smallest("ops/rmsnorm.cu", "PER", n, **row) for n in (0, 1, 2, 3, 4, 5)] == [1, 1, 3, 3, 4, 0]
    assert smallest("ops/rmsnorm.cu", "PER", 1, SCALAR="bf16", VEC=1) == 0


def test_a_launcher_reads_the_constants_of_its_kernel() -> None:
    assert kernels.constant("ops/rows.cuh", "STAGES") >= 1
    with pytest.raises(kernels.KernelError, match="embedding.cu has no line `#define STAGES <number>`"):
        kernels.constant("ops/embedding.cu", "STAGES")


def test_an_error_names_the_file_the_macros_and_the_line(compiler: Any) -> None:
    with pytest.raises(kernels.KernelError) as caught:
        kernels.compile_to_cubin("ops/swiglu.cu", {"SCALAR": "float", "VEC": "nonsense"}, "sm_80")
    message = str(caught.value)
    assert message.startswith("tinyforge/ops/swiglu.cu with SCALAR=float VEC=nonsense does not compile for sm_80:\n")
    assert re.search(r'tinyforge/ops/swiglu\.cu\(\d+\): error: identifier "nonsense" is undefined', message)


def test_a_file_of_ones_own_includes_headers_beside_it_and_of_the_package(tmp_path: Path, compiler: Any) -> None:
    (tmp_path / "mine.cuh").write_text("#define FACTOR 3\n", encoding="utf-8")
    source = tmp_path / "mine.cu"
    source.write_text(
        '#include "ops/common.cuh"\n#include "mine.cuh"\n'
        'extern "C" __global__ void triple(SCALAR *x) { narrow(FACTOR * widen(x[0]), x[0]); }\n',
        encoding="utf-8",
    )
    for scalar in ("float", "bf16"):
        assert "Used" in kernels.compile_to_cubin(source, {"SCALAR": scalar}, "sm_80")
    source.write_text("nonsense\n", encoding="utf-8")
    kernels.read.cache_clear()
    kernels.specialise.cache_clear()
    with pytest.raises(kernels.KernelError, match=rf"{source} with no macros does not compile.*\n(.*\n)*{source}\(1\)"):
        kernels.compile_to_cubin(source, {}, "sm_80")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(kernels.KernelError, match=r"tinyforge/mine.cu does not exist; .* full path"):
        kernels.read("mine.cu")
