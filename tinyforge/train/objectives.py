"""What is learned: how much each token's negative log-likelihood weighs in the loss, and so its gradient.

A model's forward gives nll, (B, T, K): one number for each token and head. An objective weighs them into a loss and
says what the loss's gradient in them is; nothing below it knows what is being learned. Losses are sums divided by
counts, and the counts are those of the whole step: all micro-batches, all ranks. So one large batch and many small ones
have the same gradient.

    counts = sum(objective.count(batch) for batch in batches)
    for batch in batches:
        sums, dnll = objective.weigh(model.forward(ids, targets, stash), batch, counts)
        model.backward(dnll, stash)
    objective.figures(total of the sums, counts)["loss"]

A model may add terms of its own to the loss, such as what balances a router: its config's `term_weights` names them,
and forward gives (nll, terms). `WithTerms` puts an objective and such terms together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.kernel import Array
from tinyforge.ops.attention import Documents
from tinyforge.ops.cross_entropy import sum_tokens

LN2 = float(np.log(2.0))


@dataclass(frozen=True)
class Batch:
    """What a model reads and predicts.

    ids: (B, T) int32, in range; of a model of images, (B, K, H, W) bytes. targets: (B, T, K) int32, -1 for none; of a
    model that predicts elsewhere than at every token, (B, M, K). weights: like targets, float, what each prediction
    weighs in the loss; None for 1. more: what else the model's forward takes, in its order: integers, B rows each.
    documents: those that the rows hold, where none is to see another; without, a token sees all of its row before it.
    stream: the rows continue those of the batch before, the first being row number `stream` of the model's carried
    state; None for rows of their own. anew: they begin again, with a state of zeros. given: what the objective alone
    takes, B rows each. together: rows that follow one another and are weighed with one another, such as a preference
    pair: a rank takes all of them. factors: what the objective's `factors` gives, where it is on the device already.
    """

    ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray | None = None
    more: tuple[np.ndarray, ...] = ()
    documents: Documents | None = None
    stream: int | None = None
    anew: bool = False
    given: tuple[np.ndarray, ...] = ()
    together: int = 1
    factors: Array | None = None

    def __getitem__(self, rows: slice) -> Batch:
        weights = None if self.weights is None else self.weights[rows]
        more = tuple(array[rows] for array in self.more)
        documents = None if self.documents is None else self.documents[rows]
        stream = None if self.stream is None else self.stream + rows.indices(len(self.ids))[0]
        given = tuple(array[rows] for array in self.given)
        return Batch(self.ids[rows], self.targets[rows], weights, more, documents, stream, self.anew, given,
                     self.together, self.factors)  # fmt: skip

    def inputs(self, backend: Backend) -> tuple[Array, ...]:
        """What the model's forward takes, on its backend; `documents` and a carried state come as keywords."""
        return tuple(backend.asarray(array) for array in (self.ids, self.targets, *self.more))


class Objective(Protocol):
    """See the module's text. `weigh` runs on the model's backend and waits for no device.

    A step can be captured in a graph if the objective also has `factors(counts)`: a float64 vector, all that `weigh`
    takes from the counts. Then `Batch.factors` has it, and `weigh` does not look at the counts.
    """

    def count(self, batch: Batch) -> np.ndarray:
        """What the loss is divided by, as a vector; added up over the step."""

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Array, Any]:
        """nll: (B, T, K), of `batch`; counts: of the step. Returns the batch's share of the sums, a float64 vector on
        the device, and the gradient of the loss in nll: (B, T, K), or (K,) where it is the same for every token."""

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        """"loss", and what else is worth logging, from the step's sums and counts."""


@dataclass(frozen=True)
class NextTokens:
    """loss = sum_k w[k] / sum(w) * (sum over tokens of a nll[..., k]) / n[k], the weighted mean over heads

    head_weights: w, (K,). a: `Batch.weights`, 1 without them. n[k]: the targets of head k whose a is not 0, in the
    whole step. A head with no target at all adds nothing, and the others keep their share: a head's part of the
    gradient does not depend on what the others had to predict.

    byte_lengths: the bytes of each token id, for the figure bits_per_byte: head 0's summed nll in bits over the bytes
    of the tokens it predicted. None where targets are no text.

    Replies alone are learned with targets of -1 on the prompts.
    """

    head_weights: tuple[float, ...] = (1.0,)
    byte_lengths: np.ndarray | None = None

    def count(self, batch: Batch) -> np.ndarray:
        """(K + 1,): targets of each head, and the bytes of head 0's."""
        counted = batch.targets >= 0
        if batch.weights is not None:
            counted = counted & (batch.weights != 0)
        heads = batch.targets.shape[-1]
        first = batch.targets[..., 0]
        size = 0 if self.byte_lengths is None else int(self.byte_lengths[first[first >= 0]].sum())
        # A sum over the first axis would take ten times as long, which a small model on a GPU waits for.
        return np.array([*(np.count_nonzero(counted[..., k]) for k in range(heads)), size])

    def scale(self, counts: np.ndarray) -> np.ndarray:
        """(K,): what a nll of each head weighs, w[k] / (sum(w) n[k]), and 0 where n[k] is."""
        targets = counts[:-1]
        weights = np.asarray(self.head_weights)
        return weights / sum(self.head_weights) / np.maximum(targets, 1) * (targets > 0)

    factors = scale

    def weigh(self, nll: Array, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Array, Array]:
        """sums: (2 K,), of a nll and of nll, each by head."""
        factors, summed = self.scale(counts) if batch.factors is None else batch.factors, sum_tokens.bind(backend)
        scale = backend.asarray(factors, backend.master_dtype)
        plain = summed(nll)
        if batch.weights is None:
            return backend.xp.concatenate([plain, plain]), scale
        weights = backend.asarray(batch.weights, backend.master_dtype)
        return backend.xp.concatenate([summed(weights * nll), plain]), weights * scale

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        weighed, plain = sums.reshape(2, -1)
        found = {"loss": float(weighed @ self.scale(counts))}
        if self.byte_lengths is not None:
            found["bits_per_byte"] = float(plain[0]) / LN2 / max(1, int(counts[-1]))
        return found


