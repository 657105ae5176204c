"""Learning from rewards: groups of sampled replies, their advantages, and GRPO's objective.

    rewards   (groups, G): of each of the G replies to a prompt
    advantage A = (reward - mean of its group) / (standard deviation of its group + 1e-4)

No value network: the other replies to the same prompt are the baseline. A group whose rewards are all equal teaches
nothing. docs/alignment.md derives the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.train.objectives import Batch

SMALLEST_DEVIATION = 1e-4  # TRL's
ADVANTAGES, OLD, REFERENCE = range(3)  # of `Batch.objective_inputs`


def advantages(rewards: np.ndarray, scale: bool = True) -> np.ndarray:
    """rewards: (groups, G); returns advantages of that shape. scale: divide by the group's standard deviation, as in
    GRPO; Dr. GRPO does not."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    if not scale:
        return centred
    deviation = rewards.std(axis=1, keepdims=True, ddof=1) if rewards.shape[1] > 1 else 0.0
    return centred / (deviation + SMALLEST_DEVIATION)


@dataclass(frozen=True)
class GRPO:
    """l[t] = -min(r A, clip(r, 1 - low, 1 + high) A) + beta (exp(d) - d - 1),  over the tokens of replies, with

        r = exp(log p - log p_old), the ratio to the policy that the replies were sampled from,
        d = log p_ref - log p, whose term is the k3 estimate of KL(p || p_ref): never negative, unbiased

    and its gradient: dl/dlog p = -r A where the ratio is not clipped, else 0, plus beta (1 - exp(d)).

    normalise: "grpo", the mean over each reply's tokens, then over replies; "dapo", the mean over all tokens of the
    step; "dr_grpo", the sum over tokens over `max_tokens`, then the mean over replies.

    batch.objective_inputs: advantages (B,), log p_old (B, T), log p_ref (B, T). In place of log p_old, or of log p_ref
    if beta is 0, (B, 0) means log p itself. Logged: "kl"; "entropy", estimated by the mean nll of the sampled tokens;
    "clip_ratio/low_mean" and "clip_ratio/high_mean", tokens whose gradient was clipped away. `reward_figures` has the
    figures that are known before a step.

    Sources: Shao et al., "DeepSeekMath" (2024); Schulman, "Approximating KL Divergence" (2020), for k3; Yu et al.,
    "DAPO" (2025); Liu et al., "Understanding R1-Zero-Like Training" (2025), Dr. GRPO.
    """

    beta: float = 0.0
    low: float = 0.2
    high: float = 0.2
    normalise: str = "dapo"
    max_tokens: int = 1

    def count(self, batch: Batch) -> np.ndarray:
        """(2,): replies, and their tokens."""
        return np.array([len(batch.ids), int((batch.targets[..., 0] >= 0).sum())])

    def weigh(self, nll: Array, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Array, Array]:
        """sums, (5,): the loss, and over tokens the KL, the nll, and the tokens clipped at each end."""
        xp, dtype = backend.xp, backend.master_dtype
        learned = batch.targets[..., 0] >= 0
        shares = backend.asarray(self._shares(learned, counts), dtype)
        advantage = backend.asarray(batch.objective_inputs[ADVANTAGES][:, None], dtype)
        mask, logp = backend.asarray(learned), -nll[..., 0].astype(dtype)
        # (B, 0): the replies were sampled from these very weights, or there is no reference.
        old, reference = (
            backend.asarray(given, dtype) if given.shape[1] else logp
            for given in (batch.objective_inputs[OLD], batch.objective_inputs[REFERENCE])
        )
        ratio = xp.exp(logp - old)
        at_low, at_high = (ratio < 1 - self.low) & (advantage < 0), (ratio > 1 + self.high) & (advantage > 0)
        kept = xp.where(at_low | at_high, 0.0, ratio)
        distance = reference - logp
        kl = xp.exp(distance) - distance - 1
        losses = -xp.minimum(ratio * advantage, xp.clip(ratio, 1 - self.low, 1 + self.high) * advantage)
        slope = -kept * advantage
        if self.beta:
            losses = losses + self.beta * kl
            slope = slope + self.beta * (1 - xp.exp(distance))
        dnll = xp.zeros(nll.shape, dtype)
        dnll[..., 0] = -slope * shares
        figures = (losses * shares, kl * mask, nll[..., 0] * mask, at_low * mask, at_high * mask)
        return xp.stack([figure.sum(dtype=np.float64) for figure in figures]), dnll

    def _shares(self, learned: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The weight of each token's loss, (B, T), 0 outside of replies."""
        if self.normalise == "dapo":
            return learned / max(1, int(counts[1]))
        lengths = np.maximum(1, learned.sum(axis=1, keepdims=True)) if self.normalise == "grpo" else self.max_tokens
        return learned / (lengths * max(1, int(counts[0])))

    def figures(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        names = ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean")
        means = (sums[1:] / max(1, int(counts[1]))).tolist()
        return {"loss": float(sums[0]), **dict(zip(names, means, strict=True))}


def reward_figures(rewards: np.ndarray, names: Sequence[str], lengths: np.ndarray, group: int) -> dict[str, float]:
    """Figures of a rollout. rewards: (B, 1 + names), their weighted sum first; lengths: (B,), in tokens.

    "reward"; "reward_std", within groups; "frac_reward_zero_std", groups that teach nothing; "rewards/NAME";
    "completions/mean_length".
    """
    groups = rewards[:, 0].reshape(-1, group)
    return {
        "reward": float(rewards[:, 0].mean()),
        "reward_std": float(groups.std(axis=1, ddof=1).mean()),
        "frac_reward_zero_std": float((np.ptp(groups, axis=1) == 0).mean()),
        **{f"rewards/{name}": float(mean) for name, mean in zip(names, rewards[:, 1:].mean(axis=0), strict=True)},
        "completions/mean_length": float(lengths.mean()),
    }


def policy_batch(ids: np.ndarray, targets: np.ndarray, advantage: np.ndarray, logps: Sequence[np.ndarray]) -> Batch:
    """A batch of replies, see `GRPO`. advantage: (groups, G); a group's rows are consecutive. logps: old, reference."""
    return Batch(ids, targets, objective_inputs=(advantage.reshape(-1), *logps), group_size=advantage.shape[1])


def worth_learning(rewards: np.ndarray, group: int) -> np.ndarray:
    """The rows, (n,), of a step without a KL term. rewards: (B,). All of them if the rewards of any group differ: a
    group of equal rewards has no gradient, and its replies count in the mean. Else the first group, for its figures."""
    return np.arange(len(rewards) if np.ptp(rewards.reshape(-1, group), axis=1).any() else group)
