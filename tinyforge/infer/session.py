"""A text that grows, with its cache: plain and speculative decoding.

Speculation: the heads behind head 0 propose the next tokens, and the next pass checks all of them at once. What is
proposed never decides what comes out: see `Session._verify`, and docs/inference.md for the proof.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import Decoder
from tinyforge.infer.sampling import Sampling, draw, log_probability, penalise, probabilities, uniforms
from tinyforge.rng import Stream


class Token(NamedTuple):
    """A token that was generated; logprob, where Sampling asks for it, is log p of it under the model."""

    id: int
    logprob: float | None = None


@dataclass
class Stats:
    """What `Session.generate` has done since the session began, or since its caller put a new Stats in place.

    prefilled: tokens of prompts computed; reused: those found in the cache. passes: of the decoder after prefill, each
    over one token and its drafts. drafted[k], accepted[k]: tokens that head k + 1 proposed and that were looked at,
    and those that were right. prefill_seconds, decode_seconds: time in `generate`, without the caller's own.
    first_seconds: from the last call of `generate` to its first token.
    """

    prefilled: int = 0
    reused: int = 0
    passes: int = 0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_seconds: float = 0.0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(1, self.passes)

    @property
    def tokens_per_second(self) -> float:
        """Without prefill."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def acceptance(self) -> list[float]:
        """The share of each drafting head's proposals that was accepted, of those that were looked at."""
        return [a / max(1, d) for a, d in zip(self.accepted, self.drafted, strict=True)]


