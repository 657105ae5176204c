"""A conversation: the turns so far, laid out as the one text that the model continues.

    conversation = Conversation(loaded)
    for piece in conversation.ask("What is 3 plus 4?", sampling): ...
    conversation.turns[-1].reply

A fine-tuned model sees each turn in Alpaca's form, the reply ended by </s>; a base model sees the plain text. What two
questions have in common stays in the key/value cache, so that a turn costs its own tokens only. When the context is
full, the oldest turns are left out.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.alpaca import END_OF_REPLY, render_prompt
from tinyforge.errors import UserError
from tinyforge.files import write_whole
from tinyforge.hub import Loaded
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.session import Session, Stats
from tinyforge.infer.stream import stream_text

FORMAT, VERSION = "nanoeuler-chat", 1
ROOM_FOR_REPLY = 4  # a quarter of the context at least


@dataclass(frozen=True)
class Turn:
    """What was said, and the reply: its text, and the tokens that the model made it of."""

    user: str
    reply: str
    tokens: tuple[int, ...]


class Conversation:
    """The turns with a model, oldest first. `notice` says what had to be left out of the last one, or is empty."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.tuned = loaded.meta["kind"] == "sft"
        self.session = Session(loaded.model)
        self.turns: list[Turn] = []
        self.notice = ""
        self._first = 0  # the oldest turn that the model still sees

    @property
    def context(self) -> int:
        return self.session.decoder.capacity

    @property
    def length(self) -> int:
        """Tokens of the turns that the model still sees."""
        return sum(map(len, map(self._turn, self.turns[self._first :])))

    @property
    def stats(self) -> Stats:
        return self.session.stats

    def ask(self, text: str, sampling: Sampling) -> Generator[str]:
        """Yield the reply in pieces that never cut a character in two; then it is a turn.

        The caller may stop at any piece, also by an exception: what the model has said until then is the reply.
        """
        if not text.strip():
            raise UserError("the prompt is empty; give at least one character")
        ids = self._fit(text, min(sampling.max_tokens, self.context // ROOM_FOR_REPLY))
        self.session.set_tokens(ids)
        pieces: list[str] = []
        try:
            stop = frozenset(self.loaded.tokenizer.specials.values())
            tokens = (token.id for token in self.session.generate(sampling, stop))
            for piece in stream_text(tokens, self.loaded.tokenizer):
                pieces.append(piece)
                yield piece
            if len(self.session.tokens) == self.context:
                self.notice = f"the reply ends here: the context of {self.context} tokens is full"
        finally:
            self.turns.append(Turn(text, "".join(pieces), tuple(self.session.tokens[len(ids) :])))

    def _fit(self, text: str, room: int) -> list[int]:
        """The ids of the turns that fit, the new one last, with `room` left for the reply."""
        self.notice = ""
        new = self._prompt(text)
        if len(new) > self.context - room:
            new = self._shortened(text, len(new), room)
        seen = [self._turn(turn) for turn in self.turns[self._first :]]
        dropped = 0
        while sum(map(len, seen[dropped:])) + len(new) > self.context - room:
            dropped += 1
        self._first += dropped
        if dropped and not self.notice:
            turns = "the oldest turn was" if dropped == 1 else f"the {dropped} oldest turns were"
            self.notice = f"the context of {self.context} tokens is full: {turns} left out"
        return [i for part in (*seen[dropped:], new) for i in part]

    def _shortened(self, text: str, tokens: int, room: int) -> list[int]:
        """The prompt with the beginning of what was said left out."""
        tokenizer = self.loaded.tokenizer
        ids = tokenizer.encode(text)
        kept = ids[max(1, tokens - (self.context - room)) :]
        # Cut ids can join otherwise when they are text again: let go of a few more until it fits.
        while kept and len(new := self._prompt(tokenizer.decode(kept))) > self.context - room:
            kept = kept[1:]
        if not kept:
            raise UserError(f"the context of {self.context} tokens has no room for a prompt; use another model")
        left_out = len(ids) - len(kept)
        self.notice = f"that is {tokens} tokens, {self.context - room} fit: the first {left_out} tokens were left out"
        return new

    def _prompt(self, text: str) -> list[int]:
        # Special tokens typed as text stay text: encode never makes them.
        return self.loaded.tokenizer.encode(render_prompt(text) if self.tuned else text)

    def _turn(self, turn: Turn) -> list[int]:
        end = [self.loaded.tokenizer.specials[END_OF_REPLY]] if self.tuned else []
        return [*self._prompt(turn.user), *turn.tokens, *end]

    def clear(self) -> None:
        """Forget all turns."""
        self.turns.clear()
        self._first = 0

    def undo(self) -> Turn:
        """Take the last turn back."""
        if not self.turns:
            raise UserError("there is no turn to take back; say something first")
        self._first = min(self._first, len(self.turns) - 1)
        return self.turns.pop()

    # --- files

    def save(self, path: Path) -> None:
        """Write the turns as JSON. A file that is no saved conversation is not replaced."""
        if path.exists():
            _read(path)
        turns = [{"user": turn.user, "reply": turn.reply} for turn in self.turns]
        content = json.dumps({"format": FORMAT, "version": VERSION, "turns": turns}, indent=1) + "\n"
        try:
            write_whole(path, content)
        except OSError as error:
            raise UserError(f"cannot save {path}: {error.strerror}; choose another place") from error

    def load(self, path: Path) -> None:
        """Replace the turns by those of a file that `save` wrote."""
        encode = self.loaded.tokenizer.encode
        self.turns = [Turn(user, reply, tuple(encode(reply))) for user, reply in _read(path)]
        self._first = 0


def _read(path: Path) -> list[tuple[str, str]]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UserError(f"{path} is no saved conversation ({error}); choose another file") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is no saved conversation (no format {FORMAT}); choose another file")
    if content.get("version") != VERSION:
        raise UserError(f"{path} has version {content.get('version')}, this program reads {VERSION}; save it again")
    turns = content.get("turns")
    if not isinstance(turns, list):
        raise UserError(f"{path}: got no list of turns; the file is damaged, choose another")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(name), str) for name in ("user", "reply")):
            raise UserError(f"{path}: turn {number} wants the texts 'user' and 'reply'; mend or remove it")
    return [(turn["user"], turn["reply"]) for turn in turns]
