"""Kernels whose threads share work through memory, run on the host from the text that the GPU gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.on_host import HOPPER_BODIES, hopper, run_on_host
from tinyforge.infer.cuda.arguments import samplers
from tinyforge.infer.cuda.decode_batched_plan import BatchPlan
from tinyforge.infer.sampling import Sampling, probabilities
from tinyforge.rng import Stream

pytestmark = pytest.mark.slow

SCAN = r"""
int main() {
    double worst = 0;
    const int shapes[][4] = {CASES};
    for (auto &[batch, length, channels, states] : shapes) {
        const int wide = batch * length * channels, narrow = batch * length * states;
        const int tiles = (length + TILE - 1) / TILE;
        const int columns = (channels + CHANNELS - 1) / CHANNELS;
        auto drawn = [](int n) { std::vector<T> x(n); for (T &v : x) v = host_normal(); return x; };
        auto poison = [](int n) { return std::vector<T>(n, T(0) / T(0)); };
        auto u = drawn(wide), delta = drawn(wide), z = drawn(wide), dy = drawn(wide), b = drawn(narrow),
             c = drawn(narrow), a_log = drawn(channels * states), skip = drawn(channels), bias = drawn(channels);
        auto y = poison(wide), naive_y = poison(wide), h = poison(wide * states), g = h, up = poison(wide);
        auto kept = poison(batch * tiles * channels * states);
        std::vector<T> state(batch * channels * states);
        host_launch(columns, batch, THREADS, [&] {
            selective_scan_fwd(y.data(), kept.data(), state.data(), u.data(), delta.data(), b.data(), c.data(),
                               z.data(), a_log.data(), skip.data(), bias.data(), length, channels, states, channels,
                               channels, states, states, channels);
        });
        host_launch((batch * channels + 31) / 32, 1, 32, [&] {
            selective_scan_fwd_naive(naive_y.data(), h.data(), u.data(), delta.data(), b.data(), c.data(), z.data(),
                                     a_log.data(), skip.data(), bias.data(), batch, length, channels, states);
        });
        std::vector<T> found[9], expected[9];
        const int of_a = batch * channels * states, of_d = batch * 2 * channels;
        const int sizes[] = {wide, wide, wide, narrow, narrow, of_a, of_d, wide};
        for (int i = 0; i < 8; i++) found[i] = poison(sizes[i]), expected[i] = found[i];
        auto parts = poison(2 * columns * narrow);
        host_launch(columns, batch, THREADS, [&] {
            selective_scan_bwd(found[0].data(), found[1].data(), found[2].data(), parts.data(), found[5].data(),
                               found[6].data(), dy.data(), u.data(), delta.data(), b.data(), c.data(), z.data(),
                               a_log.data(), skip.data(), bias.data(), kept.data(), length, channels, states, channels,
                               channels, states, states, channels, channels);
        });
        std::vector<T> both = poison(2 * narrow);
        host_launch((2 * narrow + THREADS - 1) / THREADS, 1, THREADS, [&] {
            selective_scan_sum(both.data(), both.data() + narrow, parts.data(), narrow, columns);
        });
        found[3].assign(both.begin(), both.begin() + narrow), found[4].assign(both.begin() + narrow, both.end());
        host_launch((batch * channels + 31) / 32, 1, 32, [&] {
            selective_scan_bwd_naive(expected[0].data(), expected[1].data(), expected[2].data(), g.data(), up.data(),
                                     expected[5].data(), expected[6].data(), dy.data(), u.data(), delta.data(),
                                     b.data(), c.data(), z.data(), a_log.data(), skip.data(), bias.data(), h.data(),
                                     batch, length, channels, states);
        });
        host_launch((narrow + 31) / 32, 1, 32, [&] {
            selective_scan_sum_naive(expected[3].data(), expected[4].data(), g.data(), up.data(), u.data(),
                                     delta.data(),
                                     bias.data(), h.data(), batch * length, channels, states);
        });
        found[7] = y, expected[7] = naive_y, found[8] = state;
        for (int row = 0; row < batch; row++) {
            const T *last = &h[((row + 1) * length - 1) * channels * states];
            expected[8].insert(expected[8].end(), last, last + channels * states);
        }
        for (int i = 0; i < 9; i++) {
            double apart = 0, size = 0;
            for (size_t k = 0; k < found[i].size(); k++) {
                const double d = found[i][k] - expected[i][k];
                apart += d * d, size += double(expected[i][k]) * expected[i][k];
            }
            const double error = std::sqrt(apart / size);
            worst = host_worse(worst, error);
        }
    }
    printf("%g\n", worst);
}
"""


FLOAT = 1e-6


@pytest.mark.parametrize(
    ("scalar", "per", "vec", "cases", "tolerance"),
    [
        ("double", 4, 4, "{1, 33, 40, 16}, {2, 80, 32, 16}", 1e-12),
        ("double", 4, 1, "{2, 49, 33, 13}", 1e-12),
        ("float", 4, 4, "{1, 49, 36, 16}", FLOAT),
        ("double", 1, 4, "{2, 17, 8, 4}", 1e-12),
    ],
)
def test_the_scan_is_its_naive_sibling(
    scalar: str, per: int, vec: int, cases: str, tolerance: float, tmp_path: Path
) -> None:
    """Less and more than a tile, its half and a block's channels; poisoned outputs and shared memory."""
    found = scan({"SCALAR": scalar, "PER": per, "VEC": vec}, cases, tmp_path)
    assert found <= tolerance, found


