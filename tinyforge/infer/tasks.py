"""Benchmarks: four kinds of items, how a model is scored on them, and the standard error of the score.

    Choice      which of several texts is the most likely: BLiMP, ARC, PIQA, BoolQ, Winogrande, OpenBookQA
    LastWord    whether greedy decoding gives the last word of a passage: LAMBADA
    Passage     bits per byte of a text: WikiText
    Problem     a question whose worked answer ends in a number: GSM8K

`data/evaluation.py` reads them from the published files; `run_task` scores them like EleutherAI's
lm-evaluation-harness. docs/evaluation.md has the formulas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.evaluate import continue_groups, reply_decoder
from tinyforge.infer.likelihood import Scorer
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.session import Session
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.vocabulary import ENDS, start_ids

LN2 = math.log(2.0)
LONGEST_ANSWER = 256  # tokens, as in lm-evaluation-harness; at most half the context
STOPS = ("Question:", "</s>", "<|im_end|>")  # stop strings of an answer


@dataclass(frozen=True)
class Choice:
    """pairs: (context, continuation) of each choice. texts: the choices, by whose lengths scores are normalised. group:
    the part of the set that the item is in, "" where there is one part."""

    pairs: tuple[tuple[str, str], ...]
    texts: tuple[str, ...]
    gold: int
    group: str = ""


@dataclass(frozen=True)
class LastWord:
    """A passage without its last word, and that word with the space before it."""

    context: str
    word: str


@dataclass(frozen=True)
class Passage:
    """text: the text scored. bytes, words: of the text as published, before detokenisation."""

    text: str
    bytes: int
    words: int


@dataclass(frozen=True)
class Problem:
    """A question, its answer, and solved examples to show before it, each a (question, answer)."""

    question: str
    answer: str
    shown: tuple[tuple[str, str], ...] = ()


Item = Choice | LastWord | Passage | Problem


@dataclass(frozen=True)
class Result:
    """figures: by metric. errors: their standard errors, where defined. groups: figures by part of the set. items: how
    many. cut: how many of them did not fit the context and lost their beginning."""

    figures: dict[str, float]
    errors: dict[str, float]
    chance: float | None
    items: int
    cut: int = 0
    groups: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def mean_error(values: Sequence[float]) -> float:
    """The standard error of a mean: the sample's standard deviation (n - 1) over sqrt(n)."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def run_task(scorer: Scorer, items: Sequence[Item], done: Callable[[int], object] = lambda count: None) -> Result:
    """Score the items, all of one kind. done is called with the number of texts finished since its last call."""
    scored_as: dict[type, Callable[..., Result]]
    scored_as = {Choice: _choices, LastWord: _last_words, Passage: _passages, Problem: _problems}
    return scored_as[type(items[0])](scorer, items, done)


def texts_of(items: Sequence[Item]) -> int:
    """The total that `run_task` reports to `done`: choices, words, passages or problems."""
    return sum(len(item.pairs) if isinstance(item, Choice) else 1 for item in items)


def _choices(scorer: Scorer, items: Sequence[Choice], done: Callable[[int], object]) -> Result:
    pairs = [scorer.pair(*pair) for item in items for pair in item.pairs]
    scores = iter(scorer.score(pairs, done))
    right: dict[str, list[float]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    groups: dict[str, list[float]] = {}
    cut = 0
    for item in items:
        found = [next(scores) for _ in item.pairs]
        cut += any(score.cut for score in found)
        log_probs = np.array([score.log_prob for score in found])
        lengths = {
            "acc": 1,
            "acc_norm": np.array([float(len(text)) for text in item.texts]),
            "acc_bytes": np.array([float(len(text.encode())) for text in item.texts]),
        }
        for metric, length in lengths.items():
            right[metric].append(float(np.argmax(log_probs / length) == item.gold))
        groups.setdefault(item.group, []).append(right["acc"][-1])
    chance = float(np.mean([1 / len(item.pairs) for item in items]))
    if len(groups) > 1:  # the score is the mean over the parts; as all choices are sentences, only acc applies
        shares = {name: float(np.mean(values)) for name, values in sorted(groups.items())}
        error = math.sqrt(sum(mean_error(values) ** 2 for values in groups.values())) / len(groups)
        return Result({"acc": float(np.mean(list(shares.values())))}, {"acc": error}, chance, len(items), cut, shares)
    return Result(*_means(right), chance, len(items), cut)


def _means(values: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Each metric's mean, and its standard error."""
    return (
        {metric: float(np.mean(found)) for metric, found in values.items()},
        {metric: mean_error(found) for metric, found in values.items()},
    )


def _last_words(scorer: Scorer, items: Sequence[LastWord], done: Callable[[int], object]) -> Result:
    scores = scorer.score([scorer.pair(item.context, item.word) for item in items], done)
    right, logs = [float(score.greedy) for score in scores], [score.log_prob for score in scores]
    perplexity = math.exp(min(-float(np.mean(logs)), 700.0))
    errors = {"acc": mean_error(right), "perplexity": perplexity * mean_error(logs)}  # d exp(x) = exp(x) dx
    figures = {"acc": float(np.mean(right)), "perplexity": perplexity}
    return Result(figures, errors, 0.0, len(items), sum(score.cut for score in scores))


def _passages(scorer: Scorer, items: Sequence[Passage], done: Callable[[int], object]) -> Result:
    logs = []
    for item in items:
        logs.append(scorer.rolling(item.text))
        done(1)
    size, words, total = sum(i.bytes for i in items), sum(i.words for i in items), -sum(logs)
    bits = total / LN2 / size
    # The standard error of a ratio of sums (Cochran, "Sampling Techniques", 1977, 2.11), from each document's residual.
    beyond = [-log / LN2 - bits * item.bytes for log, item in zip(logs, items, strict=True)]
    errors = {"bits_per_byte": mean_error(beyond) * len(items) / size} if len(items) > 1 else {}
    figures = {"bits_per_byte": bits, "word_perplexity": math.exp(min(total / words, 700.0))}
    return Result(figures, errors, None, len(items))


# --- problems ---------------------------------------------------------------------------------------------------------

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))


