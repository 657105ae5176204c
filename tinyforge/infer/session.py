"""A growing text with its cache: plain and speculative decoding (speculation.py)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import Decoder
from tinyforge.infer.sampling import Sampling, log_probability, uniforms
from tinyforge.infer.speculation import propose, verify
from tinyforge.rng import Stream


class Refused(NamedTuple):
    """A head's draft that was rejected."""

    head: int
    id: int


class Token(NamedTuple):
    """A generated token. logprob: log p of it under the model, where `Sampling` asks for it. A scheduler sets the rest.

    others: where asked for, the most likely tokens at its position with their log p, best first. head: the head that
    drafted it, 0 for none. refused: the draft that it replaces.
    """

    id: int
    logprob: float | None = None
    others: tuple[tuple[int, float], ...] = ()
    head: int = 0
    refused: Refused | None = None


@dataclass
class Stats:
    """What `Session.generate` has done since the session began, or since its caller assigned a new Stats.

    prefilled: prompt tokens computed; reused: those found in the cache. passes: of the decoder after prefill, each over
    one token and its drafts. drafted[k], accepted[k]: drafts of head k + 1 that were verified, and accepted.
    replies: calls of `generate` that gave a token. decode_seconds: time in `generate` after its first token, without
    the caller's own. first_seconds: from the last call of `generate` to its first token.
    """

    prefilled: int = 0
    reused: int = 0
    passes: int = 0
    tokens: int = 0
    replies: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    decode_seconds: float = 0.0
    first_seconds: float = 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(1, self.passes)

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first of each reply."""
        return (self.tokens - self.replies) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """The share of each head's verified drafts that was accepted."""
        return [a / max(1, d) for a, d in zip(self.accepted, self.drafted, strict=True)]

    def count(self, offered: int, right: int) -> None:
        """Of the drafts offered the first `right` were accepted; those after the next were not verified."""
        for counts in (self.drafted, self.accepted):
            counts += [0] * (offered - len(counts))
        for k in range(offered):
            self.drafted[k] += k <= right
            self.accepted[k] += k < right


