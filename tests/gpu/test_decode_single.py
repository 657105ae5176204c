"""Decoding on the GPU: every position's logits against the model's own forward, tokens, determinism, waits."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import load
from tinyforge.frozen_model import quantised_copy
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.cuda.prompts import append
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.infer.decoder_numpy import NumpyDecoder
from tinyforge.infer.sampling import Sampling, probabilities
from tinyforge.infer.session import Session, Stats
from tinyforge.models.nanoeuler import SPEC, Config, NanoEuler
from tinyforge.quantised import FORMATS, KINDS
from tinyforge.rng import Stream

pytestmark = pytest.mark.gpu

# Odd sizes: a hidden width and a vocabulary that fill no whole tile, three query heads to a key.
CONFIG = Config(
    dim=96, heads=6, kv_heads=2, layers=3, context=160, vocab=301, mtp_heads=3, hidden=154, mtp_weights=(1, 0.5, 0.25)
)
# The same with the smallest head that bf16 takes.
WIDER = Config(
    dim=192, heads=6, kv_heads=2, layers=3, context=160, vocab=301, mtp_heads=3, hidden=154, mtp_weights=(1, 0.5, 0.25)
)
BASE = Config(dim=768, heads=12, kv_heads=4, layers=2, context=320, vocab=4096, hidden=2048)
# Rows of whole groups; `down` has another number of them than a unit of weights has.
GROUPED = Config(
    dim=192, heads=6, kv_heads=2, layers=3, context=160, vocab=301, mtp_heads=3, hidden=608, mtp_weights=(1, 0.5, 0.25)
)
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}


def engine() -> Any:
    from tinyforge.infer.cuda import decode_single as row

    return row


def trained_like(config: Config, precision: str, backend: str = "cupy") -> NanoEuler:
    """A model whose logits differ by enough: every weight is drawn anew, and bf16 holds all of them."""
    model = NanoEuler(config, get_backend(backend, precision))
    rng = np.random.default_rng(7)
    for param in model.buffer.params:
        noise = rng.standard_normal(param.shape, np.float32) * (1.5 / config.dim**0.5 if param.std else 0.2)
        bits = (noise + param.fill).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        model.buffer.set_master(param, bits.view(np.float32))
    model.buffer.publish()
    return model


def some_tokens(config: Config, count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, config.vocab, count).astype(np.int32)


def forward(model: NanoEuler, tokens: np.ndarray) -> np.ndarray:
    """The logits of every position by the model's own ops, (T, outputs, vocab) in float64."""
    h = model.hidden(model.backend.asarray(tokens[None]))
    heads = [model.backend.to_numpy(model.heads.logits(h, k))[0] for k in range(model.config.mtp_heads)]
    return np.stack(heads, axis=1).astype(np.float64)


def stepped(decoder: Any, tokens: np.ndarray, prompt: int, sizes: tuple[int, ...]) -> np.ndarray:
    """The same by the kernel, from position `prompt` on, in steps of these sizes, round and round."""
    decoder.prefill(0, tokens[:prompt].tolist())
    found, i = [], 0
    while (past := decoder.lengths[0]) < len(tokens):
        found.append(decoder.step([tokens[past:][: sizes[i % len(sizes)]].tolist()], decoder.config.mtp_heads)[0])
        i += 1
    return np.concatenate(found).astype(np.float64)


def drawn(decoder: Any, token: int, sampling: Sampling, count: int, position: int = 0) -> list[int]:
    stream = Stream(sampling.seed, "sample", position)
    return [i for block in decoder.stream([[token]], [sampling], [stream], count) for i in block.ids[0].tolist()]


@pytest.mark.parametrize(("prompt", "sizes"), [(0, (1,)), (0, (2, 3, 4, 1)), (131, (4,)), (63, (3, 7)), (64, (2,))])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_every_position_has_the_logits_of_the_model(precision: str, prompt: int, sizes: tuple[int, ...]) -> None:
    model, tokens = trained_like(CONFIG, precision), some_tokens(CONFIG, 160)
    expected = forward(model, tokens)[prompt:]
    got = stepped(engine().RowDecoder(model), tokens, prompt, sizes)
    assert np.abs(got - expected).max() <= TOLERANCE[precision] * np.abs(expected).max()


