"""Token ids to pieces of text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence

from tinyforge.errors import UserError
from tinyforge.text import TextTokenizer


def stream_text(tokens: Iterable[int], tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> Iterator[str]:
    """The text of tokens in pieces, as soon as it is sure: never half a character, and nothing from a stop string on.

    What may be the beginning of a stop string is held back until it is one or cannot be. Bytes that are no UTF-8 become
    replacement characters. At a stop string the iteration ends, and no further token is asked for.
    """
    if not all(stop):
        raise UserError("a stop string is empty; give at least one character")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    held = ""
    for token in tokens:
        held += decoder.decode(tokenizer.token_bytes(token))
        found = _find_first(held, stop)
        if found is not None:
            if held[:found]:
                yield held[:found]
            return
        sure = len(held) - _possible_start(held, stop)
        if sure:
            yield held[:sure]
            held = held[sure:]
    held += decoder.decode(b"", final=True)
    found = _find_first(held, stop)
    if held[:found]:
        yield held[:found]


def _find_first(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string in `text` begins."""
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)


def _possible_start(text: str, stop: Sequence[str]) -> int:
    """The length of the longest end of `text` with which a stop string may begin."""
    longest = max((len(s) - 1 for s in stop), default=0)
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)