def scan(macros: dict[str, int | str], cases: str, folder: Path, fault: tuple[str, str] | None = None) -> float:
    """The worst relative difference from the naive kernels."""
    bodies = {"__device__ __forceinline__ float exp_base2(": "return std::exp2(x);"}
    main = SCAN.replace("CASES", cases)
    return float(run_on_host("ops/selective_scan.cu", macros, bodies, main, folder, fault=fault))


@pytest.mark.parametrize(
    "fault",
    [
        ("half ? middle : start", "start"),  # the later half's first state before it
        ("int q = 1; q < QUARTERS", "int q = 2; q < QUARTERS"),  # a part of C . h is not added
        ("fours[i] = {}", ""),  # positions after the end go on with the state
        ("lane % 8 * (SUMS / 8)", "lane / 4 * (SUMS / 8)"),  # sums over channels at another state
        ("(j < some ? widen(ups.v[i].v[j]) : A(0))", "widen(ups.v[i].v[j])"),  # positions after the end have gradients
    ],
    ids=lambda fault: fault[0],
)
def test_faults_of_the_scan_show(fault: tuple[str, str], tmp_path: Path) -> None:
    found = scan({"SCALAR": "double", "PER": 4, "VEC": 4}, "{1, 49, 40, 16}", tmp_path, fault)
    assert not found <= 1e-9, found


def test_a_wrong_coefficient_of_softplus_shows(tmp_path: Path) -> None:
    """The smallest of the polynomial in float32."""
    fault = ("0.0052326943f", "0.0052f")
    found = scan({"SCALAR": "float", "PER": 4, "VEC": 4}, "{1, 49, 36, 16}", tmp_path, fault)
    assert not found <= FLOAT, found