@pytest.mark.parametrize("config", [WIDER, BASE], ids=["odd", "base"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_bf16_is_as_exact_as_the_model_in_bf16(config: Config, rows: int) -> None:
    tokens = some_tokens(config, config.context)
    prompt = config.context - 64
    exact = forward(trained_like(config, "fp64"), tokens)[prompt:]
    model = trained_like(config, "bf16")
    plain = np.abs(forward(model, tokens)[prompt:] - exact)
    ours = np.abs(stepped(engine().RowDecoder(model), tokens, prompt, (rows,)) - exact)
    assert ours.max() <= 2 * plain.max() and ours.mean() <= 2 * plain.mean()


@pytest.mark.parametrize("kind", ["", *KINDS])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_the_first_pass_behind_a_prompt_begins_at_the_last_layer(precision: str, kind: str) -> None:
    """Of prompts with and without a graph: the logits of all heads, and text that goes on from them."""
    config = GROUPED if kind == "int4" else WIDER
    model = trained_like(config, precision)
    model = quantised_copy(model, kind) if kind else model
    decoder, prompt = engine().RowDecoder(model), some_tokens(config, 100).tolist()
    expected, found = forward(model, np.array(prompt, np.int32))[-1], []
    for _ in range(4):
        decoder.rewind([0])
        found.append(decoder.first(prompt, 3)[0, 0])
        assert decoder.lengths == [100]
        assert np.abs(found[-1] - expected).max() <= TOLERANCE.get(precision, 0.02) * np.abs(expected).max()
    assert len({logits.tobytes() for logits in found}) == 1
    if precision != "bf16":
        session = Session(model, decoder)
        for sampling in (GREEDY, Sampling(temperature=0, drafts=0), Sampling(max_tokens=1)):
            session.set_tokens(prompt)
            ids = [token.id for token in session.generate(sampling)]
            if sampling.temperature == 0:
                logits = forward(model, np.array([*prompt, *ids[:-1]], np.int32))[99:, 0]
                assert ids == logits.argmax(axis=-1).tolist()
            session.set_tokens([])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_weights_of_one_byte_give_the_logits_of_the_model_that_has_them(precision: str, kind: str) -> None:
    model, tokens = quantised_copy(trained_like(CONFIG, precision), kind), some_tokens(CONFIG, 100)
    decoder, expected = engine().RowDecoder(model), forward(model, tokens)
    assert bool(decoder.weights.plan.code) == (precision == "fp32")
    assert np.abs(stepped(decoder, tokens, 0, (1, 4)) - expected).max() <= TOLERANCE[precision] * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [GROUPED, BASE], ids=["odd", "base"])
@pytest.mark.parametrize("rows", [1, 4])
def test_codes_in_bf16_are_as_exact_as_the_model_in_bf16(config: Config, rows: int, kind: str) -> None:
    """All have the same codes: the loss that rounding to them brings is not part of these errors."""
    tokens, prompt = some_tokens(config, config.context), config.context - 64
    exact = forward(quantised_copy(trained_like(config, "fp64"), kind), tokens)[prompt:]
    model = quantised_copy(trained_like(config, "bf16"), kind)
    plain = np.abs(forward(model, tokens)[prompt:] - exact)
    runs = [stepped(engine().RowDecoder(model), tokens, prompt, (rows,)) for _ in range(2)]
    assert runs[0].tobytes() == runs[1].tobytes()
    ours = np.abs(runs[0] - exact)
    print(f"{kind}, {rows} rows: error ratio {ours.max() / plain.max():.2f}, mean {ours.mean() / plain.mean():.2f}")
    assert ours.max() <= 2 * plain.max() and ours.mean() <= 2 * plain.mean()


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_a_pass_do_not_change_a_bit_of_codes(kind: str) -> None:
    config = GROUPED if kind == "int4" else WIDER
    model, tokens = quantised_copy(trained_like(config, "bf16"), kind), some_tokens(config, 160)
    decoder, runs = engine().RowDecoder(model), []
    for sizes in ((1,), (2,), (3, 1), (4,)):
        decoder.rewind([0])
        runs.append(stepped(decoder, tokens, 110, sizes).tobytes())
    assert len(set(runs)) == 1


# Down of 9,216 columns is multiplied in parts of eight units; heads share keys as in Llama.
LARGE = Config(dim=512, heads=8, kv_heads=2, layers=2, context=64, vocab=301, hidden=9216)


@pytest.mark.parametrize("kind", ["", "int8", "int4"])
def test_a_wide_tile_is_multiplied_in_parts(kind: str) -> None:
    exact, model = (trained_like(LARGE, precision) for precision in ("fp64", "bf16"))
    if kind:
        exact, model = quantised_copy(exact, kind), quantised_copy(model, kind)
    tokens = some_tokens(LARGE, 40)
    expected, plain = forward(exact, tokens), np.abs(forward(model, tokens) - forward(exact, tokens))
    for sizes in ((1,), (4,)):
        ours = np.abs(stepped(engine().RowDecoder(model), tokens, 0, sizes) - expected)
        assert ours.max() <= 2 * plain.max() and ours.mean() <= 2 * plain.mean()


def test_weights_of_four_bits_stay_so_and_give_the_logits_of_the_host(poisoned_memory: None) -> None:
    """Of the decoder in NumPy, which has the same codes and computes in float32; what is read before it is written
    shows."""
    model, tokens = quantised_copy(trained_like(BASE, "bf16"), "int4"), some_tokens(BASE, 40)
    decoder = engine().RowDecoder(model)
    plan = decoder.weights.plan
    numbers = BASE.layers * ((BASE.heads + 2 * BASE.kv_heads) * plan.head_dim + BASE.dim + 3 * BASE.hidden) * BASE.dim
    of_heads = BASE.vocab * BASE.dim * BASE.mtp_heads
    assert plan.code == "four_bits"
    assert decoder.weights.matrices.nbytes <= 1.5 * (numbers * 4.5 / 8 + of_heads)  # 768 columns padded to 1,024
    host = NumpyDecoder(quantised_copy(trained_like(BASE, "fp32", "numpy"), "int4"))
    expected = np.stack([host.step([[int(token)]])[0, 0, 0].copy() for token in tokens])  # it reuses its array
    got = stepped(decoder, tokens, 0, (1,))[:, 0]
    assert np.isfinite(got).all() and np.abs(got - expected).max() <= 0.03 * np.abs(expected).max()


def test_speculation_changes_no_token_of_weights_of_four_bits() -> None:
    model = quantised_copy(trained_like(GROUPED, "bf16"), "int4")
    session = Session(model, engine().RowDecoder(model))
    for prompt in prompts_of(GROUPED, 20, 60):
        assert text(session, prompt, GREEDY) == text(session, prompt, replace(GREEDY, drafts=0))


@pytest.mark.parametrize(
    "tuning",
    [{"blocks": 1}, {"blocks": 7, "splits": 1}, {"warps": 4}, {"depth": 16, "spin": 50, "refill": 1}, {"refill": 0}],
)
def test_the_spread_over_the_device_does_not_change_the_answer(tuning: dict[str, int]) -> None:
    model, tokens = trained_like(CONFIG, "fp64"), some_tokens(CONFIG, 100)
    got = stepped(engine().RowDecoder(model, **tuning), tokens, 90, (4,))
    expected = forward(model, tokens)[90:]
    assert np.abs(got - expected).max() <= 1e-10 * np.abs(expected).max()


def test_what_the_launch_reads_before_it_is_written_shows(poisoned_memory: None) -> None:
    model, tokens = trained_like(CONFIG, "fp32"), some_tokens(CONFIG, 50)
    got = stepped(engine().RowDecoder(model), tokens, 40, (3,))
    assert np.isfinite(got).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_every_time(precision: str) -> None:
    model, tokens = trained_like(BASE, precision), some_tokens(BASE, 100)
    runs = [stepped(engine().RowDecoder(model), tokens, 60, (4, 1)).tobytes() for _ in range(4)]
    assert len(set(runs)) == 1


@pytest.mark.parametrize(("config", "precision"), [(CONFIG, "fp64"), (CONFIG, "fp32"), (WIDER, "bf16"), (BASE, "bf16")])
def test_the_rows_of_a_pass_do_not_change_a_bit(config: Config, precision: str) -> None:
    model, tokens = trained_like(config, precision), some_tokens(config, 160)
    decoder = engine().RowDecoder(model)
    runs = []
    for sizes in ((1,), (2,), (3, 1), (4,)):
        decoder.rewind([0])
        runs.append(stepped(decoder, tokens, 110, sizes).tobytes())
    assert len(set(runs)) == 1


# --- speculation on the device

GREEDY = Sampling(temperature=0, max_tokens=60)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def trained(request: pytest.FixtureRequest) -> NanoEuler:
    """The model that comes with the repository: most of its drafts are right."""
    return load(SPEC.bundled, get_backend("cupy", request.param)).model


def text(session: Session, prompt: list[int], sampling: Sampling, stop: frozenset[int] = frozenset()) -> list[int]:
    session.set_tokens([])
    session.extend(prompt)
    session.stats = Stats()
    return [token.id for token in session.generate(sampling, stop)]


def prompts_of(config: Config, count: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, config.vocab, int(rng.integers(1, longest))).tolist() for _ in range(count)]


