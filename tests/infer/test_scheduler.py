"""Continuous batching: whatever comes and goes next to it, a request gets the text that it gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.backends.machine_code import missing
from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import logits
from tinyforge.infer.decoder import Decoder, ReferenceDecoder, SequenceStart
from tinyforge.infer.decoder_compiled import CompiledDecoder
from tinyforge.infer.decoder_numpy import SMALL_ROWS, NumpyDecoder
from tinyforge.infer.generation import generate
from tinyforge.infer.sampling import Sampling, choose
from tinyforge.infer.scheduler import AHEAD, BLOCK, Prefixes, QueueFull, Request, Scheduler
from tinyforge.infer.session import Session, Token
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.registry import models
from tinyforge.rng import Stream

CONFIG = Config(
    dim=32, heads=4, kv_heads=2, layers=2, context=150, vocab=61, mtp_heads=3, hidden=44, mtp_weights=(1, 0.5, 0.5)
)


needs_numba = pytest.mark.skipif(bool(missing()), reason="needs numba")
COMPILED = pytest.param(CompiledDecoder, marks=needs_numba)


def tiny(precision: str = "fp32", config: Config = CONFIG) -> NanoEuler:
    model = NanoEuler(config, get_backend("numpy", precision, workers=1))
    model.initialise(0)
    model.buffer.values[: model.buffer.decay_end] *= 8
    return model


class Drawing(ReferenceDecoder):
    """Draws tokens itself, as the decoders on a GPU do: what nobody waited for is read later, or never.

    undrawn: whether a pass has no tokens yet. alone: passes that were queued one by one."""

    undrawn, alone = False, 0
    queues_masks = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.last, self.how = [0] * self.batch, [(Sampling(temperature=0), Stream(0))] * self.batch

    def draws(self, sampling: Sampling) -> bool:
        return not (sampling.changes_logits or sampling.logprobs)

    def queue(self, rows: Mapping[int, SequenceStart | None], count: int) -> Callable[[], np.ndarray]:
        assert not self.undrawn
        ids = np.full((self.batch, count), self.config.vocab - 1)  # where nothing is meant
        for row, start in rows.items():
            given = list(start.tokens) if start else []
            assert len(given) <= count and (start is None or given)
            if start:
                self.how[row] = start.sampling, start.stream
            sampling, stream = self.how[row]
            for i in range(min(count, self.capacity - self.lengths[row])):
                z = self.step_rows([row], [[given[i] if i < len(given) else self.last[row]]])[0, :, 0]
                if i >= len(given) - 1:
                    number = 0.0 if sampling.temperature == 0 else float(stream.uniform((1,))[0])
                    (self.last[row],) = ids[row, i : i + 1] = choose(z, sampling, [number])
        return lambda: ids

    def queue_pass(
        self, rows: Mapping[int, SequenceStart | None]
    ) -> Callable[[Sequence[int], np.ndarray], Callable[[], np.ndarray]]:
        assert not self.undrawn
        self.undrawn, self.alone, ids = True, self.alone + 1, np.full((self.batch, 1), self.config.vocab - 1)
        logits: dict[int, np.ndarray] = {}
        for row, start in rows.items():
            assert start is None or len(start.tokens) == 1
            if start:
                self.how[row] = start.sampling, start.stream
            if self.lengths[row] < self.capacity:
                logits[row] = self.step_rows([row], [start.tokens if start else [self.last[row]]])[0, :, 0].copy()
        how = list(self.how)

        def sample(masked: Sequence[int], masks: np.ndarray) -> Callable[[], np.ndarray]:
            self.undrawn = False
            allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : self.config.vocab]
            for row, bits in zip(masked, allowed, strict=True):
                logits[row][:, bits == 0] = -np.inf
            for row, z in logits.items():
                number = 0.0 if how[row][0].temperature == 0 else float(how[row][1].uniform((1,))[0])
                (self.last[row],) = ids[row] = choose(z, how[row][0], [number])
            return lambda: ids

        return sample


def wishes(rng: random.Random, vocab: int, context: int, drafts: int, count: int = 24) -> list[dict[str, Any]]:
    """Requests of all kinds; some share a beginning, some are long, some end at a token."""
    common = [rng.randrange(vocab) for _ in range(context)]
    found = []
    for i in range(count):
        length = rng.randrange(1, context)
        prompt = [*common[: rng.randrange(length)], *(rng.randrange(vocab) for _ in range(length))][:length]
        sampling = Sampling(
            temperature=rng.choice([0, 0, 0.8, 1.3]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1, 0.9]),
            repetition_penalty=rng.choice([1, 1, 1.2]),
            frequency_penalty=rng.choice([0, 0, 0.5]),
            seed=i,
            logit_bias=rng.choice([(), ((3, 1.5),)]),
            max_tokens=rng.randrange(1, 30),
            drafts=rng.choice([0, 0, drafts]),
            logprobs=rng.choice([True, False]),
        )
        found.append(
            {
                "prompt": prompt,
                "sampling": sampling,
                "stop": frozenset([rng.randrange(vocab)]),
                "alternatives": 3 * sampling.logprobs,
            }
        )
    return found


def run(scheduler: Scheduler, asked: Sequence[dict[str, Any]], rng: random.Random | None) -> list[tuple[Any, ...]]:
    """What each request got: tokens with log-probabilities, and the end. With rng they come and go at random."""
    got: dict[Request, list[Token]] = {}
    requests: list[Request] = []
    left = list(asked)

    def step() -> None:
        for request, new in scheduler.step():
            got.setdefault(request, []).extend(new)

    while left or scheduler.busy:
        while left and (rng is None or not scheduler.busy or rng.random() < 0.4):
            requests.append(scheduler.submit(**left.pop(0)))
            if rng is not None and rng.random() < 0.3:  # one that is gone before it is answered
                gone = scheduler.submit(**rng.choice(asked))
                for _ in range(rng.randrange(4)):
                    step()
                scheduler.cancel(gone)
                assert [made.id for made in got.get(gone, [])] == gone.tokens
            if rng is None:
                break
        step()
    for request in requests:
        assert [made.id for made in got.get(request, [])] == request.tokens
    return [(got.get(r, []), r.reason) for r in requests]


def check_any_interleaving(model: Any, kind: type[Decoder], seed: int, count: int) -> None:
    rng = random.Random(seed)
    asked = wishes(rng, model.config.vocab, model.config.context, 2, count)
    alone = []
    for wish in asked:
        scheduler = Scheduler(model, 4, decoder=kind(model, 4))
        alone += run(scheduler, [wish], None)
    decoder = kind(model, 4)
    together = Scheduler(model, 4, decoder=decoder)
    assert run(together, asked, rng) == alone
    assert together.free == [0, 1, 2, 3] and decoder.lengths == [0] * 4 and not together.busy
    if decoder.can_save and model.config.context > 2 * decoder.piece:
        assert len(together.prefixes) > 0


@pytest.mark.parametrize("kind", [NumpyDecoder, ReferenceDecoder, Drawing, COMPILED])
def test_any_interleaving_gives_each_row_the_text_it_has_alone(kind: type[Decoder]) -> None:
    """Tokens, log-probabilities and alternatives, to the last bit, in float32."""
    check_any_interleaving(tiny(), kind, 0, 10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("kind", [NumpyDecoder, ReferenceDecoder, Drawing, COMPILED])
def test_more_interleavings(kind: type[Decoder], seed: int) -> None:
    heads = {"heads": 4, "kv_heads": (4, 1, 2, 4)[seed - 1]}  # one head a key: matrix times vector
    check_any_interleaving(tiny(config=replace(CONFIG, context=100 + 90 * seed, **heads)), kind, seed, 24)


@pytest.mark.parametrize("name", [n for n, spec in models().items() if hasattr(spec.build, "make_cache")])
def test_every_causal_model_is_served(name: str) -> None:
    backend = get_backend("numpy", "fp32", workers=1)
    model, _ = next(iter(models()[name].build.cases(backend, np.random.default_rng(0))))
    if model.config.context > 1:
        rng = random.Random(name)
        asked = wishes(rng, model.config.vocab, model.config.context, 1, 6)
        alone = [run(Scheduler(model, 3), [wish], None)[0] for wish in asked]
        assert run(Scheduler(model, 3), asked, rng) == alone


@pytest.mark.slow
def test_a_neighbour_that_shows_is_found() -> None:
    """Negative control: a decoder whose products take all rows at once gives other bits next to others."""

    class Careless(NumpyDecoder):
        def step_rows(self, rows: Sequence[int], tokens: Any, heads: int = 1) -> np.ndarray:
            return super().step_rows(rows, tokens, heads) * (1 + 1e-6 * len(rows))

    with pytest.raises(AssertionError):
        check_any_interleaving(tiny(), Careless, 0, 10)


@pytest.mark.slow
def test_a_text_is_that_of_a_session() -> None:
    """In float64, where the order of a sum does not matter for the choice."""
    model, rng = tiny("fp64"), random.Random(5)
    scheduler = Scheduler(model, 3)
    for wish in wishes(rng, CONFIG.vocab, CONFIG.context, 2, 10):
        session = Session(model, NumpyDecoder(model))
        session.extend(wish["prompt"])
        expected = [token.id for token in session.generate(wish["sampling"], wish["stop"])]
        request = scheduler.submit(**wish)
        while request.reason is None:
            scheduler.step()
        assert request.tokens == expected
        assert request.reason == ("stop" if len(expected) < session_budget(wish, scheduler) else "length")
        assert (request.stats.drafted, request.stats.accepted) == (session.stats.drafted, session.stats.accepted)


def session_budget(wish: dict[str, Any], scheduler: Scheduler) -> int:
    return min(wish["sampling"].max_tokens, scheduler.decoder.capacity - len(wish["prompt"]))


def drawn_alone(model: NanoEuler, prompt: list[int], sampling: Sampling) -> list[int]:
    """The naive sibling of a decoder that draws: the whole prompt at once, then a number of the stream for each."""
    decoder, text, numbers = ReferenceDecoder(model), list(prompt), Stream(sampling.seed, "sample")
    decoder.prefill(0, prompt[:-1])
    for _ in range(min(sampling.max_tokens, decoder.capacity - len(prompt))):
        number = float(numbers.uniform()) if sampling.temperature else 0.0
        text += choose(decoder.step([[text[-1]]])[0, :, 0], sampling, [number])
    return text[len(prompt) :]


def test_what_a_prompt_has_beyond_its_pieces_passes_beside_other_rows() -> None:
    """Prompts of every length up to and beyond pieces of 32, in float64: the tokens that a prefilled prompt gives."""
    model, rng = tiny("fp64"), random.Random(4)
    decoder = Drawing(model, 4)
    scheduler = Scheduler(model, 4, decoder=decoder)
    lengths = [1, 2, 16, 17, 18, 31, 32, 33, 34, 64, 65, 66, 100, 149]
    asked = [
        (
            [rng.randrange(CONFIG.vocab) for _ in range(n)],
            Sampling(temperature=n % 2, top_k=0, top_p=1, seed=n, max_tokens=20),
        )
        for n in lengths
    ]
    requests = [scheduler.submit(*wish) for wish in asked]
    gone = scheduler.submit([7] * 31, Sampling(max_tokens=9))
    while gone.row is None or not decoder.lengths[gone.row]:
        scheduler.step()
    assert decoder.lengths[gone.row] <= BLOCK * AHEAD and not gone.tokens
    scheduler.cancel(gone)  # in the middle of its prompt
    while scheduler.busy:
        scheduler.step()
    assert [request.tokens for request in requests] == [drawn_alone(model, *wish) for wish in asked]
    assert [r.stats.prefilled for r in requests] == [n - 1 for n in lengths] and not gone.tokens
    assert [r.stats.passes for r in requests] == [min(20, CONFIG.context - n) for n in lengths]


@pytest.mark.parametrize(("length", "prefills"), [(1, 0), (32, 0), (33, 1), (40, 1), (65, 2)])
def test_the_end_of_a_prompt_takes_one_pass(length: int, prefills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to complete pieces nothing is prefilled, where the decoder takes several positions at once."""
    monkeypatch.setattr("tinyforge.infer.decoder_numpy.product_rows", lambda: SMALL_ROWS)
    model, filled = tiny(config=replace(CONFIG, context=100)), list[int]()
    scheduler = Scheduler(model, 2, prefix_bytes=0)
    prefill = scheduler.decoder.prefill

    def counted(row: int, ids: Sequence[int]) -> None:
        filled.append(len(ids))
        prefill(row, ids)

    monkeypatch.setattr(scheduler.decoder, "prefill", counted)
    prompt = [i % 11 for i in range(length)]
    request = scheduler.submit(prompt, Sampling(temperature=0, max_tokens=3, drafts=0))
    while request.reason is None:
        scheduler.step()
    assert filled == [32] * prefills and request.stats.prefilled == length - 1 and request.stats.passes == 3
    decoder = ReferenceDecoder(model)
    decoder.prefill(0, prompt[:-1])
    for token, last in zip(request.tokens, [prompt[-1], *request.tokens], strict=False):
        assert int(decoder.step([[last]])[0, 0, 0].argmax()) == token