GROUPED = r"""
int main() {
    const int counts[] = {COUNTS}, experts = sizeof counts / sizeof counts[0], outs = OUTS, ins = INS, tokens = 50;
    std::vector<int> starts{0};
    for (int count : counts) starts.push_back(starts.back() + count);
    const int rows = starts.back();
    std::vector<int> which(rows);
    for (int &t : which) t = host_random() % tokens;
    auto drawn = [](int n) { std::vector<T> x(n); for (T &v : x) v.bits = host_bf16(host_normal()); return x; };
    auto x = drawn(tokens * ins), dy = drawn(tokens * outs), by_row = drawn(rows * ins), up = drawn(rows * outs),
         weight = drawn(experts * outs * ins);
    auto map = [&](const std::vector<T> &a, int wide, int high, int deep, int box) {
        TensorMap m{};
        const u64 words[] = {u64(a.data()), u64(wide), u64(high), u64(deep), 64, u64(box)};
        memcpy(m.words, words, sizeof words);
        return m;
    };
    const int blocks = 3;
    double worst = 0;
    auto compare = [&](double got, double expected, double scale) {
        const double error = std::abs(got - expected) / scale;
        worst = host_worse(worst, error);
    };
    for (int gathered = 0; gathered < 2; gathered++) {
        const int *t = gathered ? which.data() : nullptr;
        auto source = [&](int r) { return gathered ? which[r] : r; };
        const auto &fwd_x = gathered ? x : by_row, &bwd_dy = gathered ? dy : up;
        std::vector<T> y(rows * outs, T{0xffff}), dx(rows * ins, T{0xffff});
        const TensorMap along = map(weight, ins, outs, experts, COLUMNS);
        const TensorMap across = map(weight, ins, outs, experts, DEPTH);
        host_launch(blocks, 1, THREADS, [&] {
            grouped_fwd(y.data(), fwd_x.data(), along, t, starts.data(), outs, ins, experts);
        });
        host_launch(blocks, 1, THREADS, [&] {
            grouped_bwd_input(dx.data(), bwd_dy.data(), across, t, starts.data(), ins, outs, experts);
        });
        // dW with one factor gathered, the other not.
        std::vector<float> dw(experts * outs * ins, 1.0f);
        const auto &dy_of_w = gathered ? dy : up, &x_of_w = gathered ? by_row : x;
        const TensorMap dy_map = map(dy_of_w, outs, dy_of_w.size() / outs, 1, DEPTH);
        const TensorMap x_map = map(x_of_w, ins, x_of_w.size() / ins, 1, DEPTH);
        const int *x_tokens = gathered ? nullptr : which.data();
        host_launch(blocks, 1, THREADS, [&] {
            grouped_bwd_weight(dw.data(), dy_of_w.data(), x_of_w.data(), dy_map, x_map, t, x_tokens, starts.data(),
                               outs, ins, experts);
        });
        for (int e = 0; e < experts; e++) {
            for (int r = starts[e]; r < starts[e + 1]; r++) {
                for (int o = 0; o < outs; o++) {
                    double sum = 0;
                    for (int i = 0; i < ins; i++)
                        sum += double(widen(weight[(e * outs + o) * ins + i])) * widen(fwd_x[source(r) * ins + i]);
                    compare(widen(y[r * outs + o]), sum, 256 * std::sqrt(ins));  // of a rounding to bf16
                }
                for (int i = 0; i < ins; i++) {
                    double sum = 0;
                    for (int o = 0; o < outs; o++)
                        sum += double(widen(weight[(e * outs + o) * ins + i])) * widen(bwd_dy[source(r) * outs + o]);
                    compare(widen(dx[r * ins + i]), sum, 256 * std::sqrt(outs));
                }
            }
            for (int o = 0; o < outs; o++)
                for (int i = 0; i < ins; i++) {
                    double sum = 1;
                    for (int r = starts[e]; r < starts[e + 1]; r++)
                        sum += double(widen(dy_of_w[(t ? t[r] : r) * outs + o])) *
                               widen(x_of_w[(x_tokens ? x_tokens[r] : r) * ins + i]);
                    compare(dw[(e * outs + o) * ins + i], sum, 1);
                }
        }
    }
    printf("%g\n", worst);
}
"""


@pytest.mark.parametrize(("counts", "outs", "ins"), [("0, 1, 130, 65, 192", 136, 72), ("300, 3", 264, 8)])
def test_the_grouped_products_for_hopper_are_the_plain_ones(counts: str, outs: int, ins: int, tmp_path: Path) -> None:
    """Groups of no row, of one, of whole buffers and of one row more; more tiles than blocks; gathered and not. The
    instructions do here what their manual says; whether the GPU agrees is seen in tests/gpu."""
    found = grouped(counts, outs, ins, tmp_path)
    assert found < 1e-4, found


def grouped(counts: str, outs: int, ins: int, folder: Path, fault: tuple[str, str] | None = None) -> float:
    """The worst difference from sums in float64: of results in bf16, in parts of a rounding of the largest."""
    main = GROUPED.replace("COUNTS", counts).replace("OUTS", str(outs)).replace("INS", str(ins))
    macros: dict[str, int | str] = {"SCALAR": "bf16"}
    file = "ops/grouped_hopper.cu"
    return float(run_on_host(file, macros, HOPPER_BODIES, main, folder, before=hopper(), fault=fault))


