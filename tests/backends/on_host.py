"""Compiles the text of a kernel for the host (on_host.hpp): its indices and its order are tested without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tinyforge.backends import compile as kernels

ASM = re.compile(r'\basm(?:\s+volatile)?\s*\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\([^()]*\))*\))*\);')


def same_layout(struct: np.dtype) -> str:
    """Assertions that `Arguments` of a kernel has the fields of a NumPy struct where that has them."""
    offsets = {name: offset for name, (_, offset, *_) in (struct.fields or {}).items()}
    checks = [f"__builtin_offsetof(Arguments, {name}) == {offset}" for name, offset in offsets.items()]
    return "\n".join(f"static_assert({x});" for x in (*checks, f"sizeof(Arguments) == {struct.itemsize}"))


def with_body(text: str, head: str, body: str) -> str:
    """The function whose head begins with `head`, with another body."""
    at = text.index(head)
    start = text.index("{", text.index(")", at))
    depth, end = 0, start
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            break
    return f"{text[:start]}{{ {body} }}{text[end + 1 :]}"


def run_on_host(
    file: str,
    macros: dict[str, int | str],
    bodies: dict[str, str],
    main: str,
    folder: Path,
    *,
    before: str = "",
    fault: tuple[str, str] | None = None,
    changes: tuple[tuple[str, str], ...] = (),
) -> str:
    """What `main`, appended to the kernel's text, prints. bodies: of the functions that are PTX, by how their heads
    begin. before: stand-ins that these bodies call. changes: words of the text and what stands there instead, because
    the host needs it; fault: the same, to see that it shows."""
    source, program = folder / "host.cpp", folder / "host"
    source.write_text(host_text(file, macros, bodies, main, before=before, fault=fault, changes=changes), "utf-8")
    # Kernels reinterpret numbers, as CUDA allows.
    flags = ("-std=c++17", "-O2", "-w", "-fno-strict-aliasing")
    subprocess.run([compiler(), *flags, "-o", program, source], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compiler() -> str:
    """The C++ compiler; skips the test where there is none."""
    found = shutil.which("c++")
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


def host_text(
    file: str,
    macros: dict[str, int | str],
    bodies: dict[str, str],
    main: str,
    *,
    before: str = "",
    fault: tuple[str, str] | None = None,
    changes: tuple[tuple[str, str], ...] = (),
) -> str:
    """The program of `run_on_host`."""
    text = kernels.specialise(file, tuple(sorted(macros.items())))
    for right, wrong in (*changes, *([fault] if fault else [])):
        assert right in text, right
        text = text.replace(right, wrong)
    for head, body in bodies.items():
        text = with_body(text, head, body)
    text = ASM.sub(";", text)
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];",
        r"static \1 *const \2 = reinterpret_cast<\1 *>(host_shared);",
        text,
    )
    text = re.sub(r"^#(line.*|define (INFINITY|NAN) .*)$", "", text, flags=re.MULTILINE)
    header = Path(__file__).with_name("on_host.hpp").read_text(encoding="utf-8")
    return "\n".join((header, before, text, main))


def hopper() -> str:
    """The stand-ins that HOPPER_BODIES call."""
    return Path(__file__).with_name("on_hopper.hpp").read_text(encoding="utf-8")


# Arrays in and out of the host's program. FOLDER is replaced by a literal, with a slash at its end.
FILES = r"""
template <class T> static std::vector<T> from_file(const char *name) {
    FILE *file = fopen((std::string(FOLDER) + name).c_str(), "rb");
    if (!file) host_fault(name);
    fseek(file, 0, SEEK_END);
    std::vector<T> x(ftell(file) / sizeof(T));
    rewind(file);
    if (fread(x.data(), sizeof(T), x.size(), file) != x.size()) host_fault(name);
    fclose(file);
    return x;
}
template <class T> static void to_file(const char *name, const std::vector<T> &x) {
    FILE *file = fopen((std::string(FOLDER) + name).c_str(), "wb");
    fwrite(x.data(), sizeof(T), x.size(), file);
    fclose(file);
}
"""
# mma.sync on bf16, whose registers the lanes of a warp show each other. Needs `u32` before it.
MULTIPLY_ADD = r"""
static u32 operands[64][32][6];
static float host_number(u32 pair, int i) { return __uint_as_float(i ? pair & 0xffff0000 : pair << 16); }
static void host_multiply_add(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    auto &all = operands[current / 32];
    const int lane = threadIdx.x % 32;
    const u32 own[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(all[lane], own, sizeof own);
    warps[current / 32].wait(32);
    for (int e = 0; e < 4; e++) {
        const int row = lane / 4, column = lane % 4 * 2 + e % 2;
        for (int k = 0; k < 16; k++)  // a lane has columns 2 c and 2 c + 1, and these + 8
            sum[e] += host_number(all[row * 4 + k % 8 / 2][e / 2 + k / 8 * 2], k % 2) *
                      host_number(all[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    }
    warps[current / 32].wait(32);
}
"""
INLINE = "__device__ __forceinline__ "
HOPPER_BODIES = {
    f"{INLINE}void narrow(float x, bf16 &to)": "to.bits = host_bf16(x);",
    f"{INLINE}void copy_async(u32 to, const void *from, bool valid)": "host_copy(to, from, valid);",
    f"{INLINE}void copy_commit()": "host_commit();",
    f"{INLINE}void copy_wait()": "host_wait(pending);",
    f"{INLINE}void barrier_make(": "host_barrier(barrier) = {int(count), int(count), 0, 0};",
    f"{INLINE}void barrier_arrive(": "host_arrive(barrier);",
    f"{INLINE}void barrier_arrive_at(": "host_arrive(barrier, rank);",
    f"{INLINE}void barrier_expect(": "host_barrier(barrier).bytes += bytes;",
    f"{INLINE}void barrier_wait(": "while (host_barrier(barrier).phase == parity) host_yield();",
    f"{INLINE}void cluster_sync(": "host_cluster_wait();",
    f"{INLINE}void copy_box(": "host_box(to, map->words, x, y, z, barrier);",
    f"{INLINE}void copy_box_to(": "host_box(to, map->words, x, y, z, barrier, blocks);",
    f"{INLINE}void multiply_commit(": "host_multiply_commit();",
    f"{INLINE}void multiply_wait(": "host_multiply_wait(PENDING);",
    **{
        f"{INLINE}void multiply_wide(float (&d)[{n}][4]": f"host_multiply(d, {n}, a, b, add, A_ACROSS, B_ACROSS);"
        for n in (8, 16, 24, 32)
    },
    **{f"{INLINE}void multiply_held(float (&d)[{n}][4]": f"host_multiply_held(d, {n}, a, b);" for n in (8, 16)},
    **{
        f"{INLINE}void multiply_fp8(float (&d)[{n}][4]": f"host_multiply_fp8(d, {n}, a, b, add, IS_E5M2);"
        for n in (16, 24, 32)
    },
    f"{INLINE}void copy_line(": "host_line(to, from, bytes, barrier);",
    f"{INLINE}u32 pair(": "return host_bf16(x) | u32(host_bf16(y)) << 16;",
}
FP8_BODIES = {  # of ops/fp8.cuh
    f"{INLINE}unsigned short two_e4m3(": "return host_fp8(x, false) | host_fp8(y, false) << 8;",
    f"{INLINE}unsigned short two_e5m2(": "return host_fp8(x, true) | host_fp8(y, true) << 8;",
}
