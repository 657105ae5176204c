"""Convolution in bf16 and group normalisation, run on the host from the text that the GPU gets: which numbers of the
images a window reads, what stands outside, which parts are summed. Whether the GPU agrees is seen in tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.on_host import HOPPER_BODIES, INLINE, MULTIPLY_ADD, hopper, run_on_host

pytestmark = pytest.mark.slow

BODIES = {
    f"{INLINE}void copy_async(u32 to, const void *from, bool valid)": "host_copy(to, from, valid);",
    f"{INLINE}void multiply_add(": "host_multiply_add(sum, a0, a1, a2, a3, b0, b1);",
    f"{INLINE}void load_matrix(u32": "host_load_matrix(x, from, false);",
    f"{INLINE}void load_matrix_transposed(": "host_load_matrix(x, from, true);",
    **{
        head: HOPPER_BODIES[head]
        for head in HOPPER_BODIES
        if any(f" {name}(" in head for name in ("narrow", "copy_commit", "copy_wait"))
    },
}
TENSOR_CORES = (
    r"""
#define NAN __int_as_float(0x7fffffff)
typedef unsigned u32;
"""
    + MULTIPLY_ADD
    + r"""
// ldmatrix: lane i passes the address of row i % 8 of matrix i / 8, and gets of each matrix the numbers 2 (i % 4) and
// the next of row i / 4, or, transposed, of column i / 4.
static void host_load_matrix(u32 (&x)[4], u32 from, bool transposed) {
    auto &all = operands[current / 32];
    const int lane = threadIdx.x % 32;
    all[lane][0] = from;
    warps[current / 32].wait(32);
    for (int n = 0; n < 4; n++) {
        unsigned short pair[2];
        for (int e = 0; e < 2; e++) {
            const int across = lane % 4 * 2 + e, along = lane / 4;
            const u32 row = all[n * 8 + (transposed ? across : along)][0];
            memcpy(&pair[e], host_at(row) + 2 * (transposed ? along : across), 2);
        }
        x[n] = pair[0] | u32(pair[1]) << 16;
    }
    warps[current / 32].wait(32);
}
"""
)
SHAPE = r"""
static Divisor divisor(u32 d) {
    u32 shift = 0;
    while ((u64(1) << shift) < d) shift++;
    return {u32(((u64(1) << 32) * ((u64(1) << shift) - d)) / d + 1), shift};
}
struct Shape { int batch, high, wide, channels, outs, height, width, stride, above, before, spread, down, across; };
static std::vector<bf16> drawn(int n) {
    std::vector<bf16> x(n);
    for (bf16 &v : x) v.bits = host_bf16(host_normal());
    return x;
}
static double pixel(const std::vector<bf16> &x, const Shape &s, int b, int p, int q, int k) {
    if (p < 0 || q < 0 || p % s.spread || q % s.spread || p / s.spread >= s.high || q / s.spread >= s.wide) return 0;
    return widen(x[((b * s.high + p / s.spread) * s.wide + q / s.spread) * s.channels + k]);
}
#define PASSED s.high, s.wide, s.channels, s.down, s.across, s.height, s.width, s.stride, s.above, s.before, s.spread, \
    image.magic, image.shift, row.magic, row.shift
