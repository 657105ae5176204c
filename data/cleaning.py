"""What is cut out of a document before it is judged: text that many documents share, and the debris of markup.

    fixed("caf\u00c3\u00a9")        # mojibake undone by ftfy; NFC; no zero-width characters and soft hyphens
    masked("a@b.org")              # [EMAIL], where mail, telephone and IP addresses stand
    debris(text)                   # tables and templates of wiki markup: [(start, stop), ...]
    boilerplate(text, hits)        # sentences and lines that stand in many documents

A unit is a sentence or a line. `Words.windows` hashes, from every unit on, as many units as have 20 words; the
windows of many documents of a source are its boilerplate. It is cut at the beginning and the end of a document, and
within it where it makes up lines and a twentieth of the documents have it: sentences that come by a template of facts
stay. A text of which a quarter stands in it before, such as an article that was pasted twice, keeps one copy. What
would lose more than 60 % of its words is a duplicate, or a page of nothing else, and stays as it is.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from ipaddress import ip_address

from tinyforge.errors import UserError
from tinyforge.requirements import needs

Spans = list[tuple[int, int]]

_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
# What stands for a person or a machine. Only addresses that the internet routes, and no versions and sections; a
# telephone number with its country, or as North America writes it.
_LETTERS = "A-Za-z\u00c0-\u024f\u0370-\u05ff"  # of scripts with blanks between words; others touch an address
_W = f"{_LETTERS}0-9_"
PRIVATE = {
    "EMAIL": re.compile(
        rf"(?<![{_W}.%+-])[{_W}.%+-]{{1,64}}@(?:[{_LETTERS}0-9-]{{1,63}}\.){{1,8}}[{_LETTERS}]{{2,24}}(?![{_W}])"
    ),
    "IP": re.compile(rf"(?<![{_W}.-])(?<!ersion )(?<!ection )(?<!hapter )(?:{_BYTE}\.){{3}}{_BYTE}(?![{_W}-]|\.\d)"),
    "PHONE": re.compile(
        rf"(?<![{_W}.+/-])(?:\+\d{{1,3}}(?:[ .-]?\(\d{{1,4}}\))?(?:[ .-]?\d){{6,12}}"
        rf"|(?:1[ .-])?\(\d{{3}}\) ?\d{{3}}[ .-]\d{{4}}|(?:1[.-])?\d{{3}}([.-])\d{{3}}\1\d{{4}})(?![{_W}-]|\.\d)"
    ),
}

_INVISIBLE = "\u00ad\u200b\u200c\u200d\u2060\ufeff"  # soft hyphen, zero-width characters
_HIDDEN = f"[{_INVISIBLE}]"
_VANISH = str.maketrans("", "", _INVISIBLE)
_ENDS = re.compile(rf"\n|[.!?](?={_HIDDEN}* )")  # of units, as `Words` has them
_WORD = re.compile("[0-9A-Za-z\u00c0-\u1fff\u2080-\u2fff\u3040-\\U0010ffff]")
_DEBRIS = re.compile(
    r"(?P<row>^(?:[^\n|]*\|\|){2}[^\n]*\n?)"  # of tables
    r"|^(?:\{\||\|(?:[}+]|-(?![-:| ]*\|))|![^\n|]{0,40}\|)[^\n]*\n?"
    r"|^(?:thumb|left|right|center|\d+px)\|[^\n]*\n?"
    r"|\{\{[A-Za-z][^{}\n|]{0,80}\|[^{}]{0,4000}\}\}\n?"
    r"|\[\[(?:File|Image|Category):[^\[\]\n]{0,1000}\]\]\n?",
    re.MULTILINE,
)
# A template of which the extractor of Wikipedia left the parser functions; the lines around have the same signs.
_FUNCTION = re.compile(r"^[ \t]*#(?:if|ifeq|ifexist|ifexpr|switch):", re.MULTILINE)
_TEMPLATE_LINE = (
    r"^[ \t]*(?:#(?:if|ifeq|ifexist|ifexpr|switch):|[|}]|\{\{|<span$|class=\"Z3988\"|title=\"ctx_ver)[^\n]*(?:\n|\Z)"
)
_TEMPLATE = re.compile(rf"{_TEMPLATE_LINE}(?:(?:[ \t]*\n)*{_TEMPLATE_LINE})*", re.MULTILINE)
_CELL_WORDS = 3  # of a row, on average at most; in Wikipedia 28 lines with two || of 2,244 have more, all of them prose
_OR = re.compile(  # `||` of a program
    r"[;{]\s*$|&&|[=!<>]=|\$\w|\([^()\n|]*\|\|[^()\n]*\)|^\s*(?:if|elif|else|while|return|assert)\b"
    r"|\|\|\s*(?:exit|return|echo|true|false|die)\b"
)
_BLOB = 400  # characters of ASCII without a blank: encoded data, which the filter `blob` would drop the document for
_BLOBS = re.compile(rf"(?<![!-~])[!-~]{{{_BLOB},}}")
# A notice of a site: the phrases by which C4 (Raffel et al., 2020) drops lines, in a line that addresses its reader.
_NOTICE_SIGNS = (
    "ookie",
    "rivacy policy",
    "rivacy Policy",
    "erms of use",
    "erms of Use",
    "erms of serv",
    "erms of Serv",
)
_NOTICE = re.compile(
    r"\bcookie (?:policy|settings|preferences|consent|notice)\b|\b(?:uses?|use of|accept(?:ing)?|all|our|the) cookies\b"
    r"|\b(?:our|the|these|to) (?:\w+ ){0,2}(?:privacy policy|terms of (?:use|service))\b",
    re.IGNORECASE,
)
_TO_READER = re.compile(r"\b(?:we|our|us|you|your|this (?:web)?site)\b", re.IGNORECASE)
_OF_SITE = re.compile(
    r"\b(?:web ?sites?|sites?|browser|consent|personali[sz]e|policy|terms|settings|accept)\b", re.IGNORECASE
)
_NOTICE_WORDS = 100  # at most in a line; a longer one is a text about such notices
MOST_CUT = 0.6  # of the words of a document
# The share of its runs of words that stand in it before, from which a text is cut, not dropped as it would be by the
# filter of repeated phrases. Below it a text stays: the refrains of a poem, the answers of a liturgy.
REPEATED = 0.25


# A byte that begins a character in UTF-8 and one that continues it, read as Windows-1252: without, nothing is mojibake.
_MOJIBAKE = re.compile(
    "[\u00c2-\u00f4][\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013-\u2026"
    "\u2030\u2039\u203a\u20ac\u2122]"
)


_CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_BEFORE_CJK = bytes(range(0xE3))  # no byte of these begins such a character


def hashed(text: str) -> bytes:
    """The text as `Words` reads it: `normalised`, in lower case, and a Chinese character or a kana ends a word."""
    if text.isascii():
        return text.lower().encode()
    raw = normalised(text).lower().encode()
    # Two of a thousand articles in English have one; a search for the class of characters takes ten times as long.
    return _CJK.sub(r"\g<0> ", raw.decode()).encode() if raw.translate(None, _BEFORE_CJK) else raw


def normalised(text: str) -> str:
    """The text in NFC, without what cannot be seen."""
    if text.isascii():
        return text
    if any(character in text for character in _INVISIBLE):
        text = text.translate(_VANISH)
    return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)


def check_installed() -> None:
    """UserError that names the package for `fixed` if it is missing."""
    try:
        import ftfy  # noqa: F401
    except ImportError:
        raise UserError(needs("--fix-text", "ftfy", "data")) from None


def fixed(text: str) -> str:
    """The text with its mojibake undone, `normalised`."""
    if _MOJIBAKE.search(text):
        from ftfy import fix_encoding
        from ftfy.badness import is_bad

        text = "\n".join(
            fix_encoding(line) if _MOJIBAKE.search(line) and is_bad(line) else line for line in text.split("\n")
        )
    return normalised(text)


def masked(text: str) -> tuple[str, dict[str, int]]:
    """The text with [EMAIL], [IP] and [PHONE] in place of addresses and telephone numbers, and how many of each."""
    counts = {}
    for kind, pattern in PRIVATE.items():
        if kind == "EMAIL" and "@" not in text:
            continue
        found = [match.span() for match in pattern.finditer(text) if kind != "IP" or ip_address(match[0]).is_global]
        if found:
            starts, ends = [0, *(stop for _, stop in found)], [*(start for start, _ in found), len(text)]
            text = f"[{kind}]".join(text[start:end] for start, end in zip(starts, ends, strict=True))
            counts[kind] = len(found)
    return text, counts


def debris(text: str) -> Spans:
    """Rows of tables, templates and links to files of wiki markup, encoded data, and notices of web sites about cookies
    and terms."""
    found = Spans()
    if "#if:" in text or "#switch:" in text:
        found = [match.span() for match in _TEMPLATE.finditer(text) if _FUNCTION.search(match[0])]
    if _has_long_word(text):
        found += [match.span() for match in _BLOBS.finditer(text)]
    if "|" in text or "[[" in text:
        found += [match.span() for match in _DEBRIS.finditer(text) if not match["row"] or _is_row(match["row"])]
    if any(sign in text for sign in _NOTICE_SIGNS):
        start = 0
        for line in text.splitlines(keepends=True):
            if (
                all(part.search(line) for part in (_NOTICE, _TO_READER, _OF_SITE))
                and len(line.split()) <= _NOTICE_WORDS
            ):
                found.append((start, start + len(line)))
            start += len(line)
    return found


def _is_row(line: str) -> bool:
    """Whether a line with `||` has cells, and is no sentence with norms such as ||x||, nor a line of a program."""
    if _OR.search(line):
        return False
    words, cells = len(line.split()), line.count("||") + 1
    return words <= _CELL_WORDS * cells and not (words > cells and line.rstrip().endswith((".", ":", ",")))


def _has_long_word(text: str) -> bool:
    """Whether `_BLOB` characters have no blank among them; looks at one of a hundred."""
    place = 0
    while place + _BLOB <= len(text):
        blank = text.rfind(" ", place, place + _BLOB)
        if blank < 0 and (blank := text.rfind("\n", place, place + _BLOB)) < 0:
            return True
        place = blank + 1
    return False


def units(text: str) -> Spans:
    """The sentences and lines with a word, each up to the beginning of the next."""
    ends = [match.end() for match in _ENDS.finditer(text)]
    starts, found = [0, *ends], []
    for start, stop in zip(starts, [*ends, len(text)], strict=True):
        if _WORD.search(normalised(text[start:stop])):
            found.append((start, stop))
    return [(start, then) for (start, _), (then, _) in zip(found, [*found[1:], (len(text), 0)], strict=False)]


def boilerplate(text: str, hits: Sequence[tuple[int, int, bool]], again: Sequence[tuple[int, int]] = ()) -> Spans:
    """What is cut of a text.

    hits:  windows of units, first and stop, in many documents, and whether in very many.
    again: windows of units that stand in the text before, and are cut wherever they are.
    """
    parts = units(text)
    many, most, cut = ([False] * len(parts) for _ in range(3))
    for first, stop, often in hits:
        for index in range(first, min(stop, len(parts))):
            many[index] = True
            most[index] = most[index] or often
    for begin, stop in _runs(many):
        start, end = parts[begin][0], parts[stop - 1][1]
        at_line = (start == 0 or text[start - 1] == "\n") and (
            end == len(text) or text[:end].rstrip(" ").endswith("\n")
        )
        if begin == 0 or stop == len(parts) or (at_line and all(most[begin:stop])):
            cut[begin:stop] = [True] * (stop - begin)
    for first, stop in again:
        cut[first:stop] = [True] * len(cut[first:stop])
    chosen = [(parts[begin][0], parts[stop - 1][1]) for begin, stop in _runs(cut)]
    words = len(text.split())
    return chosen if sum(len(text[a:b].split()) for a, b in chosen) <= MOST_CUT * words else []


def _runs(flags: Sequence[bool]) -> Spans:
    """Where consecutive flags that are set begin and end."""
    edges = [index for index, flag in enumerate([*flags, False]) if flag != (index > 0 and flags[index - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def without(text: str, spans: Spans) -> str:
    """The text without the spans, which may overlap."""
    kept, end = [], 0
    for start, stop in sorted(spans):
        kept.append(text[end : max(start, end)])
        end = max(end, stop)
    left = "".join([*kept, text[end:]])
    return left.lstrip(" \n") if spans and not min(spans)[0] else left
