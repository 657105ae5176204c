"""Logistic regression on the bag of words: what a classifier of texts is measured against."""

from models.bag_of_words.model import BagOfWords

__all__ = ["BagOfWords"]
