"""Preference pairs: a reply that is preferred to another, and objectives that learn from them.

    DPO     log-ratios to a reference model       SimPO   mean log-probabilities, no reference
    IPO     the same, length-normalised, squared  ORPO    log odds, no reference, and the chosen reply is learned too

Row 2 i of a batch is the chosen reply to a prompt, row 2 i + 1 the rejected one. log p(y) is the sum of head 0's
log-probabilities over the reply and its end. Every objective here scores a reply, and its loss is a function of the
difference: with s the scores of a pair, D = s_chosen - s_rejected,

    loss = mean over pairs of f(D),   dloss/dlog p(chosen) = f' s'_chosen,   dloss/dlog p(rejected) = -f' s'_rejected

so all that goes back into the model is one gradient per row, in its log p. docs/alignment.md derives it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tinyforge.backends import Backend, get_backend
from tinyforge.files import written_whole
from tinyforge.kernel import Array
from tinyforge.rng import Stream
from tinyforge.train.batches import Shuffled, fingerprint
from tinyforge.train.objectives import Batch

REFERENCE = 0  # of `Batch.objective_inputs`: the reference's log p of each row, (B,)


def sigmoid(xp: Any, x: Array) -> Array:
    return xp.exp(-xp.logaddexp(0.0, -x))


@dataclass(frozen=True)
class DPO:
    """s = log p(y) - log p_ref(y),   f(D) = -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)

    beta: how strongly the reference holds the model back. label_smoothing: e, the assumed share of pairs that are
    labelled the wrong way round. Logged, as means over pairs: "rewards/chosen" and "rewards/rejected", beta s, DPO's
    implicit rewards; "rewards/accuracies", how often the first is larger; "rewards/margins", their difference;
    "logps/chosen", "logps/rejected".

    Sources: Rafailov et al., "Direct Preference Optimization" (2023); Mitchell, "A note on DPO with noisy preferences"
    (2023), for e.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    referenced: ClassVar[bool] = True  # whether it needs the reference's log-probabilities

    def scores(self, xp: Any, logps: Array, lengths: Array, reference: Array) -> tuple[Array, Array]:
        """s of each row and ds/dlog p. logps, lengths (in tokens), reference: (B,) float64."""
        return logps - reference, xp.ones_like(logps)

    def loss(self, xp: Any, difference: Array) -> tuple[Array, Array]:
        """f and f' at D: (pairs,)."""
        h, e = self.beta * difference, self.label_smoothing
        value = (1 - e) * xp.logaddexp(0.0, -h) + e * xp.logaddexp(0.0, h)
        return value, self.beta * (sigmoid(xp, h) - (1 - e))

    def nll_weight(self, counts: np.ndarray) -> float:
        """The weight in the loss, relative to f, of each token's nll in chosen replies."""
        return 0.0

    def count(self, batch: Batch) -> np.ndarray:
        """(2,): pairs, and tokens of chosen replies."""
        return np.array([len(batch.ids) // 2, int((batch.targets[::2, :, 0] >= 0).sum())])

    def weigh(self, nll: Array, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Array, Array]:
        """sums, (8,): the loss before it is divided by the pairs, the logged figures, and the chosen replies' nll."""
        xp, wide = backend.xp, np.dtype(np.float64)
        lengths = backend.asarray((batch.targets[..., 0] >= 0).sum(axis=1), wide)
        reference = backend.asarray(
            batch.objective_inputs[REFERENCE] if batch.objective_inputs else np.zeros(len(batch.ids)), wide
        )
        logps = -nll[..., 0].astype(wide).sum(axis=1)
        scores, slopes = self.scores(xp, logps, xp.maximum(lengths, 1.0), reference)
        difference = scores[::2] - scores[1::2]
        value, slope = self.loss(xp, difference)
        weight = self.nll_weight(counts)
        dlogps = xp.stack([slope, -slope], axis=1).reshape(-1) * slopes / max(1, int(counts[0]))
        dnll = xp.zeros(nll.shape, backend.master_dtype)
        dnll[..., 0] = -dlogps[:, None]
        dnll[::2, :, 0] += weight
        rewards = self.beta * scores
        right, margins = (difference > 0).astype(wide), self.beta * difference
        figures = (value, rewards[::2], rewards[1::2], right, margins, logps[::2], logps[1::2], -logps[::2])
        return xp.stack([figure.sum() for figure in figures]), dnll

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        rewards = [f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")]
        names = ("loss", *rewards, "logps/chosen", "logps/rejected")
        found = dict(zip(names, (sums[:-1] / max(1, int(counts[0]))).tolist(), strict=True))
        found["loss"] += self.nll_weight(counts) * float(sums[-1])
        return found


@dataclass(frozen=True)
class IPO(DPO):
    """s = (log p(y) - log p_ref(y)) / |y|,   f(D) = (D - 1 / (2 beta))^2: the margin has a target

    Source: Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences" (2023); the
    division by the length |y| follows TRL, which asked the authors.
    """

    def scores(self, xp: Any, logps: Array, lengths: Array, reference: Array) -> tuple[Array, Array]:
        return (logps - reference) / lengths, 1 / lengths

    def loss(self, xp: Any, difference: Array) -> tuple[Array, Array]:
        off = difference - 1 / (2 * self.beta)
        return off * off, 2 * off


@dataclass(frozen=True)
class SimPO(DPO):
    """s = log p(y) / |y|,   f(D) = DPO's at D - gamma / beta: no reference, and a margin to beat

    Source: Meng et al., "SimPO" (2024).
    """

    beta: float = 2.0
    gamma: float = 0.5
    referenced: ClassVar[bool] = False

    def scores(self, xp: Any, logps: Array, lengths: Array, reference: Array) -> tuple[Array, Array]:
        return logps / lengths, 1 / lengths

    def loss(self, xp: Any, difference: Array) -> tuple[Array, Array]:
        return super().loss(xp, difference - self.gamma / self.beta)


@dataclass(frozen=True)
class ORPO(DPO):
    """s = log(p / (1 - p)), the log odds of p = exp(log p(y) / |y|),   loss = mean nll of the chosen replies' tokens +
    beta mean(-log sigmoid(D)): no reference, learned along with the replies

    Source: Hong et al., "ORPO" (2024), where beta is lambda.
    """

    referenced: ClassVar[bool] = False

    def scores(self, xp: Any, logps: Array, lengths: Array, reference: Array) -> tuple[Array, Array]:
        mean = xp.minimum(logps / lengths, -1e-12)  # at probability 1 the odds would be infinite
        rest = -xp.expm1(mean)  # 1 - p
        return mean - xp.log(rest), 1 / (lengths * rest)

    def loss(self, xp: Any, difference: Array) -> tuple[Array, Array]:
        e = self.label_smoothing
        value = (1 - e) * xp.logaddexp(0.0, -difference) + e * xp.logaddexp(0.0, difference)
        return self.beta * value, self.beta * (sigmoid(xp, difference) - (1 - e))

    def nll_weight(self, counts: np.ndarray) -> float:
        return 1 / max(1, int(counts[1]))


OBJECTIVES: dict[str, type[DPO]] = {"dpo": DPO, "ipo": IPO, "simpo": SimPO, "orpo": ORPO}

Encoded = tuple[list[int], list[int], int]
"""A pair as ids: prompt and chosen reply, prompt and rejected reply, and the prompt's length."""


class Pairs:
    """Encoded pairs as batches, in another order in each epoch.

    reference: (pairs, 2), log p of chosen and rejected under the reference; None if it is not needed.
    """

    def __init__(self, pairs: Sequence[Encoded], heads: int, seed: int, reference: np.ndarray | None = None) -> None:
        self.pairs, self.heads, self.reference = pairs, heads, reference
        self._shuffled = Shuffled(len(pairs), seed, self._make)

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch of `size` pairs, 2 * size rows."""
        return self._shuffled.batch(index, size)

    def fingerprint(self) -> str:
        """SHA-256 of all pairs: it depends on the text, the tokenizer and the template."""
        numbers = ([len(chosen), len(rejected), prompt, *chosen, *rejected] for chosen, rejected, prompt in self.pairs)
        return fingerprint(np.concatenate([np.asarray(row, np.int64) for row in numbers]))

    def reference_logps(self, token_nll: Callable[[Batch], np.ndarray], size: int) -> np.ndarray:
        """(pairs, 2) float64: log p of chosen and rejected. token_nll: computes a batch's nll, (B, T)."""
        found = [-token_nll(batch).astype(np.float64).sum(axis=1) for batch in self.in_order(size)]
        return np.concatenate(found).reshape(-1, 2)

    def in_order(self, size: int) -> list[Batch]:
        """All pairs once, `size` per batch."""
        rows = range(len(self.pairs))
        return [self.of(rows[start : start + size]) for start in range(0, len(rows), size)]

    def of(self, chosen: Sequence[int]) -> Batch:
        """The pairs of these numbers, padded to the longest."""
        rows = [(ids, self.pairs[i][2]) for i in chosen for ids in self.pairs[i][:2]]
        ids, targets = reply_rows(rows, self.heads)
        given = () if self.reference is None else (self.reference[list(chosen)].reshape(-1),)
        return Batch(ids, targets, objective_inputs=given, group_size=2)

    def _make(self, rows: np.ndarray, _: Stream) -> Batch:
        return self.of(rows.tolist())


def reply_rows(rows: Sequence[tuple[Sequence[int], int]], heads: int) -> tuple[np.ndarray, np.ndarray]:
    """rows: texts as ids with the lengths of their prompts. Returns ids, (B, T), and targets, (B, T, heads): the
    replies' tokens for head 0, -1 elsewhere."""
    longest = max(len(ids) for ids, _ in rows)
    ids, targets = np.zeros((len(rows), longest - 1), np.int32), np.full((len(rows), longest - 1, heads), -1, np.int32)
    for row, (tokens, prompt) in enumerate(rows):
        ids[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, prompt - 1 : len(tokens) - 1, 0] = tokens[prompt:]
    return ids, targets


def cached_reference(cache: Path, key: str, count: int, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """(count, 2) log-probabilities from the file for this key in `cache`; computed and written if it is missing or
    damaged. key: a hash of all that they depend on."""
    path = cache / f"{key[:32]}.npy"
    if path.is_file():
        with suppress(ValueError, EOFError, OSError):
            found = np.load(path, allow_pickle=False)
            if found.shape == (count, 2) and found.dtype == np.float64 and np.isfinite(found).all():
                print(f"the reference's log-probabilities are those of {path}")
                return found
        print(f"{path} is damaged; computing it again")
    found = compute()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial, open(partial, "wb") as file:
            np.save(file, found)
    except OSError as error:
        print(f"warning: cannot write {path}: {error.strerror}; the next run computes it again", file=sys.stderr)
    return found


def measure(parallel: Any, objective: DPO, parts: Mapping[str, Pairs], size: int) -> dict[str, float]:
    """The objective's figures on all pairs, without training, and if there are several parts, the accuracy on each as
    rewards/accuracies_NAME. parallel: a `DataParallel`."""
    host = get_backend("numpy", "fp64", workers=1)
    sums: dict[str, Any] = dict.fromkeys(parts, 0.0)
    counts: dict[str, Any] = dict.fromkeys(parts, 0)
    for name, pairs in parts.items():
        for batch in pairs.in_order(size):
            counts[name] = counts[name] + objective.count(batch)
            nll = parallel.token_nll(batch).astype(np.float64)[..., None]
            sums[name] = sums[name] + objective.weigh(nll, batch, objective.count(batch), host)[0]
    found = objective.figures(sum(sums.values()), sum(counts.values()))
    for name in parts if len(parts) > 1 else ():
        found[f"rewards/accuracies_{name}"] = objective.figures(sums[name], counts[name])["rewards/accuracies"]
    return found
