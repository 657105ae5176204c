"""Published scores of small models, for comparison. Only figures that the authors themselves have published.

Pythia-160M: the Pythia repository of EleutherAI, evals/pythia-v1/pythia-160m/zero-shot/160m_step143000.json, by an
earlier lm-evaluation-harness, zero-shot, over the whole sets. GPT-2 124M: Radford et al., "Language Models are
Unsupervised Multitask Learners" (2019), table 3, by their own procedure: LAMBADA's accuracy with a filter of stop
words, which lm-evaluation-harness does not use, and WikiText-2's perplexity with their own detokenisers.
"""

from __future__ import annotations

PUBLISHED: dict[str, dict[str, dict[str, float]]] = {
    "GPT-2 124M": {"lambada": {"acc": 0.4599, "perplexity": 35.13}, "wikitext": {"word_perplexity": 29.41}},
    "Pythia-160M": {
        "arc_easy": {"acc": 0.4352, "acc_norm": 0.3965},
        "arc_challenge": {"acc": 0.1877, "acc_norm": 0.2329},
        "piqa": {"acc": 0.6273, "acc_norm": 0.6164},
        "winogrande": {"acc": 0.5312},
        "lambada": {"acc": 0.3284, "perplexity": 38.06},
    },
}
"""By model, task and metric, named as in `tinyforge.infer.tasks`."""
