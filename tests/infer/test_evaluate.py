"""What is measured of a model: each figure against a slow or exact version of it, and against faults that it must
see.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.data.world import documents, instructions
from tinyforge.formats import Loaded, load
from tinyforge.infer import evaluate
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.infer.evaluate import (
    NEIGHBOURS,
    Reply,
    cloze_credits,
    cloze_items,
    repeats_a_line,
    repeats_four_words,
    reply_decoder,
    reply_shares,
    reply_to,
    speculate,
    standard_error,
)
from tinyforge.infer.generation import generate
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.trace import trace
from tinyforge.models.nanoeuler import SPEC, Config, NanoEuler
from tinyforge.tokenizers import Tokenizer
from tinyforge.tokenizers.chat_templates import render_prompt
from tinyforge.train import batches
from tinyforge.train.batches import PackedTokens
from tinyforge.train.data_parallel import DataParallel, evaluate_heads, evaluate_nll
from tinyforge.train.objectives import LN2

TINY = Config(
    dim=16, heads=4, kv_heads=2, layers=2, context=64, vocab=258, mtp_heads=3, hidden=10, mtp_weights=(1, 1, 1)
)
BYTES = Tokenizer([], ["<|endoftext|>", "</s>"])


@pytest.fixture(scope="module")
def tiny() -> NanoEuler:
    """Random weights, large enough that its distributions are far from even."""
    model = NanoEuler(TINY, get_backend("numpy", "fp64", workers=1))
    model.initialise(0)
    model.buffer.values[: model.buffer.decay_end] *= 12
    return model


@pytest.fixture
def bundled() -> Loaded:
    """The trained model that comes with the repository; a new copy for every test, since some of them spoil it."""
    return load(SPEC.bundled, get_backend("numpy", "fp32", workers=1))


def shuffle(weights: np.ndarray, seed: int = 0) -> None:
    """Every number stays, none in its place."""
    weights[...] = np.random.default_rng(seed).permutation(weights.reshape(-1)).reshape(weights.shape)


# --- bits per byte of every head


def bits_by_hand(model: NanoEuler, tokens: np.ndarray, window: int) -> list[float]:
    """Each window apart, every probability from the model's plain forward: head k at t is asked for token t + 1 + k."""
    nll, size = np.zeros(TINY.mtp_heads), np.zeros(TINY.mtp_heads)
    for start in range(0, len(tokens) - 1, window):
        seen = tokens[start : start + window + 1].tolist()
        p = trace(model, seen[:-1] if len(seen) > window else seen).probabilities
        for k in range(TINY.mtp_heads):
            for t in range(len(seen) - 1 - k):
                target = seen[t + 1 + k]
                nll[k] -= np.log(p[t, k, target])
                size[k] += len(BYTES.token_bytes(target)) if target < 256 else 0
    return (nll / LN2 / size).tolist()


def held_out(model: NanoEuler) -> tuple[PackedTokens, np.ndarray]:
    ids = [i for text in documents("val", 3) for i in (*BYTES.encode(text[:90]), 256)]
    return PackedTokens(np.array(ids), 40, TINY.mtp_heads, seed=0), np.array(ids)


def test_each_head_is_measured_on_its_own_targets(tiny: NanoEuler) -> None:
    windows, ids = held_out(tiny)
    parallel = DataParallel(tiny, tiny.backend)
    found = evaluate_heads(parallel, windows.in_order(2, len(ids)), BYTES.byte_lengths)
    assert found == pytest.approx(bits_by_hand(tiny, ids, 40), rel=1e-10)
    assert evaluate_nll(parallel, windows.in_order(2, len(ids)), BYTES.byte_lengths) == found[0]


