"""The prompt that a run proposes at its end."""

from __future__ import annotations

import pytest

from tinyforge.train.corpus import opening_of


@pytest.mark.parametrize(
    ("text", "cut", "expected"),
    [
        ("It was late, and the dog slept on.", False, "It was late, and the dog slept"),
        ('"Come here," said Anna. "Now," she said, quietly', False, "Come here"),
        ("aid Kobert. Then he went to the park with his dog, and", True, "Then he went to the park with his dog"),
        ('aid." He went home and slept. The dog barked at the', True, "He went home and slept. The dog barked"),
        ("gether they all went to the market and bought some bread", True, "they all went to the market and bought"),
        ("one", True, "one"),
    ],
)
def test_it_begins_with_a_word_and_where_it_can_with_a_sentence(text: str, cut: bool, expected: str) -> None:
    assert opening_of(text, cut) == expected
