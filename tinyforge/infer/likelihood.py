"""The log-likelihood of texts under a model, many at a time, for scoring benchmarks.

    scorer = Scorer(model, tokenizer)
    pairs = [scorer.pair("Question: Is ice cold?\\nAnswer:", " yes"), scorer.pair("", " Ice is cold.")]
    scorer.score(pairs)         [Score(log_prob=-3.2, greedy=False, cut=False), ...], in the order of the pairs
    scorer.rolling(text)        ln p of a text of any length, every token predicted once

Tokenisation, the token before a text, and the truncation of long texts follow EleutherAI's lm-evaluation-harness, so
that scores can be compared. docs/evaluation.md has the rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import METER, MetaBackend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.frozen_model import frozen_model
from tinyforge.infer.causal_lm import CausalLM, check_causal_lm
from tinyforge.kernel import Array
from tinyforge.memory import free_memory, gib
from tinyforge.registry import ModelSpec
from tinyforge.shards import separator_of
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.vocabulary import ENDS, start_ids

TOKENS = {"numpy": 1 << 11, "cupy": 1 << 15}
"""Tokens per batch. On a CPU a larger batch no longer fits the cache; this one fills a GPU."""
LOGITS = 1 << 24  # logits in memory at a time
SHARED = 8  # tokens of common context from which a cache pays


class Pair(NamedTuple):
    """Token ids, at least one each: those given, and those scored."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Score(NamedTuple):
    """log_prob: ln p(continuation | context). greedy: whether each of its tokens is the most likely one. cut: whether
    the beginning was left out, because it did not fit the model's context."""

    log_prob: float
    greedy: bool
    cut: bool


@dataclass(frozen=True)
class _Row:
    """A text as the model reads it. ids: all but its last token. targets: the tokens scored, at its end."""

    number: int
    ids: tuple[int, ...]
    targets: tuple[int, ...]
    cut: bool


