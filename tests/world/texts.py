"""Texts on which tokenizers differ: scripts, code, emoji, control characters, long words, special tokens in text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

PIECES = (
    "Hello world",
    " don't, I'LL we've it's",
    "naïve café, Ångström",
    "日本語のテキスト、漢字とかな",
    "한국어 문장입니다.",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Привет, мир",
    "שלום עולם",
    "مرحبا بالعالم",
    "Γειά σου Κόσμε",
    "ⅷ Ⅻ ½ ² ① ٣٤ १२",
    "🤗🏳️‍🌈👩‍👩‍👧‍👦🇩🇪👍🏽",
    "def f(x):\n    return x**2 # ok\n",
    "\tfor (int i = 0; i < 10; ++i) { a[i] = 0x1F; }\r\n",
    "SELECT * FROM t WHERE a >= 3.14;",
    "https://example.org/a?b=c&d=%20",
    "1234567890 12,345.67 1e-5 2026-11-27",
    "   ",
    "\n\n\n",
    " \n \t ",
    "\x00\x01\x7f",
    "\u200b\ufeff\u00ad\u2028",
    "e\u0301 \u1e9b\u0323 ﬁ ＡＢＣ",
    "a" * 60,
    "Donaudampfschifffahrtsgesellschaft",
    "=" * 17 + "-" * 9,
    "...?!?!",
    "\U00010348\U0001f9ff\U000e0041",
    "�",
    "ǅ ŉ ß ẞ İ ı",
    "▁ Ġ Ċ Â",
)


def texts(count: int, specials: Sequence[str] = (), seed: int = 0) -> Iterator[str]:
    """`count` texts: each piece, then random joins of parts of pieces, of `specials`, and of any characters."""
    random_ = random.Random(seed)
    yield from PIECES[:count]
    for _ in range(count - len(PIECES)):
        parts = []
        for _ in range(random_.randint(1, 6)):
            kind = random_.random()
            if kind < 0.1 and specials:
                parts.append(random_.choice(specials))
            elif kind < 0.3:
                parts.append("".join(map(chr, random_.choices(_CHARACTERS, k=random_.randint(1, 8)))))
            else:
                piece = random_.choice(PIECES)
                start = random_.randrange(len(piece))
                parts.append(piece[start : start + random_.randint(1, 40)])
        yield random_.choice(("", " ", "\n")).join(parts)


_CHARACTERS = [n for n in (*range(0x3000), *range(0x4E00, 0x4F00), *range(0x1F300, 0x1F700))]
