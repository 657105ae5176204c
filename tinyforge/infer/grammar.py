"""Grammars: which tokens may come next, so that a text is JSON of a schema, matches a pattern, or is one of a list.

    grammars = Grammars(tokenizer, stop_ids, vocab)
    scheduler.submit(prompt, sampling, stop_ids, constraint=grammars.compile("json_schema", '{"type": "object"}'))

llguidance parses the text as it grows. Its limits bound a grammar's size and the time of each token; a grammar beyond
them is an error before the first token, or ends its text with the reason "grammar".
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np

from tinyforge.errors import UserError
from tinyforge.files import json_value
from tinyforge.requirements import needs
from tinyforge.tokenizers import TextTokenizer

Kind = Literal["json_schema", "grammar", "lark", "regex", "choice"]
MOST_TEXT, MOST_KEPT = 128 << 10, 32
"""Bytes of a grammar's text; compiled grammars that are kept."""
ALONE = 1e-3
"""Seconds in which masks are computed by one thread: some 5 us each, mostly, and waking others costs more than many."""
LIMITS: dict[str, Any] = {"step_lexer_fuel": 50_000, "max_lexer_states": 20_000, "verbose_errors": False}
"""Some 4 ms a token and 40 MB at most."""
MOST_FORCED, FORCED_BYTES = 8192, 256
"""Texts that have to come next, whose tokens are kept; their bytes."""
NOTHING = {"NoExtensionBias": "no text follows it"}
"""Errors of llguidance in words."""
BLANKS = {"whitespace_pattern": r"[ \n\t]"}
"""Between JSON's tokens, at most one: small models may go on with blanks for ever."""