class Scorer:
    """Scores texts under a causal language model, in batches of up to `tokens` tokens, or one longer text."""

    def __init__(self, model: CausalLM, tokenizer: TextTokenizer, tokens: int | None = None) -> None:
        self.model, self.tokenizer = check_causal_lm(model), tokenizer
        self.context = model.config.context
        self.tokens = tokens or TOKENS.get(model.backend.name, 1 << 11)

    # --- text to ids

    def prefix(self) -> int:
        """The token before a text without context: bos, else the end-of-text token."""
        if self.tokenizer.bos is not None:
            return self.tokenizer.bos
        text = next((end for end in ENDS if end in self.tokenizer.specials), None)
        return self.tokenizer.specials[text or separator_of(self.tokenizer)]

    def pair(self, context: str, continuation: str) -> Pair:
        """The ids of a text in two parts. The context's are those of the context alone, without its trailing spaces;
        the continuation's are the rest of the whole text's ids."""
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
            raise UserError(f"nothing to score in {continuation[:40]!r} after {context[-40:]!r}; fix the file")
        return Pair(tuple(known), tuple(rest))

    # --- scores

    def score(self, pairs: Sequence[Pair], done: Callable[[int], object] = lambda count: None) -> list[Score]:
        """The scores, in the order of the pairs. done is called with the number of pairs scored since its last call."""
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
        """ln p(text), each token predicted once. The first window is the token before a text and the text's first
        context - 1 tokens; each later one is full, and scores the tokens that no earlier one did."""
        ids = start_ids(self.tokenizer) + self.tokenizer.encode(text)
        return sum(score.log_prob for score in self.score(list(windows(ids, self.prefix(), self.context)), done))

    def _caches_pay(self) -> bool:
        # On a GPU recomputing the shared context is faster than launching many small passes.
        return self.model.backend.name == "numpy" and self.model.make_cache(1, 1).can_rewind

    def _batches(self, rows: Iterable[_Row], length: Callable[[_Row], int]) -> Iterable[list[_Row]]:
        """Rows in batches of similar length, the longest first, so that running out of memory happens at once."""
        batch: list[_Row] = []
        for row in sorted(rows, key=lambda row: (-length(row), row.number)):
            if batch and (len(batch) + 1) * length(batch[0]) > self.tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _score_rows(self, rows: Sequence[_Row]) -> dict[int, Score]:
        """Score rows side by side, padded on the right, where a causal model does not look."""
        ids = np.zeros((len(rows), max(len(row.ids) for row in rows)), np.int32)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = row.ids
        h = self.model.hidden(self.model.backend.asarray(ids))
        return self._read(h, rows, [len(row.ids) - len(row.targets) for row in rows])

    def _score_families(self, length: int, families: Sequence[list[_Row]]) -> dict[int, Score]:
        """Score families of rows. The rows of a family share a context of `length` tokens, which is computed once."""
        found: dict[int, Score] = {}
        backend = self.model.backend
        longest = max(len(row.ids) for rows in families for row in rows)
        cache = self.model.make_cache(len(families), longest)
        known = np.array([rows[0].ids[: length - 1] for rows in families], np.int32)
        self.model.hidden(backend.asarray(known), cache=cache)
        for place in range(max(map(len, families))):
            rows = [family[min(place, len(family) - 1)] for family in families]
            ids = np.zeros((len(rows), max(len(row.targets) for row in rows)), np.int32)
            for i, row in enumerate(rows):
                ids[i, : len(row.targets)] = row.ids[length - 1 :]
            h = self.model.hidden(backend.asarray(ids), cache=cache)
            cache.rewind(length - 1)
            found |= self._read(h, rows, [0] * len(rows))
        return found

    def _read(self, h: Array, rows: Sequence[_Row], starts: Sequence[int]) -> dict[int, Score]:
        """The scores of rows; h[i, starts[i]:] predicts the targets of row i."""
        backend, vocab = self.model.backend, self.model.config.vocab
        first = [i * h.shape[1] + start for i, start in enumerate(starts)]
        at = np.concatenate([at + np.arange(len(row.targets)) for at, row in zip(first, rows, strict=True)])
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
    """Split a text of any length into pairs that read at most `context` tokens; each token is scored once."""
    whole, done = [prefix, *ids], 0
    while done < len(ids):
        end = min(len(ids), done + context)
        begin = max(0, end - context)  # the last window is full: it reads tokens that were scored before
        yield Pair(tuple(whole[begin : done + 1]), tuple(ids[done:end]))
        done = end


def bytes_needed(spec: ModelSpec, config: ModelConfig, precision: str, tokens: int, weights: str = "") -> int:
    """Bytes that scoring takes: the weights, one pass over `tokens` tokens, measured on arrays without memory, and its
    logits with their exponentials. weights: "int8" or "fp8" for quantised ones."""
    backend = MetaBackend(precision)
    length = min(config.context, tokens)
    start = METER.now
    METER.peak = start
    make: Callable[..., Any] = partial(spec.build, config, backend)
    hollow = frozen_model(make, weights)
    h = hollow.hidden(backend.zeros((max(1, tokens // length), length), np.dtype(np.int32)))
    peak = METER.peak - start
    rows = min(h.shape[0] * length, max(1, LOGITS // config.vocab))
    return int(peak + 3 * rows * config.vocab * np.dtype(backend.master_dtype).itemsize)


def tokens_that_fit(spec: ModelSpec, config: ModelConfig, backend: Backend, weights: str = "") -> int:
    """Tokens in a batch of the scorer, as many as are worthwhile and fit into free memory; UserError if none fit."""
    free, place = free_memory(backend)
    tokens = expected = max(TOKENS[backend.name], config.context)
    while free is not None and (needed := bytes_needed(spec, config, backend.precision.name, tokens, weights)) > free:
        if tokens == config.context:
            raise UserError(
                f"scoring {tokens} tokens needs {gib(needed)} {place}, {gib(free)} are free; use a smaller "
                "model, or --precision bf16 on a GPU"
            )
        tokens = max(tokens // 2, config.context)
    if tokens < expected:
        print(f"batches of {tokens:,} tokens rather than {expected:,}: {gib(free or 0)} are free {place}")
    return tokens