@pytest.mark.parametrize(
    "fault",
    [
        ("(piece % 8 ^ line) * 16", "piece % 8 * 16"),  # rows of dW without the swizzle
        ("ring.left() + group * CHUNK", "ring.left()"),  # both warpgroups on the same rows
    ],
    ids=lambda fault: fault[0],
)
def test_faults_of_the_grouped_products_show(fault: tuple[str, str], tmp_path: Path) -> None:
    assert not grouped("70, 30", 16, 8, tmp_path, fault) < 1e-4


SAMPLER = r"""
int main() {
    const int rows = ROWS_OF_TEST;
    static const unsigned bytes[][6] = {SAMPLERS};
    static const unsigned first[] = {FIRST}, bits[][VOCAB] = {LOGITS};
    std::vector<A> logits(rows * VOCAB_ROWS, A(-INFINITY));
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < VOCAB; i++) logits[row * VOCAB_ROWS + i] = __uint_as_float(bits[row][i]);
    std::vector<Sampler> samplers(rows);
    static_assert(sizeof(Sampler) == sizeof bytes[0], "");
    memcpy(samplers.data(), bytes, sizeof bytes);
    for (int pass = 0; pass < PASSES; pass++)
        for (int row = 0; row < rows; row++) {
            int found = -1;
            host_launch(1, 1, THREADS, [&] {
                const int id = draw(host_shared, logits.data() + row * VOCAB_ROWS, samplers[row], first[row] + pass);
                if (threadIdx.x == 0) found = id;
            });
            printf("%d ", found);
        }
}
"""


def rows_drawn(samplings: list[Sampling], logits: np.ndarray, passes: int, folder: Path, **faults: Any) -> np.ndarray:
    """What decode_batched.cu's `draw` gives each row, (passes, rows): rules and streams as its launch lays them out."""
    plan = BatchPlan(
        dim=64,
        hidden=26,
        heads=4,
        kv_heads=2,
        layers=2,
        vocab=logits.shape[1],
        outputs=1,
        batch=len(logits),
        itemsize=4,
        blocks=4,
        shared=160 << 10,
        warps=4,
    )
    streams = [Stream(s.seed, "sample", 3 * row) for row, s in enumerate(samplings)]

    def words(x: np.ndarray) -> str:
        return ", ".join(f"{{{', '.join(map(str, row))}}}" for row in x.view(np.uint32).reshape(len(x), -1).tolist())

    main = SAMPLER.replace("ROWS_OF_TEST", str(len(logits))).replace("PASSES", str(passes))
    main = main.replace("SAMPLERS", words(samplers(samplings, streams))).replace("LOGITS", words(logits))
    main = main.replace("FIRST", ", ".join(str(stream.position) for stream in streams))
    found = run_on_host("infer/cuda/decode_batched.cu", {"SCALAR": "float", **plan.macros}, {}, main, folder, **faults)
    return np.array(found.split(), int).reshape(passes, -1)


RULES = [
    Sampling(temperature=0),
    Sampling(temperature=0.7, top_k=5, top_p=1, seed=4),
    Sampling(1.5, 0, 0.8, seed=5),
    Sampling(temperature=3, top_k=0, top_p=1, min_p=0.2, seed=6),
    Sampling(temperature=1, top_k=1 << 40, seed=7),
]


def wanted_of(samplings: list[Sampling], logits: np.ndarray, passes: int) -> np.ndarray:
    """The kernel's order, most likely token first."""
    expected = np.zeros((passes, len(logits)), int)
    for row, (s, z) in enumerate(zip(samplings, logits.astype(np.float64), strict=True)):
        if s.temperature == 0:
            expected[:, row] = z.argmax()
            continue
        p = probabilities(z[None], s)[0]
        order = np.argsort(-p, kind="stable")
        running = p[order].cumsum()
        stream = Stream(s.seed, "sample", 3 * row)
        uniforms = np.array([float(stream.uniform()) for _ in range(passes)])  # a block of the stream for each
        expected[:, row] = order[running.searchsorted(uniforms * running[-1], side="right")]
    return expected


def test_rows_of_a_batch_are_drawn_by_rules_of_their_own(tmp_path: Path) -> None:
    logits = (np.random.default_rng(1).normal(size=(len(RULES), 83)) * 2).astype(np.float32)
    found = rows_drawn(RULES, logits, 30, tmp_path)
    assert (found == wanted_of(RULES, logits, 30)).all()
    assert len(set(found[:, 0])) == 1 and all(len(set(column)) > 2 for column in found.T[1:])