def on_the_host(model: NanoEuler) -> Session:
    """A session on the GPU that drafts and verifies on the host."""
    decoder = engine().RowDecoder(model)
    decoder.draws = lambda sampling: False
    return Session(model, decoder)


@pytest.mark.parametrize("drafts", [0, 3])
def test_greedy_text_is_that_of_the_models_own_ops(drafts: int) -> None:
    model, sampling = trained_like(CONFIG, "fp32"), Sampling(temperature=0, max_tokens=100, drafts=drafts)
    texts = []
    for decoder in (ReferenceDecoder(model), engine().RowDecoder(model)):
        texts.append(text(Session(model, decoder), some_tokens(CONFIG, 20).tolist(), sampling))
        assert decoder.lengths == [119]
    assert texts[0] == texts[1] and len(texts[0]) == 100


def test_speculation_changes_no_token(trained: NanoEuler) -> None:
    """200 prompts, and a stop in every third; in bf16 too, since the rows of a pass change no bit."""
    session, accepted = Session(trained, engine().RowDecoder(trained)), np.zeros(3, int)
    for i, prompt in enumerate(prompts_of(trained.config, 200, 60)):
        stop = frozenset({prompt[0], 7}) if i % 3 == 0 else frozenset()
        plain = text(session, prompt, replace(GREEDY, drafts=0), stop)
        assert text(session, prompt, replace(GREEDY, drafts=1 + i % 4), stop) == plain
        assert session.tokens == prompt + plain and session.decoder.lengths[0] <= len(session.tokens) - 1
        accepted[: len(session.stats.accepted)] += np.array(session.stats.accepted, int)
    assert accepted.min() > 100


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_speculation_changes_no_token_where_drafts_are_wrong(precision: str) -> None:
    """Random weights: hardly any draft stands."""
    model = trained_like(WIDER, precision)
    session = Session(model, engine().RowDecoder(model))
    for prompt in prompts_of(WIDER, 40, 60):
        assert text(session, prompt, GREEDY) == text(session, prompt, replace(GREEDY, drafts=0))


