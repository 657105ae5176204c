"""batch.cu, whole, on the host: rows that take given tokens beside rows that draw, as `BatchDecoder` launches them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.nanoeuler import Config, NanoEuler
from tests.backends.on_host import INLINE, run_on_host
from tinyforge.backends import get_backend
from tinyforge.infer.cuda.batch_plan import SAMPLER, BatchPlan
from tinyforge.infer.decoder import Decoder, ReferenceDecoder, Start
from tinyforge.infer.sampling import Sampling, probabilities
from tinyforge.rng import Stream

pytestmark = pytest.mark.slow

CONFIG = Config(dim=32, heads=2, kv_heads=1, layers=1, context=20, vocab=27, mtp_heads=1, hidden=12, mtp_weights=(1,))
BATCH = 18  # two teams, and rows of the second that nobody has
BODIES = {
    f"{INLINE}void copy_async(u32 to, const void *from)": "memcpy(host_shared + to, from, 16);",
    f"{INLINE}void count_up(": "++*counter;",
    f"{INLINE}u32 poll(": "return *counter;",
    f"{INLINE}void sync_crew(": "static Meeting crews[CREWS]; crews[crew].wait(CREW * 32);",
}
MAIN = r"""
static FILE *file;
template <class X> std::vector<X> taken(int count) {
    std::vector<X> found(count);
    if (fread(found.data(), sizeof(X), count, file) != size_t(count)) printf("the file is too short\n"), exit(1);
    return found;
}
int main() {
    file = fopen("PATH", "rb");
    auto sizes = taken<int>(7);
    const int units = sizes[0], layers = sizes[1], batch = sizes[2], capacity = sizes[3], launches = sizes[4],
              teams = sizes[5], stride = sizes[6];
    auto weights = taken<T>(units), embedding = taken<T>(VOCAB * DIM), gains = taken<A>((2 * layers + 1) * DIM);
    auto cosines = taken<A>(capacity * HALF), sines = taken<A>(capacity * HALF);
    auto lengths = taken<int>(TEAM);
    std::vector<T> keys(layers * batch * KV_HEADS * capacity * HEAD_DIM, T(__int_as_float(-1))), values = keys;
    std::vector<int> ids(batch, 0);
    std::vector<A> logits(teams * ROWS * VOCAB_ROWS, A(__int_as_float(-1)));
    std::vector<unsigned char> memory(teams * Exchange::BYTES, 0);
    const A eps = taken<A>(1)[0];
    for (int launch = 0; launch < launches; launch++) {
        const int passes = taken<int>(1)[0];
        auto past = taken<int>(batch), given = taken<int>(passes * batch);
        auto samplers = taken<Sampler>(batch);
        auto first = taken<u32>(batch);
        std::vector<int> drawn(passes * batch, -9);
        std::vector<u32> counters(teams * 32, 0);
        host_launch(teams * TEAM, 1, THREADS, [&] {
            decode_batch(weights.data(), embedding.data(), gains.data(), cosines.data(), sines.data(), keys.data(),
                         values.data(), past.data(), given.data(), ids.data(), drawn.data(), memory.data(),
                         counters.data(), logits.data(), lengths.data(), stride, layers, 1, batch, capacity, passes,
                         eps, samplers.data(), first.data());
        });
        for (int id : drawn) printf("%d ", id);
    }
}
"""


class Launches:
    """In the place of the launcher: keeps what a launch is told."""

    def __init__(self) -> None:
        self.found: list[tuple[np.ndarray, ...]] = []

    def drawn(self, cache: Any, lengths: Any, given: np.ndarray, draw: Any) -> np.ndarray:
        self.found.append((np.array(lengths, np.int32), given.copy(), draw.samplers.copy(), draw.first.copy()))
        return given


def without_a_device(model: NanoEuler, batch: int) -> tuple[Any, Launches]:
    """A BatchDecoder whose launches are kept."""
    pytest.importorskip("cupy", reason="the launcher imports CuPy")
    from tinyforge.infer.cuda.batch import BatchDecoder, Draw

    decoder: Any = BatchDecoder.__new__(BatchDecoder)
    Decoder.__init__(decoder, model, batch)
    decoder.launcher, decoder.cache = Launches(), None
    decoder._draw = Draw(np.zeros(batch, SAMPLER), np.zeros(batch, np.uint32))
    decoder._copy_out = lambda found: (found, None)
    decoder._wait = lambda arrived: None
    return decoder, decoder.launcher


def drawn_by_the_kernel(model: NanoEuler, launches: Launches, folder: Path, **fault: Any) -> list[np.ndarray]:
    """What each launch draws, (passes, rows)."""
    w = model.fused_weights()
    assert w is not None
    plan = BatchPlan(dim=w.dim, hidden=w.hidden, heads=w.heads, kv_heads=w.kv_heads, layers=len(w.layers),
                     vocab=w.vocab, outputs=1, itemsize=4, batch=BATCH, blocks=2, warps=4, shared=1 << 17)  # fmt: skip
    matrices = plan.arrange(w.layers, w.lm_heads, np)
    sizes = [matrices.size, plan.layers, BATCH, CONFIG.context, len(launches.found), plan.teams, matrices.shape[2]]
    parts: list[Any] = [np.array(sizes, np.int32), matrices, w.embedding, np.stack(w.gains), w.cos, w.sin,
                        plan.lengths[0], np.float32(w.norm_eps)]  # fmt: skip
    for launch in launches.found:
        parts += [np.int32(len(launch[1])), *launch]
    path = folder / "launches.bin"
    path.write_bytes(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
    main = MAIN.replace("PATH", str(path))
    found = run_on_host("infer/cuda/batch.cu", {"SCALAR": "float", **plan.macros}, BODIES, main, folder, **fault)
    ids = np.array(found.split(), int)
    ends = np.cumsum([launch[1].size for launch in launches.found])[:-1]
    return [part.reshape(-1, BATCH) for part in np.split(ids, ends)]


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


def served(folder: Path, config: Config = CONFIG, **fault: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Texts from the kernel and alone: prompts of many lengths in three launches of 6 passes, row 5 with a second
    request from the third on, row 7 idle."""
    model = NanoEuler(config, get_backend("numpy", "fp32", workers=1))
    model.initialise(3)
    model.buffer.values[: model.buffer.decay_end] *= 8
    decoder, launches = without_a_device(model, BATCH)
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
        rows: dict[int, Start | None] = {}
        for row, (prompt, sampling) in requests.items():
            left = prompt[decoder.lengths[row] :][:6]
            rows[row] = Start(left, sampling, Stream(sampling.seed, "sample")) if left else None
        decoder.queue(rows, 6)
    found = drawn_by_the_kernel(model, launches, folder, **fault)
    got, wanted = [], []
    for row, (prompt, sampling) in requests.items():
        first = 2 if row == 5 else 0
        got.append(np.concatenate(found[first:])[len(prompt) - 1 :, row].tolist())
        wanted.append(alone(model, prompt, sampling, len(got[-1])))
    prompt, sampling = ended
    got.append(np.concatenate(found[:2])[len(prompt) - 1 :, 5].tolist())
    wanted.append(alone(model, prompt, sampling, len(got[-1])))
    return got, wanted


def test_prompts_pass_beside_other_rows_tokens(tmp_path: Path) -> None:
    got, wanted = served(tmp_path, replace(CONFIG, layers=2))
    assert got == wanted
    assert len({tuple(text) for text in got}) == len(got) and sum(map(len, got)) > 180


@pytest.mark.parametrize(
    "fault",
    [
        ("told < 0 ? drawn_last : told", "drawn_last"),
        ("first[at] + pass", "first[at]"),
        ("given[pass * batch + row]", "given[row]"),
    ],
    ids=lambda fault: fault[0],
)
def test_faults_show(fault: tuple[str, str], tmp_path: Path) -> None:
    got, wanted = served(tmp_path, fault=fault)
    assert got != wanted
