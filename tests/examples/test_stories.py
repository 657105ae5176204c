"""Stories under other names, what is found in a story, and the instructions made of it."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from examples.storyteller import stories
from examples.storyteller.stories import (
    DID,
    KIND_OF,
    NAMES,
    Hero,
    asked_for,
    asks_for_a_story,
    description,
    facts,
    hero_of,
    invented_name,
    keeps_name,
    main,
    misses,
    name_counts,
    names_in,
    other_names,
    records,
    rename,
    small_story,
    typed_story,
    unanswered,
)
from tinyforge.data.alpaca import Record, read_records
from tinyforge.data.corpus import Settings, build_corpus
from tinyforge.data.source import Document, SourceWriter
from tinyforge.errors import UserError

STORY = (
    "Once upon a time, there was a little, kind girl named Lily. She lived in a small house. Lily loved to play "
    "outside.\n"
    "One day, Lily went to the park with her dog, Spot. Lily found a red ball. Then she saw Tim. Tim lost his hat. Tim "
    'lost his shoe. "Do not cry," said Lily. She gave Tim the red ball, and he was happy.'
)


def test_names_are_exchanged_everywhere_and_all_at_once() -> None:
    assert names_in(STORY) == ["Lily", "Spot", "Tim"]
    swapped = rename(STORY, {"Lily": "Tim", "Tim": "Lily"})
    counts = [Counter(re.findall(r"\w+", text)) for text in (STORY, swapped)]
    assert counts[0]["Lily"] == counts[1]["Tim"] and counts[0]["Tim"] == counts[1]["Lily"]
    assert rename(swapped, {"Lily": "Tim", "Tim": "Lily"}) == STORY
    assert rename("Timothy's Lilypad", {"Tim": "Bo", "Lily": "Ann"}) == "Timothy's Lilypad"  # whole words only


def test_other_names_are_of_the_same_kind_and_never_two_alike() -> None:
    rng, counts = random.Random(0), name_counts([STORY])
    for _ in range(200):
        chosen = other_names(STORY, rng, counts)
        assert list(chosen) == names_in(STORY) and len(set(chosen.values())) == 3
        assert all(KIND_OF[a] == KIND_OF[b] for a, b in chosen.items())
    drawn = Counter(name for _ in range(400) for name in other_names(STORY, rng).values())
    invented = sum(n for name, n in drawn.items() if name not in KIND_OF)
    assert 0.23 < invented / drawn.total() < 0.43
    assert all(re.fullmatch(r"[A-Z][a-z]{2,}", invented_name(rng)) for _ in range(200))


def test_names_are_drawn_as_often_as_the_corpus_has_them() -> None:
    rng, counts = random.Random(0), name_counts([STORY] * 300 + [STORY.replace("Lily", "Mia")] * 100)
    drawn = Counter(other_names("Anna slept.", rng, counts)["Anna"] for _ in range(1000))
    assert 0.5 < drawn["Lily"] / 1000 < 0.7 and 0.13 < drawn["Mia"] / 1000 < 0.27


def test_what_a_story_says() -> None:
    hero = hero_of(STORY)
    assert hero == Hero("Lily", "girl", "little, kind ") and hero.full == "a little, kind girl"
    answers = {fact.question: fact.answer for fact in facts(STORY)}
    assert answers["Who is the story about?"] == "The story is about a little, kind girl named Lily."
    assert answers["What did Lily find?"] == "Lily found a red ball."
    assert answers["Where did Lily go?"] == "Lily went to the park."
    assert answers["Where did Lily live?"] == "Lily lived in a small house."
    assert "What did Tim lose?" not in answers  # two things
    assert description(STORY, hero) == (
        "Lily is a little, kind girl. She lived in a small house. She loved to play outside."
    )
    assert hero_of("The rain fell all day.") is None and facts("The rain fell all day.") == []


def test_she_is_not_taken_for_the_hero_once_another_has_come() -> None:
    story = "Once there was a girl named Mia. Mia met Sue. She found a coin."
    assert "What did Mia find?" not in {fact.question for fact in facts(story)}
    assert "What did Mia find?" in {fact.question for fact in facts(story.replace(" Mia met Sue.", ""))}


def test_small_stories_hold_what_they_are_asked_for() -> None:
    rng = random.Random(1)
    for _ in range(300):
        story, hero, asked = small_story(rng)
        assert hero_of(story) == hero
        for fact in asked:
            content = set(re.findall(r"\w+", fact.answer.lower())) - set(re.findall(r"\w+", fact.question.lower()))
            # The words of the answer's own.
            content -= {"because", "was", "cried", "the", "broken", "is", "about", "named", *DID}
            assert content <= set(re.findall(r"\w+", story.lower())), (story, fact)


def test_typed_stories_are_short_and_every_question_has_one_answer() -> None:
    rng = random.Random(5)
    for _ in range(500):
        story, hero, asked = typed_story(rng)
        assert not re.search(r"[{}]|\ba [aeiou](?!ne)|\ban [^aeiou]", story) and re.fullmatch(r"[A-Z].*[.]", story)
        assert 2 <= len(re.findall(r"[.](?: |$)", story)) <= 7
        assert hero is None or hero.name in story.split(".")[0]
        answers: dict[str, set[str]] = {}
        for fact in asked:
            answers.setdefault(fact.question, set()).add(fact.answer)
            content = set(re.findall(r"\w+", fact.answer.lower())) - set(re.findall(r"\w+", fact.question.lower()))
            content -= {"is", "about", "named", "the", "got"}
            assert content <= set(re.findall(r"\w+", story.lower())), (story, fact)
        assert all(len(found) == 1 for found in answers.values()), (story, answers)


def test_a_question_stands_on_the_storys_line_as_well_as_below() -> None:
    told = [rename(STORY, {"Lily": girl}) for girl in NAMES["girl"][:60]]
    last = [r.instruction[:-1] for r in records(told, [], 0) if not r.history and r.instruction.endswith("?")]
    joined = Counter(
        re.findall(r"[.!\"](\s+)(?:What|Who|Where|Why) [^.!]*$", text)[0]
        for text in last
        if re.search(r"[.!\"]\s+(?:What|Who|Where|Why) [^.!]*$", text)
    )
    assert joined[" "] > joined.total() / 3 and joined["\n\n"] > joined.total() / 8


def test_a_story_that_another_takes_over_is_not_asked_for_by_the_heros_name() -> None:
    stolen = STORY.split("Lily")
    story = f"{stolen[0]}Lily{'Sam'.join(stolen[1:])}"
    assert not keeps_name(story, "Lily")
    tellings = [r.instruction for r in records([story] * 40, [], 0) if r.output.startswith(stolen[0])]
    assert len(tellings) > 60 and not any(re.search(r" (named|called) | about [A-Z]", text) for text in tellings)


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        ("Tell me a story about a dog named Zelda.", ("Zelda", {"dog"})),
        ("tell me a story about Tim", ("Tim", set())),
        ("Tell my child a story about a kind bear and a red kite.", ("", {"bear"})),
        ("Tell me a story.", ("", set())),
    ],
)
def test_what_a_request_asks_for(request_: str, wanted: tuple[str, set[str]]) -> None:
    assert asks_for_a_story(Record(request_, "", "Once ..."))
    assert asked_for(request_) == wanted
    assert not misses(request_, f"{wanted[0] or 'Ann'} was a dog. She met a Bear. {wanted[0] or 'Ann'} slept.")
    assert misses(request_, "A cat slept.") == bool(wanted[0]) + bool(wanted[1])


def test_every_way_to_ask_is_a_request_and_nothing_else_is(corpus: Path) -> None:
    asked = [text.format(x="a girl named Lily and a ball") for text in (*stories.SAY["tell"], *stories.SAY["tell_any"])]
    assert all(asks_for_a_story(Record(text, "", "")) for text in asked)
    for other in (*stories.SAY["who"], "Continue the story: Once there was a dog.", "Who is the story about?"):
        assert not asks_for_a_story(Record(other, "", ""))
    assert not asks_for_a_story(Record(asked[0], "Once there was a dog.", ""))
    assert not asks_for_a_story(Record(asked[0], "", "", (("Hello", "Hi"),)))


def test_a_question_without_an_answer_is_one() -> None:
    rng = random.Random(2)
    found = [fact for _ in range(300) if (fact := unanswered(STORY, Hero("Lily", "girl", ""), rng))]
    assert found
    for fact in found:
        assert not re.search(r"\b(find|lose) ", fact.question) or "There is no" in fact.answer
        if "There is no" in fact.answer:
            assert fact.answer.split()[3] not in STORY


def test_records_are_whole_and_the_same_for_a_seed() -> None:
    told = [rename(STORY, {"Lily": girl}) for girl in NAMES["girl"][:60]]
    made = list(records(told, ["What is the speed of light?"], 0))
    assert made == list(records(told, ["What is the speed of light?"], 0)) != list(records(told, [], 1))
    assert len(made) > 150
    for record in made:
        texts = [record.instruction, record.output, *(text for turn in record.history for text in turn)]
        assert all(text.strip() for text in texts)
        assert not any(re.search(r"\{\w\}|\ba [aeiou](?!ne)", text) for text in (record.instruction, record.output))
    named = [m[1] for r in made if (m := re.search(r"story about .* (?:named|called) (\w+)", r.instruction))]
    assert len(set(named)) > 20


# --- the commands


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories")
    with SourceWriter(folder / "source", "tinystories", "CDLA-Sharing-1.0") as writer:
        for number, girl in enumerate(NAMES["girl"][:40]):
            boys = " ".join(NAMES["boy"][number : number + 30])
            text = STORY.replace("Lily", girl).replace("red ball", f"ball of {boys}", 1)
            writer.add(Document(str(number), f"{text}\n"))
    settings = Settings(val_share=0.2, similarity=1.0, max_overlap=1.0, boilerplate=0)  # one story, told 40 times
    build_corpus([folder / "source"], folder / "corpus", settings, workers=1)
    return folder / "corpus"


def test_the_commands_read_training_stories_alone(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))["sources"][0]["train"]["documents"]
    assert 0 < trained < 40
    main(["retell", str(corpus), "--out", str(tmp_path / "retold"), "--copies", "3"])
    assert f"{3 * trained} stories retold" in capsys.readouterr().out
    main(["instruct", str(corpus), "--out", str(tmp_path / "made")])
    assert len(read_records([tmp_path / "made" / "alpaca.json"])) > 2 * trained
    source = json.loads((tmp_path / "made" / "source.json").read_text(encoding="utf-8"))
    assert source["licence"] == "CDLA-Sharing-1.0"


def test_a_corpus_without_stories_is_refused(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stories, "STORIES", "fables")
    with pytest.raises(UserError, match=r"no source fables; make it with"):
        main(["instruct", str(corpus), "--out", str(tmp_path / "made")])
    with pytest.raises(UserError, match="--copies is 0"):
        main(["retell", str(corpus), "--out", str(tmp_path / "made"), "--copies", "0"])
    assert not (tmp_path / "made").exists()
