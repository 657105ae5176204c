"""What page/tokenizer.js needs to encode as the model's own tokenizer and chat template do: data instead of programs.

    pattern(tokenizer)              the regular expression of its pieces, in JavaScript's syntax
    fixed_parts(loaded)             the texts and special tokens between a conversation's messages

A published model's chat template is a Jinja program, which the page does not run. Nearly all of them write fixed parts
around the messages: these are found by rendering a conversation, and others of them must then give the same ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tinyforge.errors import UserError
from tinyforge.formats import Loaded, hub
from tinyforge.tokenizers.chat_templates import (
    END_OF_REPLY,
    AnyTemplate,
    ChatTemplate,
    Special,
    Splitter,
    Turn,
    encode_pieces,
    end_of_reply,
)
from tinyforge.tokenizers.jinja_client import Refusal
from tinyforge.tokenizers.pieces import CJK, WHITE_SPACE
from tinyforge.tokenizers.vocabulary import id_of, start_ids

CLASSES = {
    **{name: rf"\p{{{name}}}" for name in ("L", "M", "N")},
    "UPPER": r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}",
    "LOWER": r"\p{Ll}\p{Lm}\p{Lo}\p{M}",
    "SIGN": r"\p{P}\p{S}",
    "S": WHITE_SPACE,
    "CJK": CJK,
}
"""The classes in `Pattern.regex` as JavaScript has them."""
# Browsers of 2024 have no (?i:...) and (?s:...).
SPELT_OUT = {
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)": "(?:'[sS\u017f]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
    "(?s:.)": "[^]",
}
SYSTEM, FIRST, REPLY, SECOND = "qzxS", "qzxA", "qzxB", "qzxC"  # messages that no template writes itself
TRIALS: tuple[tuple[list[Turn], bool], ...] = (
    ([(" Hello\n", None)], False),
    ([("One", "Two."), ("Three?", "Four"), (" 5", None)], False),
    ([("One", "Two."), ("Three?", None)], True),
)
"""Conversations that the fixed parts must encode as the template does, and whether they have a system prompt."""

Part = str | int
"""A text, or the id of a special token."""


def pattern(tokenizer: Any) -> str:
    """tokenizer: a `Tokenizer` of merges."""
    found = tokenizer.merging.pattern.regex.format_map(CLASSES)
    for python, javascript in SPELT_OUT.items():
        found = found.replace(python, javascript)
    return found


def fixed_parts(loaded: Loaded) -> dict[str, Any]:
    """The parts of a conversation before, between and after its messages, for page/tokenizer.js. UserError where the
    template does not write its messages between fixed parts.

    start: ids that every text begins with. open: before the first user message; system: before and after a system
    prompt in its place, null where the template takes none. asked: between a user message and its reply. answered:
    between a reply and the next user message. strips: messages lose the white space around them. ends: ids that end a
    reply.
    """
    tokenizer, template = loaded.tokenizer, loaded.template
    hello = _rendered(tokenizer, template, [(" qzxA ", None)])
    strips = not any(isinstance(part, str) and " qzxA " in part for part in hello)
    pair = [(FIRST, REPLY), (SECOND, None)]
    opened, asked, answered, again = _between(_rendered(tokenizer, template, pair), [FIRST, REPLY, SECOND])
    found: dict[str, Any] = {
        "start": [] if isinstance(template, ChatTemplate) else start_ids(tokenizer),
        "open": opened,
        "system": None,
        "asked": asked,
        "answered": answered,
        "strips": strips,
        "ends": sorted(template.stop_ids(tokenizer)),
    }
    try:
        *system, _ = _between(_rendered(tokenizer, template, [(FIRST, None)], SYSTEM), [SYSTEM, FIRST])
        found["system"] = system
    except Refusal:
        pass
    for turns, with_system in TRIALS:
        if with_system and found["system"] is None:
            continue
        prompt = "Be brief." if with_system else ""
        if asked != again or encode(tokenizer, found, turns, prompt) != template.encode(tokenizer, turns, prompt):
            raise UserError(
                f"{hub.called(loaded.path)}: its chat template does not write the same parts around every message, "
                "as the page does; choose another with --template"
            )
    return found


def encode(tokenizer: Any, parts: dict[str, Any], turns: Sequence[Turn], system: str = "") -> list[int]:
    """The ids of a conversation that ends with a question, as page/tokenizer.js encodes it."""

    def clean(text: str) -> str:
        return text.strip() if parts["strips"] else text

    before, after = parts["system"] if system else ([], parts["open"])
    ids = list(parts["start"])
    written = [*before, *([clean(system)] if system else []), *after]
    for user, reply in turns:
        written += [clean(user), *parts["asked"]]
        if reply is not None:
            ids += _ids(tokenizer, written) + tokenizer.encode(clean(str(reply)), "text")
            written = list(parts["answered"])
    return ids + _ids(tokenizer, written)


def _ids(tokenizer: Any, parts: Iterable[Part]) -> list[int]:
    return encode_pieces(tokenizer, [(part,) if isinstance(part, int) else part for part in parts])


def _rendered(tokenizer: Any, template: AnyTemplate, turns: Sequence[Turn], system: str = "") -> list[Part]:
    """What the template writes, neighbouring texts joined."""
    if isinstance(template, ChatTemplate):
        messages = [{"role": "system", "content": system}] if system else []
        for user, reply in turns:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": str(reply)}]
        pieces = Splitter(tokenizer, [])(template.text(tokenizer, messages[:-1]))
    else:
        pieces = template.render(turns, system)
    found: list[Part] = []
    for piece in pieces:
        if isinstance(piece, Special):
            own = template.name == "alpaca" and piece.text == END_OF_REPLY
            id = id_of(tokenizer, end_of_reply(tokenizer) if own else piece.text)
            if id is None:
                raise UserError(f"the tokenizer has no {piece.text}, which the chat template writes; use --template")
            found.append(id)
        elif found and isinstance(found[-1], str):
            found[-1] += str(piece)
        else:
            found.append(str(piece))
    return found


def _between(parts: Iterable[Part], marks: Sequence[str]) -> list[list[Part]]:
    """The parts before, between and after the messages `marks`."""
    found: list[list[Part]] = [[]]
    for part in parts:
        while isinstance(part, str) and len(found) <= len(marks) and marks[len(found) - 1] in part:
            before, _, part = part.partition(marks[len(found) - 1])
            found[-1] += [before] * bool(before)
            found.append([])
        found[-1] += [part] if part != "" else []
    if len(found) != len(marks) + 1:
        raise UserError("the chat template leaves out a message; choose another with --template")
    return found
