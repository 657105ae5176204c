"""Objectives: how much each token's negative log-likelihood weighs in the loss, and so its gradient.

A model's forward gives nll, (B, T, K): one number for each token and head. An objective combines them into a loss and
computes the loss's gradient in them; nothing below it knows what is being learned. Losses are sums divided by counts
of the whole step: all micro-batches, all ranks. So one large batch and many small ones have the same gradient.

    counts = sum(objective.count(batch) for batch in batches)
    for batch in batches:
        sums, dnll = objective.weigh(model.forward(ids, targets, stash), batch, counts)
        model.backward(dnll, stash)
    objective.figures(total of the sums, counts)["loss"]

A model that reads no tokens takes `Arrays` in place of `Batch`, and returns whatever its objective weighs: `MeanOfRows`
takes a loss for each row. Nothing in the loop of train/run.py knows tokens.

A model may add terms of its own to the loss, such as a router's balance: its config's `term_weights` names them, and
forward gives (nll, terms). `WithTerms` adds such terms to an objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, cast

import numpy as np

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.kernel import Array
from tinyforge.ops.attention import Documents
from tinyforge.ops.cross_entropy import sum_tokens

LN2 = float(np.log(2.0))


@dataclass(frozen=True)
class Batch:
    """The inputs and targets of a model.

    ids: (B, T) int32, in range; for images, (B, K, H, W) bytes.
    targets: (B, T, K) int32, -1 for none; (B, M, K) for a model that does not predict at every token.
    weights: like targets, float, the weight of each prediction in the loss; None for 1.
    extra_inputs: further inputs of the model's forward, in order: integers, B rows each.
    documents: the documents in the rows, if they must not see each other; without it a token sees its row before it.
    stream: the rows continue those of the previous batch, beginning with row `stream` of the model's carried state;
        None for independent rows.
    reset_state: reset that state to zeros.
    objective_inputs: inputs of the objective only, B rows each.
    group_size: number of consecutive rows that are weighed together, such as a preference pair: a rank takes all.
    factors: the result of the objective's `factors`, if it is on the device already.
    taught: how many of the first rows a teacher has a share in (train/distil.py); None for all.
    """

    ids: np.ndarray
    targets: np.ndarray
    weights: np.ndarray | None = None
    extra_inputs: tuple[np.ndarray, ...] = ()
    documents: Documents | None = None
    stream: int | None = None
    reset_state: bool = False
    objective_inputs: tuple[np.ndarray, ...] = ()
    group_size: int = 1
    factors: Array | None = None
    taught: int | None = None

    def __getitem__(self, rows: slice) -> Batch:
        weights = None if self.weights is None else self.weights[rows]
        more = tuple(array[rows] for array in self.extra_inputs)
        documents = None if self.documents is None else self.documents[rows]
        stream = None if self.stream is None else self.stream + rows.indices(len(self.ids))[0]
        given = tuple(array[rows] for array in self.objective_inputs)
        first, last, _ = rows.indices(len(self.ids))
        taught = None if self.taught is None else min(max(self.taught - first, 0), last - first)
        own = self.ids[rows], self.targets[rows], weights, more, documents, stream
        return Batch(*own, self.reset_state, given, self.group_size, self.factors, taught)

    def __len__(self) -> int:
        return len(self.ids)

    def size(self, unit: str) -> int:
        """Tokens, padding included; or rows, for any other unit."""
        return int(self.ids.size) if unit == "tokens" else len(self.ids)

    def inputs(self, backend: Backend) -> tuple[Array, ...]:
        """Positional inputs of the model's forward, on its backend; `documents` and a carried state are keywords."""
        return tuple(backend.asarray(array) for array in (self.ids, self.targets, *self.extra_inputs))

    def nothing(self, backend: Backend) -> Array:
        """What forward returns for no rows."""
        return backend.zeros(self.targets.shape, backend.master_dtype)

    def parts(self, backend: Backend) -> list[np.ndarray]:
        """The arrays that a step reads, in the backend's dtypes."""
        starts = () if self.documents is None else (self.documents.starts,)
        numbers = (self.ids, self.targets, *self.extra_inputs, *starts)
        found = [np.asarray(a).astype(np.int32, casting="same_kind", copy=False) for a in numbers]
        return found if self.weights is None else [*found, self.weights.astype(backend.master_dtype)]

    def moved(self, places: Iterator[Any]) -> Batch:
        """This batch with the next of `places` as its `parts`."""
        ids, targets, *more = (next(places) for _ in range(2 + len(self.extra_inputs)))
        documents, weights = self.documents, self.weights
        if documents is not None:
            documents = Documents(next(places), documents.restart)
        if weights is not None:
            weights = next(places)
        return replace(self, ids=ids, targets=targets, extra_inputs=tuple(more), documents=documents, weights=weights)

    def kind(self) -> tuple[Any, ...]:
        """All that is the same in every step of a graph."""
        arrays = (self.ids, self.targets, self.weights, *self.extra_inputs, *self.objective_inputs)
        documents = self.documents and (self.documents.starts.shape, self.documents.restart)
        shapes = (None if a is None else a.shape for a in arrays)
        return (*shapes, documents, self.stream, self.reset_state, self.group_size, self.taught)


