"""Tokenizers in Hugging Face's tokenizer.json, read and written.

    tokenizer = from_huggingface("tokenizer.json")
    json.dump(to_huggingface(tokenizer), file)              tokenizers.Tokenizer.from_file(...)

It reads the two kinds of BPE in published models:

- byte-level, as in GPT-2, Llama 3, Qwen2 and SmolLM2: a `Tokenizer`, whose ids may be in our order;
- over characters with byte fallback, as in Llama 2, TinyLlama and Mistral: a `SentencePiece`.

Both sides give the same ids for any text. A vocabulary or an option that one side does not have is refused with a
UserError, never dropped or changed. Patterns are recognised by their exact text; nothing in a file is run or compiled.

Source: the serialisation of the `tokenizers` package (version "1.0" of its JSON).
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain, repeat
from operator import add, itemgetter
from pathlib import Path
from typing import Any, cast

from tinyforge.errors import UserError
from tinyforge.files import GET_AGAIN, read_json
from tinyforge.tokenizers import wordpiece
from tinyforge.tokenizers.bpe import SPELLING, SpeltMerges, Tokenizer, byte_order_of, spell, unspell, unspell_all
from tinyforge.tokenizers.foreign import Foreign, read_foreign
from tinyforge.tokenizers.pieces import GPT2, OWN_PATTERNS, PATTERNS, Pattern
from tinyforge.tokenizers.sentencepiece import BYTES, SPACE, SentencePiece, Spaces
from tinyforge.tokenizers.vocabulary import TextTokenizer

MOST_ADDED = 256  # characters of an added token that is not special
MOST_GAP = 1 << 16  # ids that no token has
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

# --- writing ------------------------------------------------------------------------------------------------


def to_huggingface(tokenizer: TextTokenizer, recognise_specials: bool = False) -> dict[str, Any]:
    """Content of a tokenizer.json that gives the same ids; write it with `json.dump`.

    The special tokens of a `Tokenizer` in its own order are vocabulary entries that no merge makes, so that, as here,
    text that spells one does not become its id. With `recognise_specials` they are listed as "added_tokens", where most
    programs look for them; then text that spells one does become its id, unless the caller sets
    `encode_special_tokens`. A `Tokenizer` in another order and a `SentencePiece` always list them.

    Where two overlapping pairs make the same token, a `SentencePiece` with scores joins the left pair, and Hugging
    Face's tokenizer the one listed first. The tests have found no text where this matters.

    Raises UserError if two tokens have the same bytes (the file has one id for each), if a special token could not be
    told from another token or would decode to another text, and for a tokenizer that is not BPE.
    """
    if isinstance(tokenizer, SentencePiece):
        return _write_sentencepiece(tokenizer)
    if isinstance(tokenizer, wordpiece.WordPiece):
        return _write_wordpiece(tokenizer)
    if isinstance(tokenizer, Foreign):
        return tokenizer.content
    if not isinstance(tokenizer, Tokenizer):
        raise UserError(f"tokenizer.json cannot hold a {type(tokenizer).__name__}, expected a BPE tokenizer")
    merging = tokenizer.merging
    added = recognise_specials or tokenizer.byte_order is None
    special_ids = {*tokenizer.specials.values(), *tokenizer.user_defined.values()}
    vocab: dict[str, int] = {}
    for id in range(tokenizer.vocab_size):
        token = tokenizer.token_bytes(id)
        if id in special_ids or not token:  # published vocabularies have ids without a token
            continue
        spelt = spell(token)
        if spelt in vocab:
            raise UserError(
                f"tokenizer.json cannot hold this vocabulary: got the bytes {tokenizer.token_bytes(id)!r} as ids "
                f"{vocab[spelt]} and {id}, expected one id for them; train the tokenizer again"
            )
        vocab[spelt] = id
    specials: dict[str, int] = {}
    for text, id in tokenizer.specials.items():
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"tokenizer.json cannot hold the special token {text!r}: got a lone surrogate, expected "
                "text that UTF-8 can hold; give it another name"
            ) from None
        key = text if added else spell(data)
        taken = vocab.get(key, specials.get(key))
        if taken is not None:
            raise UserError(
                f"tokenizer.json cannot hold the special token {text!r}: got the spelling of token "
                f"{taken}, expected one of its own; give it another name"
            )
        if unspell(key) not in (None, data):
            raise UserError(
                f"tokenizer.json cannot hold the special token {text!r}: got characters that spell other "
                "bytes there; give it a name in ASCII"
            )
        specials[key] = id
    listed = {**tokenizer.user_defined, **specials}
    # The `tokenizers` package numbers added tokens that are not in the vocabulary itself, after it.
    if not added or sorted(listed.values()) != list(range(len(vocab), len(vocab) + len(listed))):
        vocab |= listed

    spelt_merges = [
        [spell(tokenizer.token_bytes(left)), spell(tokenizer.token_bytes(right))] for left, right in tokenizer.merges
    ]
    return _content(
        tokenizer,
        model=_model(vocab, spelt_merges) | {"ignore_merges": bool(merging.whole)},
        added=specials if added else {},
        normalizer={"type": "NFC"} if merging.nfc else None,
        pre_tokenizer=cut_by(merging.pattern),
        decoder=BYTE_LEVEL,
    )


def cut_by(pattern: Pattern) -> dict[str, Any]:
    """The pre-tokeniser that splits byte-level text by a pattern."""
    if pattern is GPT2:
        return BYTE_LEVEL
    if pattern.name == "digits":
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}
    rest = {"behavior": "Isolated", "invert": False}
    splits = [{"type": "Split", "pattern": {"Regex": regex}, **rest} for regex in pattern.steps]
    return {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL | {"use_regex": False}]}


def _write_sentencepiece(tokenizer: SentencePiece) -> dict[str, Any]:
    spaces, pieces = tokenizer.spaces, tokenizer.pieces
    merges = tokenizer.pairs()
    if spaces.collapsed or (spaces.doubled and (spaces.split or spaces.prefix == "first")) or merges is None:
        raise UserError(
            "tokenizer.json cannot hold this SentencePiece vocabulary: got spaces that are removed, or "
            "tokens with characters that are not tokens, expected a vocabulary like Llama's"
        )
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": spaces.prefix, "split": spaces.split}
    steps = [prepend, replace] if spaces.prefix == "always" else [replace]
    unspace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [] if spaces.prefix == "never" else [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    return _content(
        tokenizer,
        model=_model(vocab, [[pieces[left], pieces[right]] for left, right in merges]) | {"byte_fallback": True},
        added=tokenizer.specials,
        normalizer={"type": "Sequence", "normalizers": steps} if spaces.doubled else None,
        pre_tokenizer=None if spaces.doubled else metaspace,
        decoder={"type": "Sequence", "decoders": [unspace, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    )


def _write_wordpiece(tokenizer: wordpiece.WordPiece) -> dict[str, Any]:
    """With [CLS] before a text and [SEP] after it."""
    model = {"type": "WordPiece", **wordpiece.MODEL, "vocab": {t: id for id, t in enumerate(tokenizer.tokens)}}
    cleaned = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": tokenizer.lower}
    return _content(
        tokenizer,
        model=model,
        added=tokenizer.specials,
        normalizer={"type": "BertNormalizer", **cleaned},
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": wordpiece.PREFIX, "cleanup": False},
    )


def _model(vocab: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }


def _content(
    tokenizer: TextTokenizer,
    model: dict[str, Any],
    added: dict[str, int],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    listed = sorted({**tokenizer.user_defined, **added}.items(), key=itemgetter(1))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": text, **flags, "special": id in added.values()} for text, id in listed],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(tokenizer),
        "decoder": decoder,
        "model": model,
    }


def _post_processor(tokenizer: TextTokenizer) -> dict[str, Any] | None:
    """What puts special tokens around a text, and around a pair of texts."""
    names = [text for text, id in tokenizer.specials.items() if id == tokenizer.bos][:1]
    if isinstance(tokenizer, wordpiece.WordPiece):
        names = [wordpiece.CLS, wordpiece.SEP]
    if not names:
        return None
    first, second = ({"Sequence": {"id": letter, "type_id": kind}} for kind, letter in enumerate("AB"))
    begin, *end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in names)
    again = {"SpecialToken": {"id": names[-1], "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, first, *end],
        "pair": [begin, first, *end, *([second, again] if end else [again, second])],
        "special_tokens": {name: {"id": name, "ids": [tokenizer.specials[name]], "tokens": [name]} for name in names},
    }


# --- reading ------------------------------------------------------------------------------------------------


class NotCovered(UserError):
    """A tokenizer.json that the package tokenizers reads, but not this module."""


def from_huggingface(path: str | Path) -> TextTokenizer:
    """The tokenizer in a tokenizer.json, with the same ids.

    Special tokens are the "added_tokens" that are marked as special and, in a vocabulary in our order, the tokens that
    no merge makes. Text that spells one never becomes its id here; Hugging Face's tokenizer does that for an added
    token, unless `encode_special_tokens` is set. Other added tokens are `user_defined`. The token that the
    post-processor puts before every text is `bos`; `encode` leaves it out. Truncation and padding say nothing about
    how text is split, and are ignored.

    A model, normaliser, pattern or added token that is not covered here goes through the package tokenizers, with a
    line on stderr. Raises UserError, naming the file, if it is damaged, and where that package is needed but missing.
    """
    return read_huggingface(read_json(path, "the tokenizer"), path)


def read_huggingface(content: dict[str, Any], path: str | Path) -> TextTokenizer:
    """`from_huggingface` for the content of a file."""
    try:
        if _kind(content.get("model")) == "WordPiece":
            return wordpiece.from_huggingface(content)
        return _Reader(content).read()
    except NotCovered as error:
        return read_foreign(content, path, str(error))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _refuse(key: str, got: object, expected: str) -> NotCovered:
    shown = repr(got)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return NotCovered(f"got {key} {shown}, expected {expected}")


def _kind(part: object) -> object:
    return part.get("type") if isinstance(part, dict) else None


def _steps(part: object, key: str) -> list[dict[str, Any]]:
    """The steps of a normaliser, pre-tokeniser, ...: those of a Sequence, none for null, else the part itself."""
    if part is None:
        return []
    steps = part.get(key) if isinstance(part, dict) and _kind(part) == "Sequence" else [part]
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise UserError(f"got {part!r:.80}, expected a step or a list of steps; {GET_AGAIN}")
    return steps


class _Reader:
    """Reads a tokenizer.json, part by part."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        model = content.get("model")
        # Files from before 2021 do not name the type; the merges give it away.
        if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or "merges" not in model:
            raise _refuse("model", _kind(model) if isinstance(model, dict) else model, "'BPE' with its merges")
        if model.get("dropout"):
            raise UserError(
                f"got model.dropout {model['dropout']!r:.40}, expected none: it makes ids random; remove it"
            )
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise _refuse(f"model.{key}", model[key], "none")
        self.model = model
        self.specials, self.user_defined = self._added()
        self.spelt = self._spelt()
        self.bos = self._bos()

    def read(self) -> TextTokenizer:
        normalizers = _steps(self.content.get("normalizer"), "normalizers")
        cuts = _steps(self.content.get("pre_tokenizer"), "pretokenizers")
        if self.model.get("byte_fallback"):
            return self._sentencepiece(normalizers, cuts)
        if any(step != {"type": "NFC"} for step in normalizers):
            raise _refuse("normalizer", self.content["normalizer"], "none, or NFC")
        if _kind(self.content.get("decoder")) != "ByteLevel":
            raise _refuse("decoder", self.content.get("decoder"), "ByteLevel")
        return self._byte_level(self._pattern(cuts), nfc=bool(normalizers))

    # --- both kinds

    def _added(self) -> tuple[dict[str, int], dict[str, int]]:
        """The special tokens, and the other added ones."""
        added = self.content.get("added_tokens") or []
        if not isinstance(added, list):
            raise UserError(f"added_tokens is not a list; {GET_AGAIN}")
        found: dict[str, int] = {}
        specials, others = {}, {}
        for entry in added:
            if not (isinstance(entry, dict) and type(entry.get("id")) is int and isinstance(entry.get("content"), str)):
                raise UserError(f"got the added token {entry!r:.80}, expected an id and a content; {GET_AGAIN}")
            text, id = entry["content"], entry["id"]
            if not text or found.setdefault(text, id) != id or id < 0:
                raise UserError(f"got the added token {text!r:.80} with two ids, expected one; {GET_AGAIN}")
            if entry.get("special") is True:
                specials[text] = id
                continue
            others[text] = id
            odd = [key for key in ("single_word", "lstrip", "rstrip") if entry.get(key)]
            normalized = entry.get("normalized") and _steps(self.content.get("normalizer"), "normalizers")
            if odd or normalized or len(text) > MOST_ADDED:
                raise _refuse("added token", entry, "one that is found in a text as it is")
        return specials, others

    def _spelt(self) -> list[str]:
        """The tokens by id, as the file spells them, added ones by their text, and "" where no token has an id."""
        vocab = self.model.get("vocab")
        if not isinstance(vocab, dict) or not set(map(type, vocab.values())) <= {int}:
            raise UserError(f"model.vocab does not map tokens to ids; {GET_AGAIN}")
        added = self.specials | self.user_defined
        every = vocab | added
        texts = dict(zip(every.values(), every, strict=True))
        if len(texts) < len(every):
            seen: dict[int, str] = {}
            for text, id in [*added.items(), *vocab.items()]:
                if seen.setdefault(id, text) != text:
                    raise UserError(
                        f"got id {id} for both {seen[id]!r:.80} and {text!r:.80}, expected one token "
                        f"for an id; {GET_AGAIN}"
                    )
        for text, id in added.items():
            if vocab.get(text, id) != id:
                raise UserError(f"got the added token {text!r:.80} with two ids, expected one; {GET_AGAIN}")
        size = max(texts, default=-1) + 1
        if min(texts, default=0) < 0 or size > len(texts) + MOST_GAP:
            odd = min(texts) if min(texts) < 0 else size - 1
            raise UserError(f"got the id {odd} for one of {len(texts)} tokens, expected ids that follow; {GET_AGAIN}")
        return list(map(texts.get, range(size), repeat("")))

    def _merges(self) -> SpeltMerges:
        merges = self.model["merges"]
        ids: dict[str, int] = dict(self.model["vocab"])
        for text in self.specials:
            if ids.pop(text, None) is not None and len(text) == 1:
                raise self._ordinary(text)
        if not isinstance(merges, list):
            raise UserError(f"model.merges is not a list; {GET_AGAIN}")
        # Files from before 2024 hold "left right", newer ones ["left", "right"].
        gap = " " if set(map(type, merges)) <= {str} else ""
        with suppress(TypeError):  # what is neither
            sizes = map(str.count, merges, repeat(" ")) if gap else map(len, merges)
            pairs = set(sizes) <= {1 if gap else 2}
            parts = gap.join(merges).split(gap) if gap and merges else list(chain.from_iterable(merges))
            made: Any = list(map(ids.get, map(add, parts[::2], parts[1::2]))) if pairs else [None]
            if None not in made and ids.keys() >= set(parts):
                keys = merges if gap else map("\0".join, merges)
                order = dict(zip(keys, range(len(merges)), strict=True))
                if len(order) == len(merges):
                    return SpeltMerges(order, made, self.spelt, ids, gap or "\0")
        seen: set[tuple[str, ...]] = set()
        for number, merge in enumerate(merges):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            pair = pair if isinstance(pair, list) and all(isinstance(token, str) for token in pair) else []
            if special := next((token for token in [*pair, "".join(pair)] if token in self.specials), ""):
                raise self._ordinary(special)
            if len(pair) != 2 or not all(token in ids for token in pair):
                raise UserError(f"merge {number}: got {merge!r:.80}, expected two tokens; {GET_AGAIN}")
            if "".join(pair) not in ids or tuple(pair) in seen:
                raise UserError(
                    f"merge {number}: got {merge!r:.80}, expected a new pair that makes a token; {GET_AGAIN}"
                )
            seen.add(tuple(pair))
        raise UserError(f"got merges as texts and as pairs, expected one of them; {GET_AGAIN}")

    @staticmethod
    def _ordinary(special: str) -> NotCovered:
        return NotCovered(f"got the special token {special!r:.80}, which other text becomes too, expected one apart")

    def _bos(self) -> int | None:
        """The special token that the post-processor puts before every text."""
        bos = None
        for step in _steps(self.content.get("post_processor"), "processors"):
            if _kind(step) == "ByteLevel":
                continue
            single = step.get("single") if _kind(step) == "TemplateProcessing" else None
            single = single if isinstance(single, list) and all(isinstance(item, dict) for item in single) else []
            kinds = [list(item) for item in single]
            if bos is not None or kinds not in ([["Sequence"]], [["SpecialToken"], ["Sequence"]]):
                raise _refuse("post_processor", step, "none, ByteLevel, or one special token before the text")
            if len(single) == 2:
                token = single[0]["SpecialToken"]
                text = token.get("id") if isinstance(token, dict) else None
                if not isinstance(text, str) or text not in self.specials:
                    raise _refuse("post_processor", step, "an added token before the text")
                bos = self.specials[text]
        return bos

    # --- byte-level

    def _pattern(self, cuts: list[dict[str, Any]]) -> Pattern:
        def refuse() -> UserError:
            known = ", ".join(PATTERNS)
            return _refuse(
                "pre_tokenizer",
                self.content.get("pre_tokenizer"),
                f"ByteLevel with no prefix space and one of the patterns {known}",
            )

        if not cuts or _kind(cuts[-1]) != "ByteLevel" or cuts[-1].get("add_prefix_space", True) is not False:
            raise refuse()
        own_pattern = cuts[-1].get("use_regex", True)
        if len(cuts) == 1 and own_pattern is True:
            return GPT2
        if len(cuts) == 2 and own_pattern is True and cuts[0] == {"type": "Digits", "individual_digits": True}:
            return PATTERNS["digits"]
        if own_pattern is not False:
            raise refuse()
        # A pattern that matches every character is spelt either way: its matches, or what is between them, removed.
        whole = (("Isolated", False), ("Removed", True))
        splits = [cut.get("pattern") for cut in cuts[:-1] if _kind(cut) == "Split"]
        ways = [(cut.get("behavior"), cut.get("invert", False)) for cut in cuts[:-1]]
        texts = [split.get("Regex") if isinstance(split, dict) else None for split in splits]
        for pattern in PATTERNS.values():
            allowed = whole if len(pattern.steps) == 1 else whole[:1]
            if texts == list(pattern.steps) and len(ways) == len(texts) and all(way in allowed for way in ways):
                return pattern
        raise refuse()

    def _byte_level(self, pattern: Pattern, nfc: bool) -> TextTokenizer:
        ignore_merges = self.model.get("ignore_merges", False)
        if not isinstance(ignore_merges, bool):
            raise _refuse("model.ignore_merges", ignore_merges, "true or false")
        merges, added = self._merges(), {*self.specials.values(), *self.user_defined.values()}
        plain = pattern in OWN_PATTERNS and not (nfc or ignore_merges or self.user_defined) and self.bos is None
        order = byte_order_of([merges.ids.get(SPELLING[byte]) for byte in range(256)]) if plain else None
        if order and (in_order := self._in_order(merges, order, pattern)):
            return in_order
        spelt = list(self.spelt)
        for id in added:
            spelt[id] = ""
        tokens = unspell_all(spelt)
        if None in tokens:
            damaged = tokens.index(None)
            raise UserError(
                f"token {damaged}: got {self.spelt[damaged]!r:.80}, which does not spell bytes, expected bytes as "
                f"visible characters, or an added token; {GET_AGAIN}"
            )
        if self.model.get("unk_token") is not None and any(SPELLING[byte] not in merges.ids for byte in range(256)):
            raise _refuse("model.unk_token", self.model["unk_token"], "none where a byte is not a token")
        for text, id in self.user_defined.items():
            if text in self.model["vocab"] and unspell(text) != text.encode():
                raise NotCovered(f"got the added token {text!r:.80}, which spells other bytes too, expected one apart")
            tokens[id] = text.encode()
        return Tokenizer(
            merges,
            self.specials,
            pattern=pattern,
            tokens=cast("list[bytes]", tokens),
            bos=self.bos,
            nfc=nfc,
            ignore_merges=ignore_merges,
            user_defined=self.user_defined,
        )

    def _in_order(self, merges: SpeltMerges, order: str, pattern: Pattern) -> Tokenizer | None:
        """The tokenizer if its ids are in our order."""
        pairs, first = merges.by_id(), 256 + len(merges.made)
        made = [self.spelt[id] for id in dict.fromkeys(merges.made)]
        in_order = all(max(pair) < 256 + rank for rank, pair in enumerate(pairs)) and "" not in self.spelt
        if in_order and made == self.spelt[256:first] and min(self.specials.values(), default=first) >= first:
            return Tokenizer(pairs, [self._text(id) for id in range(first, len(self.spelt))], order, pattern)
        return None

    def _text(self, id: int) -> str:
        """The text of a special token, which may be spelt as bytes."""
        spelt = self.spelt[id]
        data = None if spelt in self.specials else unspell(spelt)
        try:
            return spelt if data is None else data.decode()
        except UnicodeDecodeError:
            raise UserError(
                f"got the token {spelt!r}, which no merge makes and which is not a text, expected only "
                f"bytes, merges and special tokens; {GET_AGAIN}"
            ) from None

    # --- over characters, with byte fallback

    def _sentencepiece(self, normalizers: list[dict[str, Any]], cuts: list[dict[str, Any]]) -> SentencePiece:
        if self.model.get("ignore_merges"):
            raise _refuse("model.ignore_merges", self.model["ignore_merges"], "false, where there is byte fallback")
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prepend = {"type": "Prepend", "prepend": SPACE}
        # Gemma's, which finds no space: they have been replaced.
        nothing = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        if normalizers not in ([], [replace], [prepend, replace]):
            raise _refuse("normalizer", self.content.get("normalizer"), "that of Llama: spaces as U+2581, one before")
        if normalizers and cuts in ([], [nothing]):
            spaces = Spaces(prefix="always" if prepend in normalizers else "never")
        elif not normalizers and len(cuts) == 1 and _kind(cuts[0]) == "Metaspace":
            spaces = self._metaspace(cuts[0])
        else:
            raise _refuse("pre_tokenizer", self.content.get("pre_tokenizer"), "Metaspace alone, or a normaliser alone")
        decoders = [_kind(step) for step in _steps(self.content.get("decoder"), "decoders")]
        if "ByteFallback" not in decoders or ("Strip" in decoders) == (spaces.prefix == "never"):
            expected = "a Sequence with ByteFallback, and with Strip where a text has a space before it"
            raise _refuse("decoder", self.content.get("decoder"), expected)
        if missing := next((byte for byte in BYTES if byte not in self.model["vocab"] or byte in self.specials), None):
            raise NotCovered(f"{missing} is no token, or a special one, expected one for each byte")
        if "" in self.spelt:
            raise NotCovered(f"got no token with id {self.spelt.index('')}, expected ids without a gap")
        return SentencePiece(self.spelt, self.specials, self.bos, None, self._merges(), spaces, self.user_defined)

    def _metaspace(self, step: dict[str, Any]) -> Spaces:
        old = {True: "always", False: "never"}.get(step.get("add_prefix_space", True))
        prefix: Any = step.get("prepend_scheme", old)
        split = step.get("split", True)
        known = prefix in ("always", "first", "never") and isinstance(split, bool)
        if step.get("replacement") != SPACE or not known:
            raise _refuse("pre_tokenizer", step, "Metaspace with U+2581")
        return Spaces(prefix, doubled=False, split=split)
