"""A score of quality: a small classifier of texts, trained on two samples that you choose. And lists of bad words.

    python -m data.quality --good books/ --bad crawl.jsonl --out quality.npz       # prints its accuracy, held out
    python -m data.corpus sources/web --out corpus --quality quality.npz           # `quality` of each document, 0 to 1

Logistic regression on hashed words and pairs of words: p = 1 / (1 + exp(-(w . x + b))), where x is 1 / sqrt(n) for each
of the n buckets, of 2^18, into which the text's words and pairs fall. Trained by Adagrad, three times over both
samples, which count the same whatever their sizes. A sample is files as data.local reads them, or a source folder.

Source: A. Joulin et al., "Bag of Tricks for Efficient Text Classification", 2017 (hashed n-grams); T. Brown et al.,
"Language Models are Few-Shot Learners", 2020, appendix A (a corpus filtered by such a classifier).
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from tinyforge.data.dedup import Words
from tinyforge.data.files import check_writable, written_whole
from tinyforge.data.local import read_documents, read_rows, read_text
from tinyforge.data.source import MANIFEST, read_source
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.report import count_of

BUCKETS = 1 << 18
EPOCHS = 3
RATE = 1.0  # of Adagrad
HELD_OUT = 10  # one text in so many
LEAST = 100  # texts in a sample
MOST_BYTES = 200 << 20  # of text in a sample, which is in memory
_BATCH = 64
_WORDS = 1000  # at the beginning of a text, by which it is judged


@dataclass(frozen=True)
class Classifier:
    """weights: of the buckets, (BUCKETS,). bias: b."""

    weights: np.ndarray
    bias: float

    def scores(self, words: Words) -> np.ndarray:
        """The quality of each text, 0 to 1, (D,)."""
        buckets, bounds = _features(words)
        return _probability(self.weights, self.bias, buckets, bounds)


def _features(words: Words) -> tuple[np.ndarray, np.ndarray]:
    """The buckets of each text, and the bounds of each text's: (F,), (D + 1,)."""
    found, bounds = list[np.ndarray](), [0]
    (ones, of_ones), (twos, of_twos) = ((words.grams(n, _WORDS)) for n in (1, 2))
    ones, twos = ((hashes >> np.uint64(64 - 18)).astype(np.int64) for hashes in (ones, twos))
    latest, places = np.empty(BUCKETS, np.int32), np.arange(2 * _WORDS, dtype=np.int32)
    for text in range(len(words.counts)):
        both = np.concatenate([ones[of_ones[text] : of_ones[text + 1]], twos[of_twos[text] : of_twos[text + 1]]])
        # Each bucket once, without a sort: where its last place was noted.
        here = places[: len(both)]
        latest[both] = here
        found.append(both[latest[both] == here])
        bounds.append(bounds[-1] + len(found[-1]))
    return np.concatenate([np.empty(0, np.int64), *found]), np.array(bounds)


def _probability(weights: np.ndarray, bias: float, buckets: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(weights[buckets], dtype=np.float64)])
    counts = np.maximum(np.diff(bounds), 1)
    logits = (sums[bounds[1:]] - sums[bounds[:-1]]) / np.sqrt(counts) + bias
    return 1 / (1 + np.exp(-np.clip(logits, -30, 30)))


def train(good: Sequence[str], bad: Sequence[str]) -> tuple[Classifier, float, float]:
    """The classifier of two samples, with the share of held-out good and of held-out bad texts that it knows.

    Deterministic. Raises UserError for a sample of fewer than `LEAST` texts.
    """
    for name, texts in (("--good", good), ("--bad", bad)):
        if len(texts) < LEAST:
            raise UserError(f"{name}: {len(texts)} texts, expected {LEAST} or more; give a larger sample")
    texts, labels = [*good, *bad], np.repeat([1.0, 0.0], [len(good), len(bad)])
    features = []
    for begin in range(0, len(texts), _BATCH):
        buckets, bounds = _features(Words(texts[begin : begin + _BATCH]))
        features += np.split(buckets, bounds[1:-1])
    share = np.where(labels == 1, len(texts) / (2 * len(good)), len(texts) / (2 * len(bad)))
    rng = np.random.default_rng(0)
    order = rng.permutation(len(texts))
    held, rest = order[::HELD_OUT], np.delete(order, np.s_[::HELD_OUT])
    weights, squares, bias = np.zeros(BUCKETS), np.full(BUCKETS, 1e-8), 0.0
    for _ in range(EPOCHS):
        for begin in range(0, len(rest), _BATCH):
            chosen = rest[begin : begin + _BATCH]
            of_batch = [features[index] for index in chosen]
            counts = np.array([len(found) for found in of_batch])
            buckets, bounds = np.concatenate(of_batch), np.concatenate([[0], np.cumsum(counts)])
            error = (_probability(weights, bias, buckets, bounds) - labels[chosen]) * share[chosen]
            each = np.repeat(error / np.sqrt(np.maximum(counts, 1)) / len(chosen), counts)
            touched, at = np.unique(buckets, return_inverse=True)
            gradient = np.bincount(at, each, len(touched))
            squares[touched] += gradient**2
            weights[touched] -= RATE * gradient / np.sqrt(squares[touched])
            bias -= 0.1 * error.mean()
        rng.shuffle(rest)
    found = Classifier(weights.astype(np.float32), float(bias))
    known = found.scores(Words([texts[index] for index in held])) > 0.5
    return found, float(known[labels[held] == 1].mean()), float(1 - known[labels[held] == 0].mean())