def test_a_block_is_queued_before_the_one_before_it_is_read() -> None:
    log: list[tuple[str, int]] = []

    class Watched(Drawing):
        def queue(self, rows: Mapping[int, SequenceStart | None], count: int) -> Callable[[], np.ndarray]:
            read = super().queue(rows, count)
            log.append(("queue", count))

            def logged() -> np.ndarray:
                log.append(("read", count))
                return read()

            return logged

    model = tiny()
    scheduler = Scheduler(model, 2, decoder=Watched(model, 2))
    first = scheduler.submit(list(range(20)), Sampling(temperature=0, max_tokens=50))
    got = [len(new) for _ in range(5) for _, new in scheduler.step()]
    assert log == [
        ("queue", 16),
        ("queue", 16),
        ("read", 16),
        ("queue", 16),
        ("read", 16),
        ("queue", 16),
        ("read", 16),
        ("queue", 5),
        ("read", 16),
        ("read", 5),
    ]
    assert got == [13, 16, 16, 5] and first.reason == "length"
    # A stop shows when a block is read: one more was queued for the row, and nobody waits for it.
    log.clear()
    second = scheduler.submit([1], Sampling(temperature=0, max_tokens=50), frozenset(range(CONFIG.vocab)))
    scheduler.step()
    assert second.reason == "stop" and not scheduler.busy
    third = scheduler.submit([1, 2], Sampling(temperature=0, max_tokens=3))
    scheduler.step()
    assert third.tokens == drawn_alone(model, [1, 2], third.sampling)
    assert log == [("queue", 16), ("queue", 16), ("read", 16), ("queue", 4), ("read", 4)]


