"""The log-likelihood of texts under a model, many at a time: what benchmarks are scored by.

    scorer = Scorer(model, tokenizer)
    pairs = [scorer.pair("Question: Is ice cold?\\nAnswer:", " yes"), scorer.pair("", " Ice is cold.")]
    scorer.score(pairs)         [Score(log_prob=-3.2, greedy=False, cut=False), ...], in the order of the pairs
    scorer.rolling(text)        ln p of a text of any length, every token predicted once

Tokenisation, the token before a text, and what is cut from a text that is too long are those of EleutherAI's
lm-evaluation-harness, so that scores can be compared. docs/evaluation.md has the rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tinyforge.backends.phantom import METER, PhantomBackend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.frozen_model import frozen_model
from tinyforge.infer.causal_lm import CausalLM, check_causal_lm
from tinyforge.kernel import Array
from tinyforge.registry import ModelSpec
from tinyforge.text import TextTokenizer
from tinyforge.text.shards import separator_of
from tinyforge.text.vocabulary import ENDS, start_ids

TOKENS = {"numpy": 1 << 11, "cupy": 1 << 15}
"""Tokens of a batch. On a CPU a larger one leaves the cache; a GPU is full with these."""
LOGITS = 1 << 24  # numbers in the logits that are in memory at a time
SHARED = 8  # tokens that several texts must begin with for a cache to pay


class Pair(NamedTuple):
    """Token ids: what is given, at least one, and what is scored, at least one."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Score(NamedTuple):
    """log_prob: ln p(continuation | context). greedy: whether each of its tokens is the most likely one. cut: whether
    the beginning did not fit the model's context and was left out."""

    log_prob: float
    greedy: bool
    cut: bool


@dataclass(frozen=True)
class _Row:
    """A text as the model reads it. ids: all but the last token; scored: how many tokens count, from the end."""

    number: int
    ids: tuple[int, ...]
    targets: tuple[int, ...]
    cut: bool


