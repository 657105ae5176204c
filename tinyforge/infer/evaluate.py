"""Measures of a trained model: last words of sentences, whole replies, and how often its drafts are accepted.

    items = cloze_items(texts, 500, seed)                   sentences, each with ten candidates for its last word
    scored = cloze_credits(model, tokenizer, items)         1 where the original word is the most likely
    replies = reply_to(model, prompts, sampling, stop, decoder)
    reply_shares([Reply(...), ...])                         how many end, are not empty, do not loop
    measure_replies(model, tokenizer, prompts, 200, 3)      the same of greedy and sampled replies, with their noise

`recipes/evaluate.py` is the command; docs/evaluation.md explains each figure and its noise.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import mean, stdev
from typing import Any

import numpy as np

from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import Decoder
from tinyforge.infer.generation import generate_batch
from tinyforge.infer.likelihood import Pair, Scorer
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.session import Session, Stats
from tinyforge.rng import Stream
from tinyforge.tokenizers import TextTokenizer

CANDIDATES = 10
NEIGHBOURS = 40
"""The wrong candidates are sampled from so many last words, those nearest in frequency to the right one."""
FEWEST_WORDS, MOST_WORDS = 5, 40  # of a sentence, before its last word
BATCH = 64  # replies decoded together
REPEATS = 3  # occurrences that count as a loop
EXAMPLES = 10  # replies that are not well-formed and are kept as examples, at most

# The last word is in lower case: a capital would give a name away. One closing mark, then white space.
_SENTENCE = re.compile(r"([A-Z].*) ([a-z]{2,})([.!?])", re.DOTALL)
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n\s*\n")


def standard_error(share: float, count: int) -> float:
    """The standard error of a share of `count` independent yes-or-no results: sqrt(p (1 - p) / n)."""
    return math.sqrt(share * (1 - share) / count)


# --- the last word of a sentence --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cloze:
    """A sentence without its last word. candidates[0] is that word, mark the closing mark. commonest: the candidate
    that ends the most sentences, which is the best guess without reading the beginning."""

    beginning: str
    candidates: tuple[str, ...]
    mark: str
    commonest: int


def cloze_items(texts: Sequence[str], count: int, seed: int) -> list[Cloze]:
    """Up to `count` sentences of `texts`, each with ten candidates; none where there are fewer than ten last words.

    All last words are sorted by how many sentences they end, ties by how often they occur in `texts`. The nine wrong
    candidates are sampled by the seed, without repetition, from the 40 words nearest to the right one in that order, so
    that frequency alone gives little away: see `commonest`.
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


def cloze_credits(model: CausalLM, tokenizer: TextTokenizer, items: Sequence[Cloze]) -> list[tuple[Cloze, float]]:
    """Each item that fits the context, with 1 if the right candidate scores highest, 1 / n if n share that, else 0.

    score = ln p(candidate and closing mark | beginning), the sum over their tokens.
    """
    scorer, pairs, kept = Scorer(model, tokenizer), list[Pair](), list[Cloze]()
    for item in items:
        beginning = tuple(tokenizer.encode(item.beginning))
        ends = [tuple(tokenizer.encode(f" {word}{item.mark}")) for word in item.candidates]
        if len(beginning) + max(map(len, ends)) <= model.config.context:
            kept.append(item)
            pairs += [Pair(beginning, end) for end in ends]
    scores = np.array([score.log_prob for score in scorer.score(pairs)]).reshape(-1, CANDIDATES)
    best = scores == scores.max(axis=1, keepdims=True)
    return list(zip(kept, (best[:, 0] / best.sum(axis=1)).tolist(), strict=True))


def measure_cloze(
    model: CausalLM, tokenizer: TextTokenizer, texts: Sequence[str], count: int, seed: int
) -> dict[str, Any] | None:
    """The share of right last words, and that of always guessing the commonest candidate; None without sentences."""
    scored = cloze_credits(model, tokenizer, cloze_items(texts, count, seed))
    if not scored:
        return None
    right = mean(credit for _, credit in scored)
    return {
        "right": right,
        "standard_error": standard_error(right, len(scored)),
        "sentences": len(scored),
        "by_frequency": mean(item.commonest == 0 for item, _ in scored),
    }


# --- replies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """A model's reply. tokens: its length, without the end token. ended: whether the model ended it."""

    text: str
    tokens: int
    ended: bool


