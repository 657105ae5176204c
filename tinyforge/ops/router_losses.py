"""Losses that keep a router from sending all tokens to a few experts, and its logits from growing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty, like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash


@kernel
def router_losses_fwd(usages: Sequence[Array], starts: Sequence[Array], active: int) -> tuple[Array, Array]:
    """Returns terms: (2,), and slope: (E + 1,), their gradients in each layer's usage."""
    usage, counts = np.sum(usages, axis=0), np.diff(np.sum(starts, axis=0))
    rows = max(int(counts.sum()), 1) / active  # tokens, each counted once per layer
    slope = np.append(len(counts) * counts / rows, 1) / rows
    return np.array([slope[:-1] @ usage[:-1], slope[-1] * usage[-1]], usage.dtype), slope.astype(usage.dtype)


router_losses_fwd.on("meta")(lambda usages: (empty((2,), usages[0].dtype), empty(usages[0].shape, usages[0].dtype)))


@kernel
def router_losses_bwd(dterms: Array, slope: Array) -> Array:
    return np.append(dterms[0] * slope[:-1], dterms[1] * slope[-1])


router_losses_bwd.on("meta")(lambda slope: like(slope))


class RouterLosses(Op):
    """balance = E sum_e f_e P_e,   z = mean of logsumexp(logits)^2

    f_e: the number of a token's choices that fall on expert e; P_e: the probability of e; both averaged over the tokens
    of all layers, as in transformers. balance is k, the number of choices, if all experts get the same share, and up to
    E if all tokens choose the same. f is a count and has no gradient; P has one.

    forward takes usage (E + 1,) of `TopKRouter` and starts (E + 1,) of `MixtureOfExperts`, alternating layer by layer,
    and returns (2,): balance and z. Saves the slope, (E + 1,). backward: usage's gradient is the same in all layers,

        dusage_e = dbalance E f_e / rows,   dusage_E = dz / rows,   rows = tokens times layers

    Sources: Fedus, Zoph and Shazeer, "Switch Transformers" (2021), equations 4 to 6; Zoph et al., "ST-MoE" (2022).
    """

    fwd = router_losses_fwd
    bwd = router_losses_bwd

    def __init__(self, active: int, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.active = active

    def forward(self, *layers: Array, stash: Stash | None = None) -> Array:
        for usage in layers[::2]:
            self.expect(usage, shape=layers[0].shape)
        terms, slope = self.fwd(layers[::2], layers[1::2], self.active)
        self.save(stash, slope, len(layers) // 2)
        return terms

    def backward(self, dterms: Array, stash: Stash) -> tuple[Array | None, ...]:
        slope, layers = stash.pop(self)
        return (self.bwd(dterms, slope), None) * layers

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for experts, active, layers, tokens in ((5, 2, 3, 11), (1, 1, 1, 4), (8, 3, 2, 1), (4, 2, 1, 0)):
            arrays: list[Array] = []
            for _ in range(layers):
                counts = rng.multinomial(tokens * active, np.full(experts, 1 / experts))
                arrays.append(backend.asarray(rng.uniform(0.1, 2, experts + 1), backend.master_dtype))
                arrays.append(backend.asarray(np.append(0, counts.cumsum())))
            yield cls(active, backend), tuple(arrays)