def test_counts_are_those_of_the_host(trained: NanoEuler) -> None:
    """Where a text stops short of max_tokens, in the middle of a block, too."""
    session, host = Session(trained, engine().RowDecoder(trained)), on_the_host(trained)
    for i, prompt in enumerate(prompts_of(trained.config, 40, 50)):
        sampling = replace(GREEDY, max_tokens=1 + 2 * i % 59, drafts=1 + i % 3)
        stop = frozenset({11, 12} if i % 2 else ())
        assert text(session, prompt, sampling, stop) == text(host, prompt, sampling, stop)
        ours, theirs = session.stats, host.stats
        assert (ours.passes, ours.tokens, ours.drafted, ours.accepted) == (
            theirs.passes,
            theirs.tokens,
            theirs.drafted,
            theirs.accepted,
        )


def test_a_reply_that_was_left_in_the_middle_leaves_nothing(trained: NanoEuler) -> None:
    """The reply to what follows, after a part of a reply with drafts and without."""
    for i, prompt in enumerate(prompts_of(trained.config, 20, 30)):
        found = []
        for drafts in (0, 3):
            session = Session(trained, engine().RowDecoder(trained))
            session.extend(prompt)
            for made, _ in enumerate(session.generate(replace(GREEDY, drafts=drafts))):
                if made == i:
                    break
            session.extend(prompt[:5])
            found.append([token.id for token in session.generate(replace(GREEDY, drafts=drafts))])
        assert found[0] == found[1]