def test_targets_that_are_shifted_by_one_are_seen(tiny: NanoEuler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above: head k asked for token t + 2 + k."""
    right = batches.shifted_targets

    def shifted(tokens: np.ndarray, length: int, heads: int) -> np.ndarray:
        return right(tokens, length, heads + 1)[..., 1:]

    windows, ids = held_out(tiny)
    monkeypatch.setattr(batches, "shifted_targets", shifted)
    found = evaluate_heads(DataParallel(tiny, tiny.backend), windows.in_order(2, len(ids)), BYTES.byte_lengths)
    for k, expected in enumerate(bits_by_hand(tiny, ids, 40)):
        assert abs(found[k] / expected - 1) > 1e-3


# --- the last word of a sentence


def test_the_candidates_are_by_the_rule() -> None:
    texts = list(documents("val", 150))
    items = cloze_items(texts, 60, seed=3)
    assert len(items) == 60 == len(set(items)) and items == cloze_items(texts, 60, seed=3)
    assert items != cloze_items(texts, 60, seed=4)
    everything = cloze_items(texts, 10**6, seed=3)
    closes = Counter(item.candidates[0] for item in everything)
    for item in items:
        assert any(f"{item.beginning} {item.candidates[0]}{item.mark}" in text for text in texts)
        assert len(set(item.candidates)) == 10 and set(item.candidates) <= set(closes)
        assert 5 <= len(item.beginning.split()) <= 40 and item.beginning[0].isupper()
        assert closes[item.candidates[item.commonest]] == max(closes[word] for word in item.candidates)
        # All words that end more sentences than one of the candidates, and fewer than the right one, are nearer to it.
        counts = [closes[word] for word in item.candidates]
        assert sum(min(counts) < closes[word] < counts[0] for word in closes) < NEIGHBOURS
        assert sum(counts[0] < closes[word] < max(counts) for word in closes) < NEIGHBOURS


def test_what_is_no_sentence_is_not_taken() -> None:
    ends = "sea hill door barn yard park pond gate tree wall".split()
    good = [f"All of them went out to the {word}." for word in ends]
    found = cloze_items([" ".join(good)], 99, 0)
    assert {item.candidates[0] for item in found} == set(ends)
    bad = [
        "All of them went out to Kabin.",
        "He went to the lake.",
        "all of them went out to the lake.",
        'All of them went out to the lake."',
        "All of them went out to the\nlake.",
        "All of them went out to the lake",
        "All of them went out\n\nto the great old lake and its seven boats.",
        "A" + " b" * 41 + " lake.",
    ]
    again = cloze_items(["\n\n".join([*good, *bad])], 99, 0)
    assert [item.candidates[0] for item in again if item.candidates[0] not in ends] == []
    assert cloze_items([" ".join(good[:9])], 99, 0) == []  # nine last words are no ten candidates


def test_the_right_word_counts_where_the_model_finds_it_the_most_likely(tiny: NanoEuler) -> None:
    ends = "lake hill door barn yard park pond gate tree wall".split()
    items = cloze_items([" ".join(f"All of them went out to the {word}." for word in ends)], 99, 0)
    credits = [credit for _, credit in cloze_credits(tiny, BYTES, items)]
    for item, credit in zip(items, credits, strict=True):
        known, scores = BYTES.encode(item.beginning), []
        for word in item.candidates:
            end = BYTES.encode(f" {word}{item.mark}")
            p = trace(tiny, [*known, *end]).probabilities[:, 0]
            scores.append(sum(np.log(p[len(known) - 1 + i, token]) for i, token in enumerate(end)))
        assert credit == float(scores[0] == max(scores))
    assert 0 < sum(credits) < len(credits) == 10


@pytest.mark.slow
def test_a_trained_model_is_above_chance_and_shuffled_weights_are_at_it(bundled: Loaded) -> None:
    items = cloze_items(list(documents("val", 300)), 400, seed=0)
    scored = cloze_credits(bundled.model, bundled.tokenizer, items)
    right = float(np.mean([credit for _, credit in scored]))
    assert right > 0.1 + 4 * standard_error(0.1, len(items))
    credits = []
    for seed in range(4):  # one order of the weights has favourites among the words, and few words end these sentences
        for param in bundled.model.params():
            shuffle(param.value, seed)
        scored = cloze_credits(bundled.model, bundled.tokenizer, items[100 * seed : 100 * seed + 100])
        credits += [credit for _, credit in scored]
    assert abs(float(np.mean(credits)) - 0.1) < 2 * standard_error(0.1, len(items))


def test_a_tie_is_worth_its_share_and_what_does_not_fit_is_left_out() -> None:
    even = NanoEuler(TINY, get_backend("numpy", "fp64", workers=1))
    even.buffer.values[:] = 0  # every token is as likely as any other
    ends = "lake hill door barn yard park pond gate tree wall".split()
    items = cloze_items([" ".join(f"All of them went out to the {word}." for word in ends)], 99, 0)
    assert cloze_credits(even, BYTES, items) == [(item, 0.1) for item in items] and len(items) == 10
    longer = replace(items[0], beginning="All of them " * 9)
    assert cloze_credits(even, BYTES, [longer, items[1]]) == [(items[1], 0.1)]


# --- replies


@pytest.mark.parametrize(
    ("text", "line", "four_words"),
    [
        ("", False, False),
        ("Yes.", False, False),
        ("A dog.\nA cat.\nA dog.", False, False),
        ("A dog.\nA cat.\nA dog.\n  a  DOG. ", True, False),
        ("The dog barked. The dog barked. The dog barked.", True, False),  # one line, three sentences
        ("The old dog barked. The old dog barked. The old dog barked.", True, True),
        ("He said no. He said yes. He said no.", False, False),
        ("Tiro Tiro Tiro", False, False),
        ("so on and on and on and on and on", False, True),
        ("one two three four, one two three four, one two three four", False, False),  # the comma makes another word
        ("one two three four one two three four one two three four", False, True),
        ("{\n}\n}\n}\n}", False, False),
        ("1. Red\n2. Red\n3. Red", True, False),
    ],
)
def test_replies_that_go_in_circles(text: str, line: bool, four_words: bool) -> None:
    assert (repeats_a_line(text), repeats_four_words(text)) == (line, four_words)


def test_shares_of_replies() -> None:
    texts = (("Red.", 2, True), (" \n", 1, True), ("a b c d " * 3, 9, True), ("No.\n" * 3, 8, False))
    replies = [Reply(*text) for text in texts]
    assert reply_shares(replies) == {
        "ended": 0.75,
        "not_empty": 0.75,
        "no_line_repeated": 0.75,
        "all_three": 0.5,
        "four_words_repeated": 0.25,
        "tokens": 5.0,
    }


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0, max_tokens=12), Sampling(max_tokens=12, seed=5)])
def test_replies_side_by_side_are_those_one_by_one(tiny: NanoEuler, sampling: Sampling) -> None:
    """Seven prompts in rows of three, the last row filled up; some end by themselves, one has little room."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, length).tolist() for length in (3, 20, 1, 7, 60, 9, 2)]
    # Plain decoding, as a batch draws: speculation keeps a sampled text's distribution, not its tokens.
    sampling = replace(sampling, drafts=0)
    whole = [list(generate(tiny, p, replace(sampling, seed=sampling.seed + i))) for i, p in enumerate(prompts)]
    end = whole[0][5]
    expected = [(ids[: ids.index(end)], True) if end in ids else (ids, False) for ids in whole]
    one = reply_to(tiny, prompts, sampling, frozenset({end}), reply_decoder(tiny, len(prompts)))
    for several in (make_decoder(tiny, 3), ReferenceDecoder(tiny, 3, batched=True)):
        assert one == expected == reply_to(tiny, prompts, sampling, frozenset({end}), several)
    assert one[0][1] and not all(ended for _, ended in one)
    assert len(one[4][0]) <= TINY.context - 60


@pytest.mark.parametrize(
    ("backend", "draws", "steps", "prompts", "rows"),
    [
        ("cupy", True, None, 200, 50),
        ("cupy", True, None, 64, 64),
        ("cupy", True, None, 65, 33),
        ("cupy", True, None, 1, 1),
        ("cupy", False, None, 200, 1),
        ("cupy", False, "steps of all rows", 200, 50),
        ("numpy", True, None, 200, 1),
    ],
)
def test_rows_side_by_side_only_where_a_pass_takes_all_of_them(
    monkeypatch: pytest.MonkeyPatch, backend: str, draws: bool, steps: Any, prompts: int, rows: int
) -> None:
    def fake(model: Any, batch: int = 1) -> Any:
        return SimpleNamespace(batch=batch, draws=lambda sampling: draws, steps=steps)

    monkeypatch.setattr(evaluate, "make_decoder", fake)
    model: Any = SimpleNamespace(backend=SimpleNamespace(name=backend))
    assert reply_decoder(model, prompts).batch == rows


def test_the_bundled_model_ends_its_replies_and_without_an_end_none_does(bundled: Loaded) -> None:
    prompts = [bundled.tokenizer.encode(render_prompt(e.instruction, e.input)) for e in instructions("val", 20)]
    decoder, sampling = make_decoder(bundled.model), Sampling(temperature=0.0, max_tokens=30)
    end = bundled.tokenizer.specials["</s>"]
    replies = reply_to(bundled.model, prompts, sampling, frozenset({end}), decoder)
    assert sum(ended for _, ended in replies) == 20
    # Head 0 has no word for the end any more: each reply goes on to the last token that it may have.
    weight = bundled.model.heads.weight.value
    weight[0, end] = weight[0, bundled.tokenizer.specials["<|endoftext|>"]]
    replies = reply_to(bundled.model, prompts, sampling, frozenset({end}), make_decoder(bundled.model))
    assert not any(ended for _, ended in replies) and {len(ids) for ids, _ in replies} == {30}


# --- speculation


def test_what_the_heads_guess(bundled: Loaded) -> None:
    """Counts that add up; heads that were spoiled guess nothing, and the text is no other."""
    prompts = [bundled.tokenizer.encode(text)[:30] for text in documents("val", 6)]
    found = speculate(bundled.model, prompts, 20, frozenset())
    assert found.tokens == 120 and len(found.accepted) == 3
    assert found.passes < 110 and 0.1 < found.acceptance[0] <= 1
    # A pass gives its own token and what was accepted; the last one of a text may be cut.
    assert found.tokens <= found.passes + sum(found.accepted) <= found.tokens + 3 * len(prompts)
    shuffle(bundled.model.heads.weight.value[1:])
    spoiled = speculate(bundled.model, prompts, 20, frozenset())
    assert spoiled.tokens == 120 and spoiled.passes >= 115 and spoiled.acceptance[0] < 0.05
