"""Chat templates: how the turns of a conversation are rendered for a model.

    template = TEMPLATES["chatml"]
    ids = template.encode(tokenizer, [("Hello", "Hi!"), ("How are you?", None)], system="Be brief.")
    stop = template.stop_ids(tokenizer)           # a reply ends at any of these

A template renders pieces: plain text, and special tokens by their text (`Special`). Only a `Special` becomes the id of
a special token: a user who types "<|im_end|>" sends ten ordinary characters, and cannot end a turn or begin another.
(In "zephyr" and "alpaca" the headings are ordinary text to the model, and a user can type them.)

Hugging Face's templates are Jinja programs. They are never run: `recognise` finds out by its markers which of the
templates here one is.

Sources: the published models' `chat_template`; Taori et al., "Stanford Alpaca" (2023) for "alpaca".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tinyforge.errors import UserError
from tinyforge.tokenizers.vocabulary import After, TextTokenizer, start_ids


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
    found = next((text for text in (END_OF_REPLY, *_OTHER_ENDS) if text in tokenizer.specials), None)
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
    directly, and generation stops at any special token. `default_system` is used if no system prompt is given.
    `strips`: white space around messages is removed.
    """

    name: str
    system: Frame
    user: Frame
    reply: Frame
    ends: tuple[str, ...]
    default_system: str = ""
    strips: bool = False

    @property
    def end(self) -> str:
        """The special token that ends a reply, or ""."""
        return self.ends[0] if self.ends else ""

    def render(self, turns: Sequence[Turn], system: str = "") -> list[Piece]:
        """The pieces of a conversation. If the last turn has no reply, they end where it begins."""
        system = self._clean(system or self.default_system)
        pieces = self.system.around(system) if system else []
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
        ids = start_ids(tokenizer)
        after: After = "start"
        for kind, group in groupby(self.render(as_ids, system), type):
            if kind is str:  # neighbouring pieces of text are one text
                ids += tokenizer.encode("".join(map(str, group)), after)
                after = "text"
                continue
            for piece in group:
                if not isinstance(piece, Special):
                    ids += map(int, piece)
                    after = "text"
                elif piece.text in tokenizer.specials:
                    ids.append(tokenizer.specials[piece.text])
                    after = "special"
                elif piece.text == END_OF_REPLY and self.name == "alpaca":
                    ids.append(tokenizer.specials[end_of_reply(tokenizer)])
                    after = "special"
                else:
                    raise UserError(
                        f"the chat template {self.name} needs the special token {piece.text}, which the "
                        "tokenizer does not have; use another template"
                    )
        return ids

    def stop_ids(self, tokenizer: TextTokenizer) -> frozenset[int]:
        """The ids that end a reply."""
        specials = tokenizer.specials
        return frozenset(id for text, id in specials.items() if text in self.ends or not self.ends)


# --- the templates ------------------------------------------------------------------------------------------


def render_prompt(instruction: str, input: str = "") -> str:
    """A prompt in Alpaca's format: its headings, with the input block only if there is an input.

    Alpaca's preamble ("Below is an instruction that describes a task. ...") is left out: it is the same for every
    record, and would take over half of the small preset's context of 128 tokens.
    """
    context = f"### Input:\n{input}\n\n" if input else ""
    return f"### Instruction:\n{instruction}\n\n{context}### Response:\n"


def _same(frame: Callable[[str], Frame]) -> tuple[Frame, Frame, Frame]:
    """The frames of a family that writes all three kinds of message alike, under their roles."""
    return frame("system"), frame("user"), frame("assistant")


_FAMILIES = (
    # A base model continues the text.
    Template("plain", Frame(after=("\n\n",)), Frame(), Frame(), ends=()),
    # A system prompt takes the place of Alpaca's preamble.
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
TEMPLATES = {template.name: template for template in _FAMILIES}

# The markers in a template's Jinja text, in the order of the search: the first family whose marks are all there, and no
# mark of another family that shares them (Phi 3 has Zephyr's headings, but ends a turn with <|end|>).
_MARKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("chatml", ("<|im_start|>", "<|im_end|>", "assistant"), ("<|im_sep|>",)),
    ("llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), ()),
    ("zephyr", ("<|user|>", "<|assistant|>", "eos_token"), ("<|end|>", "<|end_of_text|>")),
    ("alpaca", ("### Instruction:", "### Response:"), ()),
)
_DEFAULT_SYSTEM = re.compile(r"<\|im_start\|>system(?:\\n|\n)([^'\"{}<>]+)<\|im_end\|>")


def recognise(chat_template: str, specials: Container[str]) -> Template | None:
    """The template that a Hugging Face `chat_template` describes, or None.

    It is recognised by the markers in the text; the program is not run. `specials` are the tokenizer's special tokens:
    they must include the template's own. ChatML's default system prompt in the text, if any, becomes `default_system`.
    """
    for name, marks, foreign in _MARKS:
        template = TEMPLATES[name]
        if not all(mark in chat_template for mark in marks) or any(mark in chat_template for mark in foreign):
            continue
        if not all(piece.text in specials for piece in template.render([("", "")]) if isinstance(piece, Special)):
            continue
        found = _DEFAULT_SYSTEM.search(chat_template) if name == "chatml" else None
        return replace(template, default_system=found[1].replace("\\n", "\n")) if found else template
    return None
