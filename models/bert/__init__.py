"""BERT: post-norm blocks that look both ways, hidden words to guess, a classification head."""

from tinyforge.models.bert.config import PRESETS, Config
from tinyforge.models.bert.model import BERT
from tinyforge.registry import Defaults, ModelSpec

SPEC = ModelSpec(
    "bert",
    "BERT",
    BERT,
    Config,
    PRESETS,
    "Post-norm blocks that look both ways, masked words, a classifier",
    hf=f"{__name__}.hf",
    architectures=("BertForMaskedLM", "BertForSequenceClassification", "BertModel"),
    learns="masked text",
    # At the learning rate of the pre-norm models it learns no more than word frequencies: docs/models/bert.md.
    pretraining={
        "": Defaults({"lr": 5e-4, "warmup": 0.1}, "as in this project's runs"),
        "base": (published := Defaults({"lr": 1e-4, "warmup": 0.01}, "as BERT was trained")),
        "large": published,
    },
    source='Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding" (2018)',
    backward="The norms are in the residual stream: a gradient on its way down passes the Jacobian of each norm above, "
    "and a fork adds the branch's to it. Padding has no gradient: no query attends to its keys, and its outputs are "
    "not read.",
    trained={
        "IMDB's film reviews, 24 million parameters, pretrained on reviews for 129 s of an H200: test accuracy, mean "
        "of 3 seeds": "gpu-bert-imdb.json#test/mean",
        "a bag of words": "gpu-bert-imdb.json#test/bag_of_words",
        "a bag of words with tf-idf": "gpu-bert-imdb.json#test/bag_of_words_tf_idf",
    },
)
__all__ = ["BERT", "PRESETS", "SPEC", "Config"]
