"""What examples/storyteller/evaluate.py measures, on models and texts where the answer is known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from examples.storyteller.evaluate import GRAM, TYPED, Request, answers, known_shares, main, requests, story_nats, tell
from examples.storyteller.stories import STORIES, keeps_name
from tinyforge.backends import get_backend
from tinyforge.formats import Loaded, load
from tinyforge.infer.sampling import Sampling
from tinyforge.models.nanoeuler import SPEC, Config, NanoEuler

CPU = get_backend("numpy", "fp32", workers=1)


def test_the_share_of_known_eight_grams() -> None:
    told = "one two three four five six seven eight nine"
    assert GRAM == 8
    assert known_shares([[told]], ["zero One, two: three four five six seven eight!"]) == [0.5]
    assert known_shares([[told], ["a b c d e f g h"]], [told, "other text"]) == [1.0, 0.0]
    assert known_shares([[told]], ["one two three four five six seven", "eight nine"]) == [0.0]  # not across texts


def test_a_name_is_kept_to_the_end_and_is_no_second_one() -> None:
    story = "Once there was a dog named Max. Max ran. He met Tim. Max was happy."
    assert keeps_name(story, "Max") and not keeps_name(story, "Tim") and not keeps_name(story, "Zelda")
    assert not keeps_name("Max ran. He met a cat. The cat and the bird went home.", "Max")  # forgotten
    assert keeps_name("Zelda ran. Zelda slept.", "Zelda")


def test_an_answer_is_short_and_names_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Chat:
        def clear(self) -> None:
            pass

        def ask(self, text: str, sampling: Sampling) -> list[str]:
            asked.append(text)
            expected = next(word for story, _, word in TYPED if text.startswith(story))
            return {0: ["Lily lost ", "her", " ball."], 1: [expected], 2: [expected, " and went on" * 9]}[sampling.seed]

    monkeypatch.setattr("examples.storyteller.evaluate.conversation_with", lambda _: Chat())
    assert answers(None, " ", Sampling(), rounds=3) == pytest.approx((12 + 1) / 36)  # type: ignore[arg-type]
    assert asked[0] == " ".join(TYPED[0][:2]) and len(set(asked)) == 12
    assert all(word in story for story, _, word in TYPED)


def test_requests_are_many_and_mostly_named() -> None:
    asked = requests(200)
    assert len(set(asked)) > 120 and asked[:3] == requests(3)
    assert all(r.name in r.text for r in asked) and 0.5 < np.mean([bool(r.name) for r in asked]) < 0.8
    assert [r.subjects for r in asked[:3]] == [{"dog"}, {"dog"}, set()]


def test_nats_of_a_model_that_guesses_and_every_token_counts_once() -> None:
    shape = {"dim": 8, "heads": 2, "kv_heads": 1, "layers": 1, "context": 8, "vocab": 32, "hidden": 8}
    config = Config(**shape, mtp_heads=2, mtp_weights=(1, 1))
    model = NanoEuler(config, CPU)
    model.initialise(0)
    model.heads.weight.value[...] = 0
    for length in (2, 8, 9, 10, 40):
        ids = [i % 32 for i in range(length)]
        assert story_nats(model, ids, 1) == pytest.approx((length - 1) * math.log(32), rel=1e-5)


def test_the_storyteller_tells_stories_that_end() -> None:
    """Of the model that comes with the repository: a story that ends and keeps its hero, and who it is."""
    assert SPEC.bundled_for_chat is not None
    loaded = load(SPEC.bundled_for_chat, CPU)
    assert loaded.template.name == "alpaca"
    asked = [Request("Tell me a story about a dog named Max.", "Max"), Request("Who are you?")]
    (story, who), rate = tell(loaded, asked, Sampling(temperature=0, max_tokens=400))
    assert story.ended and keeps_name(story.text, "Max") and len(story.text.split()) > 50
    assert who.ended and "Storyteller" in who.text and rate > 0


def test_stories_are_sampled_as_in_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's own settings; a flag changes one of them."""
    source = SimpleNamespace(name=STORIES, documents={"val": 1}, files={"val": []})
    monkeypatch.setattr("examples.storyteller.evaluate.read_corpus", lambda _: SimpleNamespace(sources=[source]))
    monkeypatch.setattr("examples.storyteller.evaluate.read_texts", lambda _: ["A cat sat."])
    drawn: list[Sampling] = []

    class Enough(Exception):
        pass

    def tell(loaded: Loaded, asked: list[Request], sampling: Sampling) -> None:
        drawn.append(sampling)
        raise Enough

    monkeypatch.setattr("examples.storyteller.evaluate.tell", tell)
    for flags in ([], ["--temperature", "0.5", "--seed", "5"]):
        with pytest.raises(Enough):
            main(["corpus", "--checkpoint", "storyteller", *flags])
    own = Sampling(0.95, top_k=0, top_p=1.0, min_p=0.05, max_tokens=500)
    assert drawn == [own, replace(own, temperature=0.5, seed=5)]


def test_the_given_storyteller_is_small_and_its_card_names_its_sources() -> None:
    folder = SPEC.bundled_for_chat
    assert folder is not None and sum(path.stat().st_size for path in Path(folder).iterdir()) <= 20_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    for source in ("TinyStories", "CDLA-Sharing-1.0", "Simple English Wikipedia", "CC BY-SA", "Gutenberg", "Dolly"):
        assert source in card
    assert "NC" not in card
