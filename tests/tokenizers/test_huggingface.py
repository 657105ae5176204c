"""Hugging Face's tokenizer.json: parity with the real `tokenizers`, both ways, and all that must be refused."""

from __future__ import annotations

import copy
import json
import random
import sys
import unicodedata
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizers.conftest import ENGLISH, user_error
from tests.tokenizers.test_bpe import generated_text
from tests.tokenizers.test_pieces import TRICKY
from tests.tokenizers.test_sentencepiece import train as train_sentencepiece
from tests.tokenizers.test_tiktoken import texts
from tinyforge.tokenizers import CharTokenizer, SentencePiece, TextTokenizer, Tokenizer, load_tokenizer
from tinyforge.tokenizers.bpe import SPELLING
from tinyforge.tokenizers.foreign import Foreign
from tinyforge.tokenizers.huggingface import from_huggingface, to_huggingface
from tinyforge.tokenizers.pieces import PATTERNS
from tinyforge.tokenizers.sentencepiece import BYTES, SPACE, Spaces

CODE = "don't WE'LL 2024 12345 x=1;\r\n\r\n\tif (a) {\n    b++;\n}\n"
TRAINED_ON = generated_text(100_000, seed=20) + ENGLISH + CODE * 20


@cache
def strings(count: int) -> list[str]:
    """Unicode that this Python knows, runs of digits, contractions, white space of all kinds, what NFC changes."""
    rng = random.Random(21)
    planes = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x30000)]
    odd = ["'s", "'S", "'LL", "'ve", "'\u017f", "\u212a", "\n", "\r\n", "\n\n", " \n ", "\t", "\u00a0", "\u3000"]
    odd += ["\x85", "\x1c", "7", "42", "123", "1234567", "\u00bd", "\u0663", "\u2167", ".", "...", "!?", "--", "_"]
    odd += ["<|im_end|>", "</s>", "👍🏽", "中文"]
    odd += ["e\u0301", "\u00e9", "\u1100\u1161\u11a8", "\u212b", "\u0958", "\ufb01", "q\u0307\u0323", "\u0301"]
    words = TRAINED_ON[:5000].split()
    made = ["", " ", "\n", "a" * 300, " " * 50, "1" * 50, *TRICKY]
    while len(made) < count:
        parts = []
        for _ in range(rng.randrange(20)):
            kind = rng.random()
            if kind < 0.2:
                character = chr(rng.randrange(*rng.choice(planes)))
                parts.append("" if unicodedata.category(character) in ("Cn", "Co", "Cs") else character)
            else:
                parts.append(rng.choice(odd if kind < 0.6 else words))
            parts.append(rng.choice(["", "", " ", " ", "  "]))
        made.append("".join(parts))
    return made


def save(content: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def peer() -> Any:
    return pytest.importorskip("tokenizers")


def byte_level(kind: str) -> Any:
    """A tokenizer of the real package with the options of a published model, trained here."""
    p = peer()
    theirs = p.Tokenizer(p.models.BPE(ignore_merges=kind in ("llama3", "tekken")))
    level = p.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt2", "digits"))
    if kind not in ("gpt2", "digits"):
        splits = [p.pre_tokenizers.Split(p.Regex(step), "isolated") for step in PATTERNS[kind].steps]
        theirs.pre_tokenizer = p.pre_tokenizers.Sequence([*splits, level])
    elif kind == "digits":
        theirs.pre_tokenizer = p.pre_tokenizers.Sequence([p.pre_tokenizers.Digits(individual_digits=True), level])
    else:
        theirs.pre_tokenizer = level
    if kind == "qwen2":
        theirs.normalizer = p.normalizers.NFC()
    theirs.decoder = p.decoders.ByteLevel()
    # SmolLM2 has its special tokens first, as the trainer puts them; the others have them last.
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] if kind == "digits" else []
    trainer = p.trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=p.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=specials,
        show_progress=False,
    )
    theirs.train_from_iterator([TRAINED_ON], trainer)
    if kind == "llama3":
        theirs.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
        template = p.processors.TemplateProcessing(
            single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A $B", special_tokens=[("<|begin_of_text|>", 900)]
        )
        theirs.post_processor = p.processors.Sequence([p.processors.ByteLevel(trim_offsets=False), template])
    elif kind != "digits":
        theirs.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    if kind == "qwen2":
        theirs.add_tokens([p.AddedToken("<tool_call>", normalized=False)])  # as Qwen2.5: a token that is not special
    return theirs