def strict_answer(text: str) -> str:
    """The number after the first ####; "[invalid]" if there is none."""
    found = _STRICT.search(text)
    return found[1] if found else "[invalid]"


def flexible_answer(text: str) -> str:
    """The last number in the text, with sign, dollar, commas and point; "[invalid]" if there is none."""
    found = _NUMBER.findall(text)
    return next((part for part in found[-1] if part), "[invalid]") if found else "[invalid]"


def same_answer(given: str, expected: str) -> bool:
    """Whether two answers are equal up to commas, dollars, the text before ####, a final full stop, and capitals."""
    for pattern in _IGNORED:
        given, expected = pattern.sub("", given), pattern.sub("", expected)
    return given.lower() == expected.lower()


def prompt_ids(tokenizer: TextTokenizer, problem: Problem, most: int) -> tuple[list[int], int]:
    """At most `most` ids of the prompt, with as many solved examples as fit, and their number. A question that is too
    long alone loses its beginning; the number is then -1."""
    begins = start_ids(tokenizer)
    for shots in range(len(problem.shown), -1, -1):
        solved = [f"Question: {question}\nAnswer: {answer}" for question, answer in problem.shown[:shots]]
        ids = begins + tokenizer.encode("\n\n".join([*solved, f"Question: {problem.question}\nAnswer:"]))
        if len(ids) <= most:
            return ids, shots
    return ids[-most:], -1


def _problems(scorer: Scorer, items: Sequence[Problem], done: Callable[[int], object]) -> Result:
    model, tokenizer = scorer.model, scorer.tokenizer
    longest = min(LONGEST_ANSWER, model.config.context // 2)
    asked = [prompt_ids(tokenizer, item, model.config.context - longest) for item in items]
    prompts, shots = zip(*asked, strict=True)
    answers = answer_all(model, tokenizer, prompts, longest, done)
    right: dict[str, list[float]] = {"exact_match_strict": [], "exact_match_flexible": []}
    for item, text in zip(items, answers, strict=True):
        right["exact_match_strict"].append(float(same_answer(strict_answer(text), item.answer)))
        right["exact_match_flexible"].append(float(same_answer(flexible_answer(text), item.answer)))
    given = [max(0, shown) for shown in shots]
    expected = len(items[0].shown)
    note = f"{np.mean(given):.1f} of {expected} examples fit the context" if sum(given) < expected * len(items) else ""
    return Result(*_means(right), 0.0, len(items), sum(shown < 0 for shown in shots), note=note)


def answer_all(
    model: CausalLM,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    longest: int,
    done: Callable[[int], object],
) -> list[str]:
    """The greedy answer to each prompt, up to a stop string, the end of the text, or `longest` tokens."""
    ends = frozenset(tokenizer.specials[text] for text in ENDS if text in tokenizer.specials)
    sampling = Sampling(temperature=0.0, max_tokens=longest)
    decoder = reply_decoder(model, len(prompts))
    answers: list[str] = []
    if decoder.batch == 1:
        session = Session(model, decoder)
        for prompt in prompts:
            session.set_tokens(prompt)
            ids: list[int] = []
            with closing(session.generate(sampling, ends)) as tokens:
                for token in tokens:
                    ids.append(token.id)
                    # The longest stop string has ten characters, and a token at least one byte.
                    if any(stop in tokenizer.decode(ids[-16:], "text") for stop in STOPS):
                        break
            answers.append(_before_stop(tokenizer.decode(ids, "text")))
            done(1)
        return answers
    for group in continue_groups(model, prompts, sampling, ends, decoder):
        answers += [_before_stop(tokenizer.decode(ids, "text")) for ids in group]
        done(len(group))
    return answers


def _before_stop(text: str) -> str:
    return text[: min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=len(text))]
