"""Which words BERT's objective masks, and what stands in their places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.rng import Stream
from tinyforge.train.masked import FRAME, MaskedWords, evaluate_masked, framed, guesses
from tinyforge.train.objectives import Batch

PAD, CLS, SEP, MASK, FIRST, VOCAB = 0, 1, 2, 3, 4, 24


def masked_words(hidden: int) -> MaskedWords:
    tokenizer: Any = SimpleNamespace(
        specials={"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, "[MASK]": MASK}, vocab_size=VOCAB
    )
    config: Any = SimpleNamespace(input_shapes=lambda batch, length: ((batch, length), (batch, hidden)))
    return MaskedWords(None, tokenizer, config, 0, 0)  # type: ignore[arg-type]


def test_of_the_masked_words_most_are_masks_a_tenth_others_and_a_tenth_themselves() -> None:
    text = np.random.default_rng(0).integers(FIRST, VOCAB, (4000, 30)).astype(np.int32)
    batch = masked_words(5).hide(text, Stream(0, "test"))
    places, targets = batch.extra_inputs[2], batch.targets[..., 0]
    assert places.shape == (4000, 5) and (places > 0).all() and (places < 30 + FRAME - 1).all()
    assert (np.diff(places) > 0).all()  # in order, each once
    rows = np.arange(4000)[:, None]
    assert np.array_equal(targets, text[rows, places - 1])
    shown, count = batch.ids[rows, places], targets.size
    assert abs((shown == MASK).mean() - 0.8) < 4 * np.sqrt(0.16 / count)
    kept = 0.1 + 0.1 / (VOCAB - FIRST)  # a random word may be the same one
    assert abs((shown == targets).mean() - kept) < 4 * np.sqrt(0.09 / count)
    others = np.bincount(shown[(shown != MASK) & (shown != targets)], minlength=VOCAB)
    assert not others[:FIRST].any()
    expected = 0.1 * count * (1 - 1 / (VOCAB - FIRST)) / (VOCAB - FIRST)
    assert (np.abs(others[FIRST:] - expected) < 5 * np.sqrt(expected)).all()  # every word as often
    rest = np.ones_like(batch.ids, bool)
    rest[rows, places] = False
    framed = np.concatenate([np.full((4000, 1), CLS), text, np.full((4000, 1), SEP)], axis=1)
    assert np.array_equal(batch.ids[rest], framed[rest])


def test_special_tokens_are_never_masked() -> None:
    text = np.array([[MASK, FIRST, SEP, FIRST + 1]], np.int32)
    batch = masked_words(4).hide(text, Stream(0, "test"))
    assert sorted(batch.extra_inputs[2][0].tolist()) == [-1, -1, 2, 4]
    assert sorted(batch.targets[0, :, 0].tolist()) == [-1, -1, FIRST, FIRST + 1]


def test_a_long_text_loses_what_follows_its_first_quarter_and_of_a_pair_the_longer_its_end() -> None:
    tokenizer: Any = SimpleNamespace(specials={"[CLS]": CLS, "[SEP]": SEP})
    assert framed(tokenizer, range(10, 16), [], 8) == ([CLS, *range(10, 16), SEP], [0] * 8)
    assert framed(tokenizer, range(10, 30), [], 14) == ([CLS, 10, 11, 12, *range(21, 30), SEP], [0] * 14)
    for count in range(11):  # shorter than the row, and as long as it
        assert framed(tokenizer, range(10, 10 + count), [], 12)[0] == [CLS, *range(10, 10 + count), SEP]
    ids, segments = framed(tokenizer, range(10, 25), [20, 21], 10)  # of a pair it loses the end, however long it is
    assert ids == [CLS, *range(10, 15), SEP, 20, 21, SEP] and segments == [0] * 7 + [1] * 3
    ids, segments = framed(tokenizer, range(10, 16), range(20, 23), 10)
    assert ids == [CLS, 10, 11, 12, 13, SEP, 20, 21, 22, SEP] and segments == [0] * 6 + [1] * 4
    ids, segments = framed(tokenizer, range(10, 15), range(20, 25), 12)
    assert segments == [0] * 7 + [1] * 5 and ids == [
        CLS,
        *range(10, 15),
        SEP,
        20,
        21,
        22,
        23,
        SEP,
    ]  # of two equal ones the second
    ids, segments = framed(tokenizer, [10], range(20, 29), 9)
    assert ids == [CLS, 10, SEP, 20, 21, 22, 23, 24, SEP] and segments == [0] * 3 + [1] * 6


def test_the_held_out_loss_is_the_mean_over_the_masked_words_of_all_batches() -> None:
    batches = [SimpleNamespace(targets=np.array(targets)) for targets in ([[3, -1, 0]], [[-1, -1, 5]])]
    losses = {id(batch): [nll] for batch, nll in zip(batches, (2.0, 4.0), strict=True)}
    parallel: Any = SimpleNamespace(nll=lambda batch: losses[id(batch)])
    found = evaluate_masked(parallel, iter(batches))  # type: ignore[arg-type]
    assert found == {"val_loss": 2.0, "val_perplexity": np.exp(2.0)}
    assert evaluate_masked(parallel, iter([])) == {"val_loss": 0.0, "val_perplexity": 1.0}
    assert evaluate_masked(parallel, iter(batches[1:]))["val_loss"] == 4.0  # of a single word
    losses[id(batches[1])] = [1e5]
    assert np.isfinite(evaluate_masked(parallel, iter(batches[1:]))["val_perplexity"])  # a loss of any size has one


def test_frequencies_are_counted_over_different_parts_of_the_text() -> None:
    words, read = masked_words(5), []

    def batch(index: int, size: int) -> Any:
        read.append(index)
        return SimpleNamespace(ids=np.full((size, 10), FIRST + index))

    words.windows = SimpleNamespace(batch=batch)  # type: ignore[assignment]
    rows = 64 * 10
    assert words.frequency_loss(3 * rows) == pytest.approx(np.log(3)) and read == [0, 1, 2]
    for ids, expected in (([[SEP, FIRST, SEP]], 0.0), ([[FIRST, FIRST, FIRST + 1]], np.log(3) - 2 / 3 * np.log(2))):
        words.windows = SimpleNamespace(batch=lambda index, size, ids=ids: SimpleNamespace(ids=np.array(ids)))  # type: ignore[assignment]
        assert words.frequency_loss(1) == pytest.approx(expected, abs=1e-12)  # special tokens are not counted


def test_held_out_windows_are_whole_ones_whatever_their_words() -> None:
    """A window of the vocabulary's first word is whole; one that ends early is not."""
    text = np.array([[0, 0, 0, 0], [5, 6, 7, 8], [5, 6, 7, 8]], np.int32)
    targets = np.array([[0, 0, 0, 0], [6, 7, 8, -1], [6, 7, 8, 9]], np.int32)[..., None]
    windows = SimpleNamespace(tokens=text.reshape(-1), in_order=lambda rows, tokens: [Batch(text, targets)])
    corpus: Any = SimpleNamespace(held_out=[SimpleNamespace(windows=windows, source="text")])
    (found,) = masked_words(5).held_out(corpus, 3)
    assert len(found.ids) == 2 and found.targets[1, 1:, 0].tolist() == [5, 6, 7, 8]
    again = masked_words(5).hide(text[[0, 2]], Stream(0, "held out/text/0"))
    assert np.array_equal(found.ids, again.ids) and np.array_equal(found.extra_inputs[2], again.extra_inputs[2])