def test_a_neighbours_rule_would_show(tmp_path: Path) -> None:
    """Negative control: every row drawn by the first one's rule."""
    logits = (np.random.default_rng(1).normal(size=(len(RULES), 83)) * 2).astype(np.float32)
    found = rows_drawn(
        RULES,
        logits,
        30,
        tmp_path,
        fault=("take, how, number", "take, rule(how), number"),
        before="template <class S> S rule(S how) { static S one = how; return one; }",
    )
    assert (found != wanted_of(RULES, logits, 30)).any()


STATIC = """
#define NAN (0.0 / 0.0)
#undef __shared__
#define __shared__ static
using std::fabs, std::isfinite, std::isnan;
"""
SQUARES = r"""
int main() {
    const i64 bounds[] = {0, 4096, 4096, 4096, 4100, 9000, 0, 0, 9000, 9004};
    const int pieces = 5, blocks = 3;
    std::vector<A> grads(9004);
    for (A &v : grads) v = host_normal();
    std::vector<double> sums(pieces * blocks, 0.0 / 0.0);
    host_launch(blocks, pieces, 256, [&] { square_sums(sums.data(), grads.data(), bounds); });
    double worst = 0;
    for (int p = 0; p < pieces; p++) {
        double got = 0, expected = 0;
        for (int b = 0; b < blocks; b++) got += sums[p * blocks + b];
        for (i64 i = bounds[2 * p]; i < bounds[2 * p + 1]; i++) expected += double(grads[i]) * grads[i];
        if (!(std::abs(got - expected) <= worst)) worst = std::abs(got - expected);
    }
    printf("%g\n", worst);
}
"""


@pytest.mark.parametrize("fault", [None, ("i < stop", "i <= stop"), ("first + i64(blockIdx.x)", "i64(blockIdx.x)")])
def test_squares_of_pieces(fault: tuple[str, str] | None, tmp_path: Path) -> None:
    """Empty pieces, one of a vector, others of more than the blocks' first stride."""
    worst = float(run_on_host("optim/adamw.cu", {"SCALAR": "float"}, {}, SQUARES, tmp_path, before=STATIC, fault=fault))
    assert (worst < 1e-9) == (fault is None), worst


NORMUON = r"""
int main() {
    const int count = 3, rows = 6, columns = COLUMNS, size = rows * columns;
    const i64 in_v[] = {8, 20, 2}, starts[] = {96, 0, 256};
    const A beta = 0.75, rates[] = {0.5, 0, 0.25};
    std::vector<A> v(30), w(400), factors(count * rows), old_v, old_w;
    std::vector<T> x(count * size);
    std::vector<double> squares(count * rows, 0.0 / 0.0);
    for (A &one : v) one = std::abs(host_normal());
    for (A &one : w) one = host_normal();
    for (T &one : x) one = host_normal();
    const auto step = [&](double clip) {
        host_launch(rows, count, 256, [&] {
            normuon_rows(factors.data(), squares.data(), v.data(), x.data(), in_v, &clip, columns, beta, A(1e-7));
        });
        host_launch(count, 1, 256, [&] {
            normuon_factors(factors.data(), squares.data(), &clip, rows, 0.2 * std::sqrt(size), 1e-7);
        });
        host_launch((size / VEC + 255) / 256, count, 256, [&] {
            muon_update(
                (T *)nullptr, w.data(), x.data(), starts, rates, &clip, factors.data(), size / VEC, columns, A(99)
            );
        });
    };
    old_v = v, old_w = w;
    step(0.0 / 0.0);
    double worst = old_v == v && old_w == w ? 0 : 1;
    step(1);
    for (int n = 0; n < count; n++) {
        double norm = 0, factor[rows];
        for (int r = 0; r < rows; r++) {
            double sum = 0;
            for (int c = 0; c < columns; c++) sum += x[n * size + r * columns + c] * x[n * size + r * columns + c];
            old_v[in_v[n] + r] = beta * old_v[in_v[n] + r] + (1 - beta) * sum / columns;
            factor[r] = 1 / (std::sqrt(old_v[in_v[n] + r]) + 1e-7);
            norm += sum * factor[r] * factor[r];
        }
        for (int i = 0; i < size; i++) {
            const double change = x[n * size + i] * factor[i / columns] * 0.2 * std::sqrt(size / norm);
            A &one = old_w[starts[n] + i];
            one = one * (change * one < 0 ? 1 : 0.25) - 0.5 * change;
        }
    }
    for (int i = 0; i < int(v.size()); i++) worst = std::fmax(worst, std::abs(v[i] - old_v[i]));
    for (int i = 0; i < int(w.size()); i++) worst = std::fmax(worst, std::abs(w[i] - old_w[i]));
    printf("%g\n", worst);
}
"""