def reply_decoder(model: CausalLM, prompts: int) -> Decoder:
    """A decoder for so many prompts: of many rows where a pass takes all of them (on a GPU), else of one row."""
    if model.backend.name != "numpy" and prompts > 1:
        groups = -(-prompts // BATCH)
        decoder = make_decoder(model, -(-prompts // groups))
        if decoder.draws(Sampling()) or getattr(decoder, "steps", None) is not None:
            return decoder
    return make_decoder(model)


def reply_to(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    stop: frozenset[int],
    decoder: Decoder,
    *,
    what: str = "",
) -> list[tuple[list[int], bool]]:
    """The tokens of the reply to each prompt, and whether it ended with one of `stop`.

    Prompt i is sampled with the seed sampling.seed + i. decoder: of any number of rows, such as `reply_decoder`'s.
    what: the name of a progress bar on a terminal, for replies one by one.
    """
    replies = list[list[int]]()
    if decoder.batch == 1:
        from tqdm import tqdm

        session = Session(model, decoder)
        for i, prompt in enumerate(tqdm(prompts, what, leave=False, disable=None if what else True)):
            session.set_tokens(prompt)
            replies.append([token.id for token in session.generate(replace(sampling, seed=sampling.seed + i), stop)])
    else:
        replies = [ids for group in continue_groups(model, prompts, sampling, stop, decoder) for ids in group]
    # A reply that uses its whole budget was cut.
    budgets = [min(sampling.max_tokens, decoder.capacity - len(prompt)) for prompt in prompts]
    return [(ids, len(ids) < budget) for ids, budget in zip(replies, budgets, strict=True)]


def continue_groups(
    model: CausalLM, prompts: Sequence[Sequence[int]], sampling: Sampling, stop: frozenset[int], decoder: Decoder
) -> Iterator[list[list[int]]]:
    """The tokens that continue the prompts, as many prompts at a time as the decoder has rows; prompt i is sampled
    with the seed sampling.seed + i."""
    for first in range(0, len(prompts), decoder.batch):
        group = list(prompts[first : first + decoder.batch])
        padded, found = group + group[-1:] * (decoder.batch - len(group)), [list[int]() for _ in range(decoder.batch)]
        for i, token in generate_batch(model, padded, replace(sampling, seed=sampling.seed + first), stop, decoder):
            found[i].append(token.id)
        yield found[: len(group)]


def repeats_a_line(text: str) -> bool:
    """Whether some line or sentence occurs three times or more.

    A text is split at line breaks and at the ends of sentences. Capitals and white space do not matter; pieces without
    a letter or digit, such as a brace, do not count.
    """
    pieces = (" ".join(piece.lower().split()) for piece in re.split(r"\n|(?<=[.!?])\s", text))
    counts = Counter(piece for piece in pieces if any(map(str.isalnum, piece)))
    return max(counts.values(), default=0) >= REPEATS


def repeats_four_words(text: str) -> bool:
    """Whether some four consecutive words occur three times or more, overlaps included."""
    words = text.lower().split()
    counts = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
    return max(counts.values(), default=0) >= REPEATS


def reply_shares(replies: Sequence[Reply]) -> dict[str, float]:
    """The shares of replies that the model ended, that are not empty, that repeat no line three times, and that meet
    all three; the share that repeats four words three times; and the mean number of tokens."""
    fine = np.array([[r.ended, bool(r.text.strip()), not repeats_a_line(r.text)] for r in replies])
    ended, not_empty, no_line_repeated = fine.mean(axis=0).tolist()
    return {
        "ended": ended,
        "not_empty": not_empty,
        "no_line_repeated": no_line_repeated,
        "all_three": float(fine.all(axis=1).mean()),
        "four_words_repeated": float(np.mean([repeats_four_words(r.text) for r in replies])),
        "tokens": float(np.mean([r.tokens for r in replies])),
    }


def text_replies(
    model: CausalLM,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    decoder: Decoder,
    stop: frozenset[int],
) -> list[Reply]:
    """What `reply_to` samples, as text, up to a token that ends a reply."""
    replies = reply_to(model, prompts, sampling, stop, decoder, what="replies")
    return [Reply(tokenizer.decode(ids), len(ids), ended) for ids, ended in replies]


def measure_replies(
    model: CausalLM,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: int,
    stop: frozenset[int],
) -> dict[str, Any]:
    """Shares of well-formed replies, greedy and by `sampling` with several seeds; and some greedy ones that are not."""
    drawn = partial(text_replies, model, tokenizer, prompts, decoder=reply_decoder(model, len(prompts)), stop=stop)
    replies = drawn(Sampling(temperature=0.0, max_tokens=sampling.max_tokens))
    greedy = reply_shares(replies)
    wrong = [reply for reply in replies if reply_shares([reply])["all_three"] == 0]
    errors = {key: standard_error(share, len(prompts)) for key, share in greedy.items() if key != "tokens"}
    found: dict[str, Any] = {
        "prompts": len(prompts),
        "max_tokens": sampling.max_tokens,
        "greedy": greedy,
        "standard_error": errors,
        "out_of_form": [asdict(reply) for reply in wrong[:EXAMPLES]],
    }
    # Prompt i uses seed + i, so the seeds of a round start where those of the previous one end.
    rounds = [reply_shares(drawn(replace(sampling, seed=len(prompts) * number))) for number in range(seeds)]
    if rounds:
        figures = {key: [shares[key] for shares in rounds] for key in greedy}
        found["seeds"], found["sampled"] = seeds, {key: mean(values) for key, values in figures.items()}
        found["spread"] = {key: stdev(values) for key, values in figures.items()} if seeds > 1 else {}
    return found


# --- speculation ------------------------------------------------------------------------------------------------------


def speculate(model: CausalLM, prompts: Sequence[Sequence[int]], max_tokens: int, stop: frozenset[int]) -> Stats:
    """The statistics of speculative decoding, with all heads, on greedy continuations of the prompts."""
    session = Session(model)
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, drafts=model.prediction_heads - 1)
    for prompt in prompts:
        session.set_tokens(prompt)
        deque(session.generate(sampling, stop), maxlen=0)
    return session.stats


def measure_speculation(
    model: CausalLM, tokenizer: TextTokenizer, prompts: Sequence[Sequence[int]], max_tokens: int
) -> dict[str, Any]:
    """The same as figures. The continuations end at any special token."""
    stats = speculate(model, prompts, max_tokens, frozenset(tokenizer.specials.values()))
    names = ("tokens", "passes", "tokens_per_pass", "drafted", "accepted", "acceptance")
    return {"texts": len(prompts), **{name: getattr(stats, name) for name in names}}