@pytest.mark.parametrize("kind", PATTERNS)
def test_ids_and_text_equal_a_tokenizer_made_there(kind: str, tmp_path: Path) -> None:
    theirs = byte_level(kind)
    path = tmp_path / "tokenizer.json"
    theirs.save(str(path))
    ours = load_tokenizer(path)
    assert isinstance(ours, Tokenizer) and ours.byte_order == ("gpt2" if kind == "gpt2" else None)
    assert ours.vocab_size == theirs.get_vocab_size()
    assert ours.bos == (900 if kind == "llama3" else None)
    theirs.encode_special_tokens = True
    for text in strings(2000):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert [array.tolist() for array in ours.encode_many(strings(2000))] == [ours.encode(t) for t in strings(2000)]
    whole = "".join(strings(2000)) * 3
    assert ours.encode(whole) == theirs.encode(whole, add_special_tokens=False).ids
    for text, id in ours.specials.items():
        assert theirs.token_to_id(text) == id and ours.byte_lengths[id] == 0
    # Written again, it is the same there, and comes back as it was.
    if kind != "gpt2":
        again = peer().Tokenizer.from_file(str(save(to_huggingface(ours), tmp_path / "written.json")))
        again.encode_special_tokens = True
        for text in strings(300):
            ids = theirs.encode(text).ids
            assert again.encode(text).ids == ids and again.decode(ids) == theirs.decode(ids)
        assert load_tokenizer(tmp_path / "written.json").hash() == ours.hash()
    # As our own file it is the same tokenizer, also with the old spelling of merges.
    ours.save(tmp_path / "ours.json")
    again = load_tokenizer(tmp_path / "ours.json")
    assert again.hash() == ours.hash() and again.bos == ours.bos and again.specials == ours.specials
    assert [again.encode(text) for text in strings(100)] == [ours.encode(text) for text in strings(100)]
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    assert load_tokenizer(save(content, path)).hash() == ours.hash()


def test_several_merges_for_one_token_as_in_llama3(tmp_path: Path) -> None:
    """Llama 3's file has every way to cut a token in two; its tokens need not be reached by merges at all."""
    theirs = byte_level("llama3")
    path = tmp_path / "tokenizer.json"
    theirs.save(str(path))
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    cuts = [(vocab[t], t[:at], t[at:]) for t in vocab for at in range(1, len(t)) if t[:at] in vocab and t[at:] in vocab]
    content["model"]["merges"] = [[left, right] for _, left, right in sorted(cuts)]
    theirs = peer().Tokenizer.from_file(str(save(content, path)))
    ours = from_huggingface(path)
    assert isinstance(ours, Tokenizer) and ours.byte_order is None and len(ours.merges) > 1.2 * (len(vocab) - 256)
    for text in strings(500):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    # Without a merge, only a piece that is a token as a whole is one token.
    content["model"]["merges"] = []
    theirs = peer().Tokenizer.from_file(str(save(content, path)))
    ours = from_huggingface(path)
    for text in strings(200):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


# --- with byte fallback

REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
LLAMA = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, REPLACE]}
METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": False}
OLD_METASPACE = {"type": "Metaspace", "replacement": SPACE, "add_prefix_space": True}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
UNSPACE = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
FALLBACK = [UNSPACE, {"type": "ByteFallback"}, {"type": "Fuse"}]


