"""The form of tool calls in a reply, learned from the model's own chat template.

    form = learn(template, tokenizer)            None where the template has no tools

A template is asked instead of recognised: it renders a reply with a call, and what surrounds the call's name and its
arguments is the form. Hermes and Qwen begin it with `<tool_call>`, Mistral with `[TOOL_CALLS]`; Llama 3's is only the
JSON. Qwen3-Coder, GLM, MiniMax and DeepSeek 3.2 write each argument between tags instead of a JSON object (`Fields`),
LFM2 and Gemma as literals (`Literals`).
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from tinyforge.errors import UserError
from tinyforge.tokenizers.chat_templates import AnyTemplate, ChatTemplate
from tinyforge.tokenizers.vocabulary import TextTokenizer

ID, OTHER_ID = "a1B2c3D4e", "f5G6h7I8j"  # nine characters, as Mistral's templates demand
COUNT = "\ue001"  # stands for the number of a call, where a form has one
NAMES, KEYS = ("probe_one", "probe_two"), ("key_one", "key_two")
MARK = "\ue000"  # stands for a reply's text
TEXT, NUMBER = "value", 90817
TOOL = {
    "type": "function",
    "function": {
        "name": NAMES[0],
        "description": "a function",
        "parameters": {
            "type": "object",
            "properties": {
                KEYS[0]: {"type": "string", "description": "a text"},
                KEYS[1]: {"type": "integer", "description": "a number"},
            },
            "required": [KEYS[0]],
        },
    },
}


@dataclass(frozen=True)
class Fields:
    """How a call writes its arguments one by one: (before KEY kind[0] KIND kind[1] VALUE after)*.

    A text stands as it is, any other value as JSON. kinds: what is written for a text and for another value, the same
    text in most forms, which do not say.
    """

    before: str
    kind: tuple[str, str]
    kinds: tuple[str, str]
    after: str


@dataclass(frozen=True)
class Literals:
    """How a call writes its arguments as literals: (KEY assign VALUE) with commas between, up to a bracket.

    quote: what is around a text: one character, as in Python and JSON, or a tag, after which nothing is escaped.
    """

    assign: str
    comma: str
    quote: str


@dataclass(frozen=True)
class CallForm:
    """How a reply calls tools: before NAME between ARGUMENTS (separator NAME between ARGUMENTS)* after.

    separator: None where a reply has at most one call. An id in these texts is spelt `ID`, a call's number `COUNT`.
    as_text: the template takes the arguments of earlier calls as text, not as an object. fields: where the arguments
    are no JSON object.
    """

    before: str
    between: str
    after: str
    separator: str | None
    as_text: bool = False
    fields: Fields | Literals | None = None

    @property
    def is_bare(self) -> bool:
        """Whether a call is only its JSON."""
        return self.before.lstrip().startswith("{")

    @property
    def head(self) -> str:
        """What a call begins with."""
        found = re.match(r"\[?[^\s{\[]*", self.before.lstrip())
        return "{" if self.is_bare else re.split(f"{ID}|{COUNT}", found[0] if found else "")[0]


def learn(template: AnyTemplate, tokenizer: TextTokenizer) -> CallForm | None:
    """The form of a template's calls; None if it does not render tools, or no calls with arguments in JSON."""
    if not isinstance(template, ChatTemplate):
        return None
    try:
        return _learn(template, tokenizer, as_text=False)
    except ValueError:
        return None
    except UserError:  # it may add the arguments to a text
        with suppress(UserError, ValueError):
            return _learn(template, tokenizer, as_text=True)
    return None


def _learn(template: ChatTemplate, tokenizer: TextTokenizer, as_text: bool) -> CallForm:
    """ValueError where the template does not show a form."""

    def render(*messages: Mapping[str, Any], reply_to_come: bool = False) -> str:
        asked = {"role": "user", "content": "Hello"}
        return template.text(tokenizer, [asked, *messages], reply_to_come, tools=[TOOL])

    if NAMES[0] not in render(reply_to_come=True):
        raise ValueError("it does not render tools")
    plain, single = render({"role": "assistant", "content": MARK}), render(_calling(1, as_text))
    start = _tag_start(single, len(commonprefix([plain, single])))
    ending = single[_tag_end(single, len(single) - len(commonprefix([plain[::-1], single[::-1]]))) :]
    try:
        before, between, after = _parts(single, start, ending, 0)
    except ValueError:
        return _learn_fields(render, plain)
    if not before.strip():
        raise ValueError("nothing shows where a call begins")
    separator = None
    with suppress(UserError, ValueError):  # it may refuse several calls
        rest = render(_calling(2, as_text))
        second = rest.index("}", rest.rindex(KEYS[0])) + 1
        found, again, last = _parts(rest, second, ending, 1)
        counted = between.replace("0", COUNT) if again == between.replace("0", "1") else between
        if (again, last.replace(OTHER_ID, ID)) in ((between, after), (between.replace("0", "1"), after)):
            separator, between = found.replace(OTHER_ID, ID), counted
    return CallForm(before, between, after, separator, as_text)


