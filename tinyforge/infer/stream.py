"""Streaming text: token ids to pieces of text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence

from tinyforge.errors import UserError
from tinyforge.tokenizers import TextTokenizer


class TextStream:
    """The text of tokens, in pieces: never half a character, and nothing from a stop string on.

        stream = TextStream(tokenizer, stop=["\\n"])
        for token in tokens:
            piece = stream.push(token)          # may be empty
            if stream.stopped: break
        piece = stream.finish()

    Text that may begin a stop string is held back until that is decided. Bytes that are not UTF-8 become U+FFFD.
    decoded, released: characters so far, and those of them that are no longer held back.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> None:
        if not all(stop):
            raise UserError("a stop string is empty; give at least one character")
        self.tokenizer, self.stop = tokenizer, stop
        self.stopped = False
        self.matched: str | None = None  # the stop string at which it stopped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.decoded = self.released = 0

    def push(self, token: int) -> str:
        """The text that this token completes; "" after a stop string."""
        return self._take(self._decoder.decode(self.tokenizer.token_bytes(token)), last=False)

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        return self._take(self._decoder.decode(b"", final=True), last=True)

    def _take(self, new: str, last: bool) -> str:
        if self.stopped:
            return ""
        self.decoded += len(new)
        if not self.stop:
            self.released = self.decoded
            return new
        held = self._held + new
        found = _find_first(held, self.stop)
        self.stopped = found is not None
        if found is not None:
            self.matched = next(s for s in self.stop if held.startswith(s, found))
        sure = found if found is not None else len(held) - (0 if last else possible_start(held, self.stop))
        self._held = "" if self.stopped else held[sure:]
        self.released += sure
        return held[:sure]


def stream_text(tokens: Iterable[int], tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> Iterator[str]:
    """The non-empty pieces of a `TextStream`. Takes no further token after a stop string."""
    stream = TextStream(tokenizer, stop)
    for token in tokens:
        if piece := stream.push(token):
            yield piece
        if stream.stopped:
            return
    if piece := stream.finish():
        yield piece


def _find_first(text: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string in `text` begins."""
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)


def possible_start(text: str, stop: Sequence[str]) -> int:
    """The length of the longest suffix of `text` that begins a stop string."""
    longest = 0
    for s in stop:
        at = text.find(s[0], max(0, len(text) - len(s) + 1))
        while at >= 0 and not s.startswith(text[at:]):
            at = text.find(s[0], at + 1)
        longest = max(longest, len(text) - at if at >= 0 else 0)
    return longest
