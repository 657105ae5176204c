"""decode_batched.cu, whole, on the host, in teams of two blocks: rows that take given tokens next to rows that draw, as
`BatchDecoder` launches them; and logits in bf16, with the products of tensor cores."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.backends.on_host import INLINE, hopper, run_on_host, same_layout
from tests.backends.test_decode_single_on_host import BEFORE
from tinyforge.backends import get_backend
from tinyforge.infer.causal_lm import FusedLayer
from tinyforge.infer.cuda.arguments import SAMPLER, batched_arguments, samplers
from tinyforge.infer.cuda.decode_batched_plan import BatchPlan
from tinyforge.infer.decoder import Decoder, ReferenceDecoder, SequenceStart
from tinyforge.infer.sampling import Sampling, probabilities
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.rng import Stream

pytestmark = pytest.mark.slow

CONFIG = Config(dim=32, heads=2, kv_heads=1, layers=1, context=20, vocab=27, mtp_heads=1, hidden=12, mtp_weights=(1,))
BATCH = 18  # two teams, and rows of the second that nobody has
MEMORY = (
    "extern __shared__ __align__(128) unsigned char shared_memory[];",
    "unsigned char *const shared_memory = host_shared + host_rank() * HOST_ROOM;",
)
BODIES = {
    f"{INLINE}void copy_async(u32 to, const void *from)": "host_copy(to % HOST_ROOM, from, true);",
    f"{INLINE}void copy_commit()": "host_commit();",
    f"{INLINE}void copy_wait()": "host_wait(pending);",
    f"{INLINE}void narrow(float x, bf16 &to)": "to.bits = host_bf16(x);",
    f"{INLINE}void multiply_add(": "host_multiply_add(sum, a0, a1, a2, a3, b0, b1);",
    f"{INLINE}void count_up(": "++*counter;",
    f"{INLINE}u32 poll(": "return *counter;",
    f"{INLINE}void sync_crew(": "static Meeting crews[HOST_BLOCKS][CREWS]; crews[host_rank()][crew].wait(CREW * 32);",
}
MAIN = r"""
int main() {
    host_limit = 4000000;
    host_jitter = true;
    host_file = fopen("PATH", "rb");
    auto sizes = host_taken<int>(7);
    const int units = sizes[0], layers = sizes[1], batch = sizes[2], capacity = sizes[3], launches = sizes[4],
              teams = sizes[5], stride = sizes[6];
    auto weights = host_taken<T>(units), embedding = host_taken<T>(VOCAB * DIM);
    auto gains = host_taken<A>((2 * layers + 1) * DIM);
    auto cosines = host_taken<A>(capacity * HALF), sines = host_taken<A>(capacity * HALF);
    auto lengths = host_taken<int>(TEAM);
    std::vector<T> keys(layers * batch * KV_HEADS * capacity * HEAD_DIM), values;
    memset(keys.data(), 0xff, keys.size() * sizeof(T)), values = keys;  // NaN
    std::vector<int> ids(batch, 0);
    std::vector<A> logits(teams * ROWS * VOCAB_ROWS, A(__int_as_float(-1)));
    std::vector<unsigned char> memory(teams * Exchange::BYTES, 0);
    const A eps = host_taken<A>(1)[0];
    for (int launch = 0; launch < launches; launch++) {
        const int passes = host_taken<int>(1)[0];
        auto past = host_taken<int>(batch), given = host_taken<int>(passes * batch);
        auto samplers = host_taken<Sampler>(batch);
        auto first = host_taken<u32>(batch);
        std::vector<int> drawn(passes * batch, -9);
        std::vector<u32> counters(teams * 32, 0);
        const Arguments args = {weights.data(), embedding.data(), gains.data(), cosines.data(), sines.data(),
                                keys.data(), values.data(), past.data(), given.data(), ids.data(), drawn.data(),
                                memory.data(), counters.data(), logits.data(), lengths.data(), samplers.data(),
                                first.data(), eps, stride, layers, 1, batch, capacity, passes};
        host_launch(teams * TEAM, 1, THREADS, [&] { decode_batch(args); }, TEAM);
        for (int id : drawn) printf("%d ", id);
    }
    for (int i = 0; i < batch * VOCAB_ROWS; i++) printf("%.9g ", logits[i]);
}
"""


def without_a_device(model: NanoEuler, batch: int, patch: pytest.MonkeyPatch) -> tuple[Any, list[dict[str, Any]]]:
    """A BatchDecoder, and what its launches give the kernel."""
    module = pytest.importorskip("tinyforge.infer.cuda.decode_batched", reason="the launcher imports CuPy")
    patch.setattr(module, "cupy", SimpleNamespace(empty=np.zeros, asarray=np.asarray))
    patch.setattr(module, "packed", lambda struct, **fields: fields)
    w = model.fused_weights()
    assert w is not None
    plan = BatchPlan(
        dim=w.dim,
        hidden=w.hidden,
        heads=w.heads,
        kv_heads=w.kv_heads,
        layers=len(w.layers),
        vocab=w.vocab,
        outputs=1,
        itemsize=4,
        batch=batch,
        blocks=4,
        warps=4,
        shared=1 << 17,
    )
    launches: list[dict[str, Any]] = []
    launcher: Any = module.BatchLauncher.__new__(module.BatchLauncher)
    launcher.plan, launcher.exchange, memory = plan, None, SimpleNamespace(memset_async=lambda value, count: None)
    launcher.counters = SimpleNamespace(data=memory, nbytes=0)
    matrices, tables = plan.arrange(w.layers, w.lm_heads, np), {"cosines": w.cos, "sines": w.sin}
    launcher.weights = SimpleNamespace(
        matrices=matrices,
        arguments={"weights": matrices, "embedding": w.embedding, **tables, "eps": np.float32(w.norm_eps)},
        gains=np.stack(w.gains),
        lengths=plan.lengths,
        wide=np.dtype(np.float32),
    )
    launcher.kernel = lambda grid, block, args, shared_mem: launches.append(*args)
    decoder: Any = module.BatchDecoder.__new__(module.BatchDecoder)
    Decoder.__init__(decoder, model, batch)
    decoder.launcher = launcher
    decoder.cache = SimpleNamespace(keys=None, values=None, drawn=None, capacity=decoder.capacity)
    decoder._draw = module.Draw(np.zeros(batch, SAMPLER), np.zeros(batch, np.uint32))
    decoder._copy_out = lambda found: (found, None)
    decoder._wait = lambda arrived: None
    return decoder, launches


def by_the_kernel(plan: BatchPlan, parts: list[Any], batch: int, folder: Path, **fault: Any) -> tuple[Any, Any]:
    """The tokens that all launches draw, one after the other, and the last one's logits, (rows, vocab)."""
    path = folder / "launches.bin"
    path.write_bytes(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
    macros = {"SCALAR": "bf16" if plan.itemsize == 2 else "float", "SPIN": 1, **plan.macros}
    found = run_on_host(
        "infer/cuda/decode_batched.cu",
        macros,
        BODIES,
        same_layout(batched_arguments(np.dtype(np.float32))) + MAIN.replace("PATH", str(path)),
        folder,
        before=hopper() + BEFORE,
        changes=(MEMORY,),
        **fault,
    ).split()
    count = batch * plan.vocab_rows
    return np.array(found[:-count], int), np.array(found[-count:], float).reshape(batch, -1)[:, : plan.vocab]


def drawn_by_the_kernel(plan: BatchPlan, launches: list[dict[str, Any]], folder: Path, **fault: Any) -> Any:
    """What each launch draws, (passes, rows)."""
    one = launches[0]
    layers, batch, capacity, stride = (one[name] for name in ("layers", "batch", "capacity", "stride"))
    sizes = [one["weights"].size, layers, batch, capacity, len(launches), plan.teams, stride]
    parts: list[Any] = [np.array(sizes, np.int32)]
    parts += [one[name] for name in ("weights", "embedding", "gains", "cosines", "sines", "lengths", "eps")]
    for launch in launches:
        parts.append(np.int32(launch["passes"]))
        parts += [launch[name] for name in ("past", "given", "samplers", "first")]
    ids, _ = by_the_kernel(plan, parts, batch, folder, **fault)
    return [
        part.reshape(-1, batch) for part in np.split(ids, np.cumsum([launch["given"].size for launch in launches])[:-1])
    ]


def alone(model: NanoEuler, prompt: list[int], sampling: Sampling, count: int) -> list[int]:
    """The naive sibling: the model's own ops, a number of the stream for each token, most likely token first."""
    decoder, text, numbers = ReferenceDecoder(model), list(prompt), Stream(sampling.seed, "sample")
    decoder.prefill(0, prompt[:-1])
    for _ in range(count):
        z = decoder.step([[text[-1]]])[0, 0, :1].astype(np.float64)
        number = float(numbers.uniform())
        if sampling.temperature == 0:
            text.append(int(z.argmax()))
            continue
        p = probabilities(z, sampling)[0]
        order = np.argsort(-p, kind="stable")
        text.append(int(order[p[order].cumsum().searchsorted(number, side="right")]))
    return text[len(prompt) :]


def served(
    folder: Path, patch: pytest.MonkeyPatch, config: Config = CONFIG, **fault: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Texts from the kernel and alone: prompts of many lengths in three launches of 6 passes, row 5 with a second
    request from the third on, row 7 idle."""
    model = NanoEuler(config, get_backend("numpy", "fp32", workers=1))
    model.initialise(3)
    model.buffer.values[: model.buffer.decay_end] *= 8
    decoder, launches = without_a_device(model, BATCH, patch)
    rng = np.random.default_rng(0)
    rules = [Sampling(temperature=0), Sampling(1.5, top_k=0, top_p=1), Sampling(0.9, top_k=6), Sampling(2, top_p=0.8)]

    def request(row: int, length: int) -> tuple[list[int], Sampling]:
        how = rules[row % 4]
        return rng.integers(0, CONFIG.vocab, length).tolist(), Sampling(how.temperature, how.top_k, how.top_p, seed=row)

    requests = {row: request(row, 1 + row % 9) for row in range(BATCH) if row != 7}
    ended, again = requests[5], request(31, 3)
    for launch in range(3):
        if launch == 2:
            decoder.rewind_row(5, 0)
            requests[5] = again
        rows: dict[int, SequenceStart | None] = {}
        for row, (prompt, sampling) in requests.items():
            left = prompt[decoder.lengths[row] :][:6]
            rows[row] = SequenceStart(left, sampling, Stream(sampling.seed, "sample")) if left else None
        decoder.queue(rows, 6)
    found = drawn_by_the_kernel(decoder.launcher.plan, launches, folder, **fault)
    got, expected = [], []
    for row, (prompt, sampling) in requests.items():
        first = 2 if row == 5 else 0
        got.append(np.concatenate(found[first:])[len(prompt) - 1 :, row].tolist())
        expected.append(alone(model, prompt, sampling, len(got[-1])))
    prompt, sampling = ended
    got.append(np.concatenate(found[:2])[len(prompt) - 1 :, 5].tolist())
    expected.append(alone(model, prompt, sampling, len(got[-1])))
    return got, expected


def test_prompts_pass_beside_other_rows_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got, expected = served(tmp_path, monkeypatch, replace(CONFIG, layers=2))
    assert got == expected
    assert len({tuple(text) for text in got}) == len(got) and sum(map(len, got)) > 180


@pytest.mark.parametrize(
    "fault",
    [
        ("next < 0 ? drawn_last : next", "drawn_last"),
        ("args.first[at] + pass", "args.first[at]"),
        ("args.given[pass * args.batch + row]", "args.given[row]"),
    ],
    ids=lambda fault: fault[0],
)
def test_faults_show(fault: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got, expected = served(tmp_path, monkeypatch, fault=fault)
    assert got != expected


MASKED = r"""
int main() {
    host_limit = 4000000;
    host_file = fopen("PATH", "rb");
    const int batch = host_taken<int>(1)[0], words = host_taken<int>(1)[0];
    auto logits = host_taken<A>(batch * VOCAB_ROWS);
    auto masks = host_taken<u32>(words);
    auto mask_of = host_taken<int>(batch);
    auto samplers = host_taken<Sampler>(batch);
    auto first = host_taken<u32>(batch);
    std::vector<int> ids(batch, -9), drawn(batch, -9);
    host_launch(batch, 1, THREADS, [&] {
        sample_masked(logits.data(), masks.data(), mask_of.data(), samplers.data(), first.data(), ids.data(),
                      drawn.data());
    });
    for (int i = 0; i < batch; i++) printf("%d %d ", ids[i], drawn[i]);
}
"""


@pytest.mark.parametrize(
    ("vocab", "fault"),
    [
        (27, None),
        (300, None),
        (300, ("mask[begin / 32] >> begin % 32", "mask[begin / 32]")),
        (27, ("largest(id_of(sorted[below]), 0)", "id_of(sorted[below])")),
    ],
    ids=["27", "300", "bits", "none"],
)
def test_only_tokens_of_the_mask_are_sampled(vocab: int, fault: tuple[str, str] | None, tmp_path: Path) -> None:
    """Rows with masks of one token, of fewer than top k, of many and of none, next to rows without: the token that the
    distribution over the allowed ones has at the row's number."""
    rng, batch, padded = np.random.default_rng(vocab), 60, -(-vocab // 8) * 8
    plan = BatchPlan(
        dim=32,
        hidden=12,
        heads=2,
        kv_heads=1,
        layers=1,
        vocab=vocab,
        outputs=1,
        itemsize=4,
        batch=batch,
        blocks=4,
        warps=4,
        shared=1 << 17,
    )
    logits = np.full((batch, padded), -np.inf, np.float32)
    logits[:, :vocab] = rng.normal(size=(batch, vocab)) * 2
    rules = [Sampling(0.0), Sampling(1.5, 0, 1), Sampling(0.9, 5, 1), Sampling(2, 0, 0.8), Sampling(1, 9, 0.9, 0.05)]
    samplings = [replace(rules[row % 5], seed=row) for row in range(batch)]
    allowed = np.ones((batch, vocab), bool)
    for row in range(batch):
        some = rng.permutation(vocab)[: (1, 3, vocab // 2, vocab - 1)[row % 4]]
        if row % 6:
            allowed[row] = False
            allowed[row, some] = True
    allowed[7] = False
    mask_of = np.where(np.arange(batch) % 6, np.arange(batch), -1).astype(np.int32)
    masks = np.zeros((batch, 32 * -(-vocab // 32)), bool)
    masks[:, :vocab] = allowed
    masks = np.packbits(masks, axis=1, bitorder="little").view(np.uint32)
    draw = samplers(samplings, [Stream(s.seed, "sample") for s in samplings])
    parts = [np.int32(batch), np.int32(masks.size), logits, masks, mask_of, draw, np.arange(batch, dtype=np.uint32) % 3]
    path = tmp_path / "rows.bin"
    path.write_bytes(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
    macros = {"SCALAR": "float", "SPIN": 1, **plan.macros}
    main, before = MASKED.replace("PATH", str(path)), hopper() + BEFORE
    file, bodies = "infer/cuda/sample_masked.cu", {head: BODIES[head] for head in tuple(BODIES)[:4]}
    text = run_on_host(file, macros, bodies, main, tmp_path, before=before, fault=fault)
    ids, drawn = np.array(text.split(), int).reshape(batch, 2).T
    assert (ids == drawn).all()
    z = np.where(allowed, logits[:, :vocab].astype(np.float64), -np.inf)
    expected = []
    for row, sampling in enumerate(samplings):
        if sampling.temperature == 0 or row == 7:
            expected.append(int(z[row].argmax()))
            continue
        p = probabilities(z[row : row + 1], sampling)[0]
        order = np.argsort(-p, kind="stable")
        number = Stream(sampling.seed, "sample").uniform((6,))[2 * (row % 3)]
        expected.append(int(order[p[order].cumsum().searchsorted(number, side="right")]))
    right = ids == expected
    assert right.all() if fault is None else not right.all()


def cut(x: np.ndarray) -> np.ndarray:
    """The upper halves of float32: numbers in bf16."""
    return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)


def logits_in_bf16(folder: Path, passes: list[int], warps: int, **fault: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of 18 rows that are given all their tokens, after launches of `passes`: the kernel's, and the model's in float32
    with weights that bf16 holds."""
    config = Config(
        dim=96, heads=3, kv_heads=1, layers=2, context=64, vocab=27, mtp_heads=1, hidden=44, mtp_weights=(1,)
    )
    model = NanoEuler(config, get_backend("numpy", "fp32", workers=1))
    model.initialise(3)
    model.buffer.values[: model.buffer.decay_end] *= 8
    model.buffer.values.view(np.uint32)[:] &= 0xFFFF0000
    w = model.fused_weights()
    assert w is not None
    plan = BatchPlan(
        dim=w.dim,
        hidden=w.hidden,
        heads=w.heads,
        kv_heads=w.kv_heads,
        layers=len(w.layers),
        vocab=w.vocab,
        outputs=1,
        itemsize=2,
        batch=BATCH,
        blocks=4,
        warps=warps,
        shared=1 << 17,
    )
    capacity, tokens = config.context, np.random.default_rng(2).integers(0, w.vocab, (sum(passes), BATCH))
    matrices = plan.arrange([FusedLayer(*map(cut, layer)) for layer in w.layers], cut(w.lm_heads), np)
    sizes = [matrices.size, plan.layers, BATCH, capacity, len(passes), plan.teams, matrices.shape[2]]
    parts: list[Any] = [
        np.array(sizes, np.int32),
        matrices,
        cut(w.embedding),
        np.stack(w.gains),
        w.cos[:capacity],
        w.sin[:capacity],
        plan.lengths[0],
        np.float32(w.norm_eps),
    ]
    for start, end in pairwise(np.cumsum([0, *passes]).tolist()):
        parts += [
            np.int32(end - start),
            np.full(BATCH, start, np.int32),
            tokens[start:end].astype(np.int32),
            np.zeros(BATCH, SAMPLER),
            np.zeros(BATCH, np.uint32),
        ]
    _, got = by_the_kernel(plan, parts, BATCH, folder, **fault)
    return got, model.heads.logits(model.hidden(tokens.T.astype(np.int32)), 0)[:, -1]


def off(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def test_bf16_on_tensor_cores_has_the_logits_of_the_model(tmp_path: Path) -> None:
    assert off(*logits_in_bf16(tmp_path, [17, 20], warps=2)) <= 0.03


@pytest.mark.parametrize(
    "fault",
    [
        ("            queue.wait(count * STEPS);\n", ""),  # weights are read before they have come
        ("slab.take(keys, values, base, position, position + 1);", ""),  # the new key and value are not attended to
        # Hidden units are read before the team's other block has written them.
        ("            block.wait();\n            block.product<HIDDEN, ", "            block.product<HIDDEN, "),
    ],
    ids=["queue", "newest", "meeting"],
)
def test_faults_in_bf16_show(fault: tuple[str, str], tmp_path: Path) -> None:
    try:
        got, expected = logits_in_bf16(tmp_path, [5], warps=4, fault=fault)
    except AssertionError as error:
        assert "wait for ever" in str(error) or "trap" in str(error)
        return
    assert not off(got, expected) <= 0.03
