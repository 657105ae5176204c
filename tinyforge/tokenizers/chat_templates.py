"""Chat templates: how the turns of a conversation are rendered for a model.

    template = TEMPLATES["chatml"]                          a built-in format, or a published model's ChatTemplate
    ids = template.encode(tokenizer, [("Hello", "Hi!"), ("How are you?", None)], system="Be brief.")
    stop = template.stop_ids(tokenizer)                     a reply ends at any of these
    ids, length = template.encode_reply(tokenizer, [("Hello", "Hi!")])     to train on: the prompt has no loss

A template renders pieces: plain text, and special tokens by their text (`Special`). Only a `Special` becomes the id of
a special token: a user who types "<|im_end|>" sends ten ordinary characters, and cannot end a turn or begin another.
(In "zephyr" and "alpaca" the headings are ordinary text to the model, and a user can type them.)

Published models bring a template of their own, a Jinja program: see `ChatTemplate`.

Source: Taori et al., "Stanford Alpaca" (2023) for "alpaca".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

from tinyforge.errors import UserError
from tinyforge.files import read_text
from tinyforge.tokenizers.jinja_client import Refusal, render
from tinyforge.tokenizers.vocabulary import After, TextTokenizer, any_of, id_of, start_ids


@dataclass(frozen=True)
class Special:
    """A special token, named by its text."""

    text: str


# A tuple is a reply in the ids that the model generated.
Piece = str | Special | tuple[int, ...]

# A user's message, and the reply: its text, its ids, or None if it is still to come.
Turn = tuple[str, str | Sequence[int] | None]

END_OF_REPLY = "</s>"
# The end of a reply in a published vocabulary without it: the first of these that it has.
_OTHER_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>")


def end_of_reply(tokenizer: TextTokenizer) -> str:
    """The special token that ends a reply in Alpaca's format. UserError if the tokenizer has none of them."""
    found = next((text for text in (END_OF_REPLY, *_OTHER_ENDS) if id_of(tokenizer, text) is not None), None)
    if found is None:
        raise UserError(f"the tokenizer has no special token {END_OF_REPLY}, nor another to end a reply; use another")
    return found


@dataclass(frozen=True)
class Frame:
    """The pieces before and after the text of a message."""

    before: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()

    def around(self, text: str) -> list[Piece]:
        return [*self.before, text, *self.after]