@pytest.mark.parametrize(("kind", "shared"), [(NumpyDecoder, 64), pytest.param(CompiledDecoder, 70, marks=needs_numba)])
def test_prompts_that_share_a_beginning_compute_it_once(kind: type[Decoder], shared: int) -> None:
    model = tiny()
    scheduler = Scheduler(model, 2, decoder=kind(model, 2))
    prompt = list(range(61)) + list(range(40))
    for text, found in (([*prompt[:70], 5, 5], (71, 0)), (prompt, (100 - shared, shared))):
        request = scheduler.submit(text, Sampling(temperature=0, max_tokens=1))
        while scheduler.busy:
            scheduler.step()
        assert (request.stats.prefilled, request.stats.reused) == found  # the last token is a pass's


@pytest.mark.parametrize("kind", [NumpyDecoder, ReferenceDecoder, Drawing, COMPILED])
def test_the_next_turn_computes_only_what_is_new(kind: type[Decoder]) -> None:
    model = tiny()
    scheduler = Scheduler(model, 2, decoder=kind(model, 2))
    text, sampling = list(range(40)), Sampling(temperature=0, max_tokens=15)
    for turn in range(4):
        request = scheduler.submit(text, sampling)
        while scheduler.busy:
            scheduler.step()
        # Of the text before, all but the reply's last token, which no pass has taken, and three tokens of the message.
        computed = len(text) - 1 - request.stats.reused
        assert computed == (39 if turn == 0 else 3) and request.stats.prefilled == computed
        fresh = Scheduler(model, 2, decoder=kind(model, 2), prefix_bytes=0).submit(text, sampling)
        assert request.tokens == alone(model, kind, fresh)
        text = [*request.text, 5, 6, 7]
    again = scheduler.submit(text[:40], sampling)  # the first prompt
    other = scheduler.submit([*text[:50], 1, 2, 3], sampling)  # leaves in the middle of the first reply
    while scheduler.busy:
        scheduler.step()
    # No position that decoding a reply computed, unless it has the same bits.
    assert again.stats.reused == (39 if kind.any_cut else 32) and other.stats.reused == 50