@pytest.mark.parametrize("left", [1, 2, 3, 4, 5, 9])
def test_speculation_up_to_a_full_context(trained: NanoEuler, left: int, poisoned_memory: None) -> None:
    session = Session(trained, engine().RowDecoder(trained))
    prompt = prompts_of(trained.config, 1, 2)[0] * (trained.config.context - left)
    plain = text(session, prompt, replace(GREEDY, drafts=0))
    assert text(session, prompt, GREEDY) == plain and len(plain) == left


def test_speculation_gives_the_same_every_time(trained: NanoEuler, poisoned_memory: None) -> None:
    prompts, found = prompts_of(trained.config, 10, 40), []
    for _ in range(2):
        session = Session(trained, engine().RowDecoder(trained))
        found.append([(text(session, prompt, GREEDY), session.stats.passes) for prompt in prompts])
    assert found[0] == found[1]


def test_the_host_waits_once_a_block_of_passes(trained: NanoEuler, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = engine().RowDecoder(trained)
    waits: list[Any] = []
    wait = decoder._wait
    monkeypatch.setattr(decoder, "_wait", lambda event: (waits.append(event), wait(event)))
    blocks = list(decoder.stream([[5]], [GREEDY], [Stream(0, "sample")], 100))
    assert [len(block.passes) for block in blocks[:5]] == [1, 2, 4, 8, 8]
    assert all(sum(block.passes) == block.ids.size for block in blocks)
    assert sum(block.ids.size for block in blocks) == 100 and len(blocks) <= len(waits) <= len(blocks) + 1


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("choices[n - 1] == ids[n]", "(choices[n - 1] == ids[n] || n == 1)"),  # accepts what it should not
        ("best_at(k + 1, tile, added - 1)", "best_at(k + 1, tile, 0)"),  # drafts of another position
        ("        return added;", "        return added > 1 ? added - 1 : added;"),  # goes on a position too early
    ],
)
def test_a_wrong_rule_is_seen(right: str, wrong: str, trained: NanoEuler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with any of these mistakes the text or the counts are others."""
    session, host = Session(trained, faulty_decoder(trained, right, wrong, monkeypatch)), on_the_host(trained)
    seen = 0
    for prompt in prompts_of(trained.config, 40, 50):
        same = text(session, prompt, GREEDY) == text(host, prompt, GREEDY)
        seen += not same or session.stats.accepted != host.stats.accepted
    assert seen > 5


def faulty_decoder(model: NanoEuler, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A decoder whose kernel has another text."""
    from tinyforge.backends import compile as compiler
    from tinyforge.infer.cuda import decode_single as row

    specialise = compiler.specialise

    def changed(file: str, macros: Any) -> str:
        code = specialise(file, macros)
        assert right in code
        return code.replace(right, wrong)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "specialise", changed)
        patch.setattr(row, "load", compiler.load.__wrapped__)
        decoder = engine().RowDecoder(model)
        for rows in (1, 4):
            decoder.launcher(rows)
    return decoder


