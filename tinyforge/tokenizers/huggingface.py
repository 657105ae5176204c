"""Tokenizers in Hugging Face's tokenizer.json, read and written.

    tokenizer = from_huggingface("tokenizer.json")
    json.dump(to_huggingface(tokenizer), file)              tokenizers.Tokenizer.from_file(...)

It reads the two kinds of BPE in published models:

- byte-level, as in GPT-2, Llama 3, Qwen2 and SmolLM2: a `Tokenizer` if its ids are in our order, else an `ImportedBPE`;
- over characters with byte fallback, as in Llama 2, TinyLlama and Mistral: a `SentencePiece`.

Both sides give the same ids for any text. A vocabulary or an option that one side does not have is refused with a
UserError, never dropped or changed. Patterns are recognised by their exact text; nothing in a file is run or compiled.

Source: the serialisation of the `tokenizers` package (version "1.0" of its JSON).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError
from tinyforge.files import GET_AGAIN, read_json
from tinyforge.tokenizers import wordpiece
from tinyforge.tokenizers.bpe import BYTE_ORDERS, GPT2_PRINTABLE, ByteLevelBPE, Merging, Pair, Tokenizer, byte_order_of
from tinyforge.tokenizers.pieces import GPT2, OWN_PATTERNS, PATTERNS, Pattern
from tinyforge.tokenizers.sentencepiece import SPACE, SentencePiece, Spaces
from tinyforge.tokenizers.vocabulary import TextTokenizer, are_texts, check_tokenizer, fault_in_specials, is_pair

FORMAT = "tinyforge-imported-bpe"
VERSION = 1

# A byte is spelt as in GPT-2's files: a printable byte as itself, the n-th other one as U+0100 + n.
HIDDEN = 256 - len(GPT2_PRINTABLE)
SPELLING = dict(zip(BYTE_ORDERS["gpt2"], map(chr, [*GPT2_PRINTABLE, *range(256, 256 + HIDDEN)]), strict=True))
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPELT = {character: byte for byte, character in SPELLING.items()}


def spell(token: bytes) -> str:
    """`token` with each byte as one visible character."""
    return "".join(map(SPELLING.__getitem__, token))


def unspell(spelt: str) -> bytes | None:
    """The bytes that `spelt` stands for; None when a character of it stands for no byte."""
    return bytes(SPELT[c] for c in spelt) if SPELT.keys() >= set(spelt) else None


class ImportedBPE(ByteLevelBPE):
    """Byte-level BPE with ids in any order, any number of merges for a token, and a pattern of PATTERNS.

    `tokens[id]` are the bytes of a token; those of special tokens are ignored. The pair `merges[rank]` becomes the
    token with its bytes. nfc: text is normalised to form C first. ignore_merges: a piece that is a token is that token,
    whatever the merges give.

    Raises UserError if two tokens have the same bytes, a byte is not a token, or a merge does not make a token or is
    repeated.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        merges: Sequence[Pair],
        specials: dict[str, int],
        bos: int | None = None,
        pattern: Pattern = GPT2,
        nfc: bool = False,
        ignore_merges: bool = False,
    ) -> None:
        self.merges = merges
        self.ignore_merges = ignore_merges
        special_ids = set(specials.values())
        ids: dict[bytes, int] = {}
        for id, token in enumerate(tokens):
            if id not in special_ids and ids.setdefault(token, id) != id:
                raise UserError(f"token {id}: got {token[:40]!r}, which is token {ids[token]} too; {GET_AGAIN}")
        missing = next((byte for byte in range(256) if bytes([byte]) not in ids), None)
        if missing is not None:
            raise UserError(
                f"got no token for the byte {missing:#04x}, wanted one for each byte; "
                "only such a vocabulary can be read"
            )
        ranks: dict[Pair, int] = {}
        made: list[int] = []
        for rank, (left, right) in enumerate(merges):
            joint = tokens[left] + tokens[right] if 0 <= min(left, right) <= max(left, right) < len(tokens) else b""
            if joint not in ids or not special_ids.isdisjoint((left, right)) or (left, right) in ranks:
                raise UserError(
                    f"merge {rank}: got the ids {left} and {right}, wanted a new pair of tokens that makes "
                    f"one; {GET_AGAIN}"
                )
            ranks[left, right] = rank
            made.append(ids[joint])
        byte_ids = [ids[bytes([byte])] for byte in range(256)]
        merging = Merging(byte_ids, ranks, made, pattern, nfc, ids if ignore_merges else {})
        super().__init__(tokens, specials, bos, merging)

    def _content(self) -> dict[str, Any]:
        special_ids = set(self.specials.values())
        return {
            "format": FORMAT,
            "version": VERSION,
            "pattern": self.merging.pattern.name,
            "nfc": self.merging.nfc,
            "ignore_merges": self.ignore_merges,
            "specials": self.specials,
            "bos": self.bos,
            "tokens": ["" if id in special_ids else spell(self.token_bytes(id)) for id in range(self.vocab_size)],
            "merges": [list(pair) for pair in self.merges],
        }

    @classmethod
    def from_content(cls, content: dict[str, Any], path: str | Path) -> ImportedBPE:
        """The tokenizer in a file that `save` wrote, as JSON read it. Raises UserError, naming `path`."""

        check = partial(check_tokenizer, path)
        check(content.get("version") == VERSION, f"got version {content.get('version')!r}, wanted {VERSION}")
        pattern, nfc, ignore_merges = map(content.get, ("pattern", "nfc", "ignore_merges"))
        check(isinstance(pattern, str) and pattern in PATTERNS, f"pattern {pattern!r} is none of {', '.join(PATTERNS)}")
        check(isinstance(nfc, bool) and isinstance(ignore_merges, bool), "nfc or ignore_merges is not true or false")
        parts: list[Any] = [content.get(key) for key in ("specials", "bos", "tokens", "merges")]
        specials, bos, spelt, merges = parts
        check(are_texts(spelt), "tokens is not a list of texts")
        tokens = [unspell(token) for token in spelt]
        check(None not in tokens, "tokens holds a character that does not spell a byte")
        check(not (fault := fault_in_specials(content, len(tokens))), fault)
        check(isinstance(merges, list) and all(map(is_pair, merges)), "merges is not a list of pairs of ids")
        pairs = [(left, right) for left, right in merges]
        try:
            return cls(
                [token or b"" for token in tokens],
                pairs,
                specials,
                bos,
                PATTERNS[str(pattern)],
                bool(nfc),
                bool(ignore_merges),
            )
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


