"""MinHash against exact Jaccard, words and grams against slow ones, clusters against a search."""

from __future__ import annotations

import random
import re
from functools import cache

import numpy as np
import pytest

from tinyforge.data.dedup import WordHash, Words, band_keys, candidate_probability, components, estimate, permutations

ALPHABET = [*"abc é ß 1 7 . , - ! \n \t", "the ", " Of", "“", "”", "—", "\u00a0", "…", "\u3000", "日本", "ﬁ", "İ"]


def random_texts(count: int, seed: int, most: int = 60) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randrange(most))) for _ in range(count)]


def slow_words(text: str) -> list[str]:
    """The definition at the top of data/dedup.py, as a regular expression."""
    other = r"\u0080-\u00bf\u2000-\u207f\u3000-\u303f"
    runs = re.findall(rf"(?:[0-9a-z]|[^\x00-\x7f{other}])+", text.lower())
    return [word for run in runs for word in re.findall("[^日本]*[日本]|[^日本]+", run)]


@cache
def slow_grams(text: str, n: int) -> list[tuple[str, ...]]:
    words = slow_words(text)
    if len(words) < n:
        return [tuple(words)] if words else []
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def test_words_are_those_of_the_slow_definition() -> None:
    texts = [*random_texts(300, 1), "", " ", ".", "a", " a ", "A-b'C", "\x7f\x80"]
    words = Words(texts)
    assert [form.decode().split() for form in words.normal_forms()] == [slow_words(text) for text in texts]
    assert words.counts.tolist() == [len(slow_words(text)) for text in texts]
    assert words.letters.tolist() == [sum(not c.isdigit() for w in slow_words(t) for c in w) for t in texts]
    characters = [sum(c > " " for c in text.lower()) for text in texts]
    assert words.characters.tolist() == characters


@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_equal_grams_and_only_those_have_equal_hashes(n: int) -> None:
    texts = random_texts(200, n)
    hashes, bounds = Words(texts).grams(n)
    slow = [gram for text in texts for gram in slow_grams(text, n)]
    assert np.diff(bounds).tolist() == [len(slow_grams(text, n)) for text in texts]
    assert len(hashes) == len(slow)
    known: dict[tuple[str, ...], int] = {}
    for gram, value in zip(slow, hashes.tolist(), strict=True):
        assert known.setdefault(gram, value) == value
    assert len(set(known.values())) == len(known) > 100