def alone(model: NanoEuler, kind: type[Decoder], request: Request) -> list[int]:
    scheduler = Scheduler(model, 2, decoder=kind(model, 2), prefix_bytes=0)
    twin = scheduler.submit(request.prompt, request.sampling)
    while scheduler.busy:
        scheduler.step()
    return twin.tokens


def test_a_reply_after_a_prompt_of_complete_pieces_is_kept() -> None:
    scheduler = Scheduler(tiny(), 1)
    first = scheduler.submit(list(range(32)), Sampling(temperature=0, max_tokens=40))
    while scheduler.busy:
        scheduler.step()
    later = scheduler.submit([*first.text, 1], Sampling(temperature=0, max_tokens=1))
    while scheduler.busy:
        scheduler.step()
    assert later.stats.reused == 71


def test_a_short_prompt_does_not_wait_for_long_ones_nor_starves_them() -> None:
    scheduler = Scheduler(tiny(), 4, prefix_bytes=0)
    long = [scheduler.submit([i] * 140, Sampling(max_tokens=1)) for i in range(3)]
    scheduler.step()
    first = scheduler.submit([1] * 20, Sampling(max_tokens=1))
    for _ in range(2):
        scheduler.step()
    assert first.reason == "length"
    for _ in range(25):  # a stream of short ones
        scheduler.submit([1] * 20, Sampling(max_tokens=1))
        scheduler.step()
    assert long[0].reason == "length"