# --- writing ------------------------------------------------------------------------------------------------


def to_huggingface(tokenizer: TextTokenizer, recognise_specials: bool = False) -> dict[str, Any]:
    """Content of a tokenizer.json that gives the same ids; write it with `json.dump`.

    The special tokens of a `Tokenizer` are vocabulary entries that no merge makes, so that, as here, text that spells
    one does not become its id. With `recognise_specials` they are listed as "added_tokens", where most programs look
    for them; then text that spells one does become its id, unless the caller sets `encode_special_tokens`. An
    `ImportedBPE` and a `SentencePiece` always list them.

    Where two overlapping pairs make the same token, a `SentencePiece` with scores joins the left pair, and Hugging
    Face's tokenizer the one listed first. The tests have found no text where this matters.

    Raises UserError if two tokens have the same bytes (the file has one id for each), if a special token could not be
    told from another token or would decode to another text, and for a tokenizer that is not BPE.
    """
    if isinstance(tokenizer, SentencePiece):
        return _write_sentencepiece(tokenizer)
    if isinstance(tokenizer, wordpiece.WordPiece):
        return wordpiece.to_huggingface(tokenizer)
    if not isinstance(tokenizer, (Tokenizer, ImportedBPE)):
        raise UserError(f"tokenizer.json cannot hold a {type(tokenizer).__name__}, wanted a BPE tokenizer")
    merging = tokenizer.merging
    added = recognise_specials or isinstance(tokenizer, ImportedBPE)
    special_ids = set(tokenizer.specials.values())
    vocab: dict[str, int] = {}
    for id in range(tokenizer.vocab_size):
        if id in special_ids:
            continue
        spelt = spell(tokenizer.token_bytes(id))
        if spelt in vocab:
            raise UserError(
                f"tokenizer.json cannot hold this vocabulary: got the bytes {tokenizer.token_bytes(id)!r} as ids "
                f"{vocab[spelt]} and {id}, wanted one id for them; train the tokenizer again"
            )
        vocab[spelt] = id
    specials: dict[str, int] = {}
    for text, id in tokenizer.specials.items():
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"tokenizer.json cannot hold the special token {text!r}: got a lone surrogate, wanted "
                "text that UTF-8 can hold; give it another name"
            ) from None
        key = text if added else spell(data)
        taken = vocab.get(key, specials.get(key))
        if taken is not None:
            raise UserError(
                f"tokenizer.json cannot hold the special token {text!r}: got the spelling of token "
                f"{taken}, wanted one of its own; give it another name"
            )
        if unspell(key) not in (None, data):
            raise UserError(
                f"tokenizer.json cannot hold the special token {text!r}: got characters that spell other "
                "bytes there; give it a name in ASCII"
            )
        specials[key] = id
    if not added:
        vocab |= specials

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
    regex = {"Regex": pattern.published}
    split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL | {"use_regex": False}]}