@cache
def llama_model() -> dict[str, Any]:
    """Content of a tokenizer.json as of TinyLlama: trained here, the bytes put in as its converter does."""
    p = peer()
    theirs = p.Tokenizer(p.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.pre_tokenizer = p.pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = p.trainers.BpeTrainer(vocab_size=900, special_tokens=specials, show_progress=False, limit_alphabet=80)
    theirs.train_from_iterator([TRAINED_ON], trainer)
    content = json.loads(theirs.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    processor = p.processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    theirs.post_processor = processor
    content["post_processor"] = json.loads(theirs.to_str())["post_processor"]
    return content


@pytest.mark.parametrize(
    ("normalizer", "cut", "spaces"),
    [
        (LLAMA, None, Spaces()),
        (REPLACE, None, Spaces("never")),
        (None, METASPACE, Spaces(doubled=False)),
        (None, METASPACE | {"prepend_scheme": "first"}, Spaces("first", doubled=False)),
        (None, METASPACE | {"prepend_scheme": "never"}, Spaces("never", doubled=False)),
        (None, METASPACE | {"split": True}, Spaces(doubled=False, split=True)),
        (None, OLD_METASPACE, Spaces(doubled=False, split=True)),
    ],
)
def test_byte_fallback_equals_a_tokenizer_made_there(normalizer: Any, cut: Any, spaces: Spaces, tmp_path: Path) -> None:
    content = copy.deepcopy(llama_model())
    decoders = FALLBACK if spaces.prefix == "never" else [*FALLBACK, STRIP]
    content |= {"normalizer": normalizer, "pre_tokenizer": cut, "decoder": {"type": "Sequence", "decoders": decoders}}
    path = save(content, tmp_path / "tokenizer.json")
    theirs = peer().Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    ours = load_tokenizer(path)
    assert isinstance(ours, SentencePiece) and ours.spaces == spaces and ours.bos == 1
    assert ours.specials == {"<unk>": 0, "<s>": 1, "</s>": 2}
    for text in [*strings(2000), *(SPACE + text for text in strings(50)), "<0x41>", "▁▁", " ▁ "]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    ours.save(tmp_path / "ours.json")
    again = load_tokenizer(tmp_path / "ours.json")
    assert again.hash() == ours.hash() and again.encode(TRAINED_ON) == ours.encode(TRAINED_ON)
    written = peer().Tokenizer.from_file(str(save(to_huggingface(ours), path)))
    written.encode_special_tokens = True
    for text in strings(300):
        ids = theirs.encode(text).ids
        assert written.encode(text).ids == ids
        assert written.decode(ids) == theirs.decode(ids)
    assert load_tokenizer(path).hash() == ours.hash()


@pytest.mark.parametrize("scheme", ["always", "never"])
@pytest.mark.parametrize("strips", [True, False])
def test_a_decoder_that_strips_what_is_not_put_there(scheme: str, strips: bool, tmp_path: Path) -> None:
    """Or leaves the space that is: the package reads it, and texts come out as there."""
    content = copy.deepcopy(llama_model())
    steps = [*FALLBACK, STRIP] if strips else FALLBACK
    cut = METASPACE | {"prepend_scheme": scheme}
    content |= {"normalizer": None, "pre_tokenizer": cut, "decoder": {"type": "Sequence", "decoders": steps}}
    path = save(content, tmp_path / "tokenizer.json")
    theirs, ours = peer().Tokenizer.from_file(str(path)), load_tokenizer(path)
    theirs.encode_special_tokens = True
    assert isinstance(ours, SentencePiece) == (strips == (scheme == "always"))
    for text in [*strings(300), " a", "  a", "a "]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


def test_a_sentencepiece_model_with_scores_over_there(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path / "tokenizer.model")
    ours = load_tokenizer(tmp_path / "tokenizer.model")
    path = save(to_huggingface(ours), tmp_path / "tokenizer.json")
    theirs = peer().Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    back = load_tokenizer(path)
    assert back.bos == ours.bos and back.specials == ours.specials
    for text in [*strings(2000), "=" * 7, "ababababab" * 5, TRAINED_ON]:
        ids = ours.encode(text)
        assert theirs.encode(text).ids == [1, *ids]
        assert theirs.decode(ids) == ours.decode(ids)
        assert back.encode(text) == ids


# --- our vocabularies over there


def test_huggingface_reads_our_export(vocabulary: Tokenizer, tmp_path: Path) -> None:
    path = save(to_huggingface(vocabulary), tmp_path / "tokenizer.json")
    theirs = peer().Tokenizer.from_file(str(path))
    assert theirs.get_vocab_size() == vocabulary.vocab_size
    for text in texts():
        ids = vocabulary.encode(text)
        assert theirs.encode(text).ids == ids
        assert theirs.decode(ids) == text
    for text, id in vocabulary.specials.items():
        assert theirs.decode([id]) == text
    assert from_huggingface(path).hash() == vocabulary.hash()
    # And what the peer writes after reading it comes back too.
    theirs.save(str(path))
    assert from_huggingface(path).hash() == vocabulary.hash()


def test_huggingface_recognises_specials_when_asked(trained: Tokenizer, tmp_path: Path) -> None:
    path = save(to_huggingface(trained, recognise_specials=True), tmp_path / "tokenizer.json")
    theirs = peer().Tokenizer.from_file(str(path))
    stop = trained.specials["</s>"]
    assert theirs.encode("one</s>two").ids == [*trained.encode("one"), stop, *trained.encode("two")]
    assert theirs.decode([*trained.encode("one"), stop]) == "one"
    theirs.encode_special_tokens = True
    for text in texts():
        assert theirs.encode(text).ids == trained.encode(text)
    assert from_huggingface(path).hash() == trained.hash()


def test_import_of_an_old_file(trained: Tokenizer, tmp_path: Path) -> None:
    """As GPT-2's own: no model type, merges as strings, empty affixes, the special token in both places."""
    content = to_huggingface(trained, recognise_specials=True)
    model = content["model"]
    del model["type"], model["ignore_merges"], model["byte_fallback"]
    model |= {"continuing_subword_prefix": "", "end_of_word_suffix": "", "unk_token": "<|endoftext|>"}
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    model["vocab"] |= trained.specials
    assert from_huggingface(save(content, tmp_path / "old.json")).hash() == trained.hash()


def test_exports_that_are_refused() -> None:
    # "abc" in two ways: an id each here, one entry there.
    twice = Tokenizer([(97, 98), (98, 99), (256, 99), (97, 257)], [])
    assert "the bytes b'abc' as ids 258 and 259" in user_error(lambda: to_huggingface(twice))
    for special, expected in [("ab", "spelling of token 256"), ("a", "spelling of token 97"), ("\ud83d", "surrogate")]:
        odd = Tokenizer([(97, 98)], [special])
        for recognise in (False, True):
            assert expected in user_error(lambda odd=odd, flag=recognise: to_huggingface(odd, flag))
    accent = Tokenizer([], ["été"])
    assert "characters that spell other bytes" in user_error(lambda: to_huggingface(accent, True))
    assert "spelling of token 32" in user_error(lambda: to_huggingface(Tokenizer([], ["Ġ"]), True))
    assert "cannot hold a CharTokenizer" in user_error(lambda: to_huggingface(CharTokenizer("ab")))
    for spaces, pieces in [(Spaces(collapsed=True), ["a"]), (Spaces("first"), ["a"]), (Spaces(), ["ab"])]:
        scores = [0.0] * (256 + len(pieces))
        words = SentencePiece([*BYTES, *pieces], {}, None, scores, spaces=spaces)
        assert "cannot hold this SentencePiece" in user_error(lambda words=words: to_huggingface(words))


def test_huggingface_keeps_an_unreachable_token(tmp_path: Path) -> None:
    unreachable = Tokenizer([(98, 99), (97, 98), (257, 99)], [])
    path = save(to_huggingface(unreachable), tmp_path / "tokenizer.json")
    theirs = peer().Tokenizer.from_file(str(path))
    for text in ("abc", "ab", "bc", "abcabc abbc", "aabbcc"):
        assert theirs.encode(text).ids == unreachable.encode(text)


def put(content: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        content = content[key]
    content[last] = value


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
SPECIAL = {"id": 258, "content": "</s>", "special": True}
DIGITS = {"type": "Digits", "individual_digits": False}  # runs of them


def split(**change: object) -> dict[str, Any]:
    """The pre-tokeniser of Qwen2, changed."""
    pattern = {"Regex": PATTERNS["qwen2"].published}
    cut = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False} | change
    return {"type": "Sequence", "pretokenizers": [cut, LEVEL | {"use_regex": False}]}


def template(*names: str) -> dict[str, Any]:
    single = [{"Sequence": {"id": "A"}} if name == "A" else {"SpecialToken": {"id": name}} for name in names]
    return {"type": "TemplateProcessing", "single": single}


@pytest.mark.parametrize(
    ("dotted", "value", "expected"),
    [
        ("normalizer", {"type": "NFKC"}, "got normalizer {'type': 'NFKC'}, expected none, or NFC"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, "got normalizer"),
        ("normalizer", {"type": "Sequence"}, "expected a step or a list of steps"),
        ("normalizer", 1, "expected a step or a list of steps"),
        ("post_processor", {"type": "BertProcessing"}, "got post_processor"),
        ("post_processor", {"type": "TemplateProcessing"}, "got post_processor"),
        ("post_processor", {"type": "TemplateProcessing", "single": 1}, "got post_processor"),
        ("post_processor", template("A", "</s>"), "expected none, ByteLevel, or one special token before the text"),
        ("post_processor", template("</s>", "</s>", "A"), "got post_processor"),
        ("post_processor", template("<s>", "A"), "expected an added token before the text"),
        ("pre_tokenizer", None, "got pre_tokenizer None, expected ByteLevel with no prefix space and one of"),
        ("pre_tokenizer", {"type": "Whitespace"}, "gpt2, llama3, qwen2, digits"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [LEVEL] * 20}, "got pre_tokenizer"),
        ("pre_tokenizer", LEVEL | {"add_prefix_space": True}, "no prefix space"),
        ("pre_tokenizer", LEVEL | {"use_regex": False}, "got pre_tokenizer"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [DIGITS, LEVEL]}, "got pre_tokenizer"),
        ("pre_tokenizer", split(pattern={"Regex": "(a+)+$"}), "got pre_tokenizer"),
        ("pre_tokenizer", split(pattern={"String": " "}), "got pre_tokenizer"),
        ("pre_tokenizer", split(pattern={"Regex": ""}), "got pre_tokenizer"),
        ("pre_tokenizer", split(pattern=None), "got pre_tokenizer"),
        ("pre_tokenizer", split(behavior="Removed"), "got pre_tokenizer"),
        ("pre_tokenizer", split(invert=True), "got pre_tokenizer"),
        ("decoder", None, "got decoder None, expected ByteLevel"),
        ("model", [], "got model []"),
        ("model.type", "Unigram", "got model 'Unigram', expected 'BPE'"),
        ("model.dropout", 0.1, "got model.dropout 0.1"),
        ("model.end_of_word_suffix", "</w>", "got model.end_of_word_suffix"),
        ("model.continuing_subword_prefix", "##", "got model.continuing_subword_prefix"),
        ("model.ignore_merges", 1, "got model.ignore_merges 1"),
        ("model.byte_fallback", True, "got pre_tokenizer"),
        ("model.vocab", [], "model.vocab"),
        ("model.vocab", {"a": "b"}, "model.vocab"),
        ("model.vocab.a", 98, "got id 98 for both 'a' and 'b'"),
        ("model.vocab.ab", 300_000, "got the id 300000 for one of 258 tokens, expected ids that follow"),
        ("model.vocab.ÃĠ", 258, "which no merge makes and which is not a text"),
        ("model.vocab.zzz", 257, "got id 257 for both"),
        ("model.vocab.zzz", -1, "got the id -1 for one of 259 tokens"),
        ("model.merges", None, "model.merges"),
        ("model.merges", [["a", "bc"]], "merge 0: got ['a', 'bc'], expected two tokens"),
        ("model.merges", [["a", "b"], ["", "b"]], "merge 1: got ['', 'b'], expected two tokens"),
        ("model.merges", [" b"], "merge 0: got ' b', expected two tokens"),
        ("model.merges", [["a", "c"]], "merge 0: got ['a', 'c'], expected a new pair that makes a token"),
        ("model.merges", [["a", 1]], "merge 0"),
        ("model.merges", ["a b c"], "merge 0"),
        ("model.merges", [["a", "b"], ["a", "b"]], "merge 1: got ['a', 'b'], expected a new pair"),
        ("added_tokens", {"a": 1}, "added_tokens is not a list"),
        ("added_tokens", [{"id": 258}], "expected an id and a content"),
        ("added_tokens", [SPECIAL], "'</s>' with two ids"),
        ("added_tokens", [SPECIAL | {"content": ""}], "'' with two ids"),
        ("added_tokens", [SPECIAL | {"content": "x ", "special": False, "lstrip": True}], "got added token"),
        ("added_tokens", [SPECIAL | {"content": "ab", "id": 256}], "got the special token 'ab', which other text"),
        ("added_tokens", [SPECIAL | {"content": "a", "id": 97}], "got the special token 'a', which other text"),
    ],
)
def test_huggingface_files_that_are_refused(
    dotted: str, value: object, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # which reads some of them
    good = to_huggingface(Tokenizer([(97, 98)], ["</s>"]))
    path = save(good, tmp_path / "tokenizer.json")
    assert from_huggingface(path).encode("ab</s>") == [256, *b"</s>"]
    bad = copy.deepcopy(good)
    put(bad, dotted, value)
    message = user_error(lambda: load_tokenizer(save(bad, path)))
    assert expected in message and str(path) in message and len(message) < 600


def test_vocabularies_that_are_refused(tmp_path: Path) -> None:
    content = to_huggingface(Tokenizer([], [])) | {"normalizer": {"type": "NFC"}}
    content["model"]["vocab"] |= {"中": 256}
    path = save(content, tmp_path / "tokenizer.json")
    assert "token 256: got '中', which does not spell bytes" in user_error(lambda: from_huggingface(path))
    content["model"]["vocab"] = {"a": 0}  # other bytes are left out of every text, as there
    save(content, path)
    assert from_huggingface(path).encode("banana") == [0, 0, 0]
    path.write_text("[" * 100_000)
    assert "is nested too deeply" in user_error(lambda: from_huggingface(path))
    assert "cannot read the tokenizer" in user_error(lambda: from_huggingface(tmp_path / "none"))


def same_as_there(content: dict[str, Any], path: Path, *more: str) -> TextTokenizer:
    """Our tokenizer, after its ids and texts have been compared with the real package's."""
    theirs = peer().Tokenizer.from_file(str(save(content, path)))
    theirs.encode_special_tokens = True
    ours = load_tokenizer(path)
    rng = random.Random(22)
    added = [entry["content"] for entry in content["added_tokens"]]
    made = ["".join(rng.choices([*strings(60), *added, *more, " ", "\n"], k=4)) for _ in range(300)]
    for text in [*more, *made]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
    assert [ids.tolist() for ids in ours.encode_many(made)] == [ours.encode(text) for text in made]
    ours.save(path.with_name("saved.json"))
    again = load_tokenizer(path.with_name("saved.json"))
    assert again.hash() == ours.hash() and [again.encode(text) for text in made] == [ours.encode(text) for text in made]
    return ours


def test_what_published_files_have_and_stand_ins_do_not(tmp_path: Path) -> None:
    theirs = byte_level("qwen2")
    theirs.add_tokens(
        [peer().AddedToken(text, normalized=False) for text in ("<think>", "  ", "   ", "\n\n", "a\u0301b")]
    )
    theirs.enable_truncation(4)
    theirs.enable_padding(length=9)
    path = tmp_path / "tokenizer.json"
    theirs.save(str(path))
    content = json.loads(path.read_text(encoding="utf-8")) | {"truncation": None, "padding": None}
    expected = same_as_there(content, path, "<think>\n\n\n    x", "     ", "a\u0301b", "\u00e1b")
    assert expected.user_defined["  "] == 904 and "<think>" not in expected.specials
    # Settings of a call, which say nothing about the ids; ids that no token has; bytes that no token has.
    theirs.save(str(path))
    assert load_tokenizer(path).hash() == expected.hash()
    content["added_tokens"] += [content["added_tokens"][-1] | {"id": 990, "content": "<far>"}]
    # The package numbers added tokens anew where the vocabulary lacks them, so these have them, as GPT-4o's file.
    content["model"]["vocab"] |= {entry["content"]: entry["id"] for entry in content["added_tokens"]}
    found = same_as_there(content, path, "<far>")
    assert found.vocab_size == 991 and found.decode([950]) == "" and found.byte_lengths[950] == 0
    for unused in "\x7f\u0100\u0101~":
        content["model"]["vocab"].pop(SPELLING[ord(unused)] if ord(unused) < 128 else unused)
    assert same_as_there(content, path, "a~\x7fb", "\x01\x00").encode("~") == []


@pytest.mark.parametrize("text", ["!", "e", "the", "\u0120the"])
def test_a_special_token_that_is_ordinary_text_too(text: str, tmp_path: Path) -> None:
    """As a pad token that was chosen from the vocabulary: other text keeps its id."""
    content = json.loads(byte_level("llama3").to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"].append({"id": content["model"]["vocab"][text], "content": text, **flags})
    same_as_there(content, tmp_path / "tokenizer.json", "Hi! there!!", "the a bathe!", text)
    content = copy.deepcopy(llama_model())
    text = text.replace("\u0120", SPACE)
    content["added_tokens"].append({"id": content["model"]["vocab"][text], "content": text, **flags})
    unspace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    content["decoder"] = {"type": "Sequence", "decoders": [unspace, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    path = save(content, tmp_path / "tokenizer.json")
    theirs = peer().Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    for line in ("Hi! there!!", "the a bathe!", text):
        ids = theirs.encode(line, add_special_tokens=False).ids
        assert load_tokenizer(path).encode(line) == ids
        assert load_tokenizer(path).decode(ids) == theirs.decode(ids, skip_special_tokens=False)


def test_what_is_not_covered_goes_through_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p, path = peer(), tmp_path / "tokenizer.json"
    unigram = p.Tokenizer(
        p.models.Unigram([("<unk>", 0.0), *((piece, -float(i)) for i, piece in enumerate("▁aebt"))], 0)
    )
    unigram.pre_tokenizer, unigram.decoder = p.pre_tokenizers.Metaspace(), p.decoders.Metaspace()
    falcon = byte_level("gpt2")
    falcon.pre_tokenizer = p.pre_tokenizers.Sequence([p.pre_tokenizers.Punctuation(), falcon.pre_tokenizer])
    for theirs, texts_ in ((unigram, ("a bet", "tea")), (falcon, ("a,b<think>", "don't!"))):
        theirs.add_special_tokens(["<s>", "</s>"])
        theirs.post_processor = p.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[(text, theirs.token_to_id(text)) for text in ("<s>", "</s>")]
        )
        theirs.save(str(path))
        capsys.readouterr()
        found = load_tokenizer(path)
        assert capsys.readouterr().err.count("is read by the package tokenizers: got ") == 1
        assert found.bos == theirs.token_to_id("<s>") and found.specials["</s>"] == found.bos + 1
        theirs.encode_special_tokens = True
        for text in texts_:
            ids = theirs.encode(text, add_special_tokens=False).ids
            assert found.encode(text) == ids and found.decode(ids) == theirs.decode(ids)
            assert b"".join(map(found.token_bytes, ids)).decode().lstrip() == text
        found.save(path)
        assert load_tokenizer(path).hash() == found.hash()
    content = to_huggingface(Tokenizer([(97, 98)], ["</s>"]))
    content["model"]["continuing_subword_prefix"] = "##"  # at which the package panics
    assert "cannot read it: slice index" in user_error(lambda: load_tokenizer(save(content, path)))
    unigram.decoder = p.decoders.CTC()
    unigram.save(str(path))
    assert "expected ByteLevel, ByteFallback or Metaspace" in user_error(lambda: load_tokenizer(path))


@pytest.mark.parametrize(
    ("dotted", "value", "expected"),
    [
        ("normalizer", {"type": "NFC"}, "got normalizer {'type': 'NFC'}, expected that of Llama"),
        ("pre_tokenizer", {"type": "Whitespace"}, "got pre_tokenizer"),
        ("pre_tokenizer", METASPACE, "got pre_tokenizer"),
        ("decoder", {"type": "Metaspace"}, "got decoder"),
        ("model.ignore_merges", True, "got model.ignore_merges True"),
        ("model.merges", [["a", "b"]], "merge 0: got ['a', 'b'], expected a new pair"),
        ("model.vocab.<0x41>", 900, "got no token with id"),
        ("post_processor", template("A", "</s>"), "got post_processor"),
    ],
)
def test_byte_fallback_files_that_are_refused(
    dotted: str, value: object, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # which reads some of them
    every = ["<unk>", "<s>", "</s>", *BYTES, "a", "b"]
    good = {
        "added_tokens": [{"id": id, "content": every[id], "special": True} for id in range(3)],
        "normalizer": LLAMA,
        "pre_tokenizer": None,
        "post_processor": template("<s>", "A"),
        "decoder": {"type": "Sequence", "decoders": [*FALLBACK, STRIP]},
        "model": {"type": "BPE", "byte_fallback": True, "vocab": {t: i for i, t in enumerate(every)}, "merges": []},
    }
    path = save(good, tmp_path / "tokenizer.json")
    assert from_huggingface(path).encode("b", "text") == [260]
    bad = copy.deepcopy(good)
    put(bad, dotted, value)
    message = user_error(lambda: load_tokenizer(save(bad, path)))
    assert expected in message and str(path) in message and len(message) < 600


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "got version 2, expected 1"),
        ({"pattern": "words"}, "got pattern 'words', expected 'gpt2' or 'llama3' or 'qwen2' or 'digits'"),
        ({"pattern": []}, "got pattern [], expected 'gpt2'"),
        ({"nfc": None}, "nfc or ignore_merges is not true or false"),
        ({"tokens": None}, "tokens is not a list of texts"),
        ({"tokens": [1]}, "tokens is not a list of texts"),
        ({"tokens": ["中"]}, "a character that does not spell a byte"),
        ({"tokens": ["a"], "specials": {}, "bos": None}, "merge 0: got the ids 97 and 98"),
        ({"specials": []}, "specials does not map texts to ids"),
        ({"specials": {"</s>": 999}}, "specials does not map texts to ids"),
        ({"bos": -1}, "is not the id of a special token"),
        ({"merges": [[1, 2, 3]]}, "merges is not a list of pairs"),
        ({"merges": [[97, 999]]}, "merge 0: got the ids 97 and 999"),
        ({"merges": [[97, 97]]}, "merge 0: got the ids 97 and 97"),
        ({"merges": [[97, 98], [97, 98]]}, "merge 1: got the ids 97 and 98"),
        ({"format": "else"}, "got format 'else'"),
    ],
)
def test_damaged_files_of_an_imported_vocabulary(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"", b"ab"]
    good = Tokenizer([(97, 98)], {"</s>": 256}, pattern=PATTERNS["qwen2"], tokens=tokens, bos=256, nfc=True)
    path = tmp_path / "tokenizer.json"
    good.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert load_tokenizer(path).encode("ab") == [257] and load_tokenizer(path).hash() == good.hash()
    message = user_error(lambda: load_tokenizer(save(content | change, path)))
    assert expected in message and str(path) in message and len(message) < 600


def test_hash_sees_all_that_decides_the_ids() -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"", b"ab"]
    merges, specials = [(97, 98)], {"</s>": 256}
    imported = partial(Tokenizer, tokens=tokens)
    variants = [
        imported(merges, specials),
        imported([], specials),
        imported(merges, {"<s>": 256}),
        imported(merges, specials, bos=256),
        imported(merges, specials, pattern=PATTERNS["qwen2"]),
        imported(merges, specials, nfc=True),
        imported(merges, specials, ignore_merges=True),
        imported([(98, 97)], specials, tokens=[*tokens[:-1], b"ba"]),
    ]
    assert len({variant.hash() for variant in variants}) == len(variants)