@pytest.mark.parametrize("columns", [11, 10])
@pytest.mark.parametrize(
    "fault",
    [
        None,
        ("(i * VEC + j) / columns]", "i * VEC / columns % 2]"),
        ("first = i64(blockIdx.x) * rows", "first = 0"),
        ("(A(1) - beta) * A(sum / columns)", "(A(1) - beta) * A(sum)"),
        ("* w.v[j] < 0 ? A(1) : shrink", "* w.v[j] > 0 ? A(1) : shrink"),
    ],
)
def test_the_rows_of_normuon_and_cautious_decay(columns: int, fault: tuple[str, str] | None, tmp_path: Path) -> None:
    """Matrices here and there in the buffers; vectors that lie in two rows; and a factor that is NaN."""
    macros = {"SCALAR": "double", "VEC": 4 if columns % 2 == 0 else 1, "NORMUON": 1, "CAUTIOUS": 1}
    main = NORMUON.replace("COLUMNS", str(columns))
    worst = float(run_on_host("optim/muon.cu", macros, {}, main, tmp_path, before=STATIC, fault=fault))
    assert (worst < 1e-12) == (fault is None), worst


SOFT_ROWS = r"""
int main() {
    const int rows = 5, sizes[][2] = {{1, 1}, {7, 7}, {33, 40}, {96, 96}, {1000, 1000}, {2300, 2304}};
    double worst = 0;
    for (auto [vocab, pitch] : sizes) {
        if (pitch % VEC) continue;
        std::vector<T> z(rows * pitch), t(rows * pitch);
        for (T &v : z) v = 5 * host_normal();
        for (T &v : t) v = 5 * host_normal();
        std::vector<T> plain = z;
        const int targets[rows] = {0, -1, vocab - 1, vocab / 2, 0};
        A nll[rows], plain_nll[rows];
        for (A &x : nll) x = 0.0 / 0.0;
        const int threads = std::min(256, (pitch / VEC + 31) / 32 * 32);
        host_launch(rows, 1, threads, [&] {
            soft_residual(nll, z.data(), t.data(), targets, A(0.7), vocab, pitch);
        });
        host_launch(1, 1, 32, [&] {
            soft_residual_naive(plain_nll, plain.data(), t.data(), targets, A(0.7), rows, vocab, pitch);
        });
        const auto compare = [&](double a, double b) {
            if (!(std::abs(a - b) <= worst)) worst = std::abs(a - b);
        };
        for (int i = 0; i < rows; i++) compare(nll[i], plain_nll[i]);
        for (int i = 0; i < rows * pitch; i++) compare(z[i], plain[i]);
    }
    printf("%g\n", worst);
}
"""


@pytest.mark.parametrize("vec", [1, 2])
@pytest.mark.parametrize(
    "fault",
    [
        None,
        ("dot *= factor", ""),
        ("share * dot", "dot"),
        ("if (v * VEC + j >= vocab) break;", ""),
        ("lane < blockDim.x / 32", "lane < 1"),
    ],
)
def test_residuals_of_soft_targets(fault: tuple[str, str] | None, vec: int, tmp_path: Path) -> None:
    """Rows of one number, of fewer and more numbers than a block has threads, padded ones, one without a target."""
    macros = {"SCALAR": "double", "VEC": vec, "PER": 0}
    worst = float(run_on_host("ops/cross_entropy.cu", macros, {}, SOFT_ROWS, tmp_path, before=STATIC, fault=fault))
    assert (worst < 1e-12) == (fault is None), worst