@dataclass(frozen=True)
class Arrays:
    """The inputs of a model that reads no tokens: the arrays that its forward takes, in order, B rows each.

    given: floats, which become those of the backend, and integers. factors: as of `Batch`. A loss is weighed by
    `MeanOfRows`, or by your own objective.
    """

    given: tuple[np.ndarray, ...]
    factors: Array | None = None
    group_size: ClassVar[int] = 1
    documents: ClassVar[None] = None
    stream: ClassVar[None] = None

    def __getitem__(self, rows: slice) -> Arrays:
        return replace(self, given=tuple(array[rows] for array in self.given))

    def __len__(self) -> int:
        return len(self.given[0])

    def size(self, unit: str) -> int:
        return len(self)

    def inputs(self, backend: Backend) -> tuple[Array, ...]:
        """See `Batch.inputs`."""
        return tuple(backend.asarray(array) for array in self.given)

    def nothing(self, backend: Backend) -> Array:
        """What forward returns for no rows: a loss for each row."""
        return backend.zeros((0,), backend.master_dtype)

    def parts(self, backend: Backend) -> list[np.ndarray]:
        """See `Batch.parts`."""
        # In bf16 a float is rounded on the device, by `inputs`: NumPy takes long for that.
        kinds = (np.dtype(np.int32) if a.dtype.kind in "iu" else backend.master_dtype for a in self.given)
        return [a.astype(kind, copy=False) for a, kind in zip(self.given, kinds, strict=True)]

    def moved(self, places: Iterator[Any]) -> Arrays:
        """See `Batch.moved`."""
        return replace(self, given=tuple(next(places) for _ in self.given))

    def kind(self) -> tuple[Any, ...]:
        return tuple(a.shape for a in self.given)


class Objective(Protocol):
    """See the module's docstring. `weigh` runs on the model's backend and does not wait for a device.

    A step can be captured in a graph if the objective also has `factors(counts)`, a float64 vector of all that `weigh`
    needs of the counts. It is then passed as `Batch.factors`, and `weigh` does not use the counts. --mtp-schedule also
    expects `reweighed(counts, head_weights)`, the counts with the weights that heads have in this step.
    """

    def count(self, batch: Batch) -> np.ndarray:
        """The loss's divisors, a vector that is added up over the step."""

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Array, Any]:
        """nll: (B, T, K), of `batch`; counts: of the step. Returns the batch's share of the sums, a float64 vector on
        the device, and the gradient of the loss in nll: (B, T, K), or (K,) if it is the same for every token."""

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        """ "loss" and other figures to log, from the step's sums and counts."""


@dataclass(frozen=True)
class NextTokens:
    """loss = sum_k w[k] / sum(w) * (sum over tokens of a nll[..., k]) / n[k], the weighted mean over heads

    head_weights: w, (K,). a: `Batch.weights`, 1 without them. n[k]: the number of targets of head k with a nonzero a,
    in the whole step. A head without targets adds nothing, and the others keep their share: a head's part of the
    gradient does not depend on the other heads' targets.

    byte_lengths: the bytes of each token id, for the figure bits_per_byte: head 0's summed nll in bits over the bytes
    of the tokens it predicted. None if targets are not text.

    Targets of -1 on the prompts make it learn the replies only.
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
        # A sum over the first axis would take ten times as long, and a small model on a GPU waits for it.
        return np.array([*(np.count_nonzero(counted[..., k]) for k in range(heads)), size])

    def reweighed(self, counts: np.ndarray, head_weights: Sequence[float]) -> np.ndarray:
        """(2 K + 1,): the counts, and the weights of the heads in this step, in place of `head_weights`."""
        return np.concatenate([counts, head_weights])

    def scale(self, counts: np.ndarray) -> np.ndarray:
        """(K,): the weight of a nll of each head, w[k] / (sum(w) n[k]), 0 if n[k] is 0."""
        heads = len(self.head_weights)
        targets, weights = counts[:heads], counts[heads + 1 :] if len(counts) > heads + 1 else self.head_weights
        return np.asarray(weights) / sum(weights) / np.maximum(targets, 1) * (targets > 0)

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
            found["bits_per_byte"] = float(plain[0]) / LN2 / max(1, int(counts[len(self.head_weights)]))
        return found


@dataclass(frozen=True)
class MaskedTokens(NextTokens):
    """loss = the mean of nll over the masked tokens of the whole step

    targets: (B, M, 1), the masked tokens, -1 if a row has fewer than M. Also logs the perplexity, exp(loss): the number
    of equally likely tokens among which a model would be as unsure.

    Source: Devlin et al., "BERT" (2018).
    """

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        found = super().figures(sums, counts)
        return {**found, "perplexity": float(np.exp(min(found["loss"], 700.0)))}


@dataclass(frozen=True)
class Classes(NextTokens):
    """loss = sum over rows of a nll / n, the mean cross-entropy of the classes over the step's n labelled rows

    targets: (B, 1, 1), the class, -1 for a row without one. a: `Batch.weights`, of a row; 1 without them. Also logs
    `likelihood`, exp(-loss): the geometric mean of the probability of the right class.
    """

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        found = super().figures(sums, counts)
        return {**found, "likelihood": float(np.exp(-found["loss"]))}


@dataclass(frozen=True)
class MeanOfRows:
    """loss = the mean over the step's rows of what forward returns, a loss for each row: (B,)

    For models that read no tokens, with `Arrays` as batches. name: a second name under which the loss is logged, such
    as "mse".
    """

    name: str = ""

    def count(self, batch: Any) -> np.ndarray:
        """(1,): the rows."""
        return np.array([len(batch)])

    def factors(self, counts: np.ndarray) -> np.ndarray:
        return 1.0 / np.maximum(counts, 1)

    def weigh(self, loss: Array, batch: Any, counts: np.ndarray, backend: Backend) -> tuple[Array, Array]:
        """sums: (1,), of the losses; and the gradient in them, 1 / the step's rows for each: (B,)."""
        factors = self.factors(counts) if batch.factors is None else batch.factors
        each = backend.zeros(loss.shape, backend.master_dtype)
        each += backend.asarray(factors, backend.master_dtype)
        return sum_tokens.bind(backend)(loss[:, None]), each

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        loss = float(sums[0]) / max(1, int(counts[0]))
        return {"loss": loss, **({self.name: loss} if self.name else {})}


