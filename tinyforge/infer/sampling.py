"""Sampling: from logits to a distribution, and a sample from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.rng import Stream

UNIFORMS_AT_ONCE = 64
# What the fields of `Sampling` may be, and its name in errors. NaN fails these comparisons too.
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: 0 <= x < math.inf, "a number, 0 (greedy) or more"),
    "top_k": (lambda x: x >= 0, "0 (no limit) or more"),
    "top_p": (lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "min_p": (lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda x: 0 < x < math.inf, "a number above 0; 1 for none"),
    "max_tokens": (lambda x: x >= 1, "at least 1"),
    "drafts": (lambda x: x >= 0, "0 (no speculation) or more"),
    "presence_penalty": (lambda x: -math.inf < x < math.inf, "a number; 0 for none"),
    "frequency_penalty": (lambda x: -math.inf < x < math.inf, "a number; 0 for none"),
    "logit_bias": (lambda pairs: all(-math.inf < b < math.inf for _, b in pairs), "numbers"),
}


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. temperature 0: greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 change nothing.

    The steps, in order: logit_bias, (token id, bias) pairs, is added. From the logits of generated tokens,
    presence_penalty is subtracted once, and frequency_penalty once per occurrence. Logits of tokens in the text, prompt
    included, are divided by repetition_penalty if positive and multiplied by it if negative. All are divided by the
    temperature. top_k keeps the k most likely tokens; top_p the fewest of these whose probabilities reach the sum
    top_p; min_p those with at least min_p times the probability of the most likely token. Ties with the last token kept
    are kept too.

    max_tokens: of a reply. seed: the same seed gives the same text. drafts: tokens that the later heads draft for each
    pass (speculative decoding); 0 is plain decoding, at most prediction_heads - 1 are used, a decoder may use fewer.
    Drafts change only the speed: greedy text stays the same, sampled text keeps its distribution. logprobs: also return
    log p of each token under the model, before any of these steps.

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
        for name, (allowed, expected) in RULES.items():
            if not allowed(value := getattr(self, name)):
                raise UserError(f"--{name.replace('_', '-')} is {value}, expected {expected}")

    @property
    def changes_logits(self) -> bool:
        """Whether `penalise` does anything."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.logit_bias)


def penalise(logits: np.ndarray, sampling: Sampling, seen: Iterable[int], made: Iterable[int] = ()) -> np.ndarray:
    """logits: (..., V) with bias and penalties applied, in float64. seen: all tokens of the text; made: the generated
    ones among them."""
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
    """The distributions of sampled tokens, (n, V), for penalised logits z, (n, V) float64; temperature > 0."""
    p = _weights(z, sampling)
    p /= p.sum(axis=-1, keepdims=True)
    return p


def _weights(z: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Unnormalised `probabilities`. Each cut keeps the most likely tokens, so that together they are one threshold on a
    row's logits."""
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
        if sampling.top_p < 1:  # the first token whose running sum reaches top_p is the last one kept
            total = np.exp(top).cumsum(axis=-1)
            last = (total < sampling.top_p * total[:, -1:]).sum(axis=-1)
        p *= z >= top[np.arange(len(top)), last, None]
    if sampling.min_p:
        p *= z >= math.log(sampling.min_p)
    return p


def draw(p: np.ndarray, uniforms: Sequence[float]) -> list[int]:
    """For each row of p, (n, V): the first token whose running sum exceeds u times the row's sum, u in [0, 1)."""
    running = p.cumsum(axis=-1)
    total = running[:, -1:]
    tokens = np.count_nonzero(running <= np.reshape(uniforms, (-1, 1)) * total, axis=-1)
    # Rounding can make the product equal the total, past every token: then take the last one with any weight.
    return np.minimum(tokens, np.count_nonzero(running < total, axis=-1)).tolist()


def uniforms(seed: int) -> Iterator[float]:
    """The stream of uniform numbers of a seed."""
    stream = Stream(seed, "sample")
    while True:
        yield from stream.uniform((UNIFORMS_AT_ONCE,)).tolist()


def choose(logits: np.ndarray, sampling: Sampling, numbers: Iterable[float]) -> list[int]:
    """A token for each row of penalised logits, (n, V), sampled with that row's number; greedy ignores the numbers."""
    if sampling.temperature == 0:
        return logits.argmax(axis=-1).tolist()
    k, numbers = sampling.top_k, list(numbers)
    if not 0 < k < logits.shape[-1]:
        return draw(_weights(logits.astype(np.float64), sampling), numbers)
    tokens = []
    for row, least, number in zip(logits, np.partition(logits, -k)[:, -k], numbers, strict=True):
        # What may be sampled, in the order of ids: the running sums are those of the whole row, in half the time.
        ids = np.flatnonzero(~(row < least))
        tokens.append(int(ids[draw(_weights(row[None, ids].astype(np.float64), sampling), [number])[0]]))
    return tokens


def log_probability(logits: np.ndarray, token: int) -> float:
    """log softmax(logits)[token], in float64. logits: (V,)."""
    z = logits.astype(np.float64)
    top = z.max()
    return float(z[token] - top - np.log(np.exp(z - top).sum()))
