"""The router of a mixture of experts: which experts a token goes to, and their weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty, like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash
from tinyforge.ops.softmax import softmax_fwd


@kernel
def router_fwd(logits: Array, active: int, normalised: bool = True) -> tuple[Array, Array, Array]:
    """weights and chosen: (..., active); usage: (E + 1,), see `TopKRouter`."""
    rows = logits.reshape(-1, logits.shape[-1])
    # A stable sort of the negated logits: of equal experts the first is chosen.
    chosen = np.argsort(-rows, axis=-1, kind="stable")[:, :active]
    picked, lse = np.take_along_axis(rows, chosen, axis=-1), _log_sum_exp(rows)
    weights = softmax_fwd(picked) if normalised else np.exp(picked - lse[:, None])
    usage = np.append(np.exp(rows - lse[:, None]).sum(axis=0), (lse * lse).sum())
    shape = (*logits.shape[:-1], active)
    return weights.reshape(shape), chosen.astype(np.int32).reshape(shape), usage.astype(rows.dtype)


@router_fwd.on("meta")
def router_fwd_memory(logits: Array, active: int) -> tuple[Array, Array, Array]:
    shape, sums = (*logits.shape[:-1], active), wide(logits.dtype)
    return empty(shape, sums), empty(shape, np.dtype(np.int32)), empty((logits.shape[-1] + 1,), sums)


@kernel
def router_bwd(
    dweights: Array, dusage: Array, logits: Array, weights: Array, chosen: Array, normalised: bool = True
) -> Array:
    rows = logits.reshape(-1, logits.shape[-1])
    lse = _log_sum_exp(rows)[:, None]
    p = np.exp(rows - lse)
    # All logits of a token affect usage, through its probabilities and its log-sum-exp ...
    dlogits = p * (dusage[:-1] - (p @ dusage[:-1])[:, None]) + 2 * dusage[-1] * lse * p
    # ... and those of the chosen experts affect the weights, a softmax over these logits alone, or over all of them.
    active = weights.shape[-1]
    w, dw = weights.reshape(-1, active), dweights.reshape(-1, active)
    at, along = (np.arange(len(rows))[:, None], chosen.reshape(-1, active)), (w * dw).sum(axis=-1, keepdims=True)
    if normalised:
        dlogits[at] += w * (dw - along)
    else:
        through = -p * along  # on its own: where p is near 1 its terms cancel
        through[at] += w * dw
        dlogits += through
    return dlogits.reshape(logits.shape)


router_bwd.on("meta")(lambda logits: like(logits))


def _log_sum_exp(rows: Array) -> Array:
    top = rows.max(axis=-1)
    return top + np.log(np.exp(rows - top[:, None]).sum(axis=-1))


class TopKRouter(Op):
    """p = softmax(z);  for each token the `active` experts with the largest p, their p divided by its sum over them

    logits z: (..., E). Returns weights w (..., k), in the precision of sums; chosen (..., k) int32, the most likely
    first, ties to the smaller number; usage (E + 1,): for each expert the sum of p over the tokens, followed by the sum
    of logsumexp(z)^2, for `RouterLosses`.

    normalised: False leaves the weights as p, which sum to less than 1, as in OLMoE.

    Saves z, weights and chosen. backward, with upstream gradients dw and du (that of chosen is not read):
        dz_e = p_e (du_e - sum_i du_i p_i) + 2 du_E logsumexp(z) p_e,  and w_j (dw_j - sum_i dw_i w_i) if e is choice j;
        not normalised, w_j dw_j if e is choice j, less p_e sum_i dw_i w_i for every e

    Sources: Shazeer et al., "Outrageously Large Neural Networks" (2017); Jiang et al., "Mixtral of Experts" (2024).
    """

    fwd = router_fwd
    bwd = router_bwd

    def __init__(self, active: int, backend: Backend, name: str = "", *, normalised: bool = True) -> None:
        super().__init__(backend, name)
        self.active, self.normalised = active, normalised

    def forward(self, logits: Array, stash: Stash | None = None) -> tuple[Array, Array, Array]:
        self.expect(logits)
        weights, chosen, usage = self.fwd(logits, self.active, self.normalised)
        self.save(stash, logits, weights, chosen)
        return weights, chosen, usage

    def backward(self, dy: tuple[Array, Any, Array], stash: Stash) -> Array:
        dweights, _, dusage = dy
        logits, weights, chosen = stash.pop(self)
        return self.bwd(dweights, dusage, logits, weights, chosen, self.normalised)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape, active, normalised in (
            *(((2, 3, 5), 2, True), ((7, 8), 3, True), ((4, 1), 1, True), ((6, 3), 3, True), ((0, 4), 2, True)),
            ((5, 6), 3, False),
        ):
            # Logits a third apart: no finite difference changes which experts are chosen.
            logits = rng.permuted(np.broadcast_to(np.arange(shape[-1]) / 3, shape), axis=-1)
            yield cls(active, backend, normalised=normalised), (backend.asarray(logits + 0.1 * rng.random(shape)),)