class Session:
    """One text, `tokens`, and a decoder whose cache holds a prefix of it.

        session = Session(model)
        session.extend(prompt)
        for token in session.generate(sampling): ...      # each is appended to session.tokens
        session.set_tokens(longer_prompt)                 # the common prefix stays cached

    The caller may stop a reply at any token, also by an exception: tokens and cache stay consistent.
    """

    def __init__(self, model: CausalLM, decoder: Decoder | None = None) -> None:
        self.decoder = decoder or make_decoder(model)
        if self.decoder.batch != 1:
            raise ValueError(f"Session: the decoder has {self.decoder.batch} rows, expected 1")
        self.decoder.rewind([0])
        self.tokens: list[int] = []
        self._prompt = 0  # tokens before those that the last call of `generate` appended
        self.stats = Stats()

    def extend(self, ids: Iterable[int]) -> None:
        """Append to the text. Nothing is computed before `generate`."""
        # An abandoned reply whose generator is still alive has left drafts in the cache, after the text.
        self.truncate(len(self.tokens))
        self.tokens += checked_ids(ids, self.decoder.config.vocab)

    def set_tokens(self, ids: Iterable[int]) -> int:
        """Replace the text by `ids`; returns how many of its first tokens are cached."""
        new = checked_ids(ids, self.decoder.config.vocab)
        same = next((i for i, (a, b) in enumerate(zip(self.tokens, new, strict=False)) if a != b), len(new))
        self.truncate(min(same, len(self.tokens)))
        self.tokens = new
        return self.decoder.lengths[0]

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        del self.tokens[length:]
        self._keep(len(self.tokens))

    def generate(self, sampling: Sampling, stop: frozenset[int] = frozenset()) -> Generator[Token]:
        """Yield the tokens that follow the text, appending each, until one in `stop` (which is neither yielded nor
        appended), max_tokens, or a full context."""
        check_prompt(self.tokens, self.decoder.capacity)
        self._prompt = len(self.tokens)
        budget = min(sampling.max_tokens, self.decoder.capacity - len(self.tokens))
        begun = time.perf_counter()
        cached = self._keep(len(self.tokens) - 1)
        self.stats.reused += cached
        self.stats.prefilled += len(self.tokens) - cached
        if self.decoder.draws(sampling):
            stream = self._from_blocks(self.tokens[cached:], sampling, budget)
        else:
            stream = self._passes(self.tokens[cached:], sampling, budget)
        made, start = 0, None
        try:
            for token in stream:
                if token.id in stop:
                    break
                self.tokens.append(token.id)
                made += 1
                self.stats.tokens += 1
                if start is None:
                    self.stats.replies += 1
                    self.stats.first_seconds = time.perf_counter() - begun
                else:
                    self.stats.decode_seconds += time.perf_counter() - start
                yield token
                start = time.perf_counter()  # the caller's time is not ours
                if made == budget:
                    break
            if start is not None:
                self.stats.decode_seconds += time.perf_counter() - start
        finally:
            # Drop drafts, and tokens past the end, from the cache. The last token is never cached, except by a decoder
            # that cannot rewind, if the next token was a stop; it keeps the token in case the text goes on.
            stream.close()
            self._keep(max(0, len(self.tokens) - self.decoder.can_rewind))

    def _keep(self, length: int) -> int:
        """Rewind the cache to at most `length` positions, or to 0 if it cannot; returns how many it then holds."""
        if self.decoder.lengths[0] > length:
            self.decoder.rewind([length if self.decoder.can_rewind else 0])
        return self.decoder.lengths[0]

    def _from_blocks(self, ahead: list[int], sampling: Sampling, budget: int) -> Generator[Token]:
        """Tokens that the decoder samples itself, with or without drafts. ahead: tokens that are not cached."""
        offered = 0
        for drawn in self.decoder.stream([ahead], [sampling], [Stream(sampling.seed, "sample")], budget):
            logprobs = itertools.repeat(None) if drawn.logprobs is None else drawn.logprobs[0].tolist()
            new = map(Token, drawn.ids[0].tolist(), logprobs)
            for count in drawn.passes or (1,) * drawn.ids.shape[1]:
                self.stats.passes += 1
                self.stats.count(offered if drawn.passes else 0, count - 1)
                budget -= count
                offered = self._drafts(sampling, budget)
                yield from itertools.islice(new, count)

    def _drafts(self, sampling: Sampling, budget: int) -> int:
        """How many drafts the next pass takes. A pass gives one token more than the drafts it accepts."""
        return max(0, min(sampling.drafts, self.decoder.most_drafts, budget - 1))

    def _passes(self, ahead: list[int], sampling: Sampling, budget: int) -> Generator[Token]:
        """Draft, verify, rewind: each pass takes the last token and the drafts after it; plain decoding without drafts.

        ahead: tokens that are not cached. The caller appends what is yielded to self.tokens. `base` counts the cached
        tokens that are part of the text.
        """
        decoder, stats = self.decoder, self.stats
        heads = min(sampling.drafts, decoder.most_drafts) + 1
        numbers = uniforms(sampling.seed)
        drafts: list[int] = []
        proposed: np.ndarray | None = None  # the distributions that the drafts were sampled from, (drafts, V)
        while budget > 0:
            base = len(self.tokens) - 1
            logits = (decoder.first(ahead, heads) if ahead else decoder.step([[self.tokens[-1], *drafts]], heads))[0]
            ahead = []
            stats.passes += 1
            new = verify(logits[:, 0], drafts, proposed, sampling, numbers, self.tokens, self._prompt)
            right = len(new) - 1
            stats.count(len(drafts), right)
            budget -= len(new)
            logprobs = [log_probability(logits[i, 0], t) for i, t in enumerate(new)] if sampling.logprobs else None
            # Heads 1, 2, ... at the last accepted position: guesses at what follows the token that head 0 gave there.
            count = self._drafts(sampling, budget)
            if count > 0:
                guesses = logits[right, 1 : 1 + count]
                drafts, proposed = propose(guesses, sampling, numbers, self.tokens + new, self._prompt)
            else:
                drafts, proposed = [], None
            decoder.rewind([base + 1 + right])
            for i, token in enumerate(new):
                yield Token(token, logprobs[i] if logprobs else None)


def checked_ids(ids: Iterable[int], vocab: int) -> list[int]:
    ids = [*map(int, ids)]
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        wrong = next(i for i in ids if not 0 <= i < vocab)
        raise UserError(f"token id {wrong} is outside the model's vocabulary of {vocab}; use its own tokenizer")
    return ids


def check_prompt(tokens: Sequence[int], context: int) -> None:
    if not tokens:
        raise UserError("the prompt is empty; give at least one character")
    if len(tokens) >= context:
        raise UserError(f"the prompt takes {len(tokens)} tokens, the model's context is {context}; shorten the prompt")
