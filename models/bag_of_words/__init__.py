"""Logistic regression on the bag of words: the baseline of text classification."""

from tinyforge.models.bag_of_words.model import BagOfWords

__all__ = ["BagOfWords"]
