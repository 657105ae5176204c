"""Kernels are found, specialised and compiled without a GPU: NVRTC comes from pip, and needs no driver."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tinyforge.backends import compile as kernels

FILES = kernels.kernel_files()


def nvrtc() -> Any:
    """CuPy's door to NVRTC, if CUDA's compiler is installed behind it."""
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
def test_every_variant_compiles_and_keeps_its_promise(file: str, arch: str, compiler: Any) -> None:
    listed = kernels.variants(file)
    assert listed, f"{file}: no line `// compile:` says how it is specialised"
    spilled = []
    for macros in listed:
        if macros.get("arch", arch).rstrip("a") != arch:  # made for another architecture
            continue
        log = kernels.compile_to_cubin(file, macros, arch)
        assert "Used" in log, f"no report on registers: {log}"
        if any(map(int, re.findall(r"(\d+) bytes spill", log))):
            spilled.append(kernels.describe(file, macros))
    assert not (kernels.promises_no_spills(file) and spilled)


def test_the_files_of_the_package_are_found() -> None:
    assert {"ops/rmsnorm.cu", "ops/cross_entropy.cu", "optim/adamw.cu"} <= set(FILES)


def test_headers_are_pasted_in_and_lines_keep_their_numbers() -> None:
    text = kernels.specialise("ops/swiglu.cu", (("SCALAR", "float"), ("VEC", 4)))
    assert text.startswith('#define SCALAR float\n#define VEC 4\n#line 1 "tinyforge/ops/swiglu.cu"\n')
    assert "#include" not in text and '#line 1 "tinyforge/ops/common.cuh"' in text
    source = (kernels.files("tinyforge") / "ops/swiglu.cu").read_text(encoding="utf-8").split("\n")
    number, after = re.search(r'#line (\d+) "tinyforge/ops/swiglu.cu"\n(?!//)([^\n]*)', text).groups()  # type: ignore
    assert source[int(number) - 1] == after


def test_variants_are_every_combination_of_each_line() -> None:
    found = kernels.variants("ops/rmsnorm.cu")
    assert {"SCALAR": "bf16", "VEC": "8", "PER": "3"} in found
    assert {"SCALAR": "double", "VEC": "1", "PER": "0"} in found
    assert len({tuple(v.items()) for v in found}) == len(found)


def test_a_launcher_reads_the_constants_of_its_kernel() -> None:
    assert kernels.constant("ops/rows.cuh", "STAGES") >= 1
    with pytest.raises(kernels.KernelError, match="embedding.cu has no line `#define STAGES <number>`"):
        kernels.constant("ops/embedding.cu", "STAGES")


def test_kernels_of_a_file_are_listed() -> None:
    assert kernels.entries("ops/swiglu.cu") == ["swiglu_fwd", "swiglu_bwd"]
    assert "embedding_bwd" in kernels.entries("ops/embedding.cu")


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
        '// compile: SCALAR=float|bf16\n#include "ops/common.cuh"\n#include "mine.cuh"\n'
        'extern "C" __global__ void triple(SCALAR *x) { narrow(FACTOR * widen(x[0]), x[0]); }\n', encoding="utf-8"
    )  # fmt: skip
    assert kernels.entries(source) == ["triple"]
    assert [found["SCALAR"] for found in kernels.variants(source)] == ["float", "bf16"]
    for macros in kernels.variants(source):
        assert "Used" in kernels.compile_to_cubin(source, macros, "sm_80")
    source.write_text("nonsense\n", encoding="utf-8")
    kernels.read.cache_clear()
    kernels.specialise.cache_clear()
    with pytest.raises(kernels.KernelError, match=rf"{source} with no macros does not compile.*\n(.*\n)*{source}\(1\)"):
        kernels.compile_to_cubin(source, {}, "sm_80")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(kernels.KernelError, match=r"tinyforge/mine.cu does not exist; .* full path"):
        kernels.read("mine.cu")