@dataclass(frozen=True)
class WithTerms:
    """loss = the objective's + sum_j term_weights[j] * t[j],   t[j] = the mean of term j over the batches of the step

    The mean weighs a batch by its tokens. objective: weighs the likelihoods. term_weights: by name; `figures` has each
    term under its name, unweighted. A term is computed from the tokens of one pass, so a step that is cut into parts
    has a term for each part. Unlike the rest of the loss, a term that is not a sum over tokens therefore depends on how
    a step is cut.
    """

    objective: Objective
    term_weights: Mapping[str, float]

    def count(self, batch: Batch) -> np.ndarray:
        """The objective's counts, followed by the number of tokens."""
        return np.append(self.objective.count(batch), batch.ids.size)

    def reweighed(self, counts: np.ndarray, head_weights: Sequence[float]) -> np.ndarray:
        """See `NextTokens.reweighed`; the number of tokens stays last."""
        return np.append(cast(Any, self.objective).reweighed(counts[:-1], head_weights), counts[-1])

    def factors(self, counts: np.ndarray) -> np.ndarray:
        """The objective's factors, the number of tokens, and the terms' weights."""
        inner = cast(Any, self.objective).factors(counts[:-1])
        return np.concatenate([inner, counts[-1:], list(self.term_weights.values())])

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Array, Any]:
        """nll: the result of the model's forward, (nll, terms). sums: the objective's, and the terms times the batch's
        share of the tokens."""
        likelihoods, terms = nll
        if batch.factors is None:
            tokens, weights = counts[-1], np.array(list(self.term_weights.values()))
            sums, dnll = self.objective.weigh(likelihoods, batch, counts[:-1], backend)
        else:
            last = len(batch.factors) - len(self.term_weights)
            tokens, weights = batch.factors[last - 1 : last], batch.factors[last:]
            sums, dnll = self.objective.weigh(
                likelihoods, replace(batch, factors=batch.factors[: last - 1]), counts, backend
            )
        share = batch.ids.size / tokens
        dterms = backend.asarray(share * weights, backend.master_dtype)
        return backend.xp.concatenate([sums, share * terms.astype(sums.dtype)]), (dnll, dterms)

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        last = len(sums) - len(self.term_weights)
        found = self.objective.figures(sums[:last], counts[:-1])
        terms = dict(zip(self.term_weights, sums[last:].tolist(), strict=True))
        found["loss"] += sum(weight * terms[name] for name, weight in self.term_weights.items())
        return found | terms


def counts_of(objective: Any, batches: Sequence[Batch], head_weights: Sequence[float] = ()) -> np.ndarray:
    """The counts of a step; head_weights: of its own."""
    counts = sum((objective.count(batch) for batch in batches[1:]), objective.count(batches[0]))
    return objective.reweighed(counts, head_weights) if head_weights else counts


def of_tokens(objective: Any) -> Any:
    """The objective without a model's own terms."""
    return objective.objective if isinstance(objective, WithTerms) else objective


def with_terms(objective: Objective, config: ModelConfig) -> Objective:
    """The objective for a model of this config."""
    return WithTerms(objective, config.term_weights) if config.term_weights else objective


def likelihoods(result: Any) -> Array:
    """nll from the result of a model's forward, which is nll or (nll, terms)."""
    return result[0] if isinstance(result, tuple) else result
