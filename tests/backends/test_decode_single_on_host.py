"""decode_single.cu, whole, on the host: blocks that wait for each other's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.on_host import HOPPER_BODIES, INLINE, MULTIPLY_ADD, hopper, run_on_host, same_layout
from tinyforge.backends import get_backend
from tinyforge.frozen_model import quantised_copy
from tinyforge.infer.causal_lm import FusedLayer
from tinyforge.infer.cuda.arguments import single_arguments
from tinyforge.infer.cuda.decode_single_plan import FOUR_BITS, RowPlan
from tinyforge.infer.cuda.prompts import RowCache
from tinyforge.infer.sampling import Sampling, probabilities
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.quantised import FORMATS, Quantised
from tinyforge.rng import Stream

pytestmark = pytest.mark.slow

# Two layers take more units of weights than the queue has places; hidden units and ids fill no whole tile.
CONFIG = Config(
    dim=32, heads=2, kv_heads=1, layers=2, context=12, vocab=27, mtp_heads=2, hidden=44, mtp_weights=(1, 0.5)
)
DRAWN = Sampling(temperature=0.7, top_k=8, top_p=0.9, min_p=0.02, seed=3)
BODIES = {
    f"{INLINE}void copy_async(u32 to, const void *from)": "host_copy(to % HOST_ROOM, from, true);",
    f"{INLINE}void copy_codes(u32 to": "host_copy(to % HOST_ROOM, from, true, sizeof(Stored));",
    f"{INLINE}u32 fma_pair(": "return host_fma_pair(a, b, c);",
    f"{INLINE}float half_of(": "_Float16 x; memcpy(&x, reinterpret_cast<char *>(&two) + 2 * i, 2); return x;",
    f"{INLINE}void copy_commit()": "host_commit();",
    f"{INLINE}void copy_wait()": "host_wait(pending);",
    f"{INLINE}void publish(float": "*to = there(x) ? x : NAN;",
    f"{INLINE}void publish(double": "*to = x;",
    **{
        f"{INLINE}void peek(const {x} *from, Pack<{x}, {n}>": f"if (needed) to = load<{n}>(from);"
        for x, sizes in (("float", (1, 2, 4)), ("double", (1, 2)))
        for n in sizes
    },
    f"{INLINE}void narrow(float x, bf16 &to)": "to.bits = host_bf16(x);",
    f"{INLINE}void multiply_add(": "host_multiply_add(sum, a0, a1, a2, a3, b0, b1);",
    **{
        head: HOPPER_BODIES[head]
        for head in (f"{INLINE}void barrier_make(", f"{INLINE}void barrier_arrive(", f"{INLINE}void barrier_expect(")
    },
    f"{INLINE}bool barrier_passed(": "host_yield(); return host_barrier(barrier).phase != parity;",
    f"{INLINE}void copy_line(": "host_line(to % HOST_ROOM, from, bytes, barrier);",
    f"{INLINE}void sync(": "static Meeting meetings[HOST_BLOCKS]; meetings[host_rank()].wait(THREADS);",
}
BEFORE = (
    r"""
#define NAN __int_as_float(0x7fffffff)
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
inline long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
"""
    + MULTIPLY_ADD
    + r"""
