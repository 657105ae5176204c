"""Speculation: greedy text stays the same token for token, and sampled text keeps its distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.infer import session as session_module
from tinyforge.infer.decoder import ReferenceDecoder, SampledBlock
from tinyforge.infer.decoder_numpy import NumpyDecoder
from tinyforge.infer.sampling import Sampling, penalise, probabilities
from tinyforge.infer.session import Session, Stats
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.models.nanoeuler.config import PRESETS
from tinyforge.optim import AdamW
from tinyforge.rng import Stream
from tinyforge.train.batches import PackedTokens
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import NextTokens

FEW = Config(dim=16, heads=4, kv_heads=2, layers=2, context=12, vocab=5, mtp_heads=4, hidden=10)
LETTERS = Config(dim=32, heads=4, kv_heads=2, layers=2, context=64, vocab=13, mtp_heads=4, hidden=48)
WORDS = ([1, 2, 3], [4, 5, 6], [1, 5, 7, 8], [9, 10, 11, 12], [4, 2, 12])
GREEDY = Sampling(temperature=0.0, max_tokens=40)
SAMPLINGS = [
    Sampling(temperature=1.0, top_k=0, top_p=1.0),
    Sampling(temperature=0.8, top_k=4, top_p=0.95, min_p=0.02, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def trained() -> NanoEuler:
    """A model that has learned to spell five words in random order: within a word drafts are right, after it not."""
    rng = np.random.default_rng(0)
    tokens = np.array([t for _ in range(1500) for t in [*WORDS[rng.integers(5)], 0]])
    backend = get_backend("numpy", "fp32", workers=1)
    model = NanoEuler(LETTERS, backend)
    model.initialise(0)
    data = PackedTokens(tokens, 32, 4, seed=1)
    parallel = DataParallel(model, backend, NextTokens(LETTERS.head_weights))
    optimizer = AdamW(model.buffer, backend)
    for step in range(120):
        batch = data.batch(step, 16)
        parallel.gradients([batch])
        optimizer.step(1e-2, optimizer.clip(1.0)[1])
    return model


def untrained(config: Config, precision: str = "fp64") -> NanoEuler:
    model = NanoEuler(config, get_backend("numpy", precision, workers=1))
    model.initialise(0)
    model.buffer.values[: model.buffer.decay_end] *= 8
    return model


def prompts_of(config: Config, count: int, longest: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, config.vocab, rng.integers(1, longest)).tolist() for _ in range(count)]


def text(session: Session, prompt: list[int], sampling: Sampling, stop: frozenset[int] = frozenset()) -> list[int]:
    session.set_tokens([])
    session.extend(prompt)
    return [token.id for token in session.generate(sampling, stop)]


# --- greedy


def test_greedy_text_is_the_same_on_80_prompts(trained: NanoEuler) -> None:
    """On a trained model in float32, where most drafts are right, with any number of drafts, a penalty and a stop."""
    session = Session(trained)
    accepted = 0
    for i, prompt in enumerate(prompts_of(LETTERS, 80, 40)):
        sampling = replace(GREEDY, repetition_penalty=(1.0, 1.2)[i % 2])
        stop = frozenset({8}) if i % 3 == 0 else frozenset()
        plain = text(session, prompt, replace(sampling, drafts=0), stop)
        session.stats = Stats()
        assert text(session, prompt, replace(sampling, drafts=1 + i % 4), stop) == plain
        assert len(session.tokens) == len(prompt) + len(plain)
        accepted += sum(session.stats.accepted)
    assert accepted > 400


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_greedy_text_is_the_same_where_drafts_are_wrong(precision: str) -> None:
    """Random weights of the small preset: logits lie close together, and hardly any draft stands."""
    session = Session(untrained(PRESETS["small"], precision))
    for prompt in prompts_of(PRESETS["small"], 8, 100):
        assert text(session, prompt, GREEDY) == text(session, prompt, replace(GREEDY, drafts=0))


def test_every_decoder_gives_the_same_text(trained: NanoEuler) -> None:
    sampling = Sampling(max_tokens=20)
    slow, fast = Session(trained, ReferenceDecoder(trained)), Session(trained)
    for prompt in prompts_of(LETTERS, 10, 30):
        assert text(slow, prompt, GREEDY) == text(fast, prompt, GREEDY)
        assert text(slow, prompt, sampling) == text(fast, prompt, sampling)


def test_acceptance_and_passes_are_counted(trained: NanoEuler) -> None:
    session = Session(trained)
    made = sum(len(text(session, prompt, GREEDY)) for prompt in prompts_of(LETTERS, 10, 20))
    stats = session.stats
    assert stats.tokens == made == stats.passes + sum(stats.accepted)
    # A draft is looked at when the one before it was right; near max_tokens fewer are made.
    assert stats.drafted[0] > stats.accepted[0] >= stats.drafted[1] > stats.accepted[1] >= stats.drafted[2]
    assert stats.acceptance == [a / d for a, d in zip(stats.accepted, stats.drafted, strict=True)]
    assert stats.acceptance[0] > 0.5 and stats.tokens_per_pass > 1.5


class Device(NumpyDecoder):
    """A decoder that drafts and verifies itself, three passes a block, and so runs on after the last one expected."""

    def draws(self, sampling: Sampling) -> bool:
        return sampling.temperature == 0

    def stream(
        self, tokens: Sequence[Sequence[int]], samplings: Sequence[Sampling], streams: Sequence[Stream], count: int
    ) -> Iterator[SampledBlock]:
        *prompt, last = tokens[0]
        self.prefill(0, prompt)
        drafts: list[int] = []
        while count > 0:
            ids, passes = [], []
            for _ in range(3):
                base = self.lengths[0]
                heads = 1 + min(samplings[0].drafts, self.most_drafts)
                choices = self.step([[last, *drafts]], heads)[0].argmax(axis=-1)
                right = next((i for i, x in enumerate(drafts) if x != choices[i, 0]), len(drafts))
                self.rewind([base + 1 + right])
                new = choices[: right + 1, 0].tolist()[: count - len(ids)]
                last, drafts = int(choices[right, 0]), choices[right, 1:].tolist()
                ids += new
                passes += [len(new)] if new else []
            count -= len(ids)
            yield SampledBlock(np.array([ids]), None, tuple(passes))


def test_a_decoder_that_speculates_itself_is_counted_the_same(trained: NanoEuler) -> None:
    """Also where a limit or a stop comes in the middle of a pass or of a block."""
    session, device = Session(trained), Session(trained, Device(trained))
    for i, prompt in enumerate(prompts_of(LETTERS, 40, 12)):
        sampling, stop = replace(GREEDY, drafts=i % 4, max_tokens=1 + i), frozenset({12} if i % 3 == 0 else ())
        session.stats, device.stats = Stats(), Stats()
        assert text(device, prompt, sampling, stop) == text(session, prompt, sampling, stop)
        assert device.decoder.lengths == session.decoder.lengths
        ours, theirs = device.stats, session.stats
        assert (ours.passes, ours.drafted, ours.accepted) == (theirs.passes, theirs.drafted, theirs.accepted)


@pytest.mark.parametrize("kind", [NumpyDecoder, Device])
def test_drafts_that_a_decoder_cannot_check_are_not_counted(trained: NanoEuler, kind: type[NumpyDecoder]) -> None:
    decoder = kind(trained)
    decoder.most_drafts = 2
    session = Session(trained, decoder)
    for prompt in prompts_of(LETTERS, 10, 12):
        assert text(session, prompt, GREEDY) == text(Session(trained), prompt, replace(GREEDY, drafts=0))
    assert len(session.stats.drafted) == 2 and session.stats.accepted[1] > 0


def test_the_last_tokens_before_a_limit_need_no_room_for_drafts(trained: NanoEuler) -> None:
    session = Session(trained)
    for length, longest, made in ((60, 40, 4), (63, 40, 1), (10, 1, 1), (10, 2, 2)):
        prompt = prompts_of(LETTERS, 1, 2)[0] * length
        assert len(text(session, prompt, replace(GREEDY, max_tokens=longest))) == made
        assert len(text(session, prompt, Sampling(max_tokens=longest))) == made


# --- sampling


def exact(model: NanoEuler, prompt: list[int], sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of `length` tokens, from the model without a cache, by enumeration."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for start, probability in found.items():
            ids = [*prompt, *start]
            h = model.hidden(np.array([ids], np.int32))
            logits = penalise(model.heads.logits(h)[:, -1], sampling, ids)
            for token, p in enumerate(probabilities(logits, sampling)[0]):
                if p > 0:
                    longer[*start, token] = probability * float(p)
        found = longer
    return found


def chi_square(counts: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """Pearson's statistic, cells of fewer than 5 expected joined, and its 1 - 1e-4 quantile (Wilson and Hilferty)."""
    assert set(counts) <= set(wanted), "a continuation that cannot occur"
    total = sum(counts.values())
    small = [cell for cell, p in wanted.items() if p * total < 5]
    cells = [(counts[cell], p * total) for cell, p in wanted.items() if p * total >= 5]
    if small:
        cells.append((sum(counts[cell] for cell in small), sum(wanted[cell] for cell in small) * total))
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), limit


