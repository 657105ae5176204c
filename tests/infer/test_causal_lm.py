"""Any causal model can be generated from: fused where its shape is Llama's, else by its own ops, caches of any kind."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.infer.toys import Recurrent, Sizes, Wide
from tinyforge import infer
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.infer.cache import KVCache
from tinyforge.infer.causal_lm import _WANTED, CausalLM, logits
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.infer.decoder_cpu import CPUDecoder
from tinyforge.infer.decoder_numpy import NumpyDecoder
from tinyforge.infer.evaluate import speculate
from tinyforge.infer.generation import generate, generate_batch
from tinyforge.infer.likelihood import Pair, Scorer
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.session import Session
from tinyforge.infer.trace import trace
from tinyforge.models.char_mlp import CharMLP
from tinyforge.models.char_mlp import Config as CharConfig
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.tokenizers import Tokenizer

CPU = get_backend("numpy", "fp64", workers=1)
SIZES = Sizes(context=70, vocab=29)
GREEDY = Sampling(temperature=0, max_tokens=9)


def ids_of(rows: int, length: int, vocab: int = 23) -> np.ndarray:
    return np.random.default_rng(length).integers(0, vocab, (rows, length))


def greedy_by_hand(model: Recurrent | Wide, text: list[int], count: int) -> list[int]:
    made: list[int] = []
    for _ in range(count):
        made.append(int(logits(model, [text + made])[0, -1].argmax()))
    return made


# --- which decoder


def test_the_fused_decoder_is_taken_where_the_model_has_its_shape() -> None:
    assert isinstance(make_decoder(Wide(SIZES, CPU)), CPUDecoder)
    assert type(make_decoder(Wide(SIZES, CPU, fused=False))) is ReferenceDecoder
    assert type(make_decoder(Recurrent(), 3)) is ReferenceDecoder
    with pytest.raises(UserError, match="Wide has no fused weights; use make_decoder"):
        NumpyDecoder(Wide(SIZES, CPU, fused=False))


@pytest.mark.parametrize("head_dim", [2, 6, 10, 64])
def test_heads_need_not_be_as_wide_as_the_stream(head_dim: int) -> None:
    model = Wide(replace(SIZES, head_dim=head_dim), CPU)
    tokens, found = ids_of(2, 60), []
    expected = logits(model, tokens)
    decoder = make_decoder(model, 2)
    for start, end in itertools.pairwise((0, 1, 3, 40, 44, 60)):
        found.append(decoder.step(tokens[:, start:end])[:, :, 0].copy())
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=0, atol=1e-10)


def test_a_model_that_is_no_causal_lm_is_refused_in_one_line() -> None:
    class Scorer(CharMLP):
        make_cache = property()  # type: ignore[assignment]  # hasattr says that there is none

    model: Any = Scorer(CharConfig(vocab=7, window=3, dim=4, hidden=8), CPU)
    for attempt in (
        lambda: next(generate(model, [1], GREEDY)),
        lambda: make_decoder(model),
        lambda: logits(model, [[1]]),
        lambda: trace(model, [1]),
        lambda: ReferenceDecoder(model),
    ):
        with pytest.raises(UserError, match="^Scorer cannot generate text: it lacks make_cache; ") as e:
            attempt()
        assert "\n" not in str(e.value)


def test_what_is_asked_of_a_model_is_the_protocol() -> None:
    members = {name for name in vars(CausalLM) if not name.startswith("_")}
    assert members == set(_WANTED)


# --- logits


def test_logits_of_a_batch() -> None:
    model, ids = Recurrent(), ids_of(3, 11)
    found = infer.logits(model, ids)
    assert type(found) is np.ndarray and found.shape == (3, 11, 23) and found.dtype == np.float64
    np.testing.assert_array_equal(found, model.logits(model.hidden(ids)))
    half = NanoEuler(Config(vocab=9, context=8), get_backend("numpy", "fp32", workers=1))
    half.initialise(0)
    assert logits(half, [[1, 2]]).dtype == np.float32 and logits(half, [[1, 2]]).shape == (1, 2, 9)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0] * 41], "41 tokens, the model's context is 40"),
        ([[3, 23]], "ids 3 to 23, expected 0 to 22"),
        ([[-1, 0]], "ids -1 to 0, expected"),
    ],
)
def test_ids_that_the_model_does_not_take_are_refused(ids: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        logits(Recurrent(), ids)
    for wrong in ([1, 2], [[0.5]]):
        with pytest.raises(ValueError, match="expected integers of shape"):
            logits(Recurrent(), wrong)


# --- a cache that cannot go back


def test_a_recurrent_model_generates_what_it_would_without_a_cache() -> None:
    model = Recurrent()
    for drafts in (0, 3):
        assert list(generate(model, [1, 2, 3], replace(GREEDY, drafts=drafts))) == greedy_by_hand(model, [1, 2, 3], 9)
    prompts = [[5], [1, 2, 3], list(range(20)), list(range(22)) + [1] * 15]
    found: list[list[int]] = [[] for _ in prompts]
    for i, token in generate_batch(model, prompts, GREEDY):
        found[i].append(token.id)
    assert found == [greedy_by_hand(model, prompt, min(9, 40 - len(prompt))) for prompt in prompts]


def test_its_session_computes_again_what_it_cannot_go_back_to() -> None:
    model = Recurrent()
    session = Session(model)
    session.extend([1, 2, 3])
    made = [token.id for token in session.generate(GREEDY)]
    assert session.decoder.most_drafts == 0 and not session.decoder.can_rewind
    # What only goes on stays cached ...
    session.extend([7, 8])
    again = [token.id for token in session.generate(GREEDY)]
    assert again == greedy_by_hand(model, [1, 2, 3, *made, 7, 8], 9)
    assert session.stats.reused == 3 + len(made) - 1
    # ... and so it does after a stop, which the cache took nothing of.
    stop = again[4]
    session.set_tokens([1, 2, 3, *made, 7, 8])
    cut = [token.id for token in session.generate(GREEDY, frozenset({stop}))]
    assert cut == again[: again.index(stop)]
    held = session.decoder.lengths[0]
    assert held == len(session.tokens)
    session.extend([stop, 4])
    before = session.stats.reused
    assert [t.id for t in session.generate(GREEDY)] == greedy_by_hand(model, [1, 2, 3, *made, 7, 8, *cut, stop, 4], 9)
    assert session.stats.reused - before == held
    # What changes in the middle begins anew.
    session.set_tokens([1, 2, 9])
    assert [t.id for t in session.generate(GREEDY)] == greedy_by_hand(model, [1, 2, 9], 9)


def test_ctrl_c_inside_of_a_pass_leaves_no_half_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Recurrent()
    session = Session(model)
    session.extend([1, 2, 3])
    expected = greedy_by_hand(model, [1, 2, 3], 9)
    real, calls = Recurrent.hidden, iter(range(100))

    def interrupted(self: Recurrent, ids: np.ndarray, stash: None = None, *, cache: object = None) -> np.ndarray:
        found = real(self, ids, stash, cache=cache)  # type: ignore[arg-type]
        if next(calls) == 3:  # the prompt takes one call
            raise KeyboardInterrupt
        return found

    made: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(Recurrent, "hidden", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for token in session.generate(GREEDY):
                made.append(token.id)
    assert made == expected[:3] == session.tokens[3:]
    assert [token.id for token in session.generate(replace(GREEDY, max_tokens=6))] == expected[3:]


def test_its_decoder_goes_back_to_the_start_only() -> None:
    decoder = ReferenceDecoder(Recurrent(), 2)
    decoder.prefill(1, [1, 2, 3])
    with pytest.raises(ValueError, match="row 1 holds 3 positions, its cache goes to 0 only, not to 2"):
        decoder.rewind([0, 2])
    decoder.rewind([0, 3])
    decoder.rewind([0, 0])
    expected = logits(Recurrent(), [[4], [5]])
    np.testing.assert_array_equal(decoder.step([[4], [5]])[:, :, 0], expected)


def test_scores_and_speculation_take_it_too() -> None:
    model, beginning, ends = Recurrent(), [3, 1, 4], [[1, 5], [9], [2, 6, 5]]
    pairs = [Pair(tuple(beginning), tuple(end)) for end in ends]
    found = [score.log_prob for score in Scorer(model, Tokenizer([], ["<|endoftext|>"])).score(pairs)]
    for score, end in zip(found, ends, strict=True):
        z = logits(model, [[*beginning, *end]])[0, 2:-1]
        p = z - np.log(np.exp(z).sum(axis=-1, keepdims=True))
        assert score == pytest.approx(p[range(len(end)), end].sum(), rel=1e-12)
    stats = speculate(model, [[1], [2, 3]], 5, frozenset())
    assert (stats.tokens, stats.passes, stats.drafted) == (10, 10, [])


def test_a_model_without_attention_has_a_trace_without_it() -> None:
    model, ids = Recurrent(), [1, 2, 3]
    found = trace(model, ids)
    assert found.attention == ()
    z = logits(model, [ids])[0]
    np.testing.assert_allclose(found.probabilities[:, 0], np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True))
    assert [a.shape for a in trace(Wide(SIZES, CPU), ids).attention] == [(6, 3, 3)] * 2


# --- the cache of keys and values


@pytest.mark.parametrize("first", [1, 512])
def test_a_kv_cache_holds_what_was_appended_by_whole_passes(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyforge.infer.cache.FIRST_POSITIONS", first)  # and grows
    cache = KVCache(CPU, 2, 3, 5, 1, 4)
    new = np.random.default_rng(0).normal(size=(2, 3, 5, 1, 4))
    for start, end in ((0, 2), (2, 3)):
        for layer in range(2):
            keys, values, _ = cache.layer(layer).append(new[layer, :, start:end], -new[layer, :, start:end], None)
            np.testing.assert_array_equal(keys, new[layer, :, :end])
            np.testing.assert_array_equal(values, -new[layer, :, :end])
        assert cache.length == start
        cache.advance(end - start)
    cache.rewind(1)
    keys, *_ = cache.layer(1).append(new[1, :, 3:], new[1, :, 3:], None)
    np.testing.assert_array_equal(keys, new[1][:, [0, 3, 4]])
    with pytest.raises(ValueError, match="holds 1 of 5 positions, no room for 5 more"):
        cache.advance(5)
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="holds 1 positions, cannot go to"):
            cache.rewind(wrong)


def test_a_kv_cache_that_cannot_grow_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out between keys and values, or Ctrl-C comes there: the next try grows both."""
    monkeypatch.setattr("tinyforge.infer.cache.FIRST_POSITIONS", 2)
    cache, new = KVCache(CPU, 1, 2, 9, 1, 4), np.ones((2, 3, 1, 4))
    answers = [True, False]

    def zeros(shape: tuple[int, ...]) -> np.ndarray:
        if answers and not answers.pop(0):
            raise MemoryError
        return np.zeros(shape)

    with monkeypatch.context() as patch:
        patch.setattr(CPU, "zeros", zeros)
        with pytest.raises(MemoryError):
            cache.layer(0).append(new, new, None)
    assert cache.keys.shape == cache.values.shape == (1, 2, 2, 1, 4)
    keys, values, _ = cache.layer(0).append(new, -new, None)
    np.testing.assert_array_equal([keys, -values], [new, new])