# --- by the package ---------------------------------------------------------------------------------------------------


def _pieces_that_are_special(kind: str) -> dict[str, Any]:
    """A tokenizer.json whose model has its special tokens among its pieces, as those made from SentencePiece have."""
    from tokenizers import Tokenizer as Package
    from tokenizers import decoders, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", "a", "b", SPACE, "<", "/", "s", ">"]
    ids = {word: id for id, word in enumerate(words)}
    made = {
        "Unigram": lambda: models.Unigram([(word, -float(id)) for id, word in enumerate(words)], unk_id=0),
        "WordLevel": lambda: models.WordLevel(ids, unk_token="<unk>"),
        "BPE": lambda: models.BPE(ids, [], unk_token="<unk>", ignore_merges=True),
    }
    package = Package(made[kind]())
    package.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    package.decoder = decoders.Metaspace()
    package.add_special_tokens(["<s>", "</s>", "<new>"])
    package.add_tokens(["foo"])
    return dict(json.loads(package.to_str()))


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel", "BPE"])
def test_a_text_that_spells_a_special_piece_does_not_become_its_id(kind: str) -> None:
    pytest.importorskip("tokenizers")
    found = Foreign(_pieces_that_are_special(kind))
    assert found.specials == {"<s>": 1, "</s>": 2, "<new>": 10}
    ids = found.encode("a <s> </s> <new> foo b")
    assert not {1, 2, 10} & set(ids) and ids[0] == 3 and ids[-1] == 4 and 11 in ids
    assert found._reader.encode("a </s>", add_special_tokens=False).ids[-1] == 2  # what the package makes of it