class Session:
    """One text, `tokens`, and a decoder whose cache holds its beginning.

        session = Session(model)
        session.extend(prompt)
        for token in session.generate(sampling): ...      # each is appended to session.tokens
        session.set_tokens(longer_prompt)                 # what both have in common stays in the cache

    The caller may stop a reply at any token, also by an exception: tokens and cache stay whole.
    """

    def __init__(self, model: CausalLM, decoder: Decoder | None = None) -> None:
        self.decoder = decoder or make_decoder(model)
        if self.decoder.batch != 1:
            raise ValueError(f"Session: the decoder has {self.decoder.batch} rows, wants 1")
        self.decoder.rewind([0])
        self.tokens: list[int] = []
        self.stats = Stats()

    def extend(self, ids: Iterable[int]) -> None:
        """Append to the text. Nothing is computed before `generate`."""
        # A reply that was left in the middle, its generator still alive, has drafts in the cache behind the text.
        self.truncate(len(self.tokens))
        self.tokens += checked_ids(ids, self.decoder.config.vocab)

    def set_tokens(self, ids: Iterable[int]) -> int:
        """Make the text exactly `ids`; returns how many of its first tokens are in the cache already."""
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
        budget = min(sampling.max_tokens, self.decoder.capacity - len(self.tokens))
        begun = time.perf_counter()
        self._prefill()
        start = time.perf_counter()
        self.stats.prefill_seconds += start - begun
        passes = self._from_blocks if self.decoder.draws(sampling) else self._passes
        stream = passes(sampling, budget)
        made = 0
        try:
            for token in stream:
                if token.id in stop:
                    break
                self.tokens.append(token.id)
                made += 1
                self.stats.tokens += 1
                now = time.perf_counter()
                self.stats.decode_seconds += now - start
                if made == 1:
                    self.stats.first_seconds = now - begun
                yield token
                start = time.perf_counter()  # the caller's time is not ours
                if made == budget:
                    break
            self.stats.decode_seconds += time.perf_counter() - start
        finally:
            # What the cache holds beyond the text is drafts, or tokens behind the end. The last token is not in it; one
            # that cannot rewind may hold it, when the token behind was a stop, and keeps it for a text that goes on.
            stream.close()
            self._keep(max(0, len(self.tokens) - self.decoder.can_rewind))

    def _prefill(self) -> None:
        """Bring all tokens but the last into the cache: the last one is the first that a pass takes."""
        cached = self._keep(len(self.tokens) - 1)
        self.decoder.prefill(0, self.tokens[cached:-1])
        self.stats.reused += cached
        self.stats.prefilled += len(self.tokens) - cached

    def _keep(self, length: int) -> int:
        """Rewind the cache to at most `length` positions, to none if it cannot rewind; returns what it then holds."""
        if self.decoder.lengths[0] > length:
            self.decoder.rewind([length if self.decoder.can_rewind else 0])
        return self.decoder.lengths[0]

    def _from_blocks(self, sampling: Sampling, budget: int) -> Generator[Token]:
        """Tokens that the decoder draws itself, with drafts or without."""
        offered = 0
        for drawn in self.decoder.stream([self.tokens[-1]], sampling, [Stream(sampling.seed, "sample")], budget):
            logprobs = itertools.repeat(None) if drawn.logprobs is None else drawn.logprobs[0].tolist()
            new = map(Token, drawn.ids[0].tolist(), logprobs)
            for count in drawn.passes or (1,) * drawn.ids.shape[1]:
                self.stats.passes += 1
                self._count(offered if drawn.passes else 0, count - 1)
                budget -= count
                offered = self._drafts(sampling, budget)
                yield from itertools.islice(new, count)

    def _drafts(self, sampling: Sampling, budget: int) -> int:
        """Drafts of a pass. It gives one token more than it accepts drafts: the last of the budget needs no draft."""
        return max(0, min(sampling.drafts, self.decoder.most_drafts, budget - 1))

    def _count(self, offered: int, right: int) -> None:
        """Of so many drafts the first `right` stood; those behind the next were not looked at."""
        stats = self.stats
        for counts in (stats.drafted, stats.accepted):
            counts += [0] * (offered - len(counts))
        for k in range(offered):
            stats.drafted[k] += k <= right
            stats.accepted[k] += k < right

    def _passes(self, sampling: Sampling, budget: int) -> Generator[Token]:
        """Draft, verify, rewind: each pass takes the last token and the drafts after it. No drafts: plain decoding.

        The caller appends what is yielded to self.tokens. `base` counts the tokens that are in the cache and sure.
        """
        decoder, stats = self.decoder, self.stats
        heads = min(sampling.drafts, decoder.most_drafts) + 1
        numbers = uniforms(sampling.seed)
        drafts: list[int] = []
        proposed: np.ndarray | None = None  # the distributions that the drafts were drawn from, (drafts, V)
        while budget > 0:
            base = len(self.tokens) - 1
            logits = decoder.step([[self.tokens[-1], *drafts]], heads)[0]
            stats.passes += 1
            new = self._verify(logits[:, 0], drafts, proposed, sampling, numbers)
            right = len(new) - 1
            self._count(len(drafts), right)
            budget -= len(new)
            logprobs = [log_probability(logits[i, 0], t) for i, t in enumerate(new)] if sampling.logprobs else None
            # Heads 1, 2, ... at the last sure position: guesses at what follows the token that its head 0 gave.
            ahead = self._drafts(sampling, budget)
            if ahead > 0:
                drafts, proposed = self._draft(logits[right, 1 : 1 + ahead], new, sampling, numbers)
            else:
                drafts, proposed = [], None
            decoder.rewind([base + 1 + right])
            for i, token in enumerate(new):
                yield Token(token, logprobs[i] if logprobs else None)

    def _verify(
        self, logits: np.ndarray, drafts: list[int], proposed: np.ndarray | None, sampling: Sampling,
        numbers: Iterator[float],
    ) -> list[int]:  # fmt: skip
        """The drafts that stand, and one token more: what drawing from head 0 alone would give, in distribution.

        logits: (drafts + 1, V), head 0 after each prefix of the drafts. A draft x from q stands with probability
        min(1, p(x) / q(x)); at the first that falls, the token is drawn from max(0, p - q), normalised. Greedy: p and q
        are certain of one token each, so a draft stands if it is head 0's choice, and else that choice takes its place.

        Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
        """
        z = logits
        if sampling.repetition_penalty != 1:
            z = np.stack([penalise(z[i], sampling, self.tokens + drafts[:i]) for i in range(len(z))])
        if sampling.temperature == 0:
            choice = z.argmax(axis=-1).tolist()
            right = next((i for i, x in enumerate(drafts) if x != choice[i]), len(drafts))
            return choice[: right + 1]
        p = probabilities(z.astype(np.float64), sampling)
        for i, x in enumerate(drafts):
            assert proposed is not None
            if next(numbers) * proposed[i, x] >= p[i, x]:
                return [*drafts[:i], draw(np.maximum(p[i] - proposed[i], 0), next(numbers))]
        return [*drafts, draw(p[-1], next(numbers))]

    def _draft(
        self, logits: np.ndarray, new: list[int], sampling: Sampling, numbers: Iterator[float]
    ) -> tuple[list[int], np.ndarray | None]:
        """A token from each head's logits, (drafts, V), by the same rules as head 0's; and their distributions."""
        z = penalise(logits, sampling, self.tokens + new)
        if sampling.temperature == 0:
            return z.argmax(axis=-1).tolist(), None
        q = probabilities(z, sampling)
        return [draw(row, next(numbers)) for row in q], q


def checked_ids(ids: Iterable[int], vocab: int) -> list[int]:
    ids = [int(i) for i in ids]
    wrong = next((i for i in ids if not 0 <= i < vocab), None)
    if wrong is not None:
        raise UserError(f"token id {wrong} is outside of the model's vocabulary of {vocab}; use its own tokenizer")
    return ids


def check_prompt(tokens: Sequence[int], context: int) -> None:
    if not tokens:
        raise UserError("the prompt is empty; give at least one character")
    if len(tokens) >= context:
        raise UserError(f"the prompt takes {len(tokens)} tokens, the model's context is {context}; shorten the prompt")
