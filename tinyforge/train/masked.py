"""Masked-word pretraining as in BERT: 15 % of the words of a text are masked, and the model predicts them.

Of the masked words 80 % become [MASK], 10 % another word, 10 % stay: with [MASK] alone a model would learn nothing
about words that it can see. The words are sampled again in every epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.rng import Stream
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.wordpiece import CLS, MASK, PAD, SEP
from tinyforge.train.batches import Batches
from tinyforge.train.corpus import Corpus
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Batch

FRAME = 2  # tokens around a text: [CLS] before it, [SEP] after it


def special(tokenizer: TextTokenizer, text: str) -> int:
    """The id of one of BERT's special tokens. Raises UserError for a tokenizer without it."""
    if text not in tokenizer.specials:
        raise UserError(f"the tokenizer has no {text}, which BERT needs; use a WordPiece tokenizer")
    return tokenizer.specials[text]


class MaskedWords:
    """Windows of text for a model of masked words: batches with segments, lengths and the places of the masked words in
    `Batch.extra_inputs`."""

    def __init__(self, windows: Batches, tokenizer: TextTokenizer, config: ModelConfig, length: int, seed: int) -> None:
        """windows: of `length` - FRAME tokens. length: of a row, with [CLS] and [SEP]."""
        self.windows, self.seed = windows, seed
        self.cls, self.sep, self.mask = (special(tokenizer, text) for text in (CLS, SEP, MASK))
        self.hidden = config.input_shapes(1, length)[1][1]  # words of a row
        self.specials = np.array(sorted(tokenizer.specials.values()))
        self.words = np.setdiff1d(np.arange(tokenizer.vocab_size), self.specials)

    def frequency_loss(self, tokens: int = 1 << 18) -> float:
        """The loss of a model that only knows word frequencies: their entropy, -sum p log p, over `tokens` tokens."""
        counts, index = np.zeros(len(self.words) + len(self.specials)), 0
        while counts.sum() < tokens:
            counts += np.bincount(self.windows.batch(index, 64).ids.reshape(-1), minlength=len(counts))
            index += 1
        share = counts[self.words] / max(1.0, counts[self.words].sum())
        return float(-(share * np.log(np.maximum(share, 1e-300))).sum())

    def batch(self, index: int, size: int) -> Batch:
        return self.hide(self.windows.batch(index, size).ids, Stream(self.seed, f"hidden words/{index}"))

    def hide(self, text: np.ndarray, stream: Stream) -> Batch:
        """text: (B, T) ids; returns a batch of rows of T + FRAME. Special tokens are never masked."""
        batch, width = len(text), text.shape[1] + FRAME
        ids = np.concatenate(
            [np.full((batch, 1), self.cls, np.int32), text, np.full((batch, 1), self.sep, np.int32)], axis=1
        )
        order = stream.uniform((batch, width)) + np.isin(ids, self.specials)  # special ones come last
        places = np.sort(np.argsort(order, axis=1, kind="stable")[:, : self.hidden], axis=1).astype(np.int32)
        rows = np.arange(batch)[:, None]
        places[order[rows, places] >= 1.0] = -1
        hidden = places >= 0
        targets = np.where(hidden, ids[rows, places], -1).astype(np.int32)
        fate, other = stream.uniform((2, *places.shape))
        shown = np.where(fate < 0.8, self.mask, self.words[(other * len(self.words)).astype(int)])
        shown = np.where(fate < 0.9, shown, targets)
        where, which = np.nonzero(hidden)
        ids[where, places[where, which]] = shown[where, which]
        more = np.zeros_like(ids), np.full(batch, width, np.int32), places
        return Batch(ids, targets[..., None], None, more)

    def held_out(self, corpus: Corpus, rows: int, limit: int | None = None) -> Iterator[Batch]:
        """The whole windows of the held-out text, up to `limit` tokens; the same words are masked every time."""
        for part in corpus.held_out:
            tokens = len(part.windows.tokens) if limit is None else limit // len(corpus.held_out)
            for number, found in enumerate(part.windows.in_order(rows, tokens)):
                whole = found.ids[(found.targets[..., 0] >= 0).all(axis=1)]
                if len(whole):
                    yield self.hide(whole, Stream(0, f"held out/{part.source}/{number}"))


def evaluate_masked(parallel: DataParallel, batches: Iterator[Batch]) -> dict[str, float]:
    """The mean loss of the masked words, and the perplexity, over all batches."""
    nll, count = 0.0, 0
    for batch in batches:
        nll += float(parallel.nll(batch)[0])
        count += int((batch.targets >= 0).sum())
    loss = nll / max(1, count)
    return {"val_loss": loss, "val_perplexity": float(np.exp(min(loss, 700.0)))}


def guesses(model: object, batch: Batch, tokenizer: TextTokenizer, backend: Backend) -> str:
    """The first row of a batch, with masked words as [prediction|word]."""
    ids, _targets, segments, lengths, places = batch[:1].inputs(backend)
    found = model.predict(model.hidden(ids, segments, lengths), places)  # type: ignore[attr-defined]
    best = backend.to_numpy(found)[0].argmax(axis=-1)
    shown = {int(place): number for number, place in enumerate(batch.extra_inputs[2][0]) if place >= 0}
    words = []
    for place, id in enumerate(batch.ids[0].tolist()):
        if place in shown:
            guess, word = int(best[shown[place]]), int(batch.targets[0, shown[place], 0])
            words.append(f"[{_text(tokenizer, guess)}|{_text(tokenizer, word)}]")
        else:
            words.append(_text(tokenizer, id))
    return " ".join(words).replace(" ##", "")


def _text(tokenizer: TextTokenizer, id: int) -> str:
    return tokenizer.token_bytes(id).decode("utf-8", "replace")


def room_in(length: int) -> int:
    """The tokens of text in a row of `length`. UserError if it has room for none."""
    if length <= FRAME:
        raise UserError(f"--seq-len is {length}, expected {FRAME + 1} or more: {FRAME} tokens stand around a text")
    return length - FRAME


def framed(
    tokenizer: TextTokenizer, first: Sequence[int], second: Sequence[int], length: int
) -> tuple[list[int], list[int]]:
    """[CLS] first [SEP] second [SEP], or without a second [CLS] first [SEP], and the segment of each token.

    A single text that is too long for `length` loses a part after its first quarter, since reviews give their opinion
    at the end; a pair loses the end of the longer text. Source: Sun et al., "How to Fine-Tune BERT" (2019).
    """
    cls, sep = special(tokenizer, CLS), special(tokenizer, SEP)
    first, second = list(first), list(second)
    room = length - (3 if second else 2)
    if not second and len(first) > room:
        head = room // 4
        first = first[:head] + first[len(first) - (room - head) :]
    while len(first) + len(second) > room:
        (first if len(first) > len(second) else second).pop()
    ids = [cls, *first, sep] + ([*second, sep] if second else [])
    return ids, [0] * (len(first) + 2) + [1] * (len(ids) - len(first) - 2)


def padded(texts: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int) -> tuple[np.ndarray, ...]:
    """Framed texts as arrays: ids and segments, (B, longest), and lengths, (B,)."""
    lengths = np.array([len(ids) for ids, _ in texts], np.int32)
    ids = np.full((len(texts), int(lengths.max())), pad, np.int32)
    segments = np.zeros_like(ids)
    for row, (words, kinds) in enumerate(texts):
        ids[row, : len(words)], segments[row, : len(words)] = words, kinds
    return ids, segments, lengths


def padding_id(tokenizer: TextTokenizer) -> int:
    return special(tokenizer, PAD)