@dataclass(frozen=True)
class MaskedTokens(NextTokens):
    """loss = the mean of nll over the tokens that are hidden, of the whole step

    targets: (B, M, 1), the hidden tokens, -1 where a row has fewer than M. Logged beside it is the perplexity,
    exp(loss): among how many tokens, equally likely, the model would be as unsure.

    Source: Devlin et al., "BERT" (2018).
    """

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        found = super().figures(sums, counts)
        return {**found, "perplexity": float(np.exp(min(found["loss"], 700.0)))}


@dataclass(frozen=True)
class Classes(NextTokens):
    """loss = sum over rows of a nll / n, the mean cross-entropy of the classes over the step's n labelled rows

    targets: (B, 1, 1), the class, -1 for a row that has none. a: `Batch.weights`, of a row; 1 without them. Logged
    beside it is `likelihood`, exp(-loss): the geometric mean of what the model gives the right class.
    """

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        found = super().figures(sums, counts)
        return {**found, "likelihood": float(np.exp(-found["loss"]))}


@dataclass(frozen=True)
class WithTerms:
    """loss = the objective's + sum_j term_weights[j] * t[j],   t[j] = the mean of term j over the batches of the step

    The mean weighs a batch by its tokens. objective: what weighs the likelihoods. term_weights: by name; `figures` has
    each term under its name, unweighted. A term is computed from the tokens that a pass sees together: of a step cut
    into parts, each part's own counts. Unlike the rest of the loss, a term that is no sum over tokens therefore changes
    with how a step is cut.
    """

    objective: Objective
    term_weights: Mapping[str, float]

    def count(self, batch: Batch) -> np.ndarray:
        """The objective's counts, and behind them the tokens."""
        return np.append(self.objective.count(batch), batch.ids.size)

    def factors(self, counts: np.ndarray) -> np.ndarray:
        """Those of the objective, the tokens, and the terms' weights."""
        inner = cast(Any, self.objective).factors(counts[:-1])
        return np.concatenate([inner, counts[-1:], list(self.term_weights.values())])

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Array, Any]:
        """nll: what the model's forward gives, (nll, terms). sums: the objective's, and the terms times their share."""
        likelihoods, terms = nll
        if batch.factors is None:
            tokens, weights = counts[-1], np.array(list(self.term_weights.values()))
            sums, dnll = self.objective.weigh(likelihoods, batch, counts[:-1], backend)
        else:
            last = len(batch.factors) - len(self.term_weights)
            tokens, weights = batch.factors[last - 1 : last], batch.factors[last:]
            sums, dnll = self.objective.weigh(likelihoods, replace(batch, factors=batch.factors[: last - 1]), counts,
                                              backend)  # fmt: skip
        share = batch.ids.size / tokens
        dterms = backend.asarray(share * weights, backend.master_dtype)
        return backend.xp.concatenate([sums, share * terms.astype(sums.dtype)]), (dnll, dterms)

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        last = len(sums) - len(self.term_weights)
        found = self.objective.figures(sums[:last], counts[:-1])
        terms = dict(zip(self.term_weights, sums[last:].tolist(), strict=True))
        found["loss"] += sum(weight * terms[name] for name, weight in self.term_weights.items())
        return found | terms


def of_tokens(objective: Any) -> Any:
    """The objective without a model's own terms."""
    return objective.objective if isinstance(objective, WithTerms) else objective


def with_terms(objective: Objective, config: ModelConfig) -> Objective:
    """The objective for a model of this config."""
    return WithTerms(objective, config.term_weights) if config.term_weights else objective


def likelihoods(result: Any) -> Array:
    """nll, of what a model's forward gives: itself, or the first of (nll, terms)."""
    return result[0] if isinstance(result, tuple) else result
