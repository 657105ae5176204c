"""Our matrix products, run on the host from the text that the GPU gets: the units of work, the plain kernel, and the
one for Hopper with stand-ins for its instructions. Whether the GPU does what its manual says is seen in tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.on_host import FP8_BODIES, HOPPER_BODIES, INLINE, hopper, run_on_host

pytestmark = pytest.mark.slow

BODIES = HOPPER_BODIES | FP8_BODIES

UNITS = r"""
int main() {
    long long units = 0;
    for (int down = 1; down <= 9; down++) for (int across = 1; across <= 5; across++)
    for (int band = 1; band <= 10; band++)
    for (int steps = 1; steps <= 7; steps++) for (int splits = 1; splits <= steps; splits++) {
        const Tiling tiling{down, across, band, splits, steps};
        std::vector<int> seen(down * across * steps);
        int before = 0;
        for (int number = 0; number < tiling.units(); number++, units++) {
            const Unit u = tiling.unit(number);
            if (u.down < 0 || u.down >= down || u.across < 0 || u.across >= across || u.split < before) return 1;
            if (u.first >= u.stop || u.first < 0 || u.stop > steps) return 2;  // no part is empty
            before = u.split;
            for (int step = u.first; step < u.stop; step++) seen[(u.down * across + u.across) * steps + step]++;
        }
        for (int count : seen) if (count != 1) return 3;
    }
    printf("%lld\n", units);
}
"""


def units(folder: Path, fault: tuple[str, str] | None = None) -> int:
    macros: dict[str, int | str] = {"SCALAR": "double", "RESULT": "double", "VEC": 1}
    return int(run_on_host("ops/gemm.cu", macros, NARROW, UNITS, folder, fault=fault))


NARROW = {f"{INLINE}void narrow(float x, bf16 &to)": "to.bits = host_bf16(x);"}


def test_every_step_of_every_tile_is_in_one_unit(tmp_path: Path) -> None:
    assert units(tmp_path) > 100_000


@pytest.mark.parametrize(
    "fault", [("min(band, down - top)", "band"), ("(split + 1) * steps / splits", "steps / splits * (split + 1)")]
)
def test_faults_of_the_units_show(fault: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        units(tmp_path, fault)


PLAIN = r"""
int main() {
    double worst = 0;
    const int shapes[][5] = {{1, 1, 1, 1, 1}, {17, 33, 70, 1, 2}, {40, 20, 200, 3, 1}, {16, 16, 65, 2, 4}};
    for (auto &[rows, columns, depth, splits, band] : shapes)
        for (int across = 0; across < 4; across++) for (int accumulate = 0; accumulate < 2; accumulate++) {
            const int pitch = columns + 3;
            std::vector<double> a(rows * depth), b(columns * depth), out(rows * pitch, 0.0 / 0.0);
            std::vector<double> parts(splits * rows * columns, 0.0 / 0.0);
            for (double &v : a) v = host_normal();
            for (double &v : b) v = host_normal();
            auto before = out;
            if (accumulate) for (int r = 0; r < rows; r++) for (int c = 0; c < columns; c++)
                out[r * pitch + c] = before[r * pitch + c] = host_normal();
            const int row_a = across & 1 ? 1 : depth, step_a = across & 1 ? rows : 1;
            const int row_b = across & 2 ? 1 : depth, step_b = across & 2 ? columns : 1;
            host_launch(2, 1, SIDE * SIDE, [&] {
                gemm_naive(out.data(), parts.data(), a.data(), b.data(), row_a, step_a, row_b, step_b, rows, columns,
                           depth, pitch, band, splits, 64, accumulate);
            });
            if (splits > 1) host_launch((rows * columns + 255) / 256, 1, 256, [&] {
                gemm_sum(out.data(), parts.data(), rows * columns, columns, pitch, splits, accumulate);
            });
            for (int r = 0; r < rows; r++) for (int c = 0; c < pitch; c++) {
                const double got = out[r * pitch + c];
                double expected = accumulate ? before[r * pitch + c] : 0;
                if (c >= columns) { if (!std::isnan(got)) return 1; continue; }
                for (int k = 0; k < depth; k++) expected += a[r * row_a + k * step_a] * b[c * row_b + k * step_b];
                worst = host_worse(worst, std::abs(got - expected));
            }
        }
    printf("%g\n", worst);
}
"""


def test_the_plain_product_is_the_product(tmp_path: Path) -> None:
    macros: dict[str, int | str] = {"SCALAR": "double", "RESULT": "double", "VEC": 1}
    assert float(run_on_host("ops/gemm.cu", macros, NARROW, PLAIN, tmp_path)) < 1e-12


MAP = r"""
typedef SCALAR T;
// Of (lines, depth), or, across, of (depth, lines).
static TensorMap map(const std::vector<T> &x, bool across, int lines, int depth, int pitch, int box) {
    TensorMap m{};
    const u64 words[] = {u64(x.data()), u64(across ? lines : depth), u64(across ? depth : lines), 1, 64, u64(box),
                         u64(pitch)};
    memcpy(m.words, words, sizeof words);
    return m;
}
"""
FAST = r"""
static void put(float &to, float x) { to = x; }
static void put(bf16 &to, float x) { to.bits = host_bf16(x); }
static bool is_poison(float x) { return std::isnan(x); }
static bool is_poison(bf16 x) { return x.bits == 0xffff; }
int main() {
    const int rows = M, columns = N, depth = K, splits = SPLITS, blocks = BLOCKS_OF_GRID, gap = SPLITS > 1 ? 0 : 8;
    const int pitch = columns + gap;
    const int a_pitch = (ACROSS_A ? rows : depth) + 16, b_pitch = (ACROSS_B ? columns : depth) + 8;
    host_jitter = true, host_limit = 100000;
    auto drawn = [](int n) { std::vector<T> x(n); for (T &v : x) v.bits = host_bf16(host_normal()); return x; };
    auto a = drawn((ACROSS_A ? depth : rows) * a_pitch), b = drawn((ACROSS_B ? depth : columns) * b_pitch);
    const TensorMap a_map = map(a, ACROSS_A, rows, depth, a_pitch, ACROSS_A ? 64 : ROWS);
    const TensorMap b_map = map(b, ACROSS_B, columns, depth, b_pitch, (ACROSS_B ? 64 : COLUMNS) / CLUSTER);
    double worst = 0;
    for (int accumulate = 0; accumulate <= (sizeof(Result) == 4 && splits == 1); accumulate++) {
        Result poison, start;
        memset(&poison, 0xff, sizeof poison), put(start, 0.5f);
        std::vector<Result> out(splits * rows * pitch + 300 * pitch, poison);
        if (accumulate) for (int r = 0; r < rows; r++) for (int c = 0; c < columns; c++) out[r * pitch + c] = start;
        auto other = out;
        for (bool more : {false, true}) {
            host_launch(blocks + more * CLUSTER, 1, THREADS, [&] {
                gemm_hopper((more ? other : out).data(), a_map, b_map, rows, columns, depth, pitch, BAND, splits,
                            accumulate);
            }, CLUSTER);
            if (!host_boxes.empty()) host_fault("a box was never waited for");
        }
        if (memcmp(out.data(), other.data(), out.size() * sizeof(Result))) host_fault("more blocks, other bits");
        for (size_t i = 0; i < out.size(); i++) {
            const int r = i / pitch % rows, c = i % pitch, split = i / pitch / rows;
            if (split >= splits || c >= columns) {
                if (!is_poison(out[i])) host_fault("a number outside of the result was written");
                continue;
            }
            const int steps = ceil_div(depth, DEPTH);
            double expected = accumulate ? 0.5 : 0;
            for (int k = split * steps / splits * DEPTH; k < min((split + 1) * steps / splits * DEPTH, depth); k++)
                expected += double(widen(ACROSS_A ? a[k * a_pitch + r] : a[r * a_pitch + k])) *
                          widen(ACROSS_B ? b[k * b_pitch + c] : b[c * b_pitch + k]);
            const double scale = sizeof(Result) == 4 ? 1 : 256 * std::sqrt(depth);  // of a rounding to bf16
            const double error = std::abs(widen(out[i]) - expected) / scale;
            worst = host_worse(worst, error);
        }
    }
    printf("%g\n", worst);
}
"""
PRODUCTS = ("FORWARD", "INPUT", "WEIGHT")


def product(
    which: str,
    tile: tuple[int, int, int, int, int],
    shape: tuple[int, int, int],
    folder: Path,
    *,
    splits: int = 1,
    blocks: int = 2,
    band: int = 2,
    fault: tuple[str, str] | None = None,
) -> float:
    """The worst difference from sums in float64: of results in bf16, in parts of a rounding of the largest."""
    macros: dict[str, int | str] = {"SCALAR": "bf16", "PRODUCT": which}
    macros |= dict(zip(("ROWS", "COLUMNS", "STAGES", "PINGPONG", "CLUSTER"), tile, strict=True))
    main = FAST
    for name, value in zip(("M", "N", "K"), shape, strict=True):
        main = main.replace(f" {name},", f" {value},", 1)
    main = main.replace("SPLITS", str(splits)).replace("BLOCKS_OF_GRID", str(blocks)).replace("BAND", str(band))
    return float(run_on_host("ops/gemm_hopper.cu", macros, BODIES, MAP + main, folder, before=hopper(), fault=fault))


@pytest.mark.parametrize("which", PRODUCTS)
@pytest.mark.parametrize(
    ("tile", "shape", "splits", "blocks"),
    [
        ((128, 256, 4, 0, 1), (136, 264, 136), 1, 2),
        ((128, 256, 4, 0, 2), (392, 24, 328), 1, 2),
        ((256, 192, 4, 0, 1), (264, 72, 200), 1, 1),
        ((256, 192, 4, 0, 2), (520, 200, 72), 1, 2),
        ((128, 192, 5, 0, 2), (264, 208, 136), 1, 4),
        ((128, 128, 6, 1, 1), (264, 136, 200), 1, 2),
        ((128, 192, 5, 1, 2), (520, 200, 392), 1, 2),
        ((64, 256, 5, 1, 2), (136, 264, 456), 1, 2),
    ],
)
def test_the_product_for_hopper_is_the_product(
    which: str,
    tile: tuple[int, int, int, int, int],
    shape: tuple[int, int, int],
    splits: int,
    blocks: int,
    tmp_path: Path,
) -> None:
    """Tiles that stand out of the result on both sides, a last step that is not whole, more units than blocks; the same
    bits by more blocks."""
    found = product(which, tile, shape, tmp_path, splits=splits, blocks=blocks)
    assert found < 1e-4, found


@pytest.mark.parametrize("tile", [(128, 256, 4, 0, 1), (128, 256, 4, 0, 2), (128, 128, 6, 1, 2)])
def test_parts_of_the_sum(tile: tuple[int, int, int, int, int], tmp_path: Path) -> None:
    """Five parts of 13 steps, in planes of their own."""
    found = product("WEIGHT", tile, (136, 72, 13 * 64 - 8), tmp_path, splits=5, blocks=2)
    assert found < 1e-4, found


@pytest.mark.parametrize(
    ("fault", "tile"),
    [
        (("ring.left() + top * LINE", "ring.left()"), (128, 256, 4, 0, 1)),  # both warpgroups on the same rows
        (("multiply_wait<1>();", ""), (128, 192, 3, 0, 1)),  # a buffer is given back before it was read
        (("barrier_wait(ring.empty(), ring.phase ^ 1);", ""), (128, 192, 3, 0, 1)),  # nobody waits for that
        (("barrier_wait(ring.full(), ring.phase);", ""), (128, 192, 3, 0, 1)),  # nor for the copies
        (("4 * SHARERS * CLUSTER", "4 * SHARERS"), (128, 192, 3, 0, 2)),  # one block of the cluster is enough
        (("const int first = rank * LINES;", "const int first = 0;"), (128, 192, 3, 0, 2)),  # the same half twice
        (("barrier_wait(products.ring.turn(products.group), parity);", ""), (128, 128, 3, 1, 1)),  # out of turn
        (("phase ^= slot / STAGES & 1;", ""), (128, 128, 3, 1, 1)),  # the other's rounds are not counted
    ],
    ids=lambda x: x[0] if isinstance(x[0], str) else "",
)
def test_faults_of_the_product_show(
    fault: tuple[str, str], tile: tuple[int, int, int, int, int], tmp_path: Path
) -> None:
    # Sums of 9 steps, three rounds of the ring; where a turn is not waited for, of four: then the parity is the same.
    depth = 712 if "turn" in fault[0] else 568
    try:
        found = product("FORWARD", tile, (520, 136, depth), tmp_path, blocks=2, fault=fault)
    except AssertionError:  # it said what was wrong, or waited for ever
        return
    assert not found < 1e-4, found


# Whole numbers, so that sums are exact in any order: what comes out is compared bit for bit with swiglu.cuh's formulas.
GATED = r"""
typedef Pack<T, 1> One;
static One one(double x) { One found; found.v[0].bits = host_bf16(x); return found; }
int main() {
    const int rows = M, half = N, depth = K, again = AGAIN;
    constexpr bool FORWARDS = EPILOGUE == SWIGLU;
    const int lines = FORWARDS ? 2 * half : half;  // of the weight, columns of the product
    const int a_pitch = depth + 16, b_pitch = (ACROSS_B ? lines : depth) + 8;
    host_jitter = true, host_limit = 100000;
    auto drawn = [](int n) {
        std::vector<T> x(n);
        for (T &v : x) v.bits = host_bf16(int(host_normal() * 1.5));
        return x;
    };
    auto a = drawn(rows * a_pitch), b = drawn((ACROSS_B ? depth : lines) * b_pitch);
    std::vector<T> gates(rows * 2 * half);
    for (T &v : gates) v.bits = host_bf16(host_normal() * 2);
    const TensorMap a_map = map(a, false, rows, depth, a_pitch, ROWS);
    const TensorMap b_map = map(b, ACROSS_B, lines, depth, b_pitch, ACROSS_B ? 64 : WIDE);
    T poison;
    memset(&poison, 0xff, sizeof poison);
    std::vector<T> out(rows * 2 * half + 4096, poison), hidden(rows * half + 4096, poison);
    T *const h = again ? hidden.data() : nullptr;
#if EPILOGUE == SWIGLU
#define MORE h
#else
    const TensorMap gu_map = map(gates, false, rows, 2 * half, 2 * half, 64);
#define MORE h, gu_map
#endif
    host_launch(2, 1, THREADS, [&] {
        gemm_hopper(out.data(), a_map, b_map, rows, half, depth, 2 * half, BAND, 1, 0, MORE);
    });
    if (!host_boxes.empty()) host_fault("a box was never waited for");
    auto sum = [&](int r, int c) {
        double s = 0;
        for (int k = 0; k < depth; k++)
            s += double(widen(a[r * a_pitch + k])) * widen(ACROSS_B ? b[k * b_pitch + c] : b[c * b_pitch + k]);
        return one(s);
    };
    int wrong = 0;
    for (int r = 0; r < rows; r++) for (int c = 0; c < half; c++) {
        One first, second, h;
        if constexpr (FORWARDS) {
            first = sum(r, c), second = sum(r, half + c), h = swiglu(first, second);
        } else {
            const One gate{gates[r * 2 * half + c]}, up{gates[r * 2 * half + half + c]};
            swiglu_gradient(first, second, h, sum(r, c), gate, up);
        }
        wrong += out[r * 2 * half + c].bits != first.v[0].bits;
        wrong += out[r * 2 * half + half + c].bits != second.v[0].bits;
        wrong += hidden[r * half + c].bits != (again ? h.v[0].bits : 0xffff);
    }
    for (size_t i = rows * 2 * half; i < out.size(); i++) wrong += out[i].bits != 0xffff;
    for (size_t i = rows * half; i < hidden.size(); i++) wrong += hidden[i].bits != 0xffff;
    printf("%d\n", wrong);
}
"""
GATED_TILES = {"SWIGLU": ((128, 192, 5, 1), (128, 256, 4, 0)), "SWIGLU_BACKWARD": ((128, 128, 5, 1), (64, 256, 4, 1))}


# The same of RoPE: angles that change a bit wherever a wrong one is taken.
ROPES = r"""
typedef Pack<T, 1> One;
static One one(double x) { One found; found.v[0].bits = host_bf16(x); return found; }
int main() {
    const int rows = M, columns = N, depth = K, positions = POSITIONS, rotated_columns = TURNED;
    host_jitter = true, host_limit = 100000;
    auto drawn = [](int n) {
        std::vector<T> x(n);
        for (T &v : x) v.bits = host_bf16(int(host_normal() * 1.5));
        return x;
    };
    auto a = drawn(rows * depth), b = drawn(columns * depth);
    std::vector<float> cosines(positions * HEAD / 2), sines(cosines);
    for (size_t i = 0; i < sines.size(); i++) cosines[i] = host_normal(), sines[i] = host_normal();
    const TensorMap a_map = map(a, false, rows, depth, depth, ROWS);
    const TensorMap b_map = map(b, false, columns, depth, depth, COLUMNS);
    T poison;
    memset(&poison, 0xff, sizeof poison);
    std::vector<T> out(rows * columns + 4096, poison);
    host_launch(2, 1, THREADS, [&] {
        gemm_hopper(out.data(), a_map, b_map, rows, columns, depth, columns, BAND, 1, 0, cosines.data(), sines.data(),
                    positions, rotated_columns);
    });
    if (!host_boxes.empty()) host_fault("a box was never waited for");
    int wrong = 0;
    for (int r = 0; r < rows; r++) for (int c = 0; c < columns; c++) {
        if (c % HEAD >= HEAD / 2) continue;
        One pair[2];
        for (int side = 0; side < 2; side++) {
            double s = 0;
            for (int k = 0; k < depth; k++)
                s += double(widen(a[r * depth + k])) * widen(b[(c + side * HEAD / 2) * depth + k]);
            pair[side] = one(s);
        }
        const int angle = r % positions * (HEAD / 2) + c % HEAD;
        const Pack<float, 1> cosine{cosines[angle]}, sine{sines[angle]};
        if (c < rotated_columns) rotate(pair[0], pair[1], cosine, sine);
        for (int side = 0; side < 2; side++)
            wrong += out[r * columns + c + side * HEAD / 2].bits != pair[side].v[0].bits;
    }
    for (size_t i = rows * columns; i < out.size(); i++) wrong += out[i].bits != 0xffff;
    printf("%d\n", wrong);
}
"""


def roped(
    tile: tuple[int, int, int, int],
    folder: Path,
    *,
    shape: tuple[int, int, int] = (264, 320, 136),
    positions: int = 24,
    turned: int = 192,
    fault: tuple[str, str] | None = None,
) -> int:
    """How many numbers are not what the product and RoPE's own formula give."""
    macros: dict[str, int | str] = {"SCALAR": "bf16", "PRODUCT": "FORWARD", "EPILOGUE": "ROPE", "CLUSTER": 1}
    macros |= dict(zip(("ROWS", "COLUMNS", "STAGES", "PINGPONG"), tile, strict=True))
    main = ROPES.replace("POSITIONS", str(positions)).replace("TURNED", str(turned)).replace("BAND", "2")
    for name, value in zip(("M", "N", "K"), shape, strict=True):
        main = main.replace(f" {name},", f" {value},", 1)
    return int(run_on_host("ops/gemm_hopper.cu", macros, BODIES, MAP + main, folder, before=hopper(), fault=fault))


