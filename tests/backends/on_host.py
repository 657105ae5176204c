"""Compiles the text of a kernel for the host (on_host.hpp): its indices and its order are tested without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tinyforge.backends import compile as kernels

ASM = re.compile(r'\basm(?:\s+volatile)?\s*\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\([^()]*\))*\))*\);')


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
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
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
    source, program = folder / "host.cpp", folder / "host"
    source.write_text("\n".join((header, before, text, main)), encoding="utf-8")
    subprocess.run([compiler, "-std=c++17", "-O2", "-w", "-o", program, source], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def hopper() -> str:
    """The stand-ins that HOPPER_BODIES call."""
    return Path(__file__).with_name("on_hopper.hpp").read_text(encoding="utf-8")


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