def save(classifier: Classifier, path: Path) -> None:
    """Write a classifier, 1 MB; UserError if the disk is full or not writable."""
    with written_whole(path) as beside, open(beside, "wb") as file:
        np.savez(file, quality_weights=classifier.weights, bias=np.float64(classifier.bias))


@lru_cache(maxsize=1)
def load(path: Path) -> Classifier:
    """Read a classifier; UserError, naming the file, for anything else."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            weights, bias = arrays["quality_weights"], float(arrays["bias"])
        if weights.shape != (BUCKETS,) or weights.dtype != np.float32 or not np.isfinite(weights).all():
            raise ValueError(f"weights {weights.shape} {weights.dtype}")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make it with python -m data.quality") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{path}: not a classifier of data.quality ({reason}); make it again") from None
    return Classifier(weights, bias)


@lru_cache(maxsize=1)
def read_bad_words(path: Path) -> dict[int, np.ndarray]:
    """The hashes of the words and phrases in a file, one a line, by their number of words. UserError without any."""
    lines = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("#")]
    words = Words(lines)
    if not words.counts.any():
        raise UserError(f"--bad-words {path}: has no words, expected one word or phrase a line")
    found = {}
    for count in np.unique(words.counts[words.counts > 0]).tolist():
        grams, bounds = words.grams(count)
        found[count] = np.unique(grams[bounds[:-1][words.counts == count]])
    return found


def bad_word_shares(words: Words, bad: dict[int, np.ndarray]) -> np.ndarray:
    """The number of bad words and phrases in each text over that of its words, (D,)."""
    hits = np.zeros(len(words.counts))
    for count, known in bad.items():
        grams, bounds = words.grams(count)
        hits += np.diff(np.searchsorted(np.flatnonzero(np.isin(grams, known)), bounds))
    return hits / np.maximum(words.counts, 1)


def _sample(paths: Sequence[Path], flag: str) -> list[str]:
    """The texts of a sample, at most `MOST_BYTES` of them."""

    def texts() -> Iterator[str]:
        for path in paths:
            if (path / MANIFEST).is_file():
                for file in read_source(path).parquet:
                    yield from (str(row["text"]) for _, row in read_rows(file, "text"))
            else:
                yield from read_documents([path])

    found, size = list[str](), 0
    for text in texts():
        if (size := size + len(text)) > MOST_BYTES:
            print(f"{flag}: the first {len(found):,} texts are used, {MOST_BYTES >> 20} MiB")
            break
        found.append(text)
    return list(dict.fromkeys(found))  # a copy would be both learned and held out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m data.quality", description=__doc__)
    for flag, what in (("--good", "texts as you want more of them"), ("--bad", "texts as they come")):
        parser.add_argument(flag, nargs="+", type=Path, required=True, metavar="PATH", help=what)
    parser.flag("--out", Path, "the classifier", required=True, metavar="FILE.npz")
    args = parser.parse_args(arguments)
    check_writable(args.out)
    good, bad = _sample(args.good, "--good"), _sample(args.bad, "--bad")
    if repeated := len(set(good) & set(bad)):
        raise UserError(f"--good and --bad share {count_of(repeated, 'text')}; give two different samples")
    classifier, known_good, known_bad = train(good, bad)
    save(classifier, args.out)
    print(
        f"{args.out}: from {len(good):,} and {len(bad):,} texts; held out, {100 * known_good:.1f} % of the good and "
        f"{100 * known_bad:.1f} % of the bad are recognised"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