static u32 host_fma_pair(u32 a, u32 b, u32 c) {
    u32 both = 0;
    for (int i = 0; i < 2; i++)
        both |= u32(host_bf16(host_number(a, i) * host_number(b, i) + host_number(c, i))) << 16 * i;
    return both;
}
inline long long clock() { static long long now; return now += 7; }
"""
)
MEMORY = (
    "extern __shared__ __align__(128) unsigned char memory[];",
    "unsigned char *const memory = host_shared + host_rank() * HOST_ROOM;",
)
# In a launch: passes, past, 1 for greedy text, 2 for DRAWN, the key of its numbers; then tokens, logits or a report.
# Where a stream is given, the cache and what lies before the last layer are too: the first launch runs that layer only.
MAIN = r"""
int main() {
    host_limit = 2000000;
    host_jitter = true;
    host_file = fopen("PATH", "rb");
    auto sizes = host_taken<int>(11);
    const int units = sizes[0], layers = sizes[1], capacity = sizes[2], launches = sizes[3], stride = sizes[4],
              outputs = sizes[5], region = sizes[6], speculates = sizes[7];
    auto weights = host_taken<W>(units);
    auto embedding = host_taken<T>(VOCAB * DIM);
    auto gains = host_taken<A>((2 * layers + 1) * DIM);
    auto cosines = host_taken<A>(capacity * HEAD_DIM / 2), sines = host_taken<A>(capacity * HEAD_DIM / 2);
    auto lengths = host_taken<int>(BLOCKS);
    const A eps = host_taken<A>(1)[0];
    auto tokens = host_taken<int>(capacity + 1);
    auto scales = host_taken<float>(sizes[8]);
    const int tiles = sizes[9], given_words = sizes[10], cached = layers * KV_HEADS * capacity * HEAD_DIM;
    auto given = host_taken<A>(given_words);
    auto skipped = host_taken<int>(given_words ? BLOCKS : 0), left = host_taken<int>(given_words ? BLOCKS : 0);
    std::vector<T> keys(cached), values = keys;
    if (given_words) keys = host_taken<T>(cached), values = host_taken<T>(cached);
    std::vector<int> begin(1 + ROWS, -1);
    const int filled = host_taken<int>(1)[0];
    begin[0] = filled, begin[1] = tokens[filled];
    for (int launch = 0; launch < launches; launch++) {
        auto how = host_taken<int>(5);
        const int passes = how[0], past = how[1], sampled = how[2], drawn = sampled == 2;
        std::vector<A> exchange(passes * region, __int_as_float(-1));
        std::vector<int> report((passes + 1) * (1 + ROWS), -9);
        const bool last = launch == 0 && given_words;
        const int first = last ? layers - 1 : 0, at = first * KV_HEADS * capacity * HEAD_DIM;
        Arguments args = {};
        args.weights = weights.data(), args.embedding = embedding.data(), args.gains = gains.data() + 2 * first * DIM;
        args.cosines = cosines.data(), args.sines = sines.data();
        args.keys = keys.data() + at, args.values = values.data() + at, args.tokens = tokens.data();
        args.exchange = exchange.data() + first * LAYER, args.lengths = last ? left.data() : lengths.data();
        args.begin = speculates ? begin.data() : nullptr, args.report = report.data();
        args.scales = scales.data() + (last && sizes[8] ? 8 * tiles : 0);
        if (last) args.given = given.data(), args.skipped = skipped.data(), args.dealt = tiles % BLOCKS;
        args.eps = eps, args.stride = stride, args.layers = layers - first, args.heads = outputs;
        args.capacity = capacity, args.past = past, args.passes = passes, args.sampled = sampled, args.draw = past;
        args.how = {drawn * 0.7f, drawn * 0.9f, drawn * 0.02f, drawn * 8, u32(how[3]), u32(how[4])};
        host_launch(BLOCKS, 1, THREADS + PRODUCERS * 32, [&] { decode(args); }, BLOCKS);
        if (speculates) {
            for (int pass = 0; pass < passes; pass++)
                for (int i = 0; i < report[pass * (1 + ROWS)]; i++) printf("%d ", report[pass * (1 + ROWS) + 1 + i]);
            begin.assign(report.end() - 1 - ROWS, report.end());
        } else if (sampled) {
            for (int i = 1; i <= passes; i++) printf("%d ", tokens[past + i]);
        } else {
            for (int pass = 1; pass <= passes; pass++)
                for (int i = ROWS * outputs * VOCAB_ROWS; i > 0; i--) printf("%.9g ", exchange[pass * region - i]);
        }
    }
}
"""


def by_the_kernel(
    model: NanoEuler,
    rows: int,
    outputs: int,
    tokens: list[int],
    launches: list[tuple[int, ...]],
    folder: Path,
    *,
    speculates: bool = False,
    bf16: bool = False,
    fault: tuple[str, str] | None = None,
    prompt: int = 0,
    **tuning: int,
) -> list[str]:
    """What the launches, (passes, past, drawn, key), print. prompt: of the tokens, those that the model itself computes
    up to the last layer; the first pass goes on from there at the last of them."""
    w = model.fused_weights()
    assert w is not None
    # The upper halves of float32 are numbers in bf16.
    cut = (lambda x: (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)) if bf16 else lambda x: x
    itemsize = 2 if bf16 else 4
    quantised = isinstance(w.lm_heads, Quantised)
    grouped = quantised and w.layers[0].out.kind == "int4"
    code = FOUR_BITS if grouped else FORMATS[w.lm_heads.kind].scalar if quantised else ""
    plan = RowPlan(
        dim=w.dim,
        hidden=w.hidden,
        heads=w.heads,
        kv_heads=w.kv_heads,
        layers=len(w.layers),
        vocab=w.vocab,
        outputs=len(w.lm_heads),
        itemsize=itemsize,
        code=code,
        rows=rows,
        shared=1 << 17,
        **{"blocks": 2, "warps": 4, "depth": 8, "spin": 1, **tuning},
    )
    capacity, scales = model.config.context, np.zeros(0, np.float32)
    if grouped:
        pairs = [(FusedLayer(*(m.codes for m in layer)), FusedLayer(*(m.scales for m in layer))) for layer in w.layers]
        matrices = plan.arrange_groups(pairs, w.lm_heads.codes, np)
        scales = plan.arrange_scales(
            [FusedLayer(*(s[:, :1] for s in p[1])) for p in pairs], w.lm_heads.scales[..., None], np
        )
    elif quantised:
        matrices = plan.arrange([FusedLayer(*(m.codes for m in layer)) for layer in w.layers], w.lm_heads.codes, np)
        of_layers = [FusedLayer(*(m.scales[:, None] for m in layer)) for layer in w.layers]
        scales = plan.arrange_scales(of_layers, w.lm_heads.scales[..., None], np)
    else:
        matrices = plan.arrange([FusedLayer(*map(cut, layer)) for layer in w.layers], cut(np.stack(w.lm_heads)), np)
    sizes = [
        matrices.size,
        len(w.layers),
        capacity,
        len(launches),
        matrices.shape[1],
        outputs,
        plan.exchange(outputs),
        speculates,
        len(scales),
    ]
    units, tiles = plan.before(len(w.layers) - 1)
    behind: list[np.ndarray] = []
    if prompt:
        cache = RowCache(model.backend, *np.zeros((2, len(w.layers), w.kv_heads, capacity, w.head_dim), np.float32), 0)
        given = np.zeros((w.dim // 8, 4, 8), np.float32)
        given[...] = model.fill(np.array([tokens[:prompt]], np.int32), cache)[0, -1].reshape(-1, 1, 8)
        behind = [given, units, plan.lengths[outputs - 1] - units, cut(cache.keys), cut(cache.values)]
    sizes += [tiles, behind[0].size if prompt else 0]
    padded = np.zeros(capacity + 1, np.int32)
    padded[: len(tokens)] = tokens
    parts: list[Any] = [
        np.array(sizes, np.int32),
        matrices,
        cut(w.embedding),
        np.stack(w.gains),
        w.cos[:capacity],
        w.sin[:capacity],
        plan.lengths[outputs - 1].astype(np.int32),
        np.float32(w.norm_eps),
        padded,
        scales,
        *behind,
        np.array([max(prompt - 1, 0)], np.int32),
        *(np.array((*launch, 0, 0)[:5], np.uint32) for launch in launches),
    ]
    path = folder / "launches.bin"
    path.write_bytes(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
    return run_on_host(
        "infer/cuda/decode_single.cu",
        {"SCALAR": "bf16" if bf16 else "float", **plan.macros},
        BODIES,
        same_layout(single_arguments(np.dtype(np.float32))) + MAIN.replace("PATH", str(path)),
        folder,
        before=hopper() + BEFORE,
        changes=(MEMORY,),
        fault=fault,
    ).split()


def model_of(config: Config) -> NanoEuler:
    model = NanoEuler(config, get_backend("numpy", "fp32", workers=1))
    model.initialise(3)
    model.buffer.values[: model.buffer.decay_end] *= 8
    return model


@pytest.fixture(scope="module")
def model() -> NanoEuler:
    return model_of(CONFIG)


def forward(model: NanoEuler, tokens: list[int]) -> np.ndarray:
    """The naive sibling, the model's own ops: (T, outputs, vocab)."""
    h = model.hidden(np.array([tokens], np.int32))
    return np.stack([model.heads.logits(h, k)[0] for k in range(model.config.mtp_heads)], axis=1)