@pytest.mark.parametrize("tile", [(128, 192, 5, 1), (64, 256, 5, 1)])
def test_rope_at_the_end_of_a_product_is_rope(tile: tuple[int, int, int, int], tmp_path: Path) -> None:
    """Bit for bit: heads that are turned and heads that are not, in one tile; positions that begin again inside one."""
    assert roped(tile, tmp_path) == 0


@pytest.mark.parametrize(
    "fault",
    [
        ("(token + row_of(i) + 8 * below) % positions", "(token + row_of(i) + 8 * below)"),
        ("(token + row_of(i) + 8 * below) % positions", "(row_of(i) + 8 * below) % positions"),
        ("rotated_columns - column", "rotated_columns"),
        ("&right = taken[below][n + 1]", "&right = taken[below][n]"),
        ("rotate(left, right, c[below], s[below])", "rotate(left, right, s[below], c[below])"),
        ("row < rows && 32 * n < columns", "row < rows"),
    ],
    ids=lambda x: x[1],
)
def test_faults_of_rope_show(fault: tuple[str, str], tmp_path: Path) -> None:
    try:
        wrong = roped((128, 128, 4, 1), tmp_path, shape=(136, 192, 72), positions=20, turned=128, fault=fault)
    except AssertionError:  # it said what was wrong
        return
    assert wrong