def sampled(session: Session, prompt: list[int], sampling: Sampling, count: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(text(session, prompt, replace(sampling, seed=seed))) for seed in range(count))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "cut"])
def test_the_distribution_is_unchanged_on_five_tokens(sampling: Sampling) -> None:
    """All continuations of 4 tokens, so that a first pass with 3 drafts and what follows any rejection are in."""
    model = untrained(FEW)
    prompt, sampling = [1, 3, 0], replace(sampling, max_tokens=4)
    wanted = exact(model, prompt, sampling, 4)
    session = Session(model)
    statistic, limit = chi_square(sampled(session, prompt, sampling, 1000), wanted)
    assert statistic < limit
    assert min(session.stats.accepted[:2]) > 40  # the rule was at work


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "cut"])
def test_the_distribution_is_unchanged_on_a_trained_model(trained: NanoEuler, sampling: Sampling) -> None:
    prompt, sampling = [0, 4, 5, 6, 0], replace(sampling, max_tokens=4)
    wanted = exact(trained, prompt, sampling, 4)
    session = Session(trained)
    statistic, limit = chi_square(sampled(session, prompt, sampling, 1500), wanted)
    assert statistic < limit
    assert sum(session.stats.accepted) > 800


@pytest.mark.parametrize(("fault", "texts"), [("accepts everything", 600), ("draws again from p", 2000)])
def test_a_wrong_rule_is_seen(fault: str, texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same test refuses both mistakes that one makes with the rejection rule."""
    right = session_module.verify

    def verify(logits: np.ndarray, drafts: list[int], proposed: np.ndarray, *rest: object) -> list[int]:
        q = np.zeros_like(proposed) if drafts and fault == "accepts everything" else proposed
        new = right(logits, drafts, q, *rest)  # type: ignore[arg-type]
        if fault == "draws again from p" and len(new) <= len(drafts):
            p = probabilities(logits[len(new) - 1 : len(new)].astype(np.float64), SAMPLINGS[0])[0]
            new[-1] = int(rng.choice(len(p), p=p))
        return new

    rng = np.random.default_rng(0)
    monkeypatch.setattr(session_module, "verify", verify)
    model, sampling = untrained(FEW), replace(SAMPLINGS[0], max_tokens=4)
    counts = sampled(Session(model), [1, 3, 0], sampling, texts)
    statistic, limit = chi_square(counts, exact(model, [1, 3, 0], sampling, 4))
    assert statistic > 1.5 * limit


def test_plain_sampling_has_that_distribution_too() -> None:
    model, sampling = untrained(FEW), replace(SAMPLINGS[1], max_tokens=3, drafts=0)
    counts = sampled(Session(model), [2, 2], sampling, 800)
    statistic, limit = chi_square(counts, exact(model, [2, 2], sampling, 3))
    assert statistic < limit


def test_a_seed_gives_the_same_text_again(trained: NanoEuler) -> None:
    for drafts in (0, 2, 3):
        sampling = Sampling(temperature=1.0, max_tokens=40, drafts=drafts, seed=7)
        once, again = (text(Session(trained), [1], sampling) for _ in range(2))
        other = text(Session(trained), [1], replace(sampling, seed=8))
        assert once == again != other


def test_log_probabilities_are_those_of_the_model(trained: NanoEuler) -> None:
    """Of accepted drafts, corrections and plain tokens alike; before temperature, cuts and penalty."""
    for base, drafts in itertools.product((SAMPLINGS[1], GREEDY), (0, 3)):
        session = Session(trained)
        session.extend([4, 5])
        tokens = list(session.generate(replace(base, drafts=drafts, max_tokens=30, logprobs=True)))
        h = trained.hidden(np.array([session.tokens], np.int32))
        logits = trained.heads.logits(h)[0].astype(np.float64)
        wanted = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        for i, token in enumerate(tokens):
            assert token.logprob == pytest.approx(wanted[1 + i, token.id], abs=1e-4)
    session.set_tokens([4, 5])
    assert all(token.logprob is None for token in session.generate(GREEDY))