def _write_sentencepiece(tokenizer: SentencePiece) -> dict[str, Any]:
    spaces, pieces = tokenizer.spaces, tokenizer.pieces
    merges = tokenizer.pairs()
    if spaces.collapsed or (spaces.doubled and (spaces.split or spaces.prefix == "first")) or merges is None:
        raise UserError(
            "tokenizer.json cannot hold this SentencePiece vocabulary: got spaces that are removed, or "
            "tokens with characters that are not tokens, wanted a vocabulary like Llama's"
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
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    post_processor = None
    if tokenizer.bos is not None:
        name = next(text for text, id in tokenizer.specials.items() if id == tokenizer.bos)
        bos = {"SpecialToken": {"id": name, "type_id": 0}}
        first, second = ({"Sequence": {"id": letter, "type_id": kind}} for kind, letter in enumerate("AB"))
        post_processor = {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, {"SpecialToken": {"id": name, "type_id": 1}}, second],
            "special_tokens": {name: {"id": name, "ids": [tokenizer.bos], "tokens": [name]}},
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": text, **flags} for text, id in sorted(added.items(), key=itemgetter(1))],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": model,
    }


# --- reading ------------------------------------------------------------------------------------------------

# Added tokens that are not marked as special, but could be: <tool_call>, [INST]. Others, such as runs of spaces, are
# split off before all else, which is not supported here.
MARK = re.compile(r"<.+>|\[.+\]", re.DOTALL)


def from_huggingface(path: str | Path) -> TextTokenizer:
    """The tokenizer in a tokenizer.json of BPE, byte-level or with byte fallback, with the same ids.

    Special tokens are the "added_tokens" and, in a vocabulary in our order, the tokens that no merge makes. Text that
    spells one never becomes its id here; Hugging Face's tokenizer does that for an added token, unless
    `encode_special_tokens` is set. The token that the post-processor puts before every text is `bos`; `encode` leaves
    it out.

    Raises UserError, naming the file, if it is damaged or has an unsupported model, normaliser, pattern or added token.
    """
    return read_huggingface(read_json(path, "the tokenizer"), path)


def read_huggingface(content: dict[str, Any], path: str | Path) -> TextTokenizer:
    """`from_huggingface` for the content of a file."""
    try:
        if _kind(content.get("model")) == "WordPiece":
            return wordpiece.from_huggingface(content)
        return _Reader(content).read()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _refuse(key: str, got: object, wanted: str) -> UserError:
    shown = repr(got)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return UserError(f"got {key} {shown}, wanted {wanted}; no other tokenizer.json can be read")