def gated(
    epilogue: str,
    tile: tuple[int, int, int, int],
    folder: Path,
    *,
    shape: tuple[int, int, int] = (264, 136, 200),
    again: bool = True,
    fault: tuple[str, str] | None = None,
) -> int:
    """How many numbers are not what the product and SwiGLU's own formulas give."""
    macros: dict[str, int | str] = {"SCALAR": "bf16", "EPILOGUE": epilogue, "CLUSTER": 1}
    macros["PRODUCT"] = "FORWARD" if epilogue == "SWIGLU" else "INPUT"
    macros |= dict(zip(("ROWS", "COLUMNS", "STAGES", "PINGPONG"), tile, strict=True))
    main = GATED.replace("AGAIN", str(int(again))).replace("BAND", "2")
    for name, value in zip(("M", "N", "K"), shape, strict=True):
        main = main.replace(f" {name},", f" {value},", 1)
    return int(run_on_host("ops/gemm_hopper.cu", macros, BODIES, MAP + main, folder, before=hopper(), fault=fault))


@pytest.mark.parametrize(("epilogue", "tile"), [(e, tile) for e, tiles in GATED_TILES.items() for tile in tiles])
def test_swiglu_at_the_end_of_a_product_is_swiglu(
    epilogue: str, tile: tuple[int, int, int, int], tmp_path: Path
) -> None:
    """Bit for bit. Tiles stand out on both sides; the gate's last one reaches into what is up's."""
    assert gated(epilogue, tile, tmp_path) == 0