@dataclass(frozen=True)
class Template:
    """How one family of models writes a conversation.

    A conversation is the system prompt, if any, and turns; each of the three kinds of message has its frame. `ends` are
    the special tokens that can end a reply, the first being the one in prompts; if empty, the next turn follows a reply
    directly, and generation stops at any special token. `strips`: white space around messages is removed.
    """

    name: str
    system: Frame
    user: Frame
    reply: Frame
    ends: tuple[str, ...]
    strips: bool = False

    @property
    def end(self) -> str:
        """The special token that ends a reply, or ""."""
        return self.ends[0] if self.ends else ""

    def render(self, turns: Sequence[Turn], system: str = "") -> list[Piece]:
        """The pieces of a conversation. If the last turn has no reply, they end where it begins."""
        pieces = self.system.around(self._clean(system)) if system else []
        for user, reply in turns:
            pieces += [*self.user.around(self._clean(user)), *self.reply.before]
            if reply is not None:
                pieces += [self._clean(reply) if isinstance(reply, str) else tuple(reply), *self.reply.after]
        return pieces

    def _clean(self, text: str) -> str:
        return text.strip() if self.strips else text

    def prompt(self, user: str, system: str = "") -> str:
        """The prompt of one message as text, with special tokens spelt out: to be read, not encoded."""
        pieces = self.render([(user, None)], system)
        return "".join(piece.text if isinstance(piece, Special) else str(piece) for piece in pieces)

    def encode(self, tokenizer: TextTokenizer, turns: Sequence[Turn], system: str = "") -> list[int]:
        """The ids of a conversation, from the beginning of the text.

        A reply's ids do not depend on the text before it, so the ids of a prompt are a prefix of those of the prompt
        with its reply. Raises UserError if the tokenizer lacks a special token of the template.
        """
        as_ids: list[Turn] = [
            (user, tokenizer.encode(self._clean(reply), "text") if isinstance(reply, str) else reply)
            for user, reply in turns
        ]
        pieces = self.render(as_ids, system)
        if self.name == "alpaca":
            pieces = [Special(end_of_reply(tokenizer)) if piece == Special(END_OF_REPLY) else piece for piece in pieces]
        self._check(pieces, tokenizer)
        return start_ids(tokenizer) + encode_pieces(tokenizer, pieces)

    def encode_reply(self, tokenizer: TextTokenizer, turns: Sequence[Turn], system: str = "") -> tuple[list[int], int]:
        """The ids of a conversation that ends with a reply and its end, and the length of the prompt before it."""
        *before, (user, reply) = turns
        prompt = self.encode(tokenizer, [*before, (user, None)], system)
        ids = tokenizer.encode(self._clean(reply), "text") if isinstance(reply, str) else list(reply or ())
        return [*prompt, *ids, self.end_id(tokenizer)], len(prompt)

    def end_id(self, tokenizer: TextTokenizer) -> int:
        """The id that ends a reply in training. UserError if the tokenizer does not have it."""
        text = self.end if self.name not in ("alpaca", "plain") else end_of_reply(tokenizer)
        self._check([Special(text)], tokenizer)
        return _id(tokenizer, text)

    def _check(self, pieces: Iterable[Piece], tokenizer: TextTokenizer) -> None:
        specials = (piece.text for piece in pieces if isinstance(piece, Special))
        lost = next((text for text in specials if id_of(tokenizer, text) is None), None)
        if lost is not None:
            raise UserError(
                f"the chat template {self.name} needs the special token {lost}, which the tokenizer does not have; use "
                "another with --template"
            )

    def question(self, instruction: str, input: str = "") -> str:
        """The user's message for a record: its instruction, and its input if there is one."""
        heading = "### Input:\n" if self.name == "alpaca" else ""
        return f"{instruction}\n\n{heading}{input}" if input else instruction

    def stop_ids(self, tokenizer: TextTokenizer) -> frozenset[int]:
        """The ids that end a reply."""
        if not self.ends:
            return frozenset(tokenizer.specials.values())
        return frozenset(id for text in self.ends if (id := id_of(tokenizer, text)) is not None)


def _id(tokenizer: TextTokenizer, text: str) -> int:
    found = id_of(tokenizer, text)
    return tokenizer.specials[text] if found is None else found


def encode_pieces(tokenizer: TextTokenizer, pieces: Iterable[Piece], after: After = "start") -> list[int]:
    """The ids of pieces. after: what stands before them."""
    ids: list[int] = []
    for kind, group in groupby(pieces, type):
        if kind is str:  # neighbouring pieces of text are one text
            if text := "".join(map(str, group)):
                ids += tokenizer.encode(text, after)
                after = "text"
            continue
        for piece in group:
            if isinstance(piece, Special):
                ids.append(_id(tokenizer, piece.text))
                after = "special"
            else:
                ids += map(int, piece)
                after = "text"
    return ids


# --- a published model's own template -----------------------------------------------------------------------