def test_one_owner_leaves_rows_for_others() -> None:
    scheduler = Scheduler(tiny(), 8, queue=64)
    owner = object()
    many = [scheduler.submit([1, 2], Sampling(temperature=0, max_tokens=100), owner=owner) for _ in range(20)]
    scheduler.step()
    assert sum(r.row is not None for r in many) == 6 and len(scheduler.free) == 2
    other = scheduler.submit([1, 2], Sampling(temperature=0, max_tokens=1), owner=object())
    scheduler.step()
    assert other.reason == "length"


@pytest.mark.parametrize("kind", [NumpyDecoder, ReferenceDecoder, Drawing])
def test_the_log_probabilities_of_a_prompt(kind: type[Decoder]) -> None:
    model, rng = tiny("fp64"), np.random.default_rng(0)
    ids = rng.integers(0, CONFIG.vocab, 70).tolist()
    scheduler = Scheduler(model, 3, decoder=kind(model, 3))
    wish = Sampling(temperature=0, max_tokens=2, logprobs=True)
    busy = scheduler.submit([1], Sampling(temperature=0, max_tokens=60))
    scored = scheduler.submit(ids, wish, alternatives=3, score=True)
    only = scheduler.submit(ids, wish, alternatives=3, score=True, generate=False)
    empty = scheduler.submit([4], wish, generate=False)
    while scheduler.busy:
        scheduler.step()
    z = logits(model, [ids])[0]
    expected = z - z.max(axis=-1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(axis=-1, keepdims=True))
    assert scored.scored is not None and scored.scored == only.scored and only.tokens == [] == empty.tokens
    first, *rest = scored.scored
    assert [t.id for t in scored.scored] == ids and first.logprob is None and only.reason == "length"
    for i, told in enumerate(rest):
        assert told.logprob == pytest.approx(expected[i, ids[i + 1]], abs=1e-9)
        assert [t for t, _ in told.others] == np.argsort(-z[i], kind="stable")[:3].tolist()
    assert len(busy.tokens) == 60 and len(scored.tokens) == 2


def test_pieces_that_do_not_fit_go_oldest_first() -> None:
    store, ids = Prefixes(100), list(range(6))
    for number in range(5):
        store.put(ids, number, number + 1, (np.zeros(4), [np.zeros(1)]), 0)  # 40 bytes
        store.find(ids, 1, 2)
    assert [store.find(ids, n, n + 1) is not None for n in range(5)] == [False, True, False, False, True]
    assert store.bytes == 80
    nothing = Scheduler(tiny(), 2, prefix_bytes=0)
    nothing.submit(list(range(60)) * 2, Sampling(max_tokens=1))
    nothing.step()
    assert len(nothing.prefixes) == 0


def test_long_prompts_are_computed_between_the_tokens_of_others() -> None:
    scheduler = Scheduler(tiny(), 2)
    short = scheduler.submit([1, 2, 3], Sampling(temperature=0, max_tokens=40))
    scheduler.step()
    long = scheduler.submit(list(range(60)) + list(range(60)), Sampling(temperature=0, max_tokens=3))
    steps = 0
    while long.first_token is None:
        before = len(short.tokens)
        scheduler.step()
        steps += 1
        assert len(short.tokens) == before + 1  # no step without a token of the other
    assert steps == 4  # 119 positions: three times 32, and 23