def test_h_is_not_written_where_there_is_no_room_for_it(tmp_path: Path) -> None:
    assert gated("SWIGLU_BACKWARD", (128, 128, 5, 1), tmp_path, shape=(72, 40, 72), again=False) == 0


@pytest.mark.parametrize(
    ("epilogue", "fault"),
    [
        ("SWIGLU", ("half + column, 0, full", "column, 0, full")),  # the gate twice
        ("SWIGLU", ("ring.right() + WIDE * LINE", "ring.right()")),  # up in the place of the gate
        ("SWIGLU", ("rounded_row(sum[i], n + WIDE / 8, below)", "rounded_row(sum[i], n + WIDE / 8, 0)")),
        ("SWIGLU", ("swiglu(gate, up));", "swiglu(up, gate));")),
        ("SWIGLU", ("row < rows && 8 * n + first < columns", "row < rows")),
        ("SWIGLU_BACKWARD", ("half + x, y, 0, full", "x, y, 0, full")),  # the gate twice
        ("SWIGLU_BACKWARD", ("gate[below][j], up[below][j])", "up[below][j], gate[below][j])")),
        ("SWIGLU_BACKWARD", ("4 * j + lane % 4 ^ line % 8", "4 * j + lane % 4")),  # not swizzled
        ("SWIGLU_BACKWARD", ("column + piece % (COLUMNS / 64) * 64", "column")),  # of the first columns, always
        ("SWIGLU_BACKWARD", ("(dgu + line + half + column, dup)", "(dgu + line + column, dup)")),
        ("SWIGLU_BACKWARD", ("dh[i][below][n], gate", "dh[i][0][n], gate")),
        # Nobody waits until a buffer has been read, nor until it is full; its rounds are not told apart.
        ("SWIGLU_BACKWARD", ("barrier_wait(ring.gates_empty(piece), parity);", "")),
        ("SWIGLU_BACKWARD", ("barrier_wait(ring.gates_full(group, piece), parity);", "")),
        ("SWIGLU_BACKWARD", ("gates_parity ^= 1;", "")),
        ("SWIGLU_BACKWARD", ("copy_gates(&gu, group, group ^ 1,", "copy_gates(&gu, group, 1,")),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else x,
)
def test_faults_of_the_epilogues_show(epilogue: str, fault: tuple[str, str], tmp_path: Path) -> None:
    tile = (128, 128, 4, 1) if epilogue == "SWIGLU" else (64, 256, 4, 1)
    shape = (136, 264, 72) if epilogue == "SWIGLU" else (456, 264, 72)  # eight tiles of each block, in turns
    try:
        wrong = gated(epilogue, tile, tmp_path, shape=shape, fault=fault)
    except AssertionError:  # it said what was wrong
        return
    assert wrong


# Whole numbers in FP8 and scales that are powers of two: exact, and compared bit for bit.
FP8_MAIN = r"""
typedef Pack<T, 1> One;
static One one(double x) { One found; found.v[0].bits = host_bf16(x); return found; }
static u32 bits_of(float x) { return __float_as_uint(x); }
static u32 bits_of(T x) { return x.bits; }
int main() {
    const int rows = M, half = N, depth = K, blocks = 2, splits = SPLITS;  // depth: in bytes
    constexpr bool FORWARDS = EPILOGUE == SWIGLU, IS_E5M2 = FACTORS == E5M2, ADDS = PRODUCT == WEIGHT;
    const int wide = FORWARDS ? 2 * half : half;
    const int a_pitch = depth / 2 + 16, b_pitch = depth / 2 + 8;  // in pairs
    host_jitter = true, host_limit = 100000;
    auto drawn = [](int n, bool e5m2) {
        std::vector<T> x(n);
        for (T &v : x) {
            v.bits = host_fp8(int(host_normal() * 1.5), e5m2);
            v.bits |= host_fp8(int(host_normal() * 1.5), e5m2) << 8;
        }
        return x;
    };
    auto a = drawn(rows * a_pitch, IS_E5M2), b = drawn(wide * b_pitch, false);
    std::vector<float> scales(rows);
    for (float &v : scales) v = std::ldexp(1.0f, int(host_normal() * 3));
    const float weight_scale = 0.25;
    const TensorMap a_map = map(a, false, rows, depth / 2, a_pitch, ROWS);
    const TensorMap b_map = map(b, false, wide, depth / 2, b_pitch, WIDE / CLUSTER);
    Result poison;
    memset(&poison, 0xff, sizeof poison);
    std::vector<Result> out(splits * rows * wide + 4096, poison), hidden(rows * half + 4096, poison);
    if (ADDS && splits == 1) memset(out.data(), 0, rows * wide * sizeof(Result));
    host_launch(blocks, 1, THREADS, [&] {
        gemm_hopper(out.data(), a_map, b_map, rows, half, depth / 2, wide, BAND, splits, ADDS && splits == 1 MORE,
                    scales.data(), &weight_scale, !ADDS);
    }, CLUSTER);
    if (!host_boxes.empty()) host_fault("a box was never waited for");
    auto factor = [](const std::vector<T> &x, int at, int k, bool e5m2) {
        return double(host_from_fp8(x[at + k / 2].bits >> k % 2 * 8 & 0xff, e5m2));
    };
    const int steps = ceil_div(depth, 128);
    auto sum = [&](int r, int c, int split) {
        double s = 0;
        for (int k = split * steps / splits * 128; k < min((split + 1) * steps / splits * 128, depth); k++)
            s += factor(a, r * a_pitch, k, IS_E5M2) * factor(b, c * b_pitch, k, false);
        return s * scales[ADDS ? 0 : r] * weight_scale;
    };
    int wrong = 0;
    for (int split = 0; split < splits; split++) for (int r = 0; r < rows; r++) for (int c = 0; c < wide; c++) {
        const double s = sum(r, c, split);
        wrong += bits_of(out[(split * rows + r) * wide + c]) != (ADDS ? bits_of(float(s)) : bits_of(one(s).v[0]));
        if (FORWARDS && c < half) {
            const One h = swiglu(one(s), one(sum(r, half + c, split)));
            wrong += bits_of(hidden[r * half + c]) != bits_of(h.v[0]);
        }
    }
    const u32 nothing = bits_of(poison);
    for (size_t i = splits * rows * wide; i < out.size(); i++) wrong += bits_of(out[i]) != nothing;
    for (size_t i = FORWARDS ? rows * half : 0; i < hidden.size(); i++) wrong += bits_of(hidden[i]) != nothing;
    printf("%d\n", wrong);
}
"""


def fp8_product_errors(
    factors: str,
    epilogue: str,
    tile: tuple[int, int, int, int, int],
    folder: Path,
    *,
    which: str = "FORWARD",
    splits: int = 1,
    shape: tuple[int, int, int] = (264, 136, 400),
    fault: tuple[str, str] | None = None,
) -> int:
    """How many numbers are not what the bytes' product, its scales and SwiGLU's formulas give."""
    macros: dict[str, int | str] = {"SCALAR": "bf16", "PRODUCT": which, "FACTORS": factors, "EPILOGUE": epilogue}
    macros |= dict(zip(("ROWS", "COLUMNS", "STAGES", "PINGPONG", "CLUSTER"), tile, strict=True))
    main = FP8_MAIN.replace("BAND", "2").replace("SPLITS", str(splits))
    main = main.replace(" MORE", ", hidden.data()" if epilogue == "SWIGLU" else "")
    for name, value in zip(("M", "N", "K"), shape, strict=True):
        main = main.replace(f" {name},", f" {value},", 1)
    return int(run_on_host("ops/gemm_hopper.cu", macros, BODIES, MAP + main, folder, before=hopper(), fault=fault))


@pytest.mark.parametrize(
    ("factors", "epilogue", "tile", "which", "splits"),
    [
        ("E4M3", "NONE", (128, 256, 4, 0, 1), "FORWARD", 1),
        ("E5M2", "NONE", (128, 192, 5, 1, 1), "FORWARD", 1),
        ("E4M3", "SWIGLU", (128, 192, 5, 1, 1), "FORWARD", 1),
        ("E4M3", "SWIGLU", (128, 256, 4, 0, 1), "FORWARD", 1),
        ("E5M2", "NONE", (128, 192, 5, 1, 1), "WEIGHT", 1),
        ("E5M2", "NONE", (128, 256, 4, 0, 1), "WEIGHT", 3),
    ],
)
def test_fp8_products(
    factors: str, epilogue: str, tile: tuple[int, int, int, int, int], which: str, splits: int, tmp_path: Path
) -> None:
    assert fp8_product_errors(factors, epilogue, tile, tmp_path, which=which, splits=splits) == 0


@pytest.mark.parametrize(
    ("epilogue", "fault"),
    [
        ("NONE", ("columns(part, k), columns(b, k), step", "columns(part, k), columns(b, 0), step")),
        ("NONE", ("scales[i][j / 2]", "scales[i][0]")),  # the scale of the row 8 above
        ("NONE", ("* *weight_scale", "")),
        ("SWIGLU", ("products.rescale(of_rows);", "")),
        ("SWIGLU", ("scales[by_row ? at : 0]", "scales[0]")),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else x,
)
def test_faults_in_fp8_products_show(epilogue: str, fault: tuple[str, str], tmp_path: Path) -> None:
    assert fp8_product_errors("E4M3", epilogue, (128, 128, 4, 1, 1), tmp_path, shape=(136, 264, 144), fault=fault)


TRANSPOSED = r"""
int main() {
    const int rows = M, columns = N, pitch = (rows + 15) / 16 * 16;
    std::vector<T> x(rows * columns), gu(2 * rows * columns), room(rows * columns + 8);
    for (T &v : x) v.bits = host_bf16(host_normal());
    for (T &v : gu) v.bits = host_bf16(host_normal());
    const float scale = 0.01;
    std::vector<byte> codes(rows * columns + 64, 0xee), transposed(pitch * columns + 64, 0xee);
    const int across = (columns + ACROSS - 1) / ACROSS, down = (pitch + DOWN - 1) / DOWN;
    host_launch(across, down, 256, [&] {
        quantise_transposed_e5m2(codes.data(), transposed.data(), x.data(), &scale, rows, columns, pitch);
    });
    int wrong = 0;
    for (int c = 0; c < columns; c++) for (int r = 0; r < pitch; r++) {
        const byte expected = r < rows ? host_fp8(widen(x[r * columns + c]) * (1 / scale), true) : 0;
        wrong += transposed[c * pitch + r] != expected;
        if (r < rows) wrong += codes[r * columns + c] != expected;
    }
    for (int i = 0; i < 64; i++) wrong += transposed[pitch * columns + i] != 0xee || codes[rows * columns + i] != 0xee;
    std::vector<byte> more(2 * rows * columns + 64, 0xee), other(2 * pitch * columns + 64, 0xee);
    std::copy(x.begin(), x.end(), room.begin());
    host_launch(across, down, 256, [&] {
        swiglu_bwd_fp8(more.data(), other.data(), room.data(), room.data(), gu.data(), &scale, rows, columns, pitch);
    });
    for (int c = 0; c < columns; c++) for (int r = 0; r < pitch; r++) {
        Pack<T, 1> gate{}, up{}, d{}, dgate{}, dup{}, h{};
        if (r < rows) gate.v[0] = gu[2 * r * columns + c], up.v[0] = gu[(2 * r + 1) * columns + c];
        if (r < rows) d.v[0] = x[r * columns + c];
        swiglu_gradient(dgate, dup, h, d, gate, up);
        const byte first = host_fp8(widen(dgate.v[0]) * (1 / scale), true);
        const byte second = host_fp8(widen(dup.v[0]) * (1 / scale), true);
        wrong += other[c * pitch + r] != first || other[(columns + c) * pitch + r] != second;
        if (r >= rows) continue;
        wrong += more[2 * r * columns + c] != first || more[(2 * r + 1) * columns + c] != second;
        wrong += room[r * columns + c].bits != h.v[0].bits;
    }
    for (int i = 0; i < 64; i++)
        wrong += other[2 * pitch * columns + i] != 0xee || more[2 * rows * columns + i] != 0xee;
    printf("%d\n", wrong);
}
"""


def transposed_errors(folder: Path, rows: int, columns: int, fault: tuple[str, str] | None = None) -> int:
    main = TRANSPOSED.replace(" M,", f" {rows},").replace(" N,", f" {columns},")
    macros: dict[str, int | str] = {"SCALAR": "bf16", "VEC": 8, "PER": 0}
    bodies = {k: v for k, v in BODIES.items() if "narrow" in k or k in FP8_BODIES}
    shared = (("__shared__ u32 tile", "static u32 tile"),)
    return int(run_on_host("ops/fp8.cu", macros, bodies, main, folder, before=hopper(), fault=fault, changes=shared))


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (130, 72), (256, 64), (47, 200)])
def test_rows_are_transposed(rows: int, columns: int, tmp_path: Path) -> None:
    assert transposed_errors(tmp_path, rows, columns) == 0


@pytest.mark.parametrize(
    "fault",
    [
        ("4 * quad + c >= columns", "4 * quad + c > columns"),
        ("top + row >= pitch", "false"),
        ("tiles[half]", "tiles[0]"),
        ("8 * c & 255) << 16", "8 * c & 255) << 8"),
        ("tile[row + 4 * i + j][quad]", "tile[row + i + 4 * j][quad]"),
    ],
    ids=lambda x: x[0],
)
def test_faults_of_transposing_show(fault: tuple[str, str], tmp_path: Path) -> None:
    try:
        wrong = transposed_errors(tmp_path, 47, 72, fault)
    except AssertionError:  # it wrote where nothing is
        return
    assert wrong
