"""Sampling: every rule against a reference that goes token by token, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tinyforge.errors import UserError
from tinyforge.infer.cuda.arguments import samplers
from tinyforge.infer.sampling import Sampling, draw, log_probability, penalise, probabilities, uniforms
from tinyforge.rng import Stream

LOGITS = np.log(np.array([[0.1, 0.5, 0.05, 0.3, 0.05]]))
ALL = Sampling(temperature=1.0, top_k=0, top_p=1.0)


def slow(logits: list[float], s: Sampling, seen: list[int]) -> list[float]:
    """The rules of `Sampling`, word by word."""
    z = list(logits)
    for token in set(seen):
        z[token] = z[token] / s.repetition_penalty if z[token] > 0 else z[token] * s.repetition_penalty
    z = [value / s.temperature for value in z]
    order = sorted(range(len(z)), key=lambda token: -z[token])
    kept = order[: s.top_k] if s.top_k else order
    weight = {token: math.exp(z[token] - z[order[0]]) for token in kept}
    total, running, nucleus = sum(weight.values()), 0.0, []
    for token in kept:
        nucleus.append(token)
        running += weight[token]
        if running >= s.top_p * total:
            break
    likely = [token for token in nucleus if weight[token] >= s.min_p * weight[order[0]]]
    total = sum(weight[token] for token in likely)
    return [weight[token] / total if token in likely else 0.0 for token in range(len(z))]


@pytest.mark.parametrize("penalty", [1.0, 1.4, 0.7])
@pytest.mark.parametrize("min_p", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("top_k", [0, 1, 7, 23, 24, 99])
def test_all_rules_together_against_the_slow_reference(top_k: int, top_p: float, min_p: float, penalty: float) -> None:
    rng = np.random.default_rng(top_k)
    for temperature in (0.3, 1.0, 2.5):
        s = Sampling(temperature, top_k, top_p, min_p, penalty)
        logits = rng.normal(size=(4, 23)) * 3
        seen = rng.integers(0, 23, 6).tolist()
        expected = [slow(row.tolist(), s, seen) for row in logits]
        np.testing.assert_allclose(probabilities(penalise(logits, s, seen), s), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0, top_k=0, top_p=1.0), [0.1, 0.5, 0.05, 0.3, 0.05]),
        (Sampling(1.0, top_k=2, top_p=1.0), [0, 0.625, 0, 0.375, 0]),
        (Sampling(1.0, top_k=0, top_p=0.4), [0, 1, 0, 0, 0]),
        (Sampling(1.0, top_k=0, top_p=0.79), [0, 0.625, 0, 0.375, 0]),
        (Sampling(1.0, top_k=0, top_p=0.81), [1 / 9, 5 / 9, 0, 3 / 9, 0]),
        (Sampling(1.0, top_k=2, top_p=0.6), [0, 1, 0, 0, 0]),  # the nucleus of the two that are left
        (Sampling(1.0, top_k=0, top_p=1.0, min_p=0.55), [0, 0.625, 0, 0.375, 0]),
        (Sampling(0.5, top_k=2, top_p=1.0), [0, 0.25 / 0.34, 0, 0.09 / 0.34, 0]),
        (Sampling(1.0, top_k=4, top_p=1.0), [0.1, 0.5, 0.05, 0.3, 0.05]),  # a tie for the fourth place
    ],
)
def test_cases_by_hand(sampling: Sampling, expected: list[float]) -> None:
    assert probabilities(LOGITS, sampling)[0].tolist() == pytest.approx(expected)


def test_draws_follow_the_distribution() -> None:
    p = np.repeat(probabilities(LOGITS, ALL), 1000, axis=0)
    drawn = draw(p, (np.arange(1000) + 0.5) / 1000)
    assert (np.bincount(drawn) / 1000).tolist() == pytest.approx(p[0].tolist(), abs=1.1e-3)


def test_a_draw_never_gives_a_token_that_was_cut_off() -> None:
    p = np.array([[0.0, 0.3, 0.0, 0.7, 0.0]])
    edges = (0.0, 0.3, np.nextafter(0.3, 0), np.nextafter(0.3, 1), 1 - 2**-53, 1.0)
    assert draw(np.repeat(p, len(edges), axis=0), edges) == [1, 3, 1, 3, 3, 3]
    assert draw(p * 1e-9, [0.5]) == [3]  # what is left after a rejection is not normalised


def test_large_logits_do_not_overflow() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert probabilities(np.array([[1e4, -1e4, 9999.0]]), ALL)[0] == pytest.approx(
            [1 / (1 + math.exp(-1)), 0, 1 / (1 + math.e)]
        )
        assert log_probability(np.array([1e4, 9999.0]), 1) == pytest.approx(-1 - math.log1p(math.exp(-1)))


def test_the_penalty_leaves_the_logits_as_they_were() -> None:
    logits = np.array([2.0, -2.0, 1.0])
    assert penalise(logits, Sampling(repetition_penalty=2.0), [0, 1, 1]).tolist() == [1.0, -4.0, 1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0]


def test_a_seed_draws_with_its_stream_whatever_the_pieces() -> None:
    """A decoder that draws on its device takes them all at once."""
    assert list(itertools.islice(uniforms(5), 200)) == Stream(5, "sample").uniform((200,)).tolist()


def test_a_top_k_that_no_kernel_can_count_keeps_all() -> None:
    """A generation_config.json may have any number."""
    assert samplers([Sampling(top_k=10**19)], [Stream(0, "sample")])["top_k"] == [2**31 - 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("max_tokens", 0),
        ("drafts", -1),
    ],
)
def test_impossible_values_are_refused(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^--{field.replace('_', '-')} is {value}, expected [^\n]*$"):
        Sampling(**{field: value})
