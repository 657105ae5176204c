"""Speculative decoding: the heads after head 0 draft the next tokens, and the next pass verifies all drafts at once.
The drafts never change the distribution of the text: docs/inference.md has the proof.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tinyforge.infer.sampling import Sampling, draw, penalise, probabilities


def verify(
    logits: np.ndarray,
    drafts: Sequence[int],
    proposed: np.ndarray | None,
    sampling: Sampling,
    numbers: Iterator[float],
    text: Sequence[int],
    prompt: int = 0,
) -> list[int]:
    """The accepted drafts and one more token, distributed as if all were sampled from head 0.

    logits: (drafts + 1, V), head 0 after each prefix of the drafts. A draft x from q is accepted with probability
    min(1, p(x) / q(x)); the first rejected one is replaced by one from max(0, p - q), normalised. Greedy: a draft is
    accepted if it is head 0's choice, and replaced by that choice otherwise.

    proposed: the distributions that the drafts were sampled from, (drafts, V). text: the tokens before the drafts, of
    which the first `prompt` were given and the others generated.
    """
    z = logits
    if sampling.changes_logits:
        z = np.stack(
            [penalise(z[i], sampling, [*text, *drafts[:i]], [*text[prompt:], *drafts[:i]]) for i in range(len(z))]
        )
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
    """A draft from each head's logits, (drafts, V), sampled as head 0's tokens are, and their distributions (None when
    greedy). text, prompt: as in `verify`."""
    z = penalise(logits, sampling, text, text[prompt:])
    if sampling.temperature == 0:
        return z.argmax(axis=-1).tolist(), None
    q = probabilities(z, sampling)
    return draw(q, [next(numbers) for _ in q]), q
