"""Measurements of a trained model: the last words of sentences, whole replies, and how far its heads guess right.

    items = cloze_items(texts, 500, seed)                   sentences, each with ten candidates for its last word
    scored = cloze_credits(decoder, tokenizer, items)       with 1 where the word that stood there is the most likely
    replies = reply_to(model, prompts, sampling, end, decoder)
    reply_shares([Reply(...), ...])                         how many end, are not empty, do not go in circles

`recipes/evaluate.py` is the command; docs/evaluation.md says what each figure means, and how much of it is chance.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import Decoder
from tinyforge.infer.generation import generate_batch
from tinyforge.infer.sampling import Sampling, log_probability
from tinyforge.infer.session import Session, Stats
from tinyforge.rng import Stream
from tinyforge.text import TextTokenizer

CANDIDATES = 10
NEIGHBOURS = 40
"""The other candidates are drawn from so many last words, those whose frequency is nearest to the right one's."""
FEWEST_WORDS, MOST_WORDS = 5, 40  # of a sentence, before its last word
BATCH = 64  # replies side by side, where the decoder has rows
REPEATS = 3  # what is said so often is a circle

# The last word in small letters, so that no capital tells a name from a noun; one mark, and white space behind it.
_SENTENCE = re.compile(r"([A-Z].*) ([a-z]{2,})([.!?])", re.DOTALL)
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


def standard_error(share: float, count: int) -> float:
    """Of a share of `count` independent yes-or-no results: sqrt(p (1 - p) / n)."""
    return math.sqrt(share * (1 - share) / count)


# --- the last word of a sentence --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cloze:
    """A sentence without its end. candidates[0] is the word that stood there, mark the one that closed the sentence;
    commonest: which of the candidates ends the most sentences, the guess of one who has read nothing else."""

    beginning: str
    candidates: tuple[str, ...]
    mark: str
    commonest: int


def cloze_items(texts: Sequence[str], count: int, seed: int) -> list[Cloze]:
    """Up to `count` sentences of `texts`, each with ten candidates; none where fewer than ten last words differ.

    The rule: all last words are put in the order of how many sentences they end, those that end equally many in the
    order of how often they occur in `texts`. The nine wrong candidates are drawn by the seed, without repetition, from
    the 40 words nearest to the right one in that order. So frequency alone gives little away: see `commonest`.
    """
    pieces = (piece for text in texts for piece in _BETWEEN_SENTENCES.split(text))
    found = (match.groups() for piece in pieces if (match := _SENTENCE.fullmatch(piece)))
    sentences = [s for s in dict.fromkeys(found) if FEWEST_WORDS <= len(s[0].split()) <= MOST_WORDS]
    closes = Counter(word for _, word, _ in sentences)
    occurs = Counter(word for text in texts for word in re.findall(r"[a-z]+", text))
    words = sorted(closes, key=lambda word: (-closes[word], -occurs[word], word))
    if len(words) < CANDIDATES:
        return []
    place = {word: i for i, word in enumerate(words)}
    items = []
    for number in Stream(seed, "cloze").permutation(len(sentences))[:count].tolist():
        beginning, word, mark = sentences[number]
        nearest = sorted((w for w in words if w != word), key=lambda w: abs(place[w] - place[word]))[:NEIGHBOURS]
        drawn = Stream(seed, f"cloze/{number}").permutation(len(nearest))[: CANDIDATES - 1]
        candidates = (word, *(nearest[i] for i in drawn))
        commonest = min(range(CANDIDATES), key=lambda i: place[candidates[i]])
        items.append(Cloze(beginning, candidates, mark, commonest))
    return items


def cloze_credits(decoder: Decoder, tokenizer: TextTokenizer, items: Sequence[Cloze]) -> list[tuple[Cloze, float]]:
    """Each item that fits the context, with 1 if the right candidate scores highest, 1 / n if n share that, else 0.

    score = ln p(candidate and closing mark | beginning), the sum over their tokens. The decoder has one row.
    """
    scored = []
    for item in items:
        beginning = tokenizer.encode(item.beginning)
        ends = [tokenizer.encode(f" {word}{item.mark}") for word in item.candidates]
        if len(beginning) + max(map(len, ends)) <= decoder.capacity:
            scores = log_probabilities(decoder, beginning, ends)
            best = scores == scores.max()
            scored.append((item, float(best[0] / best.sum())))
    return scored