def most_likely_first(p: np.ndarray, uniform: float) -> int:
    """The kernel's order: the token at which the sum of p, the largest first, passes `uniform`."""
    order = np.argsort(-p, kind="stable")
    total = p[order].cumsum()
    return int(order[min(int(total.searchsorted(uniform * total[-1], side="right")), len(p) - 1)])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1, top_k=0, top_p=1),
        Sampling(temperature=0.7, top_k=40, top_p=0.95, seed=3),
        Sampling(temperature=2, top_k=5, top_p=1, seed=4),
        Sampling(temperature=3, top_k=0, top_p=0.5, seed=5),
        Sampling(temperature=3, top_k=0, top_p=1, min_p=0.2, seed=6),
    ],
)
def test_drawn_tokens_are_those_of_the_reference_with_the_same_numbers(sampling: Sampling) -> None:
    model, prompt = trained_like(CONFIG, "fp32"), some_tokens(CONFIG, 20).tolist()
    decoder = engine().RowDecoder(model)
    decoder.prefill(0, prompt[:-1])
    ids = drawn(decoder, prompt[-1], sampling, 120, position=2)
    logits = forward(model, np.array([*prompt, *ids], np.int32))[len(prompt) - 1 :, 0]
    numbers = Stream(sampling.seed, "sample", position=2)
    for token, p in zip(ids, probabilities(logits, sampling), strict=False):
        uniform = float(numbers.uniform())
        # float32 on the device: a number within 1e-5 of a border between two tokens may fall on either side.
        places = (max(uniform - 1e-5, 0), uniform, min(uniform + 1e-5, 1 - 1e-9))
        assert token in {most_likely_first(p, u) for u in places}
    assert len(set(ids)) > 10


def test_the_host_waits_once_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = engine().RowDecoder(trained_like(CONFIG, "fp32"))
    waits: list[Any] = []
    wait = decoder._wait
    monkeypatch.setattr(decoder, "_wait", lambda event: (waits.append(event), wait(event)))
    blocks = list(decoder.stream([[5]], [Sampling(temperature=0, drafts=0)], [Stream(0, "sample")], 150))
    assert [block.ids.shape for block in blocks[:6]] == [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 16)]
    assert sum(block.ids.size for block in blocks) == 150 and len(waits) == len(blocks)


def test_a_stream_that_is_closed_forgets_what_was_not_yielded() -> None:
    model, tokens = trained_like(CONFIG, "fp32"), some_tokens(CONFIG, 30)
    expected = forward(model, tokens)[-1]
    decoder = engine().RowDecoder(model)
    decoder.prefill(0, tokens[:20].tolist())
    stream = decoder.stream([[int(tokens[20])]], [Sampling(temperature=0, drafts=0)], [Stream(0, "sample")], 100)
    assert next(stream).ids.shape == (1, 1) and decoder.lengths == [21]
    stream.close()
    decoder.rewind([20])
    got = decoder.step([tokens[20:].tolist()], CONFIG.mtp_heads)[0, -1]
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_chunks_of_a_prompt_are_one_prompt() -> None:
    model, tokens = trained_like(CONFIG, "fp32"), some_tokens(CONFIG, 90).tolist()
    whole, parts = (engine().RowDecoder(model) for _ in range(2))
    whole.prefill(0, tokens[:-1])
    for start, end in ((0, 1), (1, 40), (40, 89)):
        parts.prefill(0, tokens[start:end])
    expected, got = (decoder.step([tokens[-1:]]).copy() for decoder in (whole, parts))
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("precision", ["fp64", "fp32", "tf32", "bf16"])
def test_a_prompt_has_the_same_bits_by_a_graph(precision: str) -> None:
    """A first time without, a second in the graphs' memory, captured, launched again: of two prompts in turns, each
    in a piece from the beginning and one after it."""
    config = replace(WIDER, context=320)
    model = trained_like(config, precision)
    decoder = engine().RowDecoder(model)
    prompts = [np.random.default_rng(i).integers(0, config.vocab, 300 - 9 * i).tolist() for i in range(2)]
    found: dict[int, list[bytes]] = {0: [], 1: []}
    for which in (0, 1, 0, 1, 0):
        decoder.rewind([0])
        decoder.prefill(0, prompts[which][:256])
        decoder.prefill(0, prompts[which][256:])
        held = (decoder.cache.keys, decoder.cache.values)
        found[which].append(b"".join(x[:, :, : len(prompts[which])].tobytes() for x in held))
    assert [len(set(bits)) for bits in found.values()] == [1, 1] and found[0][0] != found[1][0]
    assert len(decoder.prompts._launch) == 2
    expected = forward(model, np.array(prompts[0], np.int32))[-1]
    decoder.rewind([299])
    got = decoder.step([prompts[0][-1:]], config.mtp_heads)[0, -1]
    assert np.abs(got - expected).max() <= TOLERANCE.get(precision, 0.02) * np.abs(expected).max()


