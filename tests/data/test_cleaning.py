"""What is cut out before a document is judged: boilerplate, debris of markup; and text that is repaired."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import duckdb
import pytest

from tests.data.conftest import fault_of
from tests.data.test_corpus import filter_file, near, prose, rows, texts_of, write_source
from tests.data.test_dedup import jaccard
from tinyforge.data.cleaning import REPEATED, boilerplate, debris, fixed, normalised, units, without
from tinyforge.data.corpus import Settings, build_corpus
from tinyforge.data.dedup import Words
from tinyforge.data.source import Document, read_source

HEADER = "This page belongs to a library. It may be copied, as long as this line stands above it, by all who like it.\n"
FOOTER = "Home\nAbout us\nContact\nAll the rights are with those who wrote it, and none with us, who only collect.\n"


def test_units_are_those_of_words() -> None:
    rng = random.Random(0)
    pieces = ["word", "a", " ", ". ", "! ", "\n", "\n\n", "...", ".\n", "é", "\u200b", "1.5", "? No. "]
    texts = ["", "...", *("".join(rng.choice(pieces) for _ in range(60)) for _ in range(60))]
    hashes, of_text, first, stop = Words(texts).windows(4)
    expected = []
    for number, text in enumerate(texts):
        parts = units(text)
        counts = [int(Words([text[a:b]]).counts[0]) for a, b in parts]
        assert all(counts) and sum(counts) == Words([text]).counts[0]
        for a in range(len(parts)):
            if enough := [b for b in range(a + 1, len(parts) + 1) if sum(counts[a:b]) >= 4]:
                expected.append((number, a, enough[0]))
    assert list(zip(of_text.tolist(), first.tolist(), stop.tolist(), strict=True)) == expected
    same = {}
    for key, number, a, b in zip(hashes.tolist(), *zip(*expected, strict=True), strict=True):
        form = Words([texts[number][units(texts[number])[a][0] : units(texts[number])[b - 1][1]]]).normal_forms()[0]
        assert same.setdefault(key, form) == form


def test_boilerplate_goes_at_the_ends_and_within_as_lines_in_very_many() -> None:
    text = (
        "One of all. Two of all. Own text here.\nThree of all.\nMore of it. Four of all. The own end of it is long.\n"
    )
    assert without(text, boilerplate(text, [(0, 2, False)])) == text[24:]
    assert boilerplate(text, [(3, 4, False)]) == [] and boilerplate(text, [(5, 6, True)]) == []
    assert without(text, boilerplate(text, [(3, 4, True)])) == text.replace("Three of all.\n", "")
    assert boilerplate(text, [(0, 6, True)]) == []  # a duplicate, or nothing else


def test_rows_of_tables_templates_and_links_to_files_are_debris() -> None:
    rows_, template = "10||2||3||4\n20||1||0||colspan=2|-\n!Total||30||3\n", "{{Infobox person|name=X\n|born=1950}}\n"
    files = "[[File:a.jpg|thumb|A b]]\nthumb|right|A town\n"
    text = f"He played.\nStatistics.\n{rows_}He left || early.\n{template}{files}End.\n"
    assert without(text, debris(text)) == "He played.\nStatistics.\nHe left || early.\nEnd.\n"
    assert not debris("{{x}} {% if a || b %}") and not debris("|a| <= |b|")
    assert debris("a | b and [x] stay") == []


def test_sentences_with_norms_and_programs_are_no_rows_of_tables() -> None:
    prose = "This implies that ||x|| = ||x*||, and that the norm ||xx*|| is its square.\n"
    for line in (
        "return a || b || c;",
        "x = (a || b || c)",
        "make || cmake || exit 1",
        "if a || b || c",
        "a == 1 || b || c",
    ):
        assert debris(f"{line}\n") == []
    assert debris(prose) == [] and without(f"{prose}1||2||3 or 4\n", debris(f"{prose}1||2||3 or 4\n")) == prose


def test_the_functions_of_a_template_are_debris_and_other_lines_with_its_signs_are_not() -> None:
    template = " #if: \n #if: A Book\n |, \n }} {{Citation/make link\n | 1={{\n  \n |amp = \n}}<span\n"
    text = f"It is a book.\n\n{template}\nMore of it.\n"
    assert without(text, debris(text)) == "It is a book.\n\n\nMore of it.\n"
    for other in ("| a | b |\n|---|---|\n| 1 | 2 |\n", "{{ user }}\n#if x\n#endif\n", "See #if: it is a function.\n"):
        assert debris(other) == []


def test_debris_of_a_hostile_text_is_found_in_linear_time() -> None:
    lines = ("#if:\n" + "   \n" * 50, "\n | \n}}", "#if: {{", " |", "||")
    for piece in (*lines, " " * 1000, "a" * 399 + " ", "{{a|", "[[File:a"):
        debris("#if:\n(" + "b" * 400 + piece * (200_000 // len(piece)))


def test_encoded_data_is_cut_out_of_an_article_and_the_rest_judged(tmp_path: Path) -> None:
    rng, blob = random.Random(9), "iVBORw0KGgo=" * 40
    assert debris("a" * 399) == [] == debris(f"{'a' * 399} {'b' * 399}\n{'c' * 399}") == debris("\u4e00" * 500)
    text = prose(rng, 100)
    sources = [write_source(tmp_path / "s", [f"{text}\n![A picture](data:image/png;base64,{blob})\nThe end.", blob])]
    build_corpus(sources, tmp_path / "out", Settings(val_share=0.0), workers=1)
    [(first, cut), (second, _)] = rows(tmp_path / "out", "dropped, cut_bytes")
    assert (first, second) == (None, "too-short") and cut == len(f"picture](data:image/png;base64,{blob})")
    [kept] = texts_of(tmp_path / "out", "train").values()
    assert kept == f"{text}\n![A \nThe end."


def test_notices_of_sites_are_debris_and_texts_about_them_are_not() -> None:
    notices = [
        "This website uses cookies to improve your experience.\n",
        "By clicking accept you consent to the use of cookies. Read our cookie policy.\n",
        "Please read our Terms of Use and Privacy Policy before you continue.\n",
    ]
    prose = [
        "You can use cookies instead of bread, and our oven does the rest.\n",
        "In terms of use, the old bridge was better for us.\n",
        "A cookie is a small file. Sites store it in the browser.\n",
        "The privacy policy of the company was changed in 2012.\n",
        "We looked at what the website uses cookies for. " + "Then we wrote it down. " * 30 + "\n",
    ]
    mixed = "".join(a + b for a, b in zip(prose, [*notices, "", ""], strict=True))
    assert without(mixed, debris(mixed)) == "".join(prose)


def test_the_header_and_the_footer_of_all_pages_go_and_are_counted(tmp_path: Path) -> None:
    rng = random.Random(1)
    bodies = [prose(rng, rng.randrange(80, 200)).strip() for _ in range(40)]
    documents = [f"{HEADER}{body}\n{FOOTER}" for body in bodies]
    copies = [f"{bodies[0]} {n}" for n in range(12)]  # near-duplicates: not boilerplate of each other
    sources = [
        write_source(tmp_path / "s", [*documents, *copies]),
        write_source(tmp_path / "other", [HEADER + bodies[0]]),
    ]
    build_corpus(sources, tmp_path / "out", Settings(val_share=0.1), filter_file(tmp_path), workers=1)
    kept = texts_of(tmp_path / "out", "train") | texts_of(tmp_path / "out", "val")
    assert all(kept[str(n)].strip() == body for n, body in enumerate(bodies) if n)
    dropped = rows(tmp_path / "out", "dropped, cut_bytes", "WHERE source = 'other' OR number >= 40 ORDER BY number")
    assert dropped == [("near-duplicate", None)] * 12 + [("near-duplicate", None)]  # one page has no header of many
    with duckdb.connect(str(tmp_path / "out" / "corpus.duckdb"), read_only=True) as db:
        found = db.execute("SELECT source, documents, example FROM boilerplate ORDER BY example").fetchall()
        cuts = db.execute("SELECT begin, stop FROM cuts WHERE number = 7 ORDER BY begin").fetchall()
    assert found == [("s", 39, FOOTER), ("s", 39, HEADER)]  # of the first, with its copies, too much is shared
    # The catalogue has what it takes to restore a document of its source.
    assert without(documents[7], cuts).strip() == bodies[7] and sum(b - a for a, b in cuts) == len(HEADER + FOOTER)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## What was cut out" in report and "| s | 39 | This page belongs" in report
    build_corpus(sources, tmp_path / "all", Settings(boilerplate=0), filter_file(tmp_path), workers=1)
    assert not rows(tmp_path / "all", "1", "WHERE cut_bytes > 0") and read_source(sources[0]).documents == 52


def test_a_copy_in_another_source_is_found_where_only_one_of_the_two_is_cut(tmp_path: Path) -> None:
    rng = random.Random(6)
    bodies = [prose(rng, 90).strip() for _ in range(40)]
    copy = near(HEADER + bodies[3], 0.01, rng)
    assert jaccard(HEADER + bodies[3], copy) > 0.8 > jaccard(bodies[3], copy)
    one, other = [HEADER + body for body in bodies], [copy, HEADER + prose(rng, 90)]
    sources = [write_source(tmp_path / "s", one), write_source(tmp_path / "other", other)]
    build_corpus(sources, tmp_path / "out", Settings(val_share=0.0), filter_file(tmp_path), workers=1)
    assert rows(tmp_path / "out", "dropped, cluster", "WHERE number > 39 ORDER BY number") == [
        ("near-duplicate", 3),
        (None, None),
    ]


def test_a_text_pasted_twice_keeps_one_copy_and_junk_that_repeats_itself_still_goes(tmp_path: Path) -> None:
    rng = random.Random(7)
    article, more, first, then = (prose(rng, 160).strip() for _ in range(4))
    sentence, refrain = prose(rng, 30).strip().replace("\n\n", " ") + ". ", prose(rng, 24).strip() + ".\n\n"
    documents = {
        "twice": f"{article}\n\n{more}\n\n{article}",
        "no blank between": f"{first} {then}{then}".replace("\n\n", " "),
        # Refrains, of which each has 24 of 184 words: below a quarter.
        "verse": refrain.join(f"{prose(rng, 80).strip()}.\n\n" for _ in range(3)),
        "spam": sentence * 15,
        "one line": prose(rng, 80) + "buy the best shoes of the town and the best hats of the town " * 15,
        "thrice": "\n\n".join([article[::-1]] * 3),
    }
    source = write_source(tmp_path / "s", [Document(name, text) for name, text in documents.items()])
    build_corpus([source], tmp_path / "out", Settings(val_share=0.0), workers=1)
    kept = texts_of(tmp_path / "out", "train")
    assert kept["twice"].strip() == f"{article}\n\n{more}"
    # The two sentences at the joint are one, which stands nowhere else.
    sentences = then.split("\n\n")
    assert kept["no blank between"].split() == f"{first} {then}{sentences[0]} {sentences[-1]}".split()
    assert kept["verse"] == documents["verse"]
    assert set(kept) == {"twice", "no blank between", "verse"}
    for name, share in rows(tmp_path / "out", "id, repeats"):
        assert (share > REPEATED) == (name not in kept), name
    build_corpus([source], tmp_path / "all", Settings(val_share=0.0, boilerplate=0), workers=1)
    assert set(texts_of(tmp_path / "all", "train")) == {"verse"}


def test_what_is_hashed_is_nfc_and_without_what_cannot_be_seen(tmp_path: Path) -> None:
    rng = random.Random(2)
    # Letters with marks of six alphabets; a Korean syllable is two or three letters in NFD.
    marked = "Ünïcödé żółć Việt ngữ йё άέή 한국어 が"
    texts = [f"{marked} {prose(rng, 80)}" for _ in range(80)]
    same = [unicodedata.normalize("NFD", text) for text in texts]
    for n, hidden in enumerate("\u200b\u00ad\ufeff\u200d\u2060" * 2):
        same.append(texts[n].replace("a", f"a{hidden}", 9))
    assert len({*texts, *same}) == 170
    source = write_source(tmp_path / "s", [*texts, *same])
    build_corpus([source], tmp_path / "out", Settings(val_share=0.0), filter_file(tmp_path), workers=1)
    found = rows(tmp_path / "out", "dropped, cluster")
    assert [reason for reason, _ in found] == [None] * 80 + ["exact-duplicate"] * 90
    assert [cluster for _, cluster in found[80:]] == [*range(80), *range(10)]
    assert texts_of(tmp_path / "out", "train")["0"] == texts[0] and normalised("plain") == "plain"


def test_text_is_fixed_where_asked_to(tmp_path: Path) -> None:
    pytest.importorskip("ftfy", reason='mojibake: pip install -e ".[data]"')
    good = "Das schöne „Bärenfell“ — naïve Œuvre. " + prose(random.Random(3), 80)
    bad = good.encode().decode("cp1252", "replace").replace("\ufffd", "")
    hidden = "zero\u200bwidth and soft\u00adhyphen " + prose(random.Random(4), 80)
    assert fixed("schÃ¶n") == "schön" and fixed("plain") == "plain"
    source = write_source(
        tmp_path / "s", [Document("bad", good[:9] + bad[11:]), Document("hidden", hidden), Document("x", good[40:])]
    )
    build_corpus([source], tmp_path / "out", Settings(val_share=0.0, fix_text=True), filter_file(tmp_path), workers=1)
    kept = texts_of(tmp_path / "out", "train")
    assert "Ã" not in kept["bad"] and kept["hidden"] == hidden.replace("\u200b", "").replace("\u00ad", "")
    assert rows(tmp_path / "out", "dropped", "WHERE id = 'x'") == [("near-duplicate",)]  # of the fixed one


def test_a_negative_count_is_refused(tmp_path: Path) -> None:
    assert "--boilerplate is -1, expected 0 or more" in fault_of(Settings, boilerplate=-1)


@pytest.mark.parametrize("letters", [[(0x4E00, 0x9FA5)], [(0x3041, 0x3097), (0x30A1, 0x30FB), (0x4E00, 0x9FA5)]])
def test_chinese_and_japanese_with_few_characters_changed_are_near_duplicates(
    letters: list[tuple[int, int]], tmp_path: Path
) -> None:
    rng = random.Random(5)

    def letter() -> str:
        return chr(rng.randrange(*rng.choice(letters)))

    texts = ["".join(letter() + "\u3002" * (n % 30 == 29) for n in range(600)) for _ in range(40)]
    edited = ["".join(letter() if rng.random() < 0.005 else c for c in text) for text in texts]
    source = write_source(tmp_path / "s", [*texts, *edited])
    build_corpus([source], tmp_path / "out", Settings(val_share=0.0), filter_file(tmp_path), workers=1)
    found = rows(tmp_path / "out", "dropped IS NOT NULL, cluster", "WHERE number >= 40 ORDER BY number")
    assert sum(gone and cluster == n for n, (gone, cluster) in enumerate(found)) >= 38
