"""Sampling: from logits to the distribution that a token is drawn from, and the draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.rng import Stream

UNIFORMS_AT_ONCE = 64


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 change nothing.

    In this order: logit_bias is added, (token id, bias) pairs; from the logits of tokens that were generated already,
    presence_penalty is subtracted once and frequency_penalty once for each time; logits of tokens that the text holds
    already, prompt included, are divided by repetition_penalty where positive and multiplied by it where negative; all
    are divided by the temperature; top_k keeps the k most
    likely tokens; top_p the fewest of these whose probabilities sum to it; min_p those with at least min_p times the
    probability of the most likely one. Tokens that tie with the last one kept are kept too.

    max_tokens: the longest reply. seed: the same seed gives the same text. drafts: tokens that the later heads propose
    for each pass (speculation); at most prediction_heads - 1 are used, 0 is plain decoding. It changes the speed only:
    greedy text stays the same, and sampled text keeps its distribution. A decoder may use fewer. logprobs: also give
    log p of each token under the model, before any of this.

    Sources: Keskar et al., "CTRL" (2019; the penalty); Fan et al. (2018; top-k); Holtzman et al. (2019; top-p); Nguyen
    et al. (2024; min-p).
    """

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 200
    seed: int = 0
    drafts: int = 3
    logprobs: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        # Written so that NaN is refused too.
        rules = (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (no limit) or more"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number above 0; 1 for none"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("drafts", self.drafts >= 0, "0 (no speculation) or more"),
            ("presence_penalty", -math.inf < self.presence_penalty < math.inf, "a number; 0 for none"),
            ("frequency_penalty", -math.inf < self.frequency_penalty < math.inf, "a number; 0 for none"),
            ("logit_bias", all(-math.inf < b < math.inf for _, b in self.logit_bias), "numbers"),
        )
        for name, fine, wanted in rules:
            if not fine:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}, wants {wanted}")


    @property
    def changes_logits(self) -> bool:
        """Whether `penalise` does anything."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)


def penalise(logits: np.ndarray, sampling: Sampling, seen: Iterable[int], made: Iterable[int] = ()) -> np.ndarray:
    """float64 logits: (..., V) after the bias and the penalties on the tokens of the text, `seen`, and on those of it
    that were generated, `made`."""
    z = logits.astype(np.float64)
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        z[..., list(tokens)] += biases
    if sampling.presence_penalty or sampling.frequency_penalty:
        ids, counts = np.unique(np.fromiter(made, np.intp), return_counts=True)
        z[..., ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if sampling.repetition_penalty != 1:
        index = np.array(sorted(set(seen)), np.intp)
        old = z[..., index]
        z[..., index] = np.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    return z


def probabilities(z: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What tokens are drawn from, for penalised logits z: (n, V) float64; returns (n, V); temperature > 0."""
    p = _weights(z, sampling)
    p /= p.sum(axis=-1, keepdims=True)
    return p


def _weights(z: np.ndarray, sampling: Sampling) -> np.ndarray:
    """`probabilities` times a factor for each row. Each cut keeps the most likely tokens, so all of them together are
    one threshold on the logits of a row."""
    z = z - z.max(axis=-1, keepdims=True)
    z /= sampling.temperature
    vocab = z.shape[-1]
    k = sampling.top_k if 0 < sampling.top_k < vocab else vocab
    p = np.exp(z)
    if k < vocab or sampling.top_p < 1:
        top = np.partition(z, vocab - k)[:, vocab - k :] if k < vocab else z.copy()
        top.sort()
        top = top[:, ::-1]
        last: Any = k - 1
        if sampling.top_p < 1:  # the first whose sum reaches top_p is the last one kept
            total = np.exp(top).cumsum(axis=-1)
            last = (total < sampling.top_p * total[:, -1:]).sum(axis=-1)
        p *= z >= top[np.arange(len(top)), last, None]
    if sampling.min_p:
        p *= z >= math.log(sampling.min_p)
    return p


def draw(p: np.ndarray, uniforms: Sequence[float]) -> list[int]:
    """For each row of p, (n, V): the token at which its running sum passes its uniform, in [0, 1), times its total."""
    running = p.cumsum(axis=-1)
    total = running[:, -1:]
    tokens = np.count_nonzero(running <= np.reshape(uniforms, (-1, 1)) * total, axis=-1)
    # Rounding can put the product on the total itself, behind every token: the last one with any weight is meant.
    return np.minimum(tokens, np.count_nonzero(running < total, axis=-1)).tolist()


def uniforms(seed: int) -> Iterator[float]:
    """The numbers that a seed draws with, one after the other."""
    stream = Stream(seed, "sample")
    while True:
        yield from stream.uniform((UNIFORMS_AT_ONCE,)).tolist()


def choose(logits: np.ndarray, sampling: Sampling, numbers: Iterable[float]) -> list[int]:
    """A token for each row of penalised logits: (n, V), drawn with its own one of `numbers`, which greedy ignores."""
    if sampling.temperature == 0:
        return logits.argmax(axis=-1).tolist()
    return draw(_weights(logits.astype(np.float64), sampling), list(numbers))


def log_probability(logits: np.ndarray, token: int) -> float:
    """log softmax(logits)[token] for logits: (V,), in float64."""
    z = logits.astype(np.float64)
    top = z.max()
    return float(z[token] - top - np.log(np.exp(z - top).sum()))