"""
GATHERED = r"""
int main() {
    const Shape s{SIZES};
    const bool biased = BIASED, added = ADDED;
    host_jitter = true;
    const int rows = s.batch * s.down * s.across, depth = s.height * s.width * s.channels;
    const Divisor image = divisor(s.down * s.across), row = divisor(s.across);
    auto x = drawn(s.batch * s.high * s.wide * s.channels), weight = drawn(s.outs * depth), bias = drawn(s.outs);
    auto add = drawn(rows * s.outs);
    std::vector<bf16> y(rows * s.outs + 999, bf16{0xffff});
    for (blockIdx.y = 0; blockIdx.y < 1; blockIdx.y++)
        host_launch(ceil_div(rows, ROWS), ceil_div(s.outs, COLUMNS), THREADS, [&] {
            conv2d_gather(y.data(), weight.data(), biased ? bias.data() : nullptr, added ? add.data() : nullptr, rows,
                          s.outs, x.data(), PASSED);
        });
    double worst = 0;
    for (int m = 0; m < rows; m++) for (int o = 0; o < s.outs; o++) {
        const int b = m / (s.down * s.across), r = m / s.across % s.down, c = m % s.across;
        double sum = (biased ? widen(bias[o]) : 0) + (added ? widen(add[m * s.outs + o]) : 0);
        for (int i = 0; i < s.height; i++) for (int j = 0; j < s.width; j++) for (int k = 0; k < s.channels; k++)
            sum += pixel(x, s, b, r * s.stride - s.above + i, c * s.stride - s.before + j, k) *
                   widen(weight[((o * s.height + i) * s.width + j) * s.channels + k]);
        worst = host_worse(worst, std::abs(widen(y[m * s.outs + o]) - sum) / (std::abs(sum) + 0.1 * std::sqrt(depth)));
    }
    for (size_t i = rows * s.outs; i < y.size(); i++) if (y[i].bits != 0xffff) return 1;
    printf("%g\n", worst);
}
"""
WEIGHED = r"""
int main() {
    const Shape s{SIZES};
    const int real = s.channels - MISSING, parts = 3, pitch = (s.outs + 7) / 8 * 8;
    host_jitter = true;
    const int rows = s.batch * s.down * s.across, depth = s.height * s.width * s.channels, taps = s.height * s.width;
    const Divisor image = divisor(s.down * s.across), row = divisor(s.across);
    auto x = drawn(s.batch * s.high * s.wide * s.channels), dy = drawn(rows * pitch);
    const int biased = MISSING > 0, of_part = s.outs * (taps * real + biased);
    std::vector<float> partial(parts * of_part + 999, NAN);
    gridDim.z = parts;
    for (blockIdx.z = 0; blockIdx.z < parts; blockIdx.z++)
        host_launch(ceil_div(depth, COLUMNS), ceil_div(s.outs, ROWS), THREADS, [&] {
            conv2d_weight(partial.data(), dy.data(), rows, s.outs, pitch, real, biased, x.data(), PASSED);
        });
    double worst = 0;
    for (int o = 0; o < s.outs; o++) for (int tap = 0; tap < taps; tap++) for (int k = 0; k < real; k++) {
        double sum = 0, found = 0;
        for (int m = 0; m < rows; m++) {
            const int b = m / (s.down * s.across), r = m / s.across % s.down, c = m % s.across;
            sum += widen(dy[m * pitch + o]) * pixel(x, s, b, r * s.stride - s.above + tap / s.width,
                                                    c * s.stride - s.before + tap % s.width, k);
        }
        for (int z = 0; z < parts; z++) found += partial[z * of_part + (o * taps + tap) * real + k];
        worst = host_worse(worst, std::abs(found - sum) / (1 + std::sqrt(rows)));
    }
    for (int o = 0; biased && o < s.outs; o++) {
        double sum = 0, found = 0;
        for (int m = 0; m < rows; m++) sum += widen(dy[m * pitch + o]);
        for (int z = 0; z < parts; z++) found += partial[z * of_part + s.outs * taps * real + o];
        worst = host_worse(worst, std::abs(found - sum) / (1 + std::sqrt(rows)));
    }
    for (size_t i = parts * of_part; i < partial.size(); i++) if (!std::isnan(partial[i])) return 1;
    printf("%g\n", worst);
}
"""
# Images, height and width, channels; outputs; height and width of a window; stride, what is above and before; spread;
# output positions down and across.
SIZES = {
    "same": (2, 9, 8, 16, 72, 3, 3, 1, 1, 1, 1, 9, 8),
    "stride": (3, 7, 6, 8, 10, 3, 2, 2, 1, 0, 1, 4, 3),
    "spread": (2, 4, 4, 8, 9, 3, 3, 1, 1, 1, 2, 8, 7),
    "one": (5, 6, 7, 72, 130, 1, 1, 1, 0, 0, 1, 6, 7),
}


def gathered(
    sizes: tuple[int, ...], folder: Path, *, columns: int = 64, more: bool = True, fault: tuple[str, str] | None = None
) -> float:
    """The worst difference from sums in float64, in parts of the size of the sums."""
    macros: dict[str, int | str] = {
        "PART": 0,
        "ROWS": 128,
        "COLUMNS": columns,
        "STAGES": 3,
        "SPREAD": int(sizes[10] > 1),
    }
    main = GATHERED.replace("SIZES", ", ".join(map(str, sizes)))
    main = main.replace("= BIASED", f"= {int(more)}").replace("= ADDED", f"= {int(more)}")
    text = run_on_host(
        "ops/conv2d_mma.cu", macros, BODIES, SHAPE + main, folder, before=hopper() + TENSOR_CORES, fault=fault
    )
    return float(text)


def weighed(
    sizes: tuple[int, ...], folder: Path, *, rows: int = 64, missing: int = 0, fault: tuple[str, str] | None = None
) -> float:
    macros: dict[str, int | str] = {"PART": 1, "ROWS": rows, "COLUMNS": 128, "STAGES": 3, "SPREAD": 0}
    main = WEIGHED.replace("SIZES", ", ".join(map(str, sizes))).replace("MISSING", str(missing))
    text = run_on_host(
        "ops/conv2d_mma.cu", macros, BODIES, SHAPE + main, folder, before=hopper() + TENSOR_CORES, fault=fault
    )
    return float(text)


ROUNDING = 4e-3  # of a result to bf16
SUMMING = 1e-5


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("columns", [64, 128])
def test_the_windows_are_those_of_the_formula(name: str, columns: int, tmp_path: Path) -> None:
    """Tiles that stand out of the result, windows that stand out of the image, an odd number of outputs."""
    found = gathered(SIZES[name], tmp_path, columns=columns, more=name != "stride")
    assert found < ROUNDING, found


@pytest.mark.parametrize(("name", "missing"), [("same", 5), ("stride", 0), ("one", 3)])
@pytest.mark.parametrize("rows", [64, 128])
def test_the_gradient_of_the_weight_is_the_sum_over_positions(
    name: str, missing: int, rows: int, tmp_path: Path
) -> None:
    """Parts that are no whole number of steps, and channels that the launcher has added."""
    found = weighed(SIZES[name], tmp_path, rows=rows, missing=missing)
    assert found < SUMMING, found


@pytest.mark.parametrize(
    "fault",
    [
        ("copy_wait<STAGES - 2>();", "copy_wait<STAGES - 1>();"),  # a step is read before it has arrived
        ("fetch(step + STAGES - 1);", "fetch(step + STAGES);"),  # the step after next is never copied
        ("p < w.high && q < w.wide", "p < w.high"),  # the window goes on in the next row
        ("q = from.q + j", "q = from.q + i"),
    ],
    ids=lambda fault: fault[0],
)
def test_faults_of_the_windows_show(fault: tuple[str, str], tmp_path: Path) -> None:
    try:
        found = gathered(SIZES["same"], tmp_path, fault=fault)
    except AssertionError:
        return
    assert not found < ROUNDING, found


NORM = r"""
int main() {
    const int shapes[][4] = {{3, 9, 16, 2}, {2, 5, 12, 1}, {1, 30, 6, 3}, {2, 2, 520, 1}};
    double worst = 0;
    for (auto &[batch, positions, channels, groups] : shapes) {
        if (channels / groups % VEC) continue;
        auto drawn = [](int n) { std::vector<T> x(n); for (T &v : x) v = host_normal(); return x; };
        const int total = batch * positions * channels, width = channels / groups;
        auto x = drawn(total), dy = drawn(total), shift = drawn(batch * channels), w = drawn(channels),
             b = drawn(channels);
        std::vector<T> y(total, NAN), dx = y, dshift(batch * channels, NAN);
        std::vector<A> mean(batch * groups, NAN), rstd = mean, partial(batch * 2 * channels, NAN);
        const A eps = 1e-5;
        host_launch(groups, batch, THREADS, [&] {
            groupnorm_fwd(y.data(), mean.data(), rstd.data(), x.data(), shift.data(), w.data(), b.data(), positions,
                          channels, eps);
        });
        host_launch(groups, batch, THREADS, [&] {
            groupnorm_bwd(dx.data(), dshift.data(), partial.data(), dy.data(), w.data(), b.data(), x.data(),
                          shift.data(), mean.data(), rstd.data(), positions, channels);
        });
        for (int n = 0; n < batch; n++) for (int g = 0; g < groups; g++) {
            auto v = [&](int p, int c) {
                return x[(n * positions + p) * channels + c] + (SHIFT ? shift[n * channels + c] : 0);
            };
            double sum = 0, square = 0, along = 0, all = 0;
            const double count = positions * width;
            for (int p = 0; p < positions; p++) for (int c = g * width; c < (g + 1) * width; c++) sum += v(p, c);
            const double m = sum / count;
            for (int p = 0; p < positions; p++) for (int c = g * width; c < (g + 1) * width; c++)
                square += (v(p, c) - m) * (v(p, c) - m);
            const double r = 1 / std::sqrt(square / count + eps);
            auto hat = [&](int p, int c) { return (v(p, c) - m) * r; };
            auto dz = [&](int p, int c) {
                const double z = hat(p, c) * w[c] + b[c], s = 1 / (1 + std::exp(-z));
                return dy[(n * positions + p) * channels + c] * (SILU ? s * (1 + z * (1 - s)) : 1);
            };
            for (int c = g * width; c < (g + 1) * width; c++) {
                double dw = 0, db = 0;
                for (int p = 0; p < positions; p++) {
                    const double z = hat(p, c) * w[c] + b[c], expected = SILU ? z / (1 + std::exp(-z)) : z;
                    worst = host_worse(worst, std::abs(y[(n * positions + p) * channels + c] - expected));
                    dw += dz(p, c) * hat(p, c), db += dz(p, c);
                }
                worst = host_worse(worst, std::abs(partial[n * 2 * channels + c] - dw));
                worst = host_worse(worst, std::abs(partial[n * 2 * channels + channels + c] - db));
                along += dw * w[c], all += db * w[c];
            }
            for (int c = g * width; c < (g + 1) * width; c++) {
                double total = 0;
                for (int p = 0; p < positions; p++) {
                    const double d = r * (dz(p, c) * w[c] - all / count - hat(p, c) * along / count);
                    worst = host_worse(worst, std::abs(dx[(n * positions + p) * channels + c] - d));
                    total += d;
                }
                if (SHIFT) worst = host_worse(worst, std::abs(dshift[n * channels + c] - total));
            }
        }
    }
    printf("%g\n", worst);
}
"""


def normed(folder: Path, vec: int, option: int, fault: tuple[str, str] | None = None) -> float:
    macros: dict[str, int | str] = {"SCALAR": "double", "VEC": vec, "SILU": option, "SHIFT": option}
    shared = ("__shared__ A scratch", "static A scratch")  # of a block, not of a thread
    before = "#define NAN __int_as_float(0x7fffffff)\n"
    narrow = {f"{INLINE}void narrow(float x, bf16 &to)": "to.bits = host_bf16(x);"}
    return float(
        run_on_host("ops/groupnorm.cu", macros, narrow, NORM, folder, before=before, changes=(shared,), fault=fault)
    )


@pytest.mark.parametrize("vec", [1, 2])
@pytest.mark.parametrize("option", [0, 1])
def test_the_norm_is_that_of_the_formula(vec: int, option: int, tmp_path: Path) -> None:
    """Groups of 8 vectors, of 3 that no shuffle divides, of more than there are threads; more positions than lanes."""
    found = normed(tmp_path, vec, option)
    assert found < 1e-10, found


@pytest.mark.parametrize("fault", [("p += lanes", "p += lanes + 1"), ("count = THREADS / 32", "count = 1")])
def test_faults_of_the_norm_show(fault: tuple[str, str], tmp_path: Path) -> None:
    assert not normed(tmp_path, 2, 1, fault) < 1e-10
