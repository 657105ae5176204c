"""Logistic regression on the bag of words: the baseline of text classification, in two forms.

A text is a vector with an entry per known word, normalised to length 1. The entry is 1 for the words that occur; or
with tf-idf, which is harder to beat, (1 + log count) log((1 + N) / (1 + N_w)), where N_w of the N training texts
contain the word. Class probabilities are softmax(W x + b), and

    loss = mean over texts of -log p(class) + decay / 2 ||W||^2,   dL/dz = (softmax(z) - onehot) / N,   dL/dW = dz^T x

is convex: gradient descent with Nesterov's momentum finds its minimum. In a pair of texts, the words of the second text
count as different words.

Source: Joachims, "Text Categorization with Support Vector Machines" (1998) for the features.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

WORD = re.compile(r"\w+")
STEPS = 300
DECAY = 1e-5
RARE = 2  # words in fewer texts are unknown


class BagOfWords:
    """Fitted to texts (pairs, the second often "") and their classes. `predict` gives the logits, (N, classes)."""

    def __init__(self, texts: Sequence[tuple[str, str]], labels: np.ndarray, classes: int, *, tf_idf: bool) -> None:
        self.tf_idf = tf_idf
        bags = [bag(text) for text in texts]
        seen = Counter(word for words in bags for word in words)
        known = sorted(word for word, count in seen.items() if count >= RARE)
        self.index = {word: number for number, word in enumerate(known)}
        self.idf = np.log((1 + len(bags)) / (1 + np.array([seen[word] for word in known], np.float64)))
        self.weight, self.bias = np.zeros((len(known), classes)), np.zeros(classes)
        self._fit(*self._sparse(bags), np.eye(classes)[labels])

    def predict(self, texts: Sequence[tuple[str, str]]) -> np.ndarray:
        return self._logits(*self._sparse([bag(text) for text in texts]), self.weight, self.bias)

    def _sparse(self, bags: Sequence[Counter[str]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows as (text of each entry, its word, its number), in the order of the texts."""
        text, word, value = [], [], []
        for number, words in enumerate(bags):
            found = [(self.index[w], count) for w, count in words.items() if w in self.index]
            if not found:
                continue
            places, counts = (np.array(part) for part in zip(*found, strict=True))
            numbers = (1 + np.log(counts)) * self.idf[places] if self.tf_idf else np.ones(len(places))
            text.append(np.full(len(places), number))
            word.append(places)
            value.append(numbers / max(float(np.sqrt(numbers @ numbers)), 1e-12))
        self._texts = len(bags)
        if not text:
            return np.zeros(0, int), np.zeros(0, int), np.zeros(0)
        return np.concatenate(text), np.concatenate(word), np.concatenate(value)

    def _logits(
        self, text: np.ndarray, word: np.ndarray, value: np.ndarray, weight: np.ndarray, bias: np.ndarray
    ) -> np.ndarray:
        found = [np.bincount(text, value * weight[word, k], self._texts) for k in range(len(bias))]
        return np.stack(found, axis=1) + bias

    def _fit(self, text: np.ndarray, word: np.ndarray, value: np.ndarray, onehot: np.ndarray) -> None:
        rate = 1.0 / (0.5 * self._largest(text, word, value) + DECAY)  # softmax has a curvature of at most 1/2
        weight, bias = self.weight, self.bias
        last_weight, last_bias = weight, bias
        for step in range(STEPS):
            ahead = step / (step + 3)
            at_weight, at_bias = weight + ahead * (weight - last_weight), bias + ahead * (bias - last_bias)
            z = self._logits(text, word, value, at_weight, at_bias)
            z = np.exp(z - z.max(axis=1, keepdims=True))
            dz = (z / z.sum(axis=1, keepdims=True) - onehot) / len(onehot)
            last_weight, last_bias = weight, bias
            columns = [np.bincount(word, value * dz[text, k], len(weight)) for k in range(dz.shape[1])]
            weight = at_weight - rate * (np.stack(columns, axis=1) + DECAY * at_weight)
            bias = at_bias - rate * dz.sum(axis=0)
        self.weight, self.bias = weight, bias

    def _largest(self, text: np.ndarray, word: np.ndarray, value: np.ndarray) -> float:
        """The largest eigenvalue of X^T X / N, with the bias's column, by the power method, and a tenth more."""
        v, b, size = np.full(len(self.weight), max(1, len(self.weight)) ** -0.5), 1.0, 1.0
        for _ in range(20):
            row = np.bincount(text, value * v[word], self._texts) + b
            v, b = np.bincount(word, value * row[text], len(v)) / self._texts, float(row.mean())
            size = float(np.sqrt(v @ v + b * b))
            v, b = v / size, b / size
        return 1.1 * size


def bag(text: tuple[str, str]) -> Counter[str]:
    """The count of each word; those of the second text have a prefix."""
    words = Counter(WORD.findall(text[0].lower()))
    words.update("2 " + word for word in WORD.findall(text[1].lower()))
    return words