def test_guesses_show_the_first_row_with_the_word_next_to_what_was_predicted() -> None:
    """Of places in any order, one of them none; [MASK] itself is not shown, and a word's pieces are joined."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "dog"]
    tokenizer: Any = SimpleNamespace(token_bytes=lambda id: words[id].encode())
    ids = np.array([[3, 4, 3, 6, 3, 2], [1, 7, 7, 7, 7, 2]], np.int32)
    targets = np.array([[7, -1, 5, 0], [4, 4, 4, 4]], np.int32)[..., None]
    more = np.zeros_like(ids), np.array([6, 6], np.int32), np.array([[4, -1, 2, 0], [1, 2, 3, 4]], np.int32)
    scores = np.zeros((1, 4, 9))
    scores[0, [0, 1, 2, 3], [5, 4, 8, 1]] = 1  # at place 4 "cat", at none "the", at place 2 "dog", at place 0 [CLS]
    seen = []

    def hidden(*inputs: Any) -> Any:
        seen.extend(inputs)
        return inputs[0]

    model: Any = SimpleNamespace(hidden=hidden, predict=lambda h, places: scores[: len(places)])
    found = guesses(model, Batch(ids, targets, None, more), tokenizer, get_backend("numpy", "fp64", workers=1))
    assert found == "[[CLS]|[PAD]] the [dog|cat]s [cat|sat] [SEP]"
    assert [x.tolist() for x in seen] == [ids[:1].tolist(), [[0] * 6], [6]]