def test_queue_deadline_and_cancelling() -> None:
    now = [0.0]
    scheduler = Scheduler(tiny(), 1, queue=2, clock=lambda: now[0])
    first = scheduler.submit([1], Sampling(max_tokens=100), deadline=5)
    scheduler.step()
    second, third = (scheduler.submit([i], Sampling(max_tokens=2), deadline=5 + i) for i in (1, 2))
    with pytest.raises(QueueFull, match="requests that wait: 2, the queue holds 2"):
        scheduler.submit([1], Sampling())
    with pytest.raises(QueueFull):
        scheduler.enqueue([scheduler.prepare([1], Sampling()) for _ in range(2)])
    assert len(scheduler.waiting) == 2
    scheduler.cancel(second)
    now[0] = 5.0
    ended = scheduler.step()
    assert {(id(r), r.reason) for r, new in ended if not new} == {(id(first), "deadline"), (id(second), "cancelled")}
    assert len(first.tokens) == 1
    scheduler.cancel(first)
    assert first.reason == "deadline"  # what has ended stays as it ended
    while scheduler.busy:
        scheduler.step()
    assert third.reason == "length" and len(third.tokens) == 2
    fourth = scheduler.submit([1], Sampling())
    scheduler.cancel_all()
    assert fourth.reason == "cancelled" and scheduler.free == [0]


def test_a_step_tells_of_a_request_once() -> None:
    """Where the decoder draws for some rows, the others take more than one pass in a step."""
    model = tiny()
    scheduler = Scheduler(model, 2, decoder=Drawing(model, 2))
    scheduler.submit([1, 2], Sampling(temperature=0, max_tokens=60))
    told = scheduler.submit([3, 4], Sampling(temperature=0, max_tokens=8, logprobs=True))
    got: list[Token] = []
    while scheduler.busy:
        found = scheduler.step()
        assert len({id(request) for request, _ in found}) == len(found)
        got += [made for request, new in found if request is told for made in new]
    assert [made.id for made in got] == told.tokens == drawn_alone(model, [3, 4], told.sampling)


def test_what_a_reset_has_ended_stays_ended() -> None:
    """A caller that has not heard of it yet may cancel its request: whoever has the row now keeps it."""
    scheduler = Scheduler(tiny(), 1)
    before = [scheduler.submit([i], Sampling(max_tokens=9)) for i in (1, 2)]
    scheduler.step()
    scheduler.reset()
    assert not scheduler.busy
    after = scheduler.submit([3], Sampling(temperature=0, max_tokens=3))
    scheduler.step()
    for request in before:
        scheduler.cancel(request)
    while scheduler.busy:
        scheduler.step()
    assert after.reason == "length" and [request.reason for request in before] == ["error", "error"]


def test_the_caller_ends_a_text() -> None:
    seen: list[int] = []

    def accept(made: Sequence[Token]) -> int | None:
        seen.extend(token.id for token in made)
        return 1 if len(seen) >= 4 else None

    scheduler = Scheduler(tiny(), 1)
    request = scheduler.submit([1, 2], Sampling(temperature=0, max_tokens=50), accept=accept)
    while scheduler.busy:
        scheduler.step()
    assert request.reason == "stop" and request.tokens == seen and len(seen) == 4


def test_what_a_request_may_not_ask() -> None:
    scheduler = Scheduler(tiny(), 1)
    for prompt, text in (([], "prompt is empty"), ([61], "token id 61"), (range(60), None), ([1] * 150, "150 tokens")):
        if text is None:
            scheduler.prepare(prompt, Sampling())
            continue
        with pytest.raises(UserError, match=text):
            scheduler.submit(prompt, Sampling())
    with pytest.raises(UserError, match="token id 61"):
        scheduler.submit([1], Sampling(logit_bias=((61, 1.0),)))
    with pytest.raises(UserError, match="ask for logprobs too"):
        scheduler.submit([1], Sampling(), alternatives=2)


def test_speculation_tells_which_head_gave_a_token() -> None:
    scheduler = Scheduler(tiny(), 1)
    request = scheduler.submit([1, 2], Sampling(temperature=0, max_tokens=60, drafts=2))
    made = [token for _ in range(200) for _, new in scheduler.step() for token in new]
    assert [token.id for token in made] == list(generate(tiny(), [1, 2], Sampling(temperature=0, max_tokens=60)))
    assert sum(token.head > 0 for token in made) == sum(request.stats.accepted)
    refused = [token for token in made if token.refused]
    assert len(refused) == sum(request.stats.drafted) - sum(request.stats.accepted) > 0
    assert all(token.head == 0 and token.refused.id != token.id for token in refused if token.refused)