def greedy(model: NanoEuler, token: int, count: int) -> list[int]:
    text = [token]
    for _ in range(count):
        text.append(int(forward(model, text)[-1, 0].argmax()))
    return text[1:]


def logits_of(model: NanoEuler, rows: int, tokens: list[int], folder: Path, **kinds: Any) -> np.ndarray:
    """Of every position, `rows` of them a pass: (T, outputs, vocab)."""
    launches = [(1, past, 0) for past in range(0, len(tokens), rows)]
    found = by_the_kernel(model, rows, 2, tokens, launches, folder, **kinds)
    return np.array(found, float).reshape(len(tokens), 2, -1)[..., : model.config.vocab]


def some_tokens(count: int) -> list[int]:
    return np.random.default_rng(1).integers(0, CONFIG.vocab, count).tolist()


@pytest.mark.parametrize(
    ("rows", "tuning"), [(1, {}), (2, {"producers": 1}), (1, {"refill": 0}), (4, {"depth": 4, "splits": 1})]
)
def test_logits_are_those_of_the_model(model: NanoEuler, rows: int, tuning: dict[str, int], tmp_path: Path) -> None:
    tokens = some_tokens(12)
    got, expected = logits_of(model, rows, tokens, tmp_path, **tuning), forward(model, tokens)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def bf16_model() -> NanoEuler:
    """Three heads of 32 to a key; bf16 holds its weights."""
    model = model_of(
        Config(
            dim=96, heads=3, kv_heads=1, layers=2, context=64, vocab=27, mtp_heads=2, hidden=44, mtp_weights=(1, 0.5)
        )
    )
    model.buffer.values.view(np.uint32)[:] &= 0xFFFF0000
    return model