@pytest.mark.parametrize(("width", "heads"), [(6, 3), (64, 2)])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_keys_and_values_are_copied_to_their_places(precision: str, width: int, heads: int) -> None:
    """The last heads of packed rows, into the middle of a cache whose other positions stay."""
    backend = get_backend("cupy", precision)
    rng = np.random.default_rng(0)
    packed = backend.asarray(rng.standard_normal((1, 5, 2 * heads + 1, width)))
    held = [backend.asarray(rng.standard_normal((heads, 9, width))) for _ in range(2)]
    new = packed[:, :, 1 : 1 + heads], packed[:, :, 1 + heads :]
    expected = [backend.to_numpy(x) for x in held]
    for x, part in zip(expected, new, strict=True):
        x[:, 3:8] = backend.to_numpy(part)[0].swapaxes(0, 1)
    append.bind(backend)(*held, *new, 3)
    for x, other in zip(held, expected, strict=True):
        assert np.array_equal(backend.to_numpy(x), other)


def test_a_small_upload_waits_for_nothing() -> None:
    """Its source may be overwritten at once."""
    backend = get_backend("cupy", "fp32")
    busy, place = backend.zeros((8192, 8192)), backend.zeros((4097,), np.dtype(np.int32))
    source = np.arange(4097, dtype=np.int32)
    backend.put(place, source)  # the first call may take longer
    backend.synchronize()
    begun = time.perf_counter()
    for _ in range(20):  # half a second
        backend.xp.matmul(busy, busy)
    source[...] = source[::-1].copy()
    backend.put(place, source)
    source[...] = -1
    asked = time.perf_counter() - begun
    backend.synchronize()
    assert asked < 0.3 * (time.perf_counter() - begun)
    assert np.array_equal(backend.to_numpy(place), np.arange(4097)[::-1])


def test_what_it_is_for_and_what_not() -> None:
    model = trained_like(CONFIG, "fp32")
    decoder = make_decoder(model)
    assert isinstance(decoder, engine().RowDecoder)
    assert decoder.draws(Sampling()) and not decoder.draws(Sampling(repetition_penalty=1.1))
    assert not decoder.draws(Sampling(logprobs=True))
    assert isinstance(make_decoder(model, spare_memory=True), ReferenceDecoder)
    with pytest.raises(ValueError, match="no room for 9 more"):
        engine().RowDecoder(model, capacity=8).prefill(0, list(range(9)))
    with pytest.raises(UserError, match="the model is on backend numpy, expected cupy"):
        engine().RowDecoder(trained_like(CONFIG, "fp32", "numpy"))


def test_a_vocabulary_too_large_to_sort_is_drawn_from_on_the_host() -> None:
    model, greedy = trained_like(replace(CONFIG, vocab=32000), "fp32"), Sampling(temperature=0, drafts=0, max_tokens=20)
    decoder = engine().RowDecoder(model)
    assert decoder.draws(greedy) and not decoder.draws(Sampling())
    for how in (greedy, Sampling(max_tokens=20)):
        texts = [text(Session(model, one), [5, 6, 7], how) for one in (ReferenceDecoder(model), decoder)]
        assert texts[0] == texts[1] and len(texts[0]) == 20