def _learn_fields(render: Callable[..., str], plain: str) -> CallForm:
    """The form of calls with their arguments one by one."""
    arguments = {KEYS[0]: TEXT * 2, KEYS[1]: NUMBER}
    single, double = (render(_calling(count, False, arguments)) for count in (1, 2))
    start = _tag_start(single, len(commonprefix([plain, single])))
    ending = single[_tag_end(single, len(single) - len(commonprefix([plain[::-1], single[::-1]]))) :]
    body = single[start : len(single) - len(ending)]
    marks = (NAMES[0], KEYS[0], TEXT * 2, KEYS[1], str(NUMBER))
    found = re.fullmatch("(.*?)" + "(.*?)".join(map(re.escape, marks)) + "(.*)", body, re.DOTALL)
    if found is None or NAMES[0] in found[2]:
        raise ValueError("it renders no call with arguments")
    before, opening, of_text, following, of_number, end = found.groups()
    literals = _literals(opening, of_text, following, of_number, end)
    if literals is not None:
        return _with_literals(literals, double, before, opening, end)
    at = opening.rfind("<")
    field, between = opening[at:], opening[:at]
    closing = following.removesuffix(field)
    if at < 0 or closing == following or "<" not in closing or not before.strip():
        raise ValueError("nothing shows where an argument begins and ends")
    closing = closing if end.startswith(closing) else closing.rstrip()
    kind = commonprefix([of_text, of_number])
    rest = commonprefix([of_text[len(kind) :][::-1], of_number[len(kind) :][::-1]])[::-1]
    rest = rest.lstrip(string.ascii_letters)  # of "true" and "false"
    kinds = tuple(text[len(kind) : len(text) - len(rest)] for text in (of_text, of_number))
    if not end.startswith(closing) or not (kind + rest).strip():
        raise ValueError("nothing shows where an argument ends")
    after, separator = end[len(closing) :], None
    second = double.rfind(NAMES[1])
    first_end = double.rfind(str(NUMBER), 0, second) + len(str(NUMBER)) + len(closing)
    between_calls, opening = double[first_end:second], double[second + len(NAMES[1]) :]
    if NAMES[0] not in between_calls and opening.startswith((field, between + field, between.replace("1", "2"))):
        separator = between_calls
        if opening.startswith(between.replace("1", "2")) and "1" in between:
            between = between.replace("1", COUNT)
    return CallForm(
        before, between, after, separator, False, Fields(field, (kind, rest), (kinds[0], kinds[1]), closing)
    )


def _literals(opening: str, of_text: str, following: str, of_number: str, end: str) -> Literals | None:
    """How arguments are written, from what stands before a text, after it, before a number and after that."""
    quote, comma = of_text.removeprefix(of_number), following.lstrip("\"'")
    if len(quote) > 1 and following.startswith(quote):
        comma = following.removeprefix(quote)
    closes = {"(": ")", "{": "}"}.get(opening.strip())
    if of_number.strip() not in ("=", ":") or comma.strip() != "," or not closes or not end.startswith(closes):
        return None
    is_quote = quote in ("'", '"') or (quote.startswith("<") and quote.endswith(">"))
    return Literals(of_number, comma, quote) if is_quote and following == quote + comma else None


def _with_literals(literals: Literals, double: str, before: str, opening: str, end: str) -> CallForm:
    """The form of calls with literals. double: a reply with two calls."""
    second = double.rfind(NAMES[1])
    first_end = double.rfind(str(NUMBER), 0, second) + len(str(NUMBER))
    separator: str | None = double[first_end:second]
    if separator is None or NAMES[0] in separator or not double[second + len(NAMES[1]) :].startswith(opening):
        separator = None
    elif separator.endswith(before):  # what follows the last call's own end is no part of it
        end = separator.removesuffix(before)
    return CallForm(before, opening, end, separator, fields=literals)


def _calling(count: int, as_text: bool, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A reply with calls. given: the arguments of each."""
    calls = []
    for name, key, id in zip(NAMES[:count], KEYS, (ID, OTHER_ID), strict=False):
        arguments: Any = given or (f'{{"{key}": "{TEXT}"}}' if as_text else {key: TEXT})
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _parts(text: str, start: int, ending: str, number: int) -> tuple[str, str, str]:
    """What stands before a call's name, between the name and the arguments, and after them, up to the ending."""
    before, _, rest = text[start : len(text) - len(ending)].partition(NAMES[number])
    arguments = re.search(rf'\{{\s*"{KEYS[number]}"\s*:\s*"value"\s*\}}', rest)
    if arguments is None or not text.endswith(ending):
        raise ValueError("it renders no call with arguments in JSON")
    return before, rest[: arguments.start()], rest[arguments.end() :]


def _tag_start(text: str, at: int) -> int:
    """`at`, or where the <tag> begins that it lies in."""
    opened = text.rfind("<", 0, at)
    return opened if opened >= 0 and not re.search(r"[>\s]", text[opened:at]) else at


def _tag_end(text: str, at: int) -> int:
    """`at`, or where the <tag> ends that it lies in."""
    return at if _tag_start(text, at) == at else text.find(">", at) + 1 or len(text)