class Constraint:
    """A text that grows by a grammar's rules. words: 32-bit words of a mask, a bit for each token."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self.words = matcher, words

    def fill(self, mask: np.ndarray) -> Any:
        """Fill a mask, (words,) uint32, with the tokens that may come next; or return the matcher that does."""
        return self._matcher

    def mask(self, z: np.ndarray) -> None:
        """Set the logits of the tokens that may not come next, z (V,), to -inf. No change after an error."""
        if not self._matcher.is_error():
            allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if not self._matcher.is_error():
                z[np.unpackbits(allowed, count=len(z), bitorder="little") == 0] = -np.inf

    def mask_along(self, z: np.ndarray, drafts: Sequence[int]) -> None:
        """`mask` of z (1 + drafts, V): row i after i drafts, up to the first that may not come. No token is taken."""
        taken = 0
        for row, draft in zip(z, [*drafts, None], strict=True):
            self.mask(row)
            if draft is None or self._matcher.try_consume_tokens([draft]) == 0:
                break
            taken += 1
            if self.complete:
                break
        self._matcher.rollback(taken)

    def accept(self, token: int) -> bool:
        """Take the next token; returns False where the grammar has failed, or grown beyond its limits."""
        return bool(self._matcher.consume_token(token))

    @property
    def failed(self) -> bool:
        """Whether the grammar has grown beyond its limits: masks mean nothing then."""
        return bool(self._matcher.is_error())

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> Constraint:
        return Constraint(self._matcher.deep_copy(), self.words)


class After(Constraint):
    """A constraint that begins after a mark; up to there the text is free, but cannot end. tokens: their bytes."""

    def __init__(self, inner: Constraint, mark: bytes, tokens: Callable[[int], bytes], ends: Sequence[int]) -> None:
        self._inner, self._mark, self._tokens, self._ends = inner, mark, tokens, list(ends)
        self._tail: bytes | None = b""  # None: the constraint has begun
        self.words = inner.words

    def fill(self, mask: np.ndarray) -> Any:
        if self._tail is None:
            return self._inner.fill(mask)
        mask[:] = ~np.uint32(0)
        for end in self._ends:
            mask[end // 32] &= ~np.uint32(1 << end % 32)
        return None

    def mask(self, z: np.ndarray) -> None:
        if self._tail is None:
            self._inner.mask(z)
        else:
            z[self._ends] = -np.inf

    def mask_along(self, z: np.ndarray, drafts: Sequence[int]) -> None:
        tail = self._tail
        for i, draft in enumerate([*drafts, None]):
            if self._tail is None:
                self._inner.mask_along(z[i:], drafts[i:])
                break
            self.mask(z[i])
            if draft is not None:
                self.accept(draft)
        self._tail = tail

    def accept(self, token: int) -> bool:
        if self._tail is None:
            return self._inner.accept(token)
        text = self._tail + self._tokens(token)
        self._tail = None if self._mark in text else text[-len(self._mark) :]
        return True

    @property
    def failed(self) -> bool:
        return self._inner.failed

    @property
    def complete(self) -> bool:
        return self._tail is None and self._inner.complete

    def copy(self) -> Constraint:
        made = After(self._inner.copy(), self._mark, self._tokens, self._ends)
        made._tail = self._tail
        return made


@cache
def _executor() -> Any:
    """Threads that compute masks."""
    import llguidance

    return llguidance.LLExecutor()


def masks(constraints: Sequence[Constraint]) -> np.ndarray:
    """The tokens that may come next in each text, (texts, words) uint32. What `ALONE` seconds leave is computed by
    several threads. The constraints must be by one `Grammars`."""
    found = np.empty((len(constraints), max((c.words for c in constraints), default=0)), np.uint32)
    begin, size, until = found.ctypes.data, found.strides[0], time.perf_counter() + ALONE
    left = []
    for i, constraint in enumerate(constraints):
        if (matcher := constraint.fill(found[i])) is None:
            continue
        if time.perf_counter() < until:
            matcher.unsafe_compute_mask_ptr(begin + i * size, size)
        else:
            left.append((matcher, i))
    if left:
        _executor().unsafe_compute_mask_ptr(left, begin, size, len(found))
    return found


class _Tokens:
    """A tokenizer as llguidance takes it."""

    def __init__(self, tokenizer: TextTokenizer, vocab: int, end: int) -> None:
        specials = set(tokenizer.specials.values())
        known = min(vocab, tokenizer.vocab_size)
        self.eos_token_id, self.bos_token_id = end, tokenizer.bos
        self.tokens = [tokenizer.token_bytes(i) if i < known else b"<unused %d>" % i for i in range(vocab)]
        self.special_token_ids = sorted(specials | {end} | set(range(known, vocab)))
        self._tokenizer, self._kept = tokenizer, lru_cache(MOST_FORCED)(self._encode)

    def __call__(self, text: bytes) -> list[int]:
        """Called while masks are made, for the text that has to come next: mostly the same as before."""
        return list(self._kept(text)) if len(text) <= FORCED_BYTES else self._encode(text)

    def _encode(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"), "text")


class Grammars:
    """The grammars of a model's tokenizer. stop_ids: what ends a text. vocab: tokens that the model may give."""

    def __init__(self, tokenizer: TextTokenizer, stop_ids: Iterable[int], vocab: int) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise UserError(needs("structured output", "llguidance", "serve")) from error
        self._library = llguidance
        ends = sorted(stop_ids)
        count = vocab if ends else vocab + 1  # an end that is never drawn
        wrapper = llguidance.TokenizerWrapper(_Tokens(tokenizer, count, ends[0] if ends else vocab))
        self._tokenizer = llguidance.LLTokenizer(wrapper, count, ends or [vocab])
        self._words = -(-count // 32)
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._kept: OrderedDict[tuple[str, str], Constraint] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, kind: Kind, text: str) -> Constraint:
        """A constraint by a grammar's text: a JSON schema; GBNF or Lark; a regular expression; a JSON list of choices.
        UserError for one that is wrong, not supported, or too large."""
        if (size := len(text.encode("utf-8", "replace"))) > MOST_TEXT:
            raise UserError(f"the grammar has {size} bytes, at most {MOST_TEXT} here")
        with self._lock:
            found = self._kept.get((kind, text))
        if found is None:
            found = Constraint(self._matcher(kind, text), self._words)
            with self._lock:
                self._kept[kind, text] = found
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return found.copy()

    def _matcher(self, kind: Kind, text: str) -> Any:
        library = self._library
        try:
            if kind == "json_schema":
                text = json.dumps(closed(json_value(text)))
                grammar = library.LLMatcher.grammar_from_json_schema(text, defaults=BLANKS)
            else:
                grammar = library.grammar_from(kind, text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the grammar cannot be read: {_first_line(error)}") from None
        matcher = library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        matcher.compute_bitmask()  # a grammar that matches nothing shows here
        if matcher.is_error():
            found = _first_line(matcher.get_error())
            raise UserError(f"the grammar cannot be used: {NOTHING.get(found, found)}")
        return matcher


MIXED = {"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties"}
"""Keywords whose schemas are joined with others."""
DATA = {"enum", "const", "default", "examples"}
"""Keywords whose values are no schemas."""


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in objects that list their properties and do not say, as llama.cpp,
    vLLM and OpenAI have it: a model need not invent further ones. A reply is valid under the given schema too."""
    if _keywords(schema) & MIXED:
        return schema
    return _closed(schema)


def _keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_keywords, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema).union(*(_keywords(value) for key, value in schema.items() if key not in DATA))


def _closed(schema: Any, joined: bool = False) -> Any:
    """joined: whether another schema with properties applies to the same object."""
    if isinstance(schema, list):
        return [_closed(each, joined) for each in schema]
    if not isinstance(schema, dict):
        return schema
    owns = isinstance(schema.get("properties"), dict)
    branches = {"anyOf", "oneOf", "$ref"} & schema.keys()
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            found[key] = {name: _closed(each) for name, each in value.items()}
        else:
            found[key] = value if key in DATA else _closed(value, owns and key in branches)
    if owns and not branches and not joined and "patternProperties" not in schema:
        found.setdefault("additionalProperties", False)
    return found


def _first_line(message: object) -> str:
    return str(message).strip().split("\n")[0][:300]


def choices(texts: Iterable[str]) -> str:
    """The text of a grammar of the kind "choice"."""
    return json.dumps(list(texts))