Message = Mapping[str, Any]
"""A message as in OpenAI's protocol: "role", "content", and what else the template reads, such as "tool_calls"."""
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a reply's thoughts in templates and clients
ASKED, REPLIED = "Is it noon?", "It is."  # of the conversation that shows how a template ends a reply


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A Jinja program, as published models have it, rendered as by transformers' `apply_chat_template`, to its ids.

    sources: the programs by name: "default", and for instance "tool_use", which is taken where there are tools.
    tokens: the tokenizer's special tokens as the program sees them: bos_token, eos_token and so on. ends: ids that end
    a text by the model's generation_config.json; the template's own end is found by rendering a reply. variables:
    further variables, such as enable_thinking.

    Text of the template that spells a special token is that token. In messages, tools, documents and variables such
    text stays text, as with transformers' `sanitize_control_tokens`, so that nobody can end a turn by typing; only the
    special tokens of a reply given as ids are the template's to find. Tokens that are not special, such as `<think>`,
    are recognised everywhere, as in transformers.

    The program runs in a process with bounded time and memory (`jinja_client`).
    """

    sources: Mapping[str, str]
    tokens: Mapping[str, Any] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    name: str = "jinja"
    _found: dict[str, Any] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """As in a checkpoint's meta.json."""
        maps = {name: dict(getattr(self, name)) for name in ("sources", "tokens", "variables")}
        return {**maps, "ends": list(self.ends)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ChatTemplate:
        """From `to_dict`. UserError if it is damaged."""
        maps = [found for name in ("sources", "tokens", "variables") if isinstance(found := content.get(name), dict)]
        ends = content.get("ends")
        sound = len(maps) == 3 and isinstance(ends, list) and all(type(id) is int for id in ends)
        if not (sound and maps[0] and all(isinstance(text, str) for text in maps[0].values())):
            raise UserError("the chat template in meta.json is damaged; use another checkpoint of the run")
        return cls(maps[0], maps[1], tuple(ends or ()), maps[2])

    def source(self, tools: object = None) -> str:
        """The program for a conversation with or without tools. UserError if there is no default one."""
        found = self.sources.get("tool_use" if tools else "default", self.sources.get("default"))
        if found is None:
            names = ", ".join(sorted(self.sources))
            raise UserError(f"the model has no default chat template, but {names}; choose one with --template FILE")
        return found

    def encode(self, tokenizer: TextTokenizer, turns: Sequence[Turn], system: str = "") -> list[int]:
        """The ids of a conversation, up to where the reply to its last message begins, or with that reply.

        A reply in ids stands there as it is if the template leaves its text, and the text before it, unchanged.
        """
        messages = _messages(tokenizer, turns, system)
        jobs, known = [(messages, turns[-1][1] is None)], []
        for number, (_, reply) in enumerate(turns):
            if reply is not None and not isinstance(reply, str):
                place = 2 * number + 1 + bool(system)
                jobs.append((messages[:place], True))
                known.append((tuple(reply), messages[place]["content"]))
        (whole, *prompts), split = self._render(tokenizer, jobs)
        pieces, done = list[Piece](), 0
        for prompt, (ids, text) in zip(prompts, known, strict=True):
            marked = split.mark(text)
            if len(prompt) >= done and whole.startswith(prompt + marked):
                pieces += [*split(whole[done : len(prompt)]), ids]
                done = len(prompt) + len(marked)
        return encode_pieces(tokenizer, [*pieces, *split(whole[done:])])

    def encode_messages(
        self, tokenizer: TextTokenizer, messages: Sequence[Message], reply_to_come: bool = True, /, **variables: Any
    ) -> list[int]:
        """The ids of `apply_chat_template(messages, add_generation_prompt=reply_to_come, **variables)`: tools,
        documents, enable_thinking."""
        (text,), split = self._render(tokenizer, [(messages, reply_to_come)], variables)
        return encode_pieces(tokenizer, split(text))

    def encode_begun(self, tokenizer: TextTokenizer, messages: Sequence[Message], /, **variables: Any) -> list[int]:
        """The ids of a conversation up to the end of its last message, a reply that goes on, as of transformers'
        `continue_final_message`. UserError if the template changes its text."""
        *before, last = messages
        begun = str(last["content"])
        if not begun.strip():
            return self.encode_messages(tokenizer, before, True, **variables)
        (text,), split = self._render(tokenizer, [(messages, False)], variables)
        text = self._said(tokenizer, text)
        kept = next((t for t in map(split.mark, (begun, begun.lstrip(), begun.strip())) if t in text), None)
        if kept is None:
            raise UserError("the chat template changes the text of the last message, which cannot be continued")
        return encode_pieces(tokenizer, split(text[: text.rindex(kept) + len(kept)]))

    def text(
        self, tokenizer: TextTokenizer, messages: Sequence[Message], reply_to_come: bool = True, /, **variables: Any
    ) -> str:
        """The text of `encode_messages`, in which special tokens of the messages are marked: to be read."""
        return self._render(tokenizer, [(messages, reply_to_come)], variables)[0][0]

    def encode_reply(self, tokenizer: TextTokenizer, turns: Sequence[Turn], system: str = "") -> tuple[list[int], int]:
        """The ids of a conversation that ends with a reply and its end, and the length of the part without a loss.

        The reply is what the template adds to the prompt. A template that writes the prompt differently once there is
        a reply is reported, and then only the reply's own text and its end are learned.
        """
        messages = _messages(tokenizer, turns, system)
        (prompt, whole), split = self._render(tokenizer, [(messages[:-1], True), (messages, False)])
        start = len(prompt)
        if not whole.startswith(prompt):
            start = self._said(tokenizer, whole).rfind(split.mark(messages[-1]["content"]).strip())
            if start < 0:
                raise UserError("the chat template leaves out the text of a reply; use another with --template")
            if not self._found.setdefault("noted", False):
                self._found["noted"] = True
                note = "the chat template writes a prompt differently once it has a reply: only the reply's text and"
                print(f"note: {note} its end are learned", file=sys.stderr)
        ids = encode_pieces(tokenizer, split(whole[:start]))
        reply = encode_pieces(tokenizer, split(whole[start:]), "text" if start else "start")
        stop, end = self.stop_ids(tokenizer), self.end_id(tokenizer)
        last = next((i for i, id in enumerate(reply) if id in stop), len(reply))
        return [*ids, *reply[:last], end], len(ids)

    def end_id(self, tokenizer: TextTokenizer) -> int:
        """The id that ends a reply in training: the special token that the template writes after it, else the
        tokenizer's end of text. UserError if there is neither."""
        found = self._ends(tokenizer)
        if not found:
            raise UserError("the chat template does not show how a reply ends; use another with --template")
        return found[0]

    def stop_ids(self, tokenizer: TextTokenizer) -> frozenset[int]:
        """The ids that end a reply: the template's, the tokenizer's and the generation config's; where there are none,
        all special tokens."""
        return frozenset(self._ends(tokenizer)) or frozenset(tokenizer.specials.values())

    def _ends(self, tokenizer: TextTokenizer) -> list[int]:
        if "ends" not in self._found:
            own = [id_of(tokenizer, text) for text in (self._written_end(tokenizer), self.tokens.get("eos_token"))]
            self._found["ends"] = list(dict.fromkeys(id for id in [*own, *self.ends] if id is not None))
        found: list[int] = self._found["ends"]
        return found

    def _written_end(self, tokenizer: TextTokenizer) -> str | None:
        """The token that the template writes after a reply. Some templates need a system prompt."""
        for system in ("", "Be brief."):
            with suppress(Refusal):
                (text,), split = self._render(tokenizer, [(_messages(tokenizer, [(ASKED, REPLIED)], system), False)])
                self._found["after"] = after = text.rpartition(REPLIED)[2] if REPLIED in text else ""
                specials = (piece.text for piece in split(after) if isinstance(piece, Special))
                return _first_user_defined(tokenizer, after) or next(specials, None)
        return None

    def _said(self, tokenizer: TextTokenizer, text: str) -> str:
        """The text of a conversation without what the template writes after a reply, whose letters may spell it."""
        self._ends(tokenizer)
        return text.removesuffix(self._found.get("after", ""))

    def question(self, instruction: str, input: str = "") -> str:
        """The user's message for a record: its instruction, and its input if there is one."""
        return f"{instruction}\n\n{input}" if input else instruction

    def _render(
        self,
        tokenizer: TextTokenizer,
        jobs: Sequence[tuple[Sequence[Message], bool]],
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[str], Splitter]:
        """The text of each conversation, with or without the beginning of a reply, and how to split it."""
        given = {"tools": None, "documents": None, **self.variables, **(variables or {})}
        split = Splitter(tokenizer, [given, [messages for messages, _ in jobs]])
        marked = {**self.tokens, **split.mark(given)}
        texts = render(
            self.source(given["tools"]),
            [
                {**marked, "messages": split.mark(list(map(_cleaned, messages))), "add_generation_prompt": reply}
                for messages, reply in jobs
            ],
        )
        return texts, split


def _first_user_defined(tokenizer: TextTokenizer, text: str) -> str | None:
    """The user-defined token that a text begins with, white space aside: some vocabularies have tokens of that too."""
    texts = [token for token in tokenizer.user_defined if token.strip()]
    return max((token for token in texts if text.lstrip().startswith(token.strip())), key=len, default=None)


def _messages(tokenizer: TextTokenizer, turns: Sequence[Turn], system: str) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system else []
    for user, reply in turns:
        messages.append({"role": "user", "content": user})
        if reply is not None:
            text = reply if isinstance(reply, str) else _Generated(tokenizer, reply)
            messages.append({"role": "assistant", "content": text})
    return messages


def _cleaned(message: Message) -> dict[str, Any]:
    """A message as templates expect it: without null values, and a reply's thoughts under each of their names."""
    found = {key: value for key, value in message.items() if value is not None}
    thoughts = next((found[name] for name in REASONING if name in found), None)
    return found if thoughts is None else {"thinking": thoughts, **found, "reasoning_content": thoughts}


class _Generated(str):
    """The text of a reply in ids. Special tokens in it, such as `<think>` in some vocabularies, are the model's own,
    and the template may look for them."""

    parts: list[str | Special]

    def __new__(cls, tokenizer: TextTokenizer, ids: Sequence[int]) -> _Generated:
        texts = {id: Special(text) for text, id in tokenizer.specials.items()}
        parts = list[str | Special]()
        for special, run in groupby(ids, texts.__contains__):
            group = list(run)
            parts += [texts[id] for id in group] if special else [tokenizer.decode(group, "text")]
        made = super().__new__(cls, "".join(part.text if isinstance(part, Special) else part for part in parts))
        made.parts = parts
        return made


class Splitter:
    """Splits rendered text at its special tokens, except at those that were in the given values.

    There the first character of a token is replaced by a private one, which no value has, so that it is no token; it is
    replaced back when all other tokens have been found, also where the template has escaped it: as repr, tojson and
    urlencode do.
    """

    def __init__(self, tokenizer: TextTokenizer, given: object) -> None:
        self._controls, self._all = _patterns(tokenizer)
        texts = list(_texts(given))
        first = sorted({found[0] for text in texts for found in self._controls.findall(text)})
        used = {_private(found) for text in texts for found in _PRIVATE.findall(text)} if first else set()
        free = (c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in used)
        self._marks = dict(zip(first, free, strict=False))
        if len(self._marks) < len(first):
            raise UserError("the messages use every private character from U+F0000; leave some of them out")
        self._firsts = {mark: character for character, mark in self._marks.items()}

    def mark(self, value: Any) -> Any:
        """The value with its special tokens marked, in lists and dicts too: a schema's keys are a user's as well."""
        if not self._marks:
            return value
        if isinstance(value, _Generated):
            return "".join(part.text if isinstance(part, Special) else self.mark(part) for part in value.parts)
        if isinstance(value, str):
            return self._controls.sub(lambda found: f"{self._marks[found[0][0]]}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def _unmarked(self, text: str) -> str:
        def first(found: re.Match[str]) -> str:
            character = self._firsts.get(_private(found[0]))
            if character is None:
                return found[0]
            if found[0][0] == "%":
                return quote(character)
            slashes = len(found[0]) - len(found[0].lstrip("\\"))  # those of the value, doubled, and then its own
            return "\\" * (slashes - (slashes & -slashes)) + character

        return _PRIVATE.sub(first, text) if self._marks else text

    def __call__(self, text: str) -> list[Piece]:
        parts = self._all.split(text)
        return [Special(part) if number % 2 else self._unmarked(part) for number, part in enumerate(parts) if part]


# A private character of plane 15, as it is and as repr, JSON in ASCII and URLs spell it.
_PRIVATE = re.compile(
    r"[\U000f0000-\U000fffff]|%f3(?:%[89ab][\da-f]){3}"
    r"|(?<!\\)\\+(?:U000f[\da-f]{4}|udb[89ab][\da-f]\\+ud[c-f][\da-f]{2})",
    re.ASCII | re.IGNORECASE,
)


def _private(spelt: str) -> str:
    digits = re.sub(r"[\\Uu%]", "", spelt)
    if spelt[0] == "%":
        return bytes.fromhex(digits).decode("utf-8", "replace")
    if spelt[0] != "\\":
        return spelt
    data = bytes.fromhex(digits)
    return data.decode("utf-32-be" if digits.startswith("000") else "utf-16-be", "replace")


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in chain(value.keys(), value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(item)


_PATTERNS: WeakKeyDictionary[TextTokenizer, tuple[re.Pattern[str], re.Pattern[str]]] = WeakKeyDictionary()


def _patterns(tokenizer: TextTokenizer) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds a tokenizer's special tokens, in values and in rendered text."""
    if tokenizer not in _PATTERNS:
        found = any_of(tokenizer.specials) if tokenizer.specials else "(?!)"
        _PATTERNS[tokenizer] = re.compile(found), re.compile(f"({found})")
    return _PATTERNS[tokenizer]


# --- the templates ------------------------------------------------------------------------------------------


def _same(frame: Callable[[str], Frame]) -> tuple[Frame, Frame, Frame]:
    """The frames of a family that writes all three kinds of message alike, under their roles."""
    return frame("system"), frame("user"), frame("assistant")


_FAMILIES = (
    # A base model continues the text.
    Template("plain", Frame(after=("\n\n",)), Frame(), Frame(), ends=()),
    # Alpaca's preamble ("Below is an instruction that describes a task. ...") is left out: it is the same for every
    # record, and would take over half of the small preset's context of 128 tokens. A system prompt takes its place.
    Template(
        "alpaca",
        Frame(after=("\n\n",)),
        Frame(("### Instruction:\n",), ("\n\n",)),
        Frame(("### Response:\n",), (Special(END_OF_REPLY),)),
        ends=(END_OF_REPLY, *_OTHER_ENDS),
    ),
    # Qwen, SmolLM2-Instruct.
    Template(
        "chatml",
        *_same(lambda role: Frame((Special("<|im_start|>"), f"{role}\n"), (Special("<|im_end|>"), "\n"))),
        ends=("<|im_end|>", "<|endoftext|>"),
    ),
    # Llama 3 Instruct. The dates that Llama 3.1 and later write into the system prompt are left out.
    Template(
        "llama3",
        *_same(
            lambda role: Frame(
                (Special("<|start_header_id|>"), role, Special("<|end_header_id|>"), "\n\n"), (Special("<|eot_id|>"),)
            )
        ),
        ends=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        strips=True,
    ),
    # Zephyr, TinyLlama-Chat.
    Template("zephyr", *_same(lambda role: Frame((f"<|{role}|>\n",), (Special("</s>"), "\n"))), ends=("</s>",)),
)
AnyTemplate = Template | ChatTemplate


class _Templates(dict[str, Template]):
    def __missing__(self, given: Any) -> Any:
        """A template itself: `TEMPLATES[opened.template]`, where earlier versions had the name."""
        if isinstance(given, AnyTemplate):
            return given
        raise KeyError(given)


TEMPLATES = _Templates({template.name: template for template in _FAMILIES})


def render_prompt(instruction: str, input: str = "") -> str:
    """A prompt in Alpaca's format: its headings, with the input block only if there is an input."""
    alpaca = TEMPLATES["alpaca"]
    return alpaca.prompt(alpaca.question(instruction, input))


def read_template(asked: str, own: AnyTemplate) -> AnyTemplate:
    """The template that --template asks for: a built-in one by its name, or the Jinja program in a file, with the
    special tokens and ends of the model's `own`. UserError if there is neither."""
    if asked in TEMPLATES:
        return TEMPLATES[asked]
    if not Path(asked).is_file():
        raise UserError(f"--template {asked}: no such file, nor one of {', '.join(TEMPLATES)}; check the path")
    sources = {"default": read_text(asked, "the chat template")}
    return replace(own, sources=sources, _found={}) if isinstance(own, ChatTemplate) else ChatTemplate(sources)
