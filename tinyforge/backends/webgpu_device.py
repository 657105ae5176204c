"""A WebGPU device: its buffers, its queue, and kernels compiled from .wgsl files.

Launches are collected and submitted together: when something is read, when an array is uploaded, or when LAUNCHES are
waiting. WebGPU runs them in order, each after the writes of those before it, so an array that Python frees can be given
out again at once.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import wgpu

from tinyforge.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])

ROOT = Path(__file__).resolve().parent.parent
LAUNCHES = 512
"""Launches that wait at most before they are submitted."""
KEPT = 1 << 18
"""Uploads of at most so many bytes are kept on the host too: kernels that need ids or rates there wait for nothing."""
SLOT = 256
"""Bytes of a launch's sizes: a multiple of every device's alignment of uniforms."""
DIMENSIONS = 6
RAISED = (
    "max-storage-buffer-binding-size max-buffer-size max-storage-buffers-per-shader-stage "
    "max-compute-workgroup-storage-size max-compute-invocations-per-workgroup max-compute-workgroup-size-x "
    "min-storage-buffer-offset-alignment"
).split()
"""The limits that are asked for as the adapter has them; all others are WebGPU's defaults."""
REAL = {"float32": "f32", "float64": "f64", "int32": "i32", "uint32": "u32"}
"""The WGSL type of each dtype that kernels compute with. Arrays of other types are computed with on the host."""
_PACKED = {"f32": "f", "f64": "d", "i32": "i", "u32": "I"}
_STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST


# --- memory -----------------------------------------------------------------------------------------------------------


class Block:
    """A buffer of the device's; it goes back to the pool when nothing refers to it."""

    host: np.ndarray | None = None
    """The bytes that were uploaded, if they are few and nothing has written to the buffer since."""

    def __init__(self, device: Device, size: int) -> None:
        self.device, self.size = device, size
        self.buffer = device.take(size)

    def __del__(self) -> None:
        if "buffer" in vars(self):  # else it was refused
            self.device.give(self.buffer)