def _kind(part: object) -> object:
    return part.get("type") if isinstance(part, dict) else None


def _steps(part: object, key: str) -> list[dict[str, Any]]:
    """The steps of a normaliser, pre-tokeniser, ...: those of a Sequence, none for null, else the part itself."""
    if part is None:
        return []
    steps = part.get(key) if isinstance(part, dict) and _kind(part) == "Sequence" else [part]
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise UserError(f"got {part!r:.80}, wanted a step or a list of steps; {GET_AGAIN}")
    return steps


class _Reader:
    """Reads a tokenizer.json, part by part."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        for key in ("truncation", "padding"):
            if content.get(key) is not None:
                raise _refuse(key, content[key], "none")
        model = content.get("model")
        # Files from before 2021 do not name the type; the merges give it away.
        if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or "merges" not in model:
            raise _refuse("model", _kind(model) if isinstance(model, dict) else model, "'BPE' with its merges")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise _refuse(f"model.{key}", model[key], "none")
        self.model = model
        self.specials = self._specials()
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

    def _specials(self) -> dict[str, int]:
        added = self.content.get("added_tokens") or []
        if not isinstance(added, list):
            raise UserError(f"added_tokens is not a list; {GET_AGAIN}")
        specials: dict[str, int] = {}
        for entry in added:
            if not (isinstance(entry, dict) and type(entry.get("id")) is int and isinstance(entry.get("content"), str)):
                raise UserError(f"got the added token {entry!r:.80}, wanted an id and a content; {GET_AGAIN}")
            text, id = entry["content"], entry["id"]
            if entry.get("special") is not True and not MARK.fullmatch(text):
                raise UserError(
                    f"got the added token {text!r:.80}, which is not special, wanted special ones or marks such as "
                    "<tool>: others are split off before all else, which is not supported here"
                )
            if not text or specials.setdefault(text, id) != id or id < 0:
                raise UserError(f"got the added token {text!r:.80} with two ids, wanted one; {GET_AGAIN}")
        return specials

    def _spelt(self) -> list[str]:
        """The tokens by id, as the file spells them; special ones by their text."""
        vocab = self.model.get("vocab")
        if not isinstance(vocab, dict) or not all(type(id) is int for id in vocab.values()):
            raise UserError(f"model.vocab does not map tokens to ids; {GET_AGAIN}")
        texts: dict[int, str] = {}
        for text, id in [*self.specials.items(), *vocab.items()]:
            if texts.setdefault(id, text) != text:
                raise UserError(
                    f"got id {id} for both {texts[id]!r:.80} and {text!r:.80}, wanted one token for an id; {GET_AGAIN}"
                )
        for text, id in self.specials.items():
            if vocab.get(text, id) != id:
                raise UserError(f"got the added token {text!r:.80} with two ids, wanted one; {GET_AGAIN}")
        missing = next((id for id in range(len(texts)) if id not in texts), None)
        if missing is not None:
            raise UserError(
                f"got no token with id {missing}, but {len(texts)} tokens, wanted ids without a gap; only "
                "such a vocabulary can be read"
            )
        return [texts[id] for id in range(len(texts))]

    def _merges(self, ids: dict[str, int]) -> list[Pair]:
        merges: list[Pair] = []
        if not isinstance(self.model["merges"], list):
            raise UserError(f"model.merges is not a list; {GET_AGAIN}")
        for number, merge in enumerate(self.model["merges"]):
            # Files from before 2024 hold "left right", newer ones ["left", "right"].
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) and t in ids for t in pair)):
                raise UserError(f"merge {number}: got {merge!r:.80}, wanted two tokens; {GET_AGAIN}")
            merges.append((ids[pair[0]], ids[pair[1]]))
        return merges

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
        if len(cuts) == 2 and own_pattern is False and _kind(cuts[0]) == "Split":
            split = cuts[0]
            text = split["pattern"].get("Regex") if isinstance(split.get("pattern"), dict) else None
            found = next((pattern for pattern in PATTERNS.values() if text and pattern.published == text), None)
            if found and split.get("behavior") == "Isolated" and split.get("invert", False) is False:
                return found
        raise refuse()

    def _byte_level(self, pattern: Pattern, nfc: bool) -> TextTokenizer:
        special_ids = set(self.specials.values())
        ids = {text: id for id, text in enumerate(self.spelt) if id not in special_ids}
        merges = self._merges(ids)
        ignore_merges = self.model.get("ignore_merges", False)
        if not isinstance(ignore_merges, bool):
            raise _refuse("model.ignore_merges", ignore_merges, "true or false")
        plain = pattern in OWN_PATTERNS and not nfc and not ignore_merges and self.bos is None
        order = byte_order_of([ids.get(SPELLING[byte]) for byte in range(256)]) if plain else None
        first = 256 + len(merges)
        made = {self.spelt[left] + self.spelt[right]: None for left, right in merges} if order else {}
        in_order = all(max(pair) < 256 + rank for rank, pair in enumerate(merges))
        if order and in_order and list(made) == self.spelt[256:first] and min(special_ids, default=first) >= first:
            return Tokenizer(merges, [self._text(id) for id in range(first, len(self.spelt))], order, pattern)
        tokens = []
        for id, text in enumerate(self.spelt):
            token = b"" if id in special_ids else unspell(text)
            if token is None:
                raise UserError(
                    f"token {id}: got {text!r:.80}, which does not spell bytes, wanted bytes as visible "
                    f"characters, or an added token; {GET_AGAIN}"
                )
            tokens.append(token)
        return ImportedBPE(tokens, merges, self.specials, self.bos, pattern, nfc, ignore_merges)

    def _text(self, id: int) -> str:
        """The text of a special token, which may be spelt as bytes."""
        spelt = self.spelt[id]
        data = None if spelt in self.specials else unspell(spelt)
        try:
            return spelt if data is None else data.decode()
        except UnicodeDecodeError:
            raise UserError(
                f"got the token {spelt!r}, which no merge makes and which is not a text, wanted only "
                f"bytes, merges and special tokens; {GET_AGAIN}"
            ) from None

    # --- over characters, with byte fallback

    def _sentencepiece(self, normalizers: list[dict[str, Any]], cuts: list[dict[str, Any]]) -> SentencePiece:
        if self.model.get("ignore_merges"):
            raise _refuse("model.ignore_merges", self.model["ignore_merges"], "false, where there is byte fallback")
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prepend = {"type": "Prepend", "prepend": SPACE}
        if normalizers not in ([], [replace], [prepend, replace]):
            raise _refuse("normalizer", self.content.get("normalizer"), "that of Llama: spaces as U+2581, one before")
        if normalizers and not cuts:
            spaces = Spaces(prefix="always" if prepend in normalizers else "never")
        elif not normalizers and len(cuts) == 1 and _kind(cuts[0]) == "Metaspace":
            spaces = self._metaspace(cuts[0])
        else:
            raise _refuse("pre_tokenizer", self.content.get("pre_tokenizer"), "Metaspace alone, or a normaliser alone")
        decoders = [_kind(step) for step in _steps(self.content.get("decoder"), "decoders")]
        if "ByteFallback" not in decoders:
            raise _refuse("decoder", self.content.get("decoder"), "a Sequence with ByteFallback")
        special_ids = set(self.specials.values())
        ids = {text: id for id, text in enumerate(self.spelt) if id not in special_ids}
        return SentencePiece(self.spelt, self.specials, self.bos, merges=self._merges(ids), spaces=spaces)

    def _metaspace(self, step: dict[str, Any]) -> Spaces:
        old = {True: "always", False: "never"}.get(step.get("add_prefix_space", True))
        prefix: Any = step.get("prepend_scheme", old)
        split = step.get("split", True)
        known = prefix in ("always", "first", "never") and isinstance(split, bool)
        if step.get("replacement") != SPACE or not known:
            raise _refuse("pre_tokenizer", step, "Metaspace with U+2581")
        return Spaces(prefix, doubled=False, split=split)