class Scorer:
    """Scores texts under a causal language model, `tokens` at a time at most (one text where it is longer)."""

    def __init__(self, model: CausalLM, tokenizer: TextTokenizer, tokens: int | None = None) -> None:
        self.model, self.tokenizer = check_causal_lm(model), tokenizer
        self.context = model.config.context
        self.tokens = tokens or TOKENS.get(model.backend.name, 1 << 11)
        self.computed = 0  # tokens that went through the model, for tests and reports

    # --- text to ids

    def prefix(self) -> int:
        """The token before a text that has no context: bos, else the one that ends a text."""
        if self.tokenizer.bos is not None:
            return self.tokenizer.bos
        text = next((end for end in ENDS if end in self.tokenizer.specials), None)
        return self.tokenizer.specials[text or separator_of(self.tokenizer)]

    def pair(self, context: str, continuation: str) -> Pair:
        """The ids of a text in two parts. Spaces at the end of the context go to the continuation, and the whole is
        encoded at once: the context's ids are those it has alone, the continuation's all that come behind as many."""
        if not context:
            ids = self.tokenizer.encode(continuation)
            first = self.prefix()
            known, rest = ([first], ids) if ids[:1] != [first] else (ids[:1], ids[1:])
        else:
            bare = context.rstrip()
            whole = start_ids(self.tokenizer) + self.tokenizer.encode(context + continuation)
            known = start_ids(self.tokenizer) + self.tokenizer.encode(bare)
            rest = whole[len(known) :]
        if not (known and rest):
            raise UserError(f"nothing to score in {continuation[:40]!r} behind {context[-40:]!r}; mend the file")
        return Pair(tuple(known), tuple(rest))

    # --- scores

    def score(self, pairs: Sequence[Pair], done: Callable[[int], object] = lambda count: None) -> list[Score]:
        """done is called with the number of pairs that have been scored since the last call."""
        found: dict[int, Score] = {}
        alone: list[_Row] = []
        families: dict[tuple[int, ...], list[_Row]] = defaultdict(list)
        for number, pair in enumerate(pairs):
            whole = (*pair.context, *pair.continuation)
            kept = whole[-(self.context + 1) :]
            row = _Row(number, kept[:-1], pair.continuation[-(len(kept) - 1) :], len(kept) < len(whole))
            sharing = not row.cut and len(pair.context) > SHARED and self._caches_pay()
            (families[pair.context] if sharing else alone).append(row)
        for context in [c for c, rows in families.items() if len(rows) == 1]:
            alone += families.pop(context)
        for rows in self._batches(alone, lambda row: len(row.ids)):
            found |= self._score_rows(rows)
            done(len(rows))
        by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for context in families:
            by_length[len(context)].append(context)
        for length in sorted(by_length, reverse=True):
            most = max(1, self.tokens // length)
            contexts = by_length[length]
            for begin in range(0, len(contexts), most):
                group = [families[context] for context in contexts[begin : begin + most]]
                found |= self._score_families(length, group)
                done(sum(map(len, group)))
        return [found[number] for number in range(len(pairs))]

    def rolling(self, text: str, done: Callable[[int], object] = lambda count: None) -> float:
        """ln p(text): every token is predicted once. The first window is the token before a text and the text's first
        `context` tokens but one; each later one is full, and scores the tokens that no earlier one has."""
        ids = start_ids(self.tokenizer) + self.tokenizer.encode(text)
        return sum(score.log_prob for score in self.score(list(windows(ids, self.prefix(), self.context)), done))

    def _caches_pay(self) -> bool:
        # A GPU computes the shared beginning again faster than many small passes are launched.
        return self.model.backend.name == "numpy" and self.model.make_cache(1, 1).can_rewind

    def _batches(self, rows: Iterable[_Row], length: Callable[[_Row], int]) -> Iterable[list[_Row]]:
        """Rows of about one length together, the longest first: what does not fit into memory shows at once."""
        batch: list[_Row] = []
        for row in sorted(rows, key=lambda row: (-length(row), row.number)):
            if batch and (len(batch) + 1) * length(batch[0]) > self.tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _score_rows(self, rows: Sequence[_Row]) -> dict[int, Score]:
        """Rows side by side, padded on the right, where causal models do not look."""
        ids = np.zeros((len(rows), max(len(row.ids) for row in rows)), np.int32)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = row.ids
        self.computed += ids.size
        h = self.model.hidden(self.model.backend.asarray(ids))
        return self._read(h, rows, [len(row.ids) - len(row.targets) for row in rows])

    def _score_families(self, length: int, families: Sequence[list[_Row]]) -> dict[int, Score]:
        """Families of rows, each with a beginning of its own, all of `length` tokens, that is computed once."""
        found: dict[int, Score] = {}
        backend = self.model.backend
        longest = max(len(row.ids) for rows in families for row in rows)
        cache = self.model.make_cache(len(families), longest)
        known = np.array([rows[0].ids[: length - 1] for rows in families], np.int32)
        self.model.hidden(backend.asarray(known), cache=cache)
        self.computed += known.size
        for place in range(max(map(len, families))):
            rows = [family[min(place, len(family) - 1)] for family in families]
            ids = np.zeros((len(rows), max(len(row.targets) for row in rows)), np.int32)
            for i, row in enumerate(rows):
                ids[i, : len(row.targets)] = row.ids[length - 1 :]
            h = self.model.hidden(backend.asarray(ids), cache=cache)
            self.computed += ids.size
            cache.rewind(length - 1)
            found |= self._read(h, rows, [0] * len(rows))
        return found

    def _read(self, h: Array, rows: Sequence[_Row], starts: Sequence[int]) -> dict[int, Score]:
        """The scores of rows whose targets are predicted from h[i, starts[i]:] on."""
        backend, vocab = self.model.backend, self.model.config.vocab
        at = np.concatenate([i * h.shape[1] + start + np.arange(len(row.targets))
                             for i, (row, start) in enumerate(zip(rows, starts, strict=True))])  # fmt: skip
        targets = np.concatenate([row.targets for row in rows])
        flat = h.reshape(-1, h.shape[-1])
        log_probs, best, step = np.empty(len(at)), np.empty(len(at), bool), max(1, LOGITS // vocab)
        for begin in range(0, len(at), step):
            part = slice(begin, begin + step)
            z = self.model.logits(flat[backend.asarray(at[part])][None])[0].astype(backend.master_dtype, copy=False)
            chosen = backend.asarray(targets[part])
            z = z - z.max(axis=-1, keepdims=True)
            picked = z[backend.xp.arange(len(chosen)), chosen]
            log_probs[part] = backend.to_numpy(picked - backend.xp.log(backend.xp.exp(z).sum(axis=-1)))
            best[part] = backend.to_numpy(z.argmax(axis=-1) == chosen)
        found, end = {}, 0
        for row in rows:
            begin, end = end, end + len(row.targets)
            found[row.number] = Score(float(log_probs[begin:end].sum()), bool(best[begin:end].all()), row.cut)
        return found


def windows(ids: Sequence[int], prefix: int, context: int) -> Iterable[Pair]:
    """A text of any length as pairs of at most `context` tokens read, each token scored once."""
    whole, done = [prefix, *ids], 0
    while done < len(ids):
        end = min(len(ids), done + context)
        begin = max(0, end - context)  # the last window is full: it reads again what the one before it scored
        yield Pair(tuple(whole[begin : done + 1]), tuple(ids[done:end]))
        done = end


def bytes_needed(spec: ModelSpec, config: ModelConfig, precision: str, tokens: int, weights: str = "") -> int:
    """Bytes that scoring takes, the weights included: they, one pass over `tokens` tokens, on arrays without memory,
    and its logits with their exponentials. weights: their format, where they have one of their own."""
    backend = PhantomBackend(precision)
    length = min(config.context, tokens)
    start = METER.now
    METER.peak = start
    make: Callable[..., Any] = partial(spec.build, config, backend)
    phantom = frozen_model(make, weights)
    h = phantom.hidden(backend.zeros((max(1, tokens // length), length), np.dtype(np.int32)))
    peak = METER.peak - start
    rows = min(h.shape[0] * length, max(1, LOGITS // config.vocab))
    return int(peak + 3 * rows * config.vocab * np.dtype(backend.master_dtype).itemsize)