def size_class(count: int) -> int:
    """`count` bytes rounded up by at most an eighth, so that arrays of like sizes can share freed buffers."""
    step = max(256, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


class Launch(NamedTuple):
    pipeline: Any
    group: Any
    slot: int
    grid: tuple[int, int, int]


class Copy(NamedTuple):
    source: Any
    at: int
    target: Any
    to: int
    size: int


def unless_lost(method: F) -> F:
    """Say in one line that the device is lost, where a call fails for that."""

    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return method(*args, **named)
        except Exception as error:  # wgpu's classes of it differ by call
            if not re.search(r"(?i)device.* lost|lost device", str(error)):
                raise
            raise UserError(
                "backend webgpu: the adapter was lost, as after a driver's reset; run the command again, training with "
                "--resume, or use --backend numpy"
            ) from None

    return cast(F, call)


class Device:
    """A wgpu device, its buffers and its queue."""

    def __init__(self, adapter: Any, features: Sequence[str]) -> None:
        given = dict(adapter.limits)
        limits = {name: given[name] for name in RAISED}
        self.adapter, self.features = adapter, frozenset(features)
        self.handle = adapter.request_device_sync(required_features=list(features), required_limits=limits)
        self.most = min(given["max-storage-buffer-binding-size"], given["max-buffer-size"])
        self.alignment = given["min-storage-buffer-offset-alignment"]
        self.used = self.held = self.peak = 0
        self._buffers: list[Any] = []
        self._free: dict[int, list[Any]] = {}
        self._waiting: list[Launch | Copy] = []
        self._sizes = bytearray(SLOT * LAUNCHES)
        self._slots = 0
        usage = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
        self._uniforms = self.handle.create_buffer(size=SLOT * LAUNCHES, usage=usage)
        self._fence = self.handle.create_buffer(size=4, usage=_STORAGE)
        self._groups: dict[tuple[Any, ...], Any] = {}

    # memory

    @unless_lost
    def take(self, size: int) -> Any:
        """A buffer of at least `size` bytes, whose contents are anything."""
        size = size_class(max(size, 4))
        if size > self.most:
            raise UserError(
                f"backend webgpu: an array of {size / 2**20:,.0f} MiB, and the adapter binds at most "
                f"{self.most / 2**20:,.0f} MiB at a time; use a smaller batch or model, or --backend numpy"
            )
        self.used += size
        self.peak = max(self.peak, self.used)
        if free := self._free.get(size):
            return free.pop()
        self.held += size
        # Held here for good: a buffer in a cycle of garbage would be finalised along with its block.
        self._buffers.append(self.handle.create_buffer(size=size, usage=_STORAGE))
        return self._buffers[-1]

    def give(self, buffer: Any) -> None:
        self.used -= buffer.size
        self._free.setdefault(buffer.size, []).append(buffer)

    @unless_lost
    def write(self, block: Block, at: int, data: bytes | memoryview | np.ndarray) -> None:
        block.host = None
        self.flush()  # a write overtakes the launches that wait, and the buffer may be one of theirs
        self.handle.queue.write_buffer(block.buffer, at, data)

    @unless_lost
    def read(self, block: Block, at: int, count: int) -> memoryview:
        """`count` bytes; waits for the device."""
        if block.host is not None:
            return block.host[at:].data[:count]
        self.flush()
        first, last = at // 4 * 4, -(-(at + count) // 4) * 4
        return memoryview(self.handle.queue.read_buffer(block.buffer, first, last - first))[at - first :][:count]

    @unless_lost
    def wait(self) -> None:
        """Wait until all work is done. Reading a buffer waits; `read` may answer from the host."""
        self.flush()
        self.handle.queue.read_buffer(self._fence, 0, 4)

    # launches

    @unless_lost
    def launch(self, pipeline: Pipeline, blocks: Sequence[tuple[Block, int, int]], numbers: bytes, grid: Any) -> None:
        """blocks: of each binding the block, where it begins and how many bytes it has."""
        if self._slots == LAUNCHES:
            self.flush()
        slot = self._slots
        self._slots += 1
        self._sizes[SLOT * slot : SLOT * slot + len(numbers)] = numbers
        key = (id(pipeline), *((id(block.buffer), at, count) for block, at, count in blocks))
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) > 4096:
                self._groups.clear()
            group = self._groups[key] = self._group(pipeline, blocks)
        self._waiting.append(Launch(pipeline.handle, group, slot, grid))

    def _group(self, pipeline: Pipeline, blocks: Sequence[tuple[Block, int, int]]) -> Any:
        entries = [{"binding": 0, "resource": {"buffer": self._uniforms, "offset": 0, "size": SLOT}}]
        for binding, (block, at, count) in zip(pipeline.bindings, blocks, strict=True):
            resource = {"buffer": block.buffer, "offset": at, "size": -(-count // 4) * 4 or 16}
            entries.append({"binding": binding, "resource": resource})
        return self.handle.create_bind_group(layout=pipeline.layout, entries=entries)

    def copy(self, source: Block, at: int, target: Block, to: int, count: int) -> None:
        """Copy bytes from one block to another; all numbers are multiples of 4."""
        target.host = None
        self._waiting.append(Copy(source.buffer, at, target.buffer, to, count))

    @unless_lost
    def flush(self) -> None:
        """Submit what is waiting."""
        if not self._waiting:
            return
        if self._slots:
            self.handle.queue.write_buffer(self._uniforms, 0, memoryview(self._sizes)[: SLOT * self._slots])
        encoder = self.handle.create_command_encoder()
        task, last = None, None
        for item in self._waiting:
            if isinstance(item, Copy):
                if task is not None:
                    task.end()
                task = None
                encoder.copy_buffer_to_buffer(*item)
                continue
            if task is None:
                task, last = encoder.begin_compute_pass(), None
            if item.pipeline is not last:
                task.set_pipeline(item.pipeline)
                last = item.pipeline
            task.set_bind_group(0, item.group, [SLOT * item.slot])
            task.dispatch_workgroups(*item.grid)
        if task is not None:
            task.end()
        self._waiting.clear()
        self._slots = 0
        self.handle.queue.submit([encoder.finish()])


# --- kernels ----------------------------------------------------------------------------------------------------------


@cache
def source(file: str) -> str:
    """The text of a .wgsl file, named from the package's folder; a custom op gives a path of its own."""
    return (ROOT / file).read_text(encoding="utf-8")


def unrolled(text: str) -> str:
    """`for (var i = 0u; i < N; i++) {  // unrolled` written out, N a number or a constant of the text.

    Compilers keep an array in registers only where its indices are constants, and of the loops that naga writes for
    them, with a count of its own against those without an end, they unroll none.
    """
    constants = dict(re.findall(r"const (\w+) = (\d+)u?;", text))
    while head := re.search(r"\n( *)for \(var (\w+) = 0u; \2 < (\w+); \2\+\+\) \{  // unrolled", text):
        indent, name, count = map(str, head.groups())
        end = text.index(f"\n{indent}}}\n", head.end())
        body, turns = text[head.end() : end], range(int(constants.get(count, count)))
        written = "".join("\n{" + re.sub(rf"\b{name}\b", f"{turn}u", body) + "\n}" for turn in turns)
        text = text[: head.start()] + written + text[end + len(f"\n{indent}}}") :]
    return text


class Pipeline:
    """A compiled entry point. names: its arrays, in the order of their bindings; fields: types of its sizes."""

    def __init__(self, device: Device, file: str, entry: str, arrays: tuple[str, ...], macros: Any, flags: Any) -> None:
        text = "".join(f"{line}\n" for line in (*macros, source(file)))
        for called, helper in (
            (": Place", "ops/place"),
            ("group_", "ops/group"),
            ("philox(", "ops/philox"),
            ("codes(", f"infer/codes_{'int8' if 'alias word = u32;' in macros else 'real'}"),
            ("sigmoid(", "ops/sigmoid"),
            ("real_", f"ops/float{64 if 'f64' in ''.join(macros) else 32}"),
        ):
            if called in text:  # helpers come with the files that call them
                text = source(f"{helper}.wgsl") + text
        declared = {
            name: (int(binding), access)
            for binding, access, name in re.findall(
                r"@binding\((\d+)\)\s*var<storage,\s*(read|read_write)>\s*(\w+)\s*:", text
            )
        }
        if unknown := [name for name in arrays if name not in declared]:
            raise KeyError(f"{file}: {entry} takes no array called {unknown[0]}; it declares {', '.join(declared)}")
        self.bindings = [declared[name][0] for name in arrays]
        self.writes = [declared[name][1] == "read_write" for name in arrays]
        kinds = {"read": wgpu.BufferBindingType.read_only_storage, "read_write": wgpu.BufferBindingType.storage}
        uniform = {"type": wgpu.BufferBindingType.uniform, "has_dynamic_offset": True}
        entries = [{"binding": 0, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": uniform}]
        for name in arrays:
            binding, access = declared[name]
            buffer = {"type": kinds[access]}
            entries.append({"binding": binding, "visibility": wgpu.ShaderStage.COMPUTE, "buffer": buffer})
        self.layout = device.handle.create_bind_group_layout(entries=entries)
        both = device.handle.create_pipeline_layout(bind_group_layouts=[self.layout])
        stage = {"module": _module(device, unrolled(text)), "entry_point": entry, "constants": dict(flags)}
        self.handle = device.handle.create_compute_pipeline(layout=both, compute=stage)
        self.fields = sizes_of(text, file)

    def pack(self, numbers: Sequence[Any]) -> bytes:
        """The sizes as the kernel reads them."""
        kinds = [kind for _, kind in self.fields]
        wrapped = [n & 0xFFFFFFFF if kind == "u32" else n for kind, n in zip(kinds, numbers, strict=False)]
        try:
            return struct.pack("<" + "".join(map(_PACKED.__getitem__, kinds)), *wrapped, *numbers[len(kinds) :])
        except struct.error as error:
            names = ", ".join(f"{name}: {kind}" for name, kind in self.fields)
            raise ValueError(f"sizes {tuple(numbers)}, expected {names}: {error}") from error


def sizes_of(text: str, file: str) -> list[tuple[str, str]]:
    """Names and types of `struct Sizes`. Reals come first, so that nothing is padded."""
    found = re.search(r"struct Sizes \{(.*?)\}", text, re.S)
    if found is None:
        raise ValueError(f"{file} declares no struct Sizes")
    aliases = dict(re.findall(r"alias (\w+) = (\w+);", text))
    return [(name, aliases.get(kind, kind)) for name, kind in re.findall(r"(\w+): (\w+)", re.sub("//.*", "", found[1]))]


def _module(device: Device, text: str) -> Any:
    found = _modules.get((id(device), text))
    if found is None:
        found = _modules[id(device), text] = device.handle.create_shader_module(code=text)
    return found


_modules: dict[tuple[int, str], Any] = {}


@cache
def pipeline_of(device: Device, file: str, entry: str, arrays: tuple[str, ...], macros: Any, flags: Any) -> Pipeline:
    return Pipeline(device, file, entry, arrays, macros, flags)
