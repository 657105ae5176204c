"""Log-likelihoods of many texts at once, the scores made of them, and answers: next to a loop over single texts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.infer import tasks
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.infer.likelihood import Pair, Score, Scorer, bytes_needed, windows
from tinyforge.infer.tasks import Choice, LastWord, Passage, Problem, prompt_ids, run_task
from tinyforge.registry import find_model, models
from tinyforge.tokenizers import Tokenizer

CAUSAL = [name for name in models() if find_model(name).learns == "text"]
TEXT = "How much is two and two? It is four, said the old man by the river, and went home to his dog. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT * 3], 300, progress=False)


def built(name: str) -> Any:
    spec = find_model(name)
    config = spec.config.from_dict(next(iter(spec.presets.values())).to_dict())
    sizes = {"dim": 16, "heads": 2, "kv_heads": 1, "layers": 2, "hidden": 24, "context": 24, "vocab": 300}
    known = config.to_dict()
    config = config.override({key: value for key, value in sizes.items() if key in known})
    model = spec.build(config, get_backend("numpy", "fp64", workers=1))
    model.initialise(3)
    return model


def alone(model: Any, pair: Pair) -> tuple[float, bool, bool]:
    """One text, the whole of it, without a cache: the definition."""
    whole = (*pair.context, *pair.continuation)[-(model.config.context + 1) :]
    z = np.asarray(model.logits(model.hidden(np.array([whole[:-1]], np.int32))))[0].astype(np.float64)
    log_p = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)
    count = min(len(pair.continuation), len(whole) - 1)
    at, targets = np.arange(len(whole) - 1 - count, len(whole) - 1), list(whole[-count:])
    found = log_p[at, targets]
    cut = len(whole) < len(pair.context) + len(pair.continuation)
    return float(found.sum()), bool((log_p[at].argmax(-1) == targets).all()), cut


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("tokens", [1, 60, 1000])
def test_scores_are_those_of_one_text_at_a_time(name: str, tokens: int) -> None:
    """Padded, in batches, with a shared beginning or one that was cut: for every causal model."""
    model, rng = built(name), np.random.default_rng(1)
    pairs = []
    for length in (1, 3, 10, 10, 12, 30):
        context = tuple(rng.integers(0, 300, length).tolist())
        pairs += [Pair(context, tuple(rng.integers(0, 300, n).tolist())) for n in (1, 4, 2, 9)]
    pairs.append(Pair((5,), tuple(rng.integers(0, 300, 40).tolist())))
    counted: list[int] = []
    for pair, score in zip(pairs, Scorer(model, None, tokens).score(pairs, counted.append), strict=True):  # type: ignore[arg-type]
        expected = alone(model, pair)
        assert score.log_prob == pytest.approx(expected[0], abs=1e-9) and (score.greedy, score.cut) == expected[1:]
    assert sum(counted) == len(pairs)


def test_a_shared_beginning_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, computed = built("llama"), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, **more: computed.append(ids.size) or hidden(ids, **more))
    Scorer(model, None).score([Pair(tuple(range(20)), (i, 7)) for i in range(4)])  # type: ignore[arg-type]
    assert computed == [19] + 4 * [2]


def test_windows_score_every_token_once() -> None:
    for length in (1, 7, 8, 9, 16, 21):
        ids = list(range(100, 100 + length))
        found = list(windows(ids, 1, 8))
        assert [token for pair in found for token in pair.continuation] == ids
        assert all(len(pair.context) + len(pair.continuation) <= 9 for pair in found)
        assert all(len(pair.context) + len(pair.continuation) == 9 for pair in found[1:])
    assert list(windows([], 1, 8)) == []


def test_the_parts_of_a_text(tokenizer: Tokenizer) -> None:
    """The context's ids are those that it has alone; its last spaces are the continuation's."""
    scorer = Scorer(built("llama"), tokenizer)
    known, rest = scorer.pair("How much is", " two")
    assert list(known) == tokenizer.encode("How much is") and tokenizer.decode([*known, *rest]) == "How much is two"
    assert scorer.pair("How much is ", "two") == (known, rest)
    assert scorer.pair("", " two") == ((tokenizer.specials["<|endoftext|>"],), tuple(tokenizer.encode(" two")))


def scored(monkeypatch: pytest.MonkeyPatch, log_probs: list[float]) -> Scorer:
    """A scorer that gives these, in order."""
    scorer = object.__new__(Scorer)
    given = [Score(value, value > -2, False) for value in log_probs]
    monkeypatch.setattr(Scorer, "pair", lambda self, context, rest: (context, rest))
    monkeypatch.setattr(Scorer, "score", lambda self, pairs, done: given[: len(pairs)])
    return scorer


def test_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """acc: the likeliest; acc_norm: by character; acc_bytes: by byte, which differs for an accent."""
    item = Choice((("q", " éé"), ("q", " abcd")), ("éé", "abcd"), 1)
    result = run_task(scored(monkeypatch, [-3.0, -5.0]), [item])
    assert result.figures == {"acc": 0.0, "acc_norm": 1.0, "acc_bytes": 0.0} and result.chance == 0.5
    four = [Choice(item.pairs, item.texts, gold) for gold in (0, 0, 0, 1)]
    result = run_task(scored(monkeypatch, [-1.0, -2.0] * 4), four)
    assert result.figures["acc"] == 0.75 and result.errors["acc"] == pytest.approx(math.sqrt(0.1875 / 3))


def test_parts_of_a_set_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = ((("", " a"), ("", " b")), ("a", "b"))
    items = [
        Choice(*pair, 0, "one"),
        Choice(*pair, 0, "one"),
        Choice(*pair, 1, "one"),
        Choice(*pair, 1, "two"),
        Choice(*pair, 1, "two"),
    ]
    result = run_task(scored(monkeypatch, [-1.0, -2.0] * 5), items)
    assert result.groups == {"one": pytest.approx(2 / 3), "two": 0.0}
    assert result.figures == {"acc": pytest.approx(1 / 3)}
    assert result.errors["acc"] == pytest.approx(math.sqrt(2 / 9 / 2) / 2)


def test_last_words_and_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_task(scored(monkeypatch, [-1.0, -3.0]), [LastWord("a", " b")] * 2)
    assert result.figures == {"acc": 0.5, "perplexity": pytest.approx(math.exp(2))}
    monkeypatch.setattr(Scorer, "rolling", lambda self, text: -math.log(2) * len(text))
    result = run_task(object.__new__(Scorer), [Passage("a" * 8, 4, 1), Passage("a" * 2, 4, 1)])
    assert result.figures["bits_per_byte"] == pytest.approx(10 / 8)
    assert result.errors["bits_per_byte"] == pytest.approx(math.sqrt(18 / 2) * 2 / 8)


def test_problems_are_answered_until_a_stop(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many examples as fit; what comes after a stop does not count."""
    model = built("llama")
    ids, shots = prompt_ids(tokenizer, Problem("two and two?", "#### 4", (("a", "b"),) * 5), 60)
    assert 0 < shots < 5 and len(ids) <= 60
    assert tokenizer.decode(ids).count("Question:") == shots + 1
    assert prompt_ids(tokenizer, Problem("two " * 50, "#### 4"), 20)[1] == -1
    told = tokenizer.encode(" 2 + 2 = 4\n#### 4\n\nQuestion: 5?\n#### 5")

    class Told:
        def __init__(self, *_: Any) -> None: ...
        def set_tokens(self, ids: Any) -> None: ...
        def generate(self, *_: Any) -> Any:
            yield from (type("Token", (), {"id": id}) for id in told)

    monkeypatch.setattr(tasks, "Session", Told)
    given = tasks.answer_all(model, tokenizer, [[1]], 99, lambda count: None)
    assert given == [" 2 + 2 = 4\n#### 4\n\n"]
    result = run_task(Scorer(model, tokenizer), [Problem("2 and 2?", "So 4.\n#### 4")])
    assert result.figures == {"exact_match_strict": 1.0, "exact_match_flexible": 1.0}


def test_answers_alone_and_side_by_side(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama")
    prompts = [tokenizer.encode(text)[:6] for text in ("How much is", "It is four, said", "two", "dog and the old")]
    answers = []
    for rows in (1, 3):
        monkeypatch.setattr(tasks, "reply_decoder", lambda model, count, rows=rows: ReferenceDecoder(model, rows))
        answers.append(tasks.answer_all(model, tokenizer, prompts, 8, lambda count: None))
    assert len(answers[0]) == 4 and answers[0] == answers[1]


@pytest.mark.parametrize("name", CAUSAL)
def test_memory_grows_with_the_tokens(name: str) -> None:
    model = built(name)
    few, many = (bytes_needed(find_model(name), model.config, "fp32", tokens) for tokens in (24, 240))
    assert 0 < few < many