def test_bf16_with_tensor_cores_gives_the_same_bits_for_any_rows(tmp_path: Path) -> None:
    model, tokens = bf16_model(), some_tokens(24)
    # With six blocks each has all of its tiles at one time, and takes weights a step ahead. And units in lines.
    kinds = ((1, {"producers": 1, "blocks": 6}), (4, {"producers": 2, "line": 4}))
    one, four = (logits_of(model, rows, tokens, tmp_path, bf16=True, depth=16, **kind) for rows, kind in kinds)
    expected = forward(model, tokens)
    assert one.tobytes() == four.tobytes()
    assert np.abs(one - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("right", "wrong", "producers"),
    [
        ("queue.await(p.count * STEPS);\n", ";\n", 0),  # weights are read before they have come
        ("queue.await(p.count * STEPS);\n", ";\n", 4),
        ("line >= LINES && !barrier_passed(", "false && !barrier_passed(", 4),  # a place is filled before it is empty
        ("next = wrapped(next + FILLERS)", "next = wrapped(next + 1)", 4),  # the wrong weights
        ("score[u][i] += other[u][i]", "score[u][i] += 0 * other[u][i]", 4),
        ("narrow(mean[j] * scale, both.v[j]);", "narrow(mean[j], both.v[j]);", 4),
    ],
)
def test_faults_show(right: str, wrong: str, producers: int, tmp_path: Path) -> None:
    model, tokens = bf16_model(), some_tokens(4)
    try:
        how: dict[str, Any] = {"bf16": True, "depth": 16, "producers": producers, "line": 1}
        got = logits_of(model, 4, tokens, tmp_path, fault=(right, wrong), **how)
    except AssertionError as error:
        assert any(said in str(error) for said in ("wait for ever", "trap", "barrier"))
        return
    expected = forward(model, tokens)
    assert not np.abs(got - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_of_one_byte_in_float(model: NanoEuler, kind: str, tmp_path: Path) -> None:
    """The reference has the same codes: nothing but the order of sums differs."""
    tokens, small = some_tokens(8), quantised_copy(model, kind)
    got, expected = logits_of(small, 2, tokens, tmp_path), forward(small, tokens)
    tolerance = 1e-5 * np.abs(expected).max()
    assert np.abs(got - expected).max() <= tolerance < 0.1 * np.abs(expected - forward(model, tokens)).max()


@pytest.mark.parametrize("producers", [0, 4])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_of_one_byte_in_bf16(kind: str, producers: int, tmp_path: Path) -> None:
    tokens, small = some_tokens(12), quantised_copy(bf16_model(), kind)
    kinds = {"bf16": True, "depth": 16, "producers": producers}
    one, four = (logits_of(small, rows, tokens, tmp_path, **kinds) for rows in (1, 4))
    expected = forward(small, tokens)
    assert one.tobytes() == four.tobytes()
    assert np.abs(one - expected).max() <= 0.02 * np.abs(expected).max()


# Rows of whole groups; a tile of `down` has more units than the queue has places.
GROUPS = Config(
    dim=96, heads=3, kv_heads=1, layers=2, context=64, vocab=27, mtp_heads=2, hidden=2080, mtp_weights=(1, 1)
)


def grouped_model(hidden: int = 2080) -> NanoEuler:
    model = model_of(GROUPS.override({"hidden": hidden}))
    model.buffer.values.view(np.uint32)[:] &= 0xFFFF0000
    return quantised_copy(model, "int4")


@pytest.mark.parametrize(("blocks", "depth", "line"), [(2, 8, 1), (6, 32, 4)])
def test_weights_of_four_bits_in_bf16(blocks: int, depth: int, line: int, tmp_path: Path) -> None:
    tokens, small = some_tokens(8), grouped_model()
    kinds = {"bf16": True, "depth": depth, "producers": 4, "blocks": blocks, "line": line}
    one, four = (logits_of(small, rows, tokens, tmp_path, **kinds) for rows in (1, 4))
    expected = forward(small, tokens)
    assert one.tobytes() == four.tobytes()
    assert np.abs(one - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.parametrize(
    "fault",
    [
        ("word >> 8 & 0x00F000F0}", "word >> 8 & 0x007000F0}"),  # a bit is lost
        ("scale = half_of(taken.scales.v[s / 2], s % 2)", "scale = half_of(taken.scales.v[s / 2], 0)"),
        ("if constexpr (HAS_EIGHTS) {", "if constexpr (false) {"),  # codes count from 0
        ("LOW_UNIT = 8589934592.0f", "LOW_UNIT = 4294967296.0f"),
    ],
    ids=str,
)
def test_faults_of_four_bits_show(fault: tuple[str, str], tmp_path: Path) -> None:
    tokens, small = some_tokens(4), grouped_model(hidden=160)
    kinds = {"bf16": True, "depth": 16, "producers": 4}
    got, expected = logits_of(small, 4, tokens, tmp_path, fault=fault, **kinds), forward(small, tokens)
    assert not np.abs(got - expected).max() <= 0.02 * np.abs(expected).max()


def test_units_that_are_copied_together_change_no_token(tmp_path: Path) -> None:
    """In launches of several passes, each of which begins with a line of its own; seen where it does not."""
    small = grouped_model(hidden=160)

    def text(line: int, fault: tuple[str, str] | None = None) -> list[str]:
        kinds: dict[str, Any] = {"bf16": True, "depth": 16, "producers": 4, "blocks": 3, "line": line}
        return by_the_kernel(small, 1, 1, [5], [(3, 0, 1), (5, 3, 1)], tmp_path, fault=fault, **kinds)

    plain = text(1)
    assert text(4) == plain
    try:
        assert text(4, ("block.queue.end_pass();", "")) != plain
    except AssertionError as error:
        assert any(said in str(error) for said in ("wait for ever", "trap", "barrier"))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("int8", ("(bytes & 0x00800080) | 0x43004300", "0x43004300")),  # no sign
        ("int8", ("0x4342 : 0x4140", "0x4140 : 0x4342")),
        ("fp8", ("0x3424 : 0x1404", "0x1404 : 0x3424")),
        ("fp8", ("0x07F007F0", "0x07C007C0")),  # a bit of mantissa is lost
        ("int8", ("if constexpr (CODES && !FOUR) sum *= p.scale;", "")),
        ("int8", ("scales += count * 8;", "scales += count * 8 - 8;")),
    ],
    ids=str,
)
def test_faults_of_codes_show(kind: str, fault: tuple[str, str], tmp_path: Path) -> None:
    tokens, small = some_tokens(4), quantised_copy(bf16_model(), kind)
    got, expected = logits_of(small, 4, tokens, tmp_path, bf16=True, depth=16, fault=fault), forward(small, tokens)
    assert not np.abs(got - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.parametrize("producers", [0, 4])
def test_drawn_text(producers: int, model: NanoEuler, tmp_path: Path) -> None:
    """Each token is the one that the reference draws by the same number, within float32 of a border."""
    numbers = Stream(DRAWN.seed, "sample")
    ids = [int(x) for x in by_the_kernel(model, 1, 1, [5], [(11, 0, 2, *numbers.key)], tmp_path, producers=producers)]
    for token, p in zip(ids, probabilities(forward(model, [5, *ids[:-1]])[:, 0], DRAWN), strict=True):
        order, uniform = np.argsort(-p, kind="stable"), float(numbers.uniform())
        at = p[order].cumsum().searchsorted([uniform - 1e-5, uniform + 1e-5], side="right")
        assert token in order[at.clip(0, len(p) - 1)]
    assert len(set(ids)) > 3


@pytest.mark.parametrize("producers", [0, 4])
def test_greedy_text_and_speculation_up_to_a_full_cache(
    producers: int, model: NanoEuler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowPlan, "draws", producers == 0)  # and as with a vocabulary too large to sort
    expected = greedy(model, 5, 12)
    found = by_the_kernel(model, 1, 1, [5], [(3, 0, 1), (9, 3, 1)], tmp_path, producers=producers)
    assert [int(x) for x in found] == expected
    # More passes than the cache has room for: the launch ends early.
    found = by_the_kernel(model, 2, 2, [5], [(2, 0, 0), (12, 0, 0)], tmp_path, speculates=True, producers=producers)
    ids = [int(x) for x in found]
    assert len(ids) >= 11 and ids == expected[: len(ids)]


PROMPT = [5, 3, 8, 1, 20, 13]


@pytest.mark.parametrize("producers", [0, 4])
@pytest.mark.parametrize("kind", ["", "int8"])
def test_text_behind_a_prompt_of_which_one_layer_is_left(
    kind: str, producers: int, model: NanoEuler, tmp_path: Path
) -> None:
    """The first pass begins at the last layer; plain, and with drafts up to a full cache."""
    model = quantised_copy(model, kind) if kind else model
    past, text = len(PROMPT) - 1, list(PROMPT)
    while len(text) < CONFIG.context + 1:
        text.append(int(forward(model, text)[-1, 0].argmax()))
    expected, known = text[len(PROMPT) :], {"prompt": len(PROMPT), "producers": producers}
    plain = [(1, past, 1), (len(expected) - 1, past + 1, 1)]
    assert [int(x) for x in by_the_kernel(model, 1, 1, PROMPT, plain, tmp_path, **known)] == expected
    found = by_the_kernel(model, 2, 2, PROMPT, [(1, 0, 0), (12, 0, 0)], tmp_path, speculates=True, **known)
    ids = [int(x) for x in found]
    assert len(ids) >= len(expected) - 1 and ids == expected[: len(ids)]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("args.given, args.gains}", "nullptr, args.gains}"),  # begins at the token's embedding
        ("block.dealt = args.dealt;", "block.dealt = 0;"),  # other blocks' tiles
        ("(args.skipped ? args.skipped[blockIdx.x] : 0)", "0"),  # the first layer's weights
    ],
)
def test_faults_of_the_first_pass_show(right: str, wrong: str, tmp_path: Path) -> None:
    model = bf16_model()
    model.initialise(3)
    model.buffer.values[: model.buffer.decay_end] *= 8
    past, launches = len(PROMPT) - 1, [(1, len(PROMPT) - 1, 0)]
    expected = forward(model, PROMPT)[past]

    def error(fault: tuple[str, str] | None) -> float:
        """Of the logits of the first pass."""
        found = by_the_kernel(model, 1, 2, PROMPT, launches, tmp_path, fault=fault, prompt=len(PROMPT), blocks=3)
        return float(np.abs(np.array(found, float).reshape(2, -1)[:, : model.config.vocab] - expected).max())

    tolerance = 1e-5 * np.abs(expected).max()
    assert error(None) <= tolerance
    try:
        assert not error((right, wrong)) <= tolerance
    except AssertionError as problem:
        assert any(said in str(problem) for said in ("wait for ever", "trap", "barrier"))
