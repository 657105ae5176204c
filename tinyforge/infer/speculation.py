"""Speculation: the heads behind head 0 propose the next tokens, and the next pass checks all of them at once. What is
proposed never decides what comes out: docs/inference.md has the proof.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tinyforge.infer.sampling import Sampling, draw, penalise, probabilities


def verify(
    logits: np.ndarray, drafts: Sequence[int], proposed: np.ndarray | None, sampling: Sampling,
    numbers: Iterator[float], text: Sequence[int], prompt: int = 0,
) -> list[int]:  # fmt: skip
    """The drafts that stand, and one token more: what drawing from head 0 alone would give, in distribution.

    logits: (drafts + 1, V), head 0 after each prefix of the drafts. A draft x from q stands with probability
    min(1, p(x) / q(x)); at the first that falls, the token is drawn from max(0, p - q), normalised. Greedy: p and q
    are certain of one token each, so a draft stands if it is head 0's choice, and else that choice takes its place.

    proposed: the distributions that the drafts were drawn from, (drafts, V). text: what the drafts follow, its first
    `prompt` tokens given, the others generated.
    """
    z = logits
    if sampling.changes_logits:
        z = np.stack([
            penalise(z[i], sampling, [*text, *drafts[:i]], [*text[prompt:], *drafts[:i]]) for i in range(len(z))
        ])  # fmt: skip
    if sampling.temperature == 0:
        choice = z.argmax(axis=-1).tolist()
        right = next((i for i, x in enumerate(drafts) if x != choice[i]), len(drafts))
        return choice[: right + 1]
    p = probabilities(z.astype(np.float64), sampling)
    for i, x in enumerate(drafts):
        assert proposed is not None
        if next(numbers) * proposed[i, x] >= p[i, x]:
            return [*drafts[:i], *draw(np.maximum(p[i] - proposed[i], 0)[None], [next(numbers)])]
    return [*drafts, *draw(p[-1:], [next(numbers)])]


def propose(
    logits: np.ndarray, sampling: Sampling, numbers: Iterator[float], text: Sequence[int], prompt: int = 0
) -> tuple[list[int], np.ndarray | None]:
    """A token from each head's logits, (drafts, V), by the same rules as head 0's; and their distributions. text: what
    the token before the drafts ends, as in `verify`."""
    z = penalise(logits, sampling, text, text[prompt:])
    if sampling.temperature == 0:
        return z.argmax(axis=-1).tolist(), None
    q = probabilities(z, sampling)
    return draw(q, [next(numbers) for _ in q]), q
