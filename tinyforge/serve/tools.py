"""Tools: which ones a reply may or must call, the grammar that forces a call, and the calls in a reply's text.

The form of calls is the one that the model's chat template writes (`tokenizers.tool_calls`). Where `tool_choice` is
"required" or names a function, or a function is `strict`, llguidance masks what is not such a call with arguments of
the function's schema. All other replies are free, and read as they come: white space in a call may differ, and a call
of an unknown function stays text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from tinyforge.infer.grammar import BLANKS, closed
from tinyforge.infer.stream import possible_start
from tinyforge.serve.fields import FieldReader, rules_of
from tinyforge.serve.literals import LiteralReader, literal_rules
from tinyforge.serve.protocol import ApiError, Tool, ToolChoice
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.thoughts import Tags
from tinyforge.tokenizers.tool_calls import COUNT, ID, CallForm, Fields, Literals

MOST_HELD = 1024
"""Characters of a call up to its arguments, white space included."""
IGNORED = {"x-tools-ignored": "the model's chat template has no tools"}
ANYTHING = "TEXT: /(.|\\n)*/"
LETTERS = string.ascii_letters + string.digits
PYTHON_TAG = "<|python_tag|>"  # Llama 3 may write it before the JSON of a call


@dataclass(frozen=True)
class Tools:
    """What a request's tools come to, and how its reply is read. shown: to the template. form: of calls in the reply,
    None where there can be none. forced: whether the reply has to be a call. thoughts: the tags of what comes before
    the reply, None where it is not told apart; begun: whether the prompt ends within them."""

    shown: Sequence[Tool] = ()
    form: CallForm | None = None
    parallel: bool | None = None
    forced: bool = False
    ignored: bool = False
    thoughts: Tags | None = None
    begun: bool = False

    @property
    def headers(self) -> dict[str, str]:
        return IGNORED if self.ignored else {}

    @property
    def is_constrained(self) -> bool:
        return self.forced or (self.form is not None and any(tool.function.strict for tool in self.shown))

    def reader(self) -> Reader:
        """Of a reply."""
        rest: Reader = TextReader()
        if self.form is not None:
            schemas = {tool.function.name: tool.function.parameters or {} for tool in self.shown}
            rest = CallReader(self.form, list(schemas), self.parallel is not False, schemas)
        return rest if self.thoughts is None else ThoughtReader(self.thoughts, self.begun, rest)


def select(
    tools: Sequence[Tool] | None, choice: str | ToolChoice | None, parallel: bool | None, form: CallForm | None
) -> Tools:
    """The tools of a request by its `tool_choice`. ApiError for a choice that cannot be met."""
    tools = tools or []
    names = [tool.function.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(400, f"two tools have the name {twice!a}; rename one", param="tools")
    forced = choice not in (None, "auto", "none")
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.called]
    if forced and not tools:
        wrong = f"names {choice.called!a}" if isinstance(choice, ToolChoice) else "is required"
        raise ApiError(
            400, f"tool_choice {wrong}, and tools has {'no such' if names else 'no'} function", param="tools"
        )
    if choice == "none" or not tools:
        return Tools()
    if form is None:
        if forced:
            raise ApiError(400, "the model's chat template has no tools; leave tool_choice out", param="tool_choice")
        return Tools(ignored=True)
    return Tools(tools, form, parallel, forced)


# --- grammars


def grammar(tools: Tools, tokenizer: TextTokenizer, schema: Any = None) -> str:
    """A grammar in Lark of the replies that may be: calls; if they are not forced also texts, or JSON of a schema."""
    form = tools.form
    assert form is not None

    before, between = form.before.lstrip(), _spelt(tokenizer, form.between)
    several = f"({_spelt(tokenizer, form.separator)} call)*" if form.separator and tools.parallel else ""
    rest = f"call {several} {_spelt(tokenizer, form.after)}"
    if tools.forced:
        rules = [f"start: {_spelt(tokenizer, before)} {rest}"]
    elif schema is not None:
        rules = [f"start: {_spelt(tokenizer, before)} {rest} | json", f"json: %json {_json(schema)}"]
    else:
        first, *others = _terms(tokenizer, before)
        trigger, lazy = first, ""
        if not first.startswith("<["):
            head = before if form.is_bare else form.head
            trigger, lazy = json.dumps(head, ensure_ascii=False), "[lazy]"
            others = _terms(tokenizer, before[len(head) :])
        times = "?" if tools.parallel is False else "*"
        rules = [f"start: (begin {' '.join(others)} {rest}){times} TEXT"]
        rules += [f"begin{lazy}: TEXT {trigger}", ANYTHING]
    calls = [f"call_{i}" for i in range(len(tools.shown))]
    rules.append(f"call: {' | '.join(calls)}")
    for call, tool in zip(calls, tools.shown, strict=True):
        function = tool.function
        parameters = {"type": "object"} if function.parameters is None else function.parameters
        arguments = f"%json {_json(parameters)}"
        if form.fields is not None:
            given: Any = (function.name, form.fields, parameters, call, lambda text: _terms(tokenizer, text))
            arguments, more = (literal_rules if isinstance(form.fields, Literals) else rules_of)(*given)
            rules += more
        rules.append(f"{call}: {_spelt(tokenizer, function.name)} {between} {arguments}")
    if not any(rule.startswith("TEXT:") for rule in rules) and any("TEXT" in rule for rule in rules):
        rules.append(ANYTHING)
    return "\n".join(["%llguidance {}", *rules, ""])


def _json(schema: Any) -> str:
    return json.dumps({"x-guidance": BLANKS, **closed(schema)})


def _spelt(tokenizer: TextTokenizer, text: str) -> str:
    return " ".join(_terms(tokenizer, text))


def _terms(tokenizer: TextTokenizer, text: str) -> list[str]:
    """A text in Lark: special tokens by their ids, an id of a call by a pattern, the rest as strings."""
    marks = "|".join(map(re.escape, sorted({*tokenizer.specials, ID, COUNT}, key=len, reverse=True)))
    terms = []
    for part in re.split(f"({marks})", text):
        if part == ID:
            terms.append(f"/[a-zA-Z0-9]{{{len(ID)}}}/")
        elif part == COUNT:
            terms.append("/[0-9]{1,3}/")
        elif part in tokenizer.specials:
            terms.append(f"<[{tokenizer.specials[part]}]>")
        elif part:
            terms.append(json.dumps(part, ensure_ascii=False))
    return terms


# --- replies


class Event(NamedTuple):
    """Some text of a reply or of the thoughts before it, the beginning of a call (text: the function's name), or a part
    of its arguments. number: of the call."""

    kind: Literal["thought", "text", "call", "arguments"]
    text: str
    id: str = ""
    number: int = 0


def read_calls(events: Sequence[Event]) -> tuple[str, list[dict[str, Any]]]:
    """The text without the calls, and the calls as OpenAI has them."""
    calls: list[dict[str, Any]] = []
    for event in events:
        if event.kind == "call":
            calls.append({"id": event.id, "type": "function", "function": {"name": event.text, "arguments": ""}})
        elif event.kind == "arguments":
            calls[-1]["function"]["arguments"] += event.text
    return "".join(event.text for event in events if event.kind == "text"), calls


class Reader(Protocol):
    """Reads a reply as its text comes. count: calls so far."""

    @property
    def count(self) -> int: ...

    def push(self, text: str, last: bool = False) -> list[Event]: ...


class TextReader:
    """A reply that is all text."""

    count = 0

    def push(self, text: str, last: bool = False) -> list[Event]:
        return [Event("text", text)] if text else []


class ThoughtReader:
    """A reply that may begin with thoughts between tags; white space at their ends is left out. begun: whether the
    prompt has the first tag. rest: reads what follows."""

    def __init__(self, tags: Tags, begun: bool, rest: Reader) -> None:
        self.tags, self.rest, self._held = tags, rest, ""
        self._state: Literal["start", "thoughts", "blank", "reply"] = "thoughts" if begun else "start"
        self._said = False

    @property
    def count(self) -> int:
        return self.rest.count

    def push(self, text: str, last: bool = False) -> list[Event]:
        if self._state == "reply":
            return self.rest.push(text, last)
        self._held += text
        found: list[Event] = []
        if self._state == "start":
            begun = self._held.lstrip()
            if self.tags.open.startswith(begun) and begun != self.tags.open and not last:
                return []
            self._state = "reply"
            if begun.startswith(self.tags.open):
                self._state, self._held = "thoughts", begun[len(self.tags.open) :]
        if self._state == "thoughts":
            at = self._held.find(self.tags.close)
            sure = at if at >= 0 else len(self._held) - (0 if last else possible_start(self._held, [self.tags.close]))
            thought = self._held[:sure].rstrip()
            self._held = self._held[sure + len(self.tags.close) :] if at >= 0 else self._held[len(thought) :]
            thought = thought if self._said else thought.lstrip()
            if thought:
                self._said = True
                found.append(Event("thought", thought))
            if at < 0:
                return [*found, *(self.rest.push("", last) if last else [])]
            self._state = "blank"
        if self._state == "blank":
            self._held = self._held.lstrip()
            if not self._held and not last:
                return found
            self._state = "reply"
        return [*found, *self.rest.push(self._held, last)]


class CallReader:
    """The calls in a reply, as its text comes. names: of the functions. parallel: whether it may have several calls;
    otherwise all after the first is left out. schemas: of their parameters, where the form needs them."""

    def __init__(
        self, form: CallForm, names: Sequence[str], parallel: bool, schemas: Mapping[str, Any] | None = None
    ) -> None:
        self._fields, self._schemas = form.fields, schemas or {}
        self.parallel, self.count = parallel, 0
        self._names = sorted(names, key=len, reverse=True)
        self._heads = [form.head, PYTHON_TAG] if form.is_bare else [form.head]
        begun = [form.before.lstrip()]
        if form.is_bare:
            begun.append(begun[0].replace("{", '{"type": "function", ', 1))
            begun += [PYTHON_TAG + each for each in begun]
        if isinstance(form.fields, Fields) and (inner := begun[0][begun[0].rfind("<") :]) != begun[0]:
            begun.append(inner)  # Qwen3-Coder may leave the outer tag out
            self._heads.append(re.match(r"[^\s\"]*", inner)[0])  # type: ignore[index]
        self._begun = [_loose(text) for text in begun]
        between = [form.between]
        if '"arguments"' in form.between or '"parameters"' in form.between:
            between = [re.sub("arguments|parameters", key, form.between) for key in ("arguments", "parameters")]
        self._after, self._close = _loose(form.after), form.after.lstrip()[:1]
        if form.fields is None:
            self._between = [(match := _loose(text + "{")[:-1], match) for text in between]
        elif isinstance(form.fields, Literals):
            self._between = [(_loose(form.between), _loose(form.between))]
        else:  # an argument or the end has to follow: a name may begin with another
            starts = (form.fields.before, form.after)
            self._between = [(_loose(form.between + text), _loose(form.between)) for text in starts]
        self._separator = None if form.separator is None else _loose(form.separator)
        self._held, self._blank = "", ""  # text that may belong to a call; white space that may stand before one
        self._depth, self._quoted, self._escaped = 0, False, False
        self._read: Callable[[bool, list[Event]], bool] = self._read_text

    def push(self, text: str, last: bool = False) -> list[Event]:
        """What this text completes. last: whether no more is to come."""
        self._held += text
        found: list[Event] = []
        while self._held and self._read(last, found):
            pass
        if last and not self.count and self._blank:
            found.append(Event("text", self._blank))
        return found

    def _read_text(self, last: bool, found: list[Event]) -> bool:
        text = self._held
        start = min((at for head in self._heads if (at := text.find(head)) >= 0), default=-1)
        if start < 0:
            start = len(text) - (0 if last else possible_start(text, self._heads))
            self._say(text[:start], found)
            self._held = text[start:]
            return False
        self._say(text[:start], found)
        self._held = text = text[start:]
        for begun in self._begun:
            end = _match(begun, text, 0)
            ended = end if end is None or end < 0 else self._begin(end, found)
            if ended is None and not last and len(text) < MOST_HELD:
                return False
            if ended is not None and ended >= 0:
                return True
        self._say(text[0], found)
        self._held = text[1:]
        return True

    def _begin(self, at: int, found: list[Event]) -> int | None:
        """Read a call's name from `at`, and what stands before its arguments: the end, -1 if it is none, None if more
        has to come."""
        text, partial = self._held, False
        for name in self._names:
            end = _match(list(name), text, at)
            for whole, between in self._between:
                done = end if end is None or end < 0 else _match(whole, text, end)
                partial = partial or done is None
                if end is not None and done is not None and done >= 0:
                    done = _match(between, text, end) or 0
                    self.count += 1
                    id = "".join(secrets.choice(LETTERS) for _ in ID)
                    found.append(Event("call", name, id, self.count - 1))
                    if self._fields is None:
                        self._blank, self._held, self._depth, self._read = "", text[done - 1 :], 0, self._read_arguments
                        return done
                    self._blank, self._held, self._read = "", text[done:], self._read_fields
                    schema, fields = self._schemas.get(name), self._fields
                    if isinstance(fields, Literals):
                        self._reader: FieldReader | LiteralReader = LiteralReader(fields, schema, self._close)
                    else:
                        self._reader = FieldReader(fields, schema, self._ends)
                    return done
        return None if partial else -1

    def _read_arguments(self, last: bool, found: list[Event]) -> bool:
        """A JSON object, up to the bracket that closes it."""
        for at, character in enumerate(self._held):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    found.append(Event("arguments", self._held[: at + 1], "", self.count - 1))
                    self._held = self._held[at + 1 :]
                    self._read = self._read_after if self.parallel else self._read_rest
                    return True
        found.append(Event("arguments", self._held, "", self.count - 1))
        self._held = ""
        return False

    def _read_fields(self, last: bool, found: list[Event]) -> bool:
        """Arguments between tags."""
        made, self._held, done = self._reader.push(self._held, last)
        if made:
            found.append(Event("arguments", made, "", self.count - 1))
        if done:
            self._read = self._read_after if self.parallel else self._read_rest
        return done

    def _ends(self, text: str, at: int) -> bool | None:
        """Whether an argument, the end of the call, or another call follows at a place."""
        assert isinstance(self._fields, Fields)
        patterns = [[SPACE, *_loose(self._fields.before)], [SPACE, *self._after]]
        if self._separator is not None:
            patterns.append([SPACE, *self._separator])
        ends = [_match(pattern, text, at) for pattern in patterns]
        if any(end is not None and end >= 0 for end in ends):
            return True
        return None if None in ends and len(text) - at < MOST_HELD else False

    def _read_after(self, last: bool, found: list[Event]) -> bool:
        text = self._held
        end = _match(self._after, text, 0)
        if end is not None and end >= 0:
            self._held, self._read = text[end:], self._read_text
            return True
        next_call = -1 if self._separator is None else _match(self._separator, text, 0)
        if next_call is not None and next_call >= 0:
            next_call = self._begin(next_call, found)
            if next_call is not None and next_call >= 0:
                return True
        if (end is None or next_call is None) and len(text) < MOST_HELD:
            self._held = "" if last else text  # an unfinished end is none of the text
            return False
        self._read = self._read_text
        return True

    def _read_rest(self, last: bool, found: list[Event]) -> bool:
        self._held = ""
        return False

    def _say(self, text: str, found: list[Event]) -> None:
        """Add text, but for the white space at its end."""
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown.strip(";") or (shown and not self.count):  # Llama 3 writes ; between calls
            found.append(Event("text", shown))


SPACE = " "
_LETTER = re.compile(r"[a-zA-Z0-9]*")


def _loose(text: str) -> list[str]:
    """A text as a list of characters that have to stand there, white space being free around JSON's punctuation."""
    found: list[str] = []
    for part in re.split(rf"({ID}|{COUNT}|[{{}}\[\],:]|\s+)", text):
        blank, mark = part.isspace(), part in tuple("{}[],:")
        found += [SPACE] if blank else [SPACE, part, SPACE] if mark else [part] if part in (ID, COUNT) else list(part)
    return [part for i, part in enumerate(found) if part != SPACE or found[i - 1 : i] != [SPACE]]


def _match(pattern: Sequence[str], text: str, at: int) -> int | None:
    """Where a pattern that begins at `at` ends; -1 if it is not there, None if more text has to come."""
    for part in pattern:
        if part == SPACE:
            while at < len(text) and text[at].isspace():
                at += 1
        elif at == len(text):
            return None
        elif part in (ID, COUNT):
            found = _LETTER.match(text, at)
            at = found.end() if found else at
        elif text[at] == part:
            at += 1
        else:
            return -1
    return at