def test_the_first_grams_are_the_first_of_all() -> None:
    words = Words(random_texts(20, 4))
    (every, bounds), (first, of_first) = words.grams(2), words.grams(2, 7)
    parts = [every[a:b][:7] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert np.array_equal(first, np.concatenate(parts)) and np.array_equal(np.diff(of_first), [*map(len, parts)])


def test_a_gram_has_the_same_hash_wherever_it_stands() -> None:
    alone, _ = Words(["one two three"]).grams(3)
    later, _ = Words(["x " * 1000, "zero one. Two\n\nTHREE four"]).grams(3)
    assert alone[0] in later.tolist()


def test_the_hash_is_that_of_the_words_however_they_are_cut() -> None:
    whole, other, *parts = Words(["A b, c; d e", "a b c d f", "a B -", "c\n", "D e."]).normal_forms()
    cut = WordHash()
    for part in parts:
        cut.update(part)
    assert WordHash().update(whole).halves() == cut.halves() != WordHash().update(other).halves()


def altered_pairs(count: int, seed: int, words: int = 300) -> list[tuple[str, str]]:
    """Pairs of texts from equal to nearly unlike."""
    rng = random.Random(seed)
    pairs = []
    for index in range(count):
        text = [f"w{rng.randrange(5000)}" for _ in range(words)]
        other = list(text)
        for at in rng.sample(range(words), index * words // (6 * count)):
            other[at] = f"v{rng.randrange(5000)}"
        pairs.append((" ".join(text), " ".join(other)))
    return pairs


def jaccard(a: str, b: str, n: int = 5) -> float:
    left, right = set(slow_grams(a, n)), set(slow_grams(b, n))
    return len(left & right) / len(left | right)


def test_the_estimate_is_unbiased_and_as_spread_as_a_binomial() -> None:
    pairs = altered_pairs(400, 0)
    exact = np.array([jaccard(a, b) for a, b in pairs])
    functions = permutations(120)
    a, b = (Words([pair[side] for pair in pairs]).signatures(5, functions) for side in (0, 1))
    error = estimate(a, b) - exact
    spread = np.sqrt(exact * (1 - exact) / 120)
    assert abs(error.mean()) < 4 * np.sqrt((spread**2).sum()) / len(pairs)
    inner = spread > 0
    assert 0.85 < np.sqrt((error[inner] ** 2 / spread[inner] ** 2).mean()) < 1.15
    assert (error[~inner] == 0).all()  # equal texts


def test_candidates_follow_the_s_curve() -> None:
    pairs = altered_pairs(1500, 1, words=120)
    exact = np.array([jaccard(a, b) for a, b in pairs])
    a, b = (band_keys(Words([p[side] for p in pairs]).signatures(5, permutations(120)), 20, 6) for side in (0, 1))
    candidate = (a == b).any(axis=1)
    expected = np.array([candidate_probability(j, 20, 6) for j in exact])
    for low, high in ((0.2, 0.45), (0.45, 0.6), (0.6, 0.8), (0.8, 1.01)):
        chosen = (exact >= low) & (exact < high)
        p = expected[chosen]
        assert chosen.sum() > 30
        assert abs(candidate[chosen].sum() - p.sum()) < 4 * np.sqrt((p * (1 - p)).sum()) + 1


def test_a_band_key_is_of_all_its_rows_and_of_nothing_else() -> None:
    signatures = np.random.default_rng(0).integers(0, 2**32, (1, 6), dtype=np.uint32).repeat(7, axis=0)
    for column in range(6):
        signatures[column + 1, column] ^= 1
    keys = band_keys(signatures, bands=2, rows=3)
    for column in range(6):
        assert (keys[column + 1] == keys[0]).tolist() == [column >= 3, column < 3]


def test_components_are_those_of_a_search() -> None:
    rng = np.random.default_rng(0)
    for edges in (0, 1, 30, 80, 200):
        a, b = rng.integers(0, 100, (2, edges))
        neighbours: dict[int, set[int]] = {}
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            neighbours.setdefault(x, set()).add(y)
            neighbours.setdefault(y, set()).add(x)
        least: dict[int, int] = {}
        for start in sorted(neighbours):
            stack = [start]
            while stack:
                if (node := stack.pop()) not in least:
                    least[node] = start
                    stack += neighbours[node]
        nodes, firsts = components(a, b)
        assert dict(zip(nodes.tolist(), firsts.tolist(), strict=True)) == least


def test_a_long_chain_is_one_component() -> None:
    nodes = np.random.default_rng(0).permutation(1000)
    _, firsts = components(nodes[:-1], nodes[1:])
    assert (firsts == 0).all()


def test_operators_are_words_of_code_alone() -> None:
    """A program is not the one with other operators; prose is the same with other punctuation."""
    adds, prose = "def f(a, b):\n    return a + b >= 2 * a\n", "She said - and he knew - that this was so."
    forms = [Words([text], operators=True).normal_forms()[0] for text in (adds, adds.replace("+", "-"))]
    assert (
        forms[0] != forms[1] and [Words([text]).normal_forms()[0] for text in (adds,)][0] == b"def f a b return a b 2 a"
    )
    people = "Of the households 40.7% had children, 56.1% were couples, 9.2% were of women and 31.3% of others. "
    assert Words([adds, "x = y / z", prose, f"{prose} (50 %)", people]).code.tolist() == [True] * 2 + [False] * 3


def test_repeats_are_runs_of_words_that_stood_before() -> None:
    rng = random.Random(3)
    texts = [" ".join(rng.choice("abcd") for _ in range(rng.randrange(60))) for _ in range(50)]
    for text, share in zip(texts, Words(texts).repeats(3), strict=True):
        runs = slow_grams(text, 3)
        assert share == pytest.approx((len(runs) - len(set(runs))) / max(len(runs), 1))