def log_probabilities(decoder: Decoder, beginning: Sequence[int], ends: Sequence[Sequence[int]]) -> np.ndarray:
    """ln p(end | beginning) for each of the ends; all are token ids. If the cache can rewind, the beginning is
    computed once."""
    known, scores = len(beginning) - 1, []
    decoder.rewind([0])
    for ids in ends:
        decoder.prefill(0, beginning[decoder.lengths[0] : known])
        logits = decoder.step([[beginning[-1], *ids[:-1]]])[0, :, 0]
        scores.append(sum(log_probability(z, token) for z, token in zip(logits, ids, strict=True)))
        decoder.rewind([known if decoder.can_rewind else 0])
    return np.array(scores)


# --- replies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """What a model answered. tokens: without the end of the reply; ended: whether that came by itself."""

    text: str
    tokens: int
    ended: bool


def reply_decoder(model: CausalLM, prompts: int) -> Decoder:
    """The decoder for so many prompts: one of many rows where it draws for all of them at once, else one of one row."""
    if model.backend.name != "numpy" and prompts > 1:
        groups = -(-prompts // BATCH)
        decoder = make_decoder(model, -(-prompts // groups))
        if decoder.draws(Sampling()):
            return decoder
    return make_decoder(model)


def reply_to(
    model: CausalLM, prompts: Sequence[Sequence[int]], sampling: Sampling, end: int, decoder: Decoder
) -> list[tuple[list[int], bool]]:
    """The tokens of the reply to each prompt, and whether it ended with the token `end`.

    Prompt i draws with the seed sampling.seed + i. Decoder: from `reply_decoder`.
    """
    replies: list[list[int]] = [[] for _ in prompts]
    rows, stop = decoder.batch, frozenset({end})
    session = Session(model, decoder) if rows == 1 else None
    for first in range(0, len(prompts), rows):
        drawn = replace(sampling, seed=sampling.seed + first)
        if session is not None:
            session.set_tokens(prompts[first])
            replies[first] += (token.id for token in session.generate(drawn, stop))
            continue
        group = list(prompts[first : first + rows])
        padded = group + group[-1:] * (rows - len(group))
        for i, token in generate_batch(model, padded, drawn, stop, decoder):
            if i < len(group):
                replies[first + i].append(token.id)
    # One that has all the tokens it could have was cut.
    budgets = [min(sampling.max_tokens, decoder.capacity - len(prompt)) for prompt in prompts]
    return [(ids, len(ids) < budget) for ids, budget in zip(replies, budgets, strict=True)]


def repeats_a_line(text: str) -> bool:
    """Whether some line or sentence stands in the text three times or more.

    What stands between line breaks, and between the ends of sentences within a line, so that a reply of one line can
    repeat itself too. Capitals and white space do not count, nor pieces without a letter or digit, such as a brace.
    """
    pieces = (" ".join(piece.lower().split()) for piece in re.split(r"\n|(?<=[.!?])\s", text))
    counts = Counter(piece for piece in pieces if any(map(str.isalnum, piece)))
    return max(counts.values(), default=0) >= REPEATS


def repeats_four_words(text: str) -> bool:
    """Whether the same four words, in a row, stand in the text three times or more; overlapping ones count."""
    words = text.lower().split()
    counts = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
    return max(counts.values(), default=0) >= REPEATS


def reply_shares(replies: Sequence[Reply]) -> dict[str, float]:
    """Shares of the replies that end by themselves, are not empty, repeat no line three times, and do all three; the
    share that has four words three times; and the mean number of tokens."""
    fine = np.array([[r.ended, bool(r.text.strip()), not repeats_a_line(r.text)] for r in replies])
    ended, not_empty, no_line_repeated = fine.mean(axis=0).tolist()
    return {
        "ended": ended, "not_empty": not_empty, "no_line_repeated": no_line_repeated,
        "all_three": float(fine.all(axis=1).mean()),
        "four_words_repeated": float(np.mean([repeats_four_words(r.text) for r in replies])),
        "tokens": float(np.mean([r.tokens for r in replies])),
    }  # fmt: skip


# --- speculation ------------------------------------------------------------------------------------------------------


def speculate(model: CausalLM, prompts: Sequence[Sequence[int]], max_tokens: int, stop: frozenset[int]) -> Stats:
    """What all drafting heads achieve on greedy continuations of the prompts."""
    session = Session(model)
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, drafts=model.prediction_heads - 1)
    for prompt in prompts:
        session.set_tokens(prompt)
        deque(session.generate(sampling, stop), maxlen=0)
    return session.stats