def _without_pre_tokenizer(vocab: dict[str, int], decoder: Any, added: str = "", **model: Any) -> dict[str, Any]:
    """A tokenizer.json of a BPE without merges, all of whose words have one character."""
    from tokenizers import Tokenizer as Package
    from tokenizers import models, pre_tokenizers

    package = Package(models.BPE(vocab, [], unk_token="<unk>", **model))
    if not model:
        package.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    package.decoder = decoder
    package.add_tokens([added] if added else [])
    return dict(json.loads(package.to_str()))


def check_with_the_package(content: dict[str, Any], path: Path, some: list[str]) -> TextTokenizer:
    """The ids and the texts are the package's."""
    from tokenizers import Tokenizer as Package

    found, package = load_tokenizer(save(content, path)), Package.from_str(json.dumps(content))
    for text in some:
        ids = package.encode(text, add_special_tokens=False).ids
        assert found.encode(text) == ids
        assert found.decode(ids) == package.decode(ids, skip_special_tokens=False)
    return found


@pytest.mark.parametrize("special", [False, True])
def test_bytes_that_are_missing_or_special_tokens(special: bool, tmp_path: Path) -> None:
    decoders = pytest.importorskip("tokenizers.decoders")
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    names = ["<unk>", SPACE, "a", *BYTES[: 256 if special else 128]]
    content = _without_pre_tokenizer(
        {name: id for id, name in enumerate(names)}, decoders.Sequence(steps), byte_fallback=True, ignore_merges=special
    )
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": id, "content": name, "special": True, **flags} for id, name in enumerate(names) if special and id > 2
    ]
    check_with_the_package(content, tmp_path / "tokenizer.json", ["a b", "b\n", "\u00e9" if special else "ab"])


def test_an_added_token_that_spells_a_byte(tmp_path: Path) -> None:
    """\u00e9 is the byte 0xe9 too, which other characters have."""
    decoders = pytest.importorskip("tokenizers.decoders")
    vocab = {SPELLING[byte]: byte for byte in range(256)}
    content = _without_pre_tokenizer(vocab, decoders.ByteLevel(), added="\u00e9")
    check_with_the_package(content, tmp_path / "tokenizer.json", ["a\u00e9", "\u97f3 a", "\u00e9\u97f3"])


def test_the_first_token_loses_its_marks_of_spaces(tmp_path: Path) -> None:
    decoders = pytest.importorskip("tokenizers.decoders")
    vocab = {name: id for id, name in enumerate(["<unk>", "a", SPACE, " ", f"{SPACE}{SPACE}a{SPACE}", "b"])}
    content = _without_pre_tokenizer(vocab, decoders.Metaspace(), ignore_merges=True)
    found = check_with_the_package(
        content, tmp_path / "tokenizer.json", [" a", "a", f"{SPACE}a", f"{SPACE}{SPACE}a{SPACE}"]
    )
    assert found.decode([4, 4]) == "a  a " and found.decode([3, 1]) == " a"
