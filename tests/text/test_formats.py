"""Exports read by the real `tokenizers` and `tiktoken`, imports of what they write, and all that must be refused."""

from __future__ import annotations

import base64
import copy
import json
import random
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tinyforge.errors import UserError
from tinyforge.text import Tokenizer, bpe, formats

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SHAKESPEARE = SHARED / "shakespeare" / "input.txt"
GPT2 = SHARED / "gpt2"

ENGLISH = (
    """It was the best of times, it was the worst of times; don't you'll say I've  said it's 1859?
\tThe "period" was so far like the present period, that some of its noisiest authorities insisted...\r\n\r\n
naïve café — Übergröße, 中文和日本語, любовь, 👩‍👩‍👧‍👦 👍🏽 </s> <|endoftext|> <| end é |>
"""
    * 20
)


@cache
def texts() -> list[str]:
    """English, and random characters known to this Python: what a newer Unicode assigns, a newer library knows."""
    rng = random.Random(0)
    planes = [(0, 0x80), (0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x30000)]
    out = [ENGLISH, "", " ", "</s>", "<|endoftext|></s>", "a" * 3000, "abcab" * 500]
    for _ in range(30):
        characters = [chr(rng.randrange(*rng.choice(planes))) for _ in range(120)]
        known = [c for c in characters if unicodedata.category(c) not in ("Cn", "Co", "Cs")]
        out.append("".join(c + rng.choice(["", "", "", " ", "  ", "\n", "'s", "\u00a0"]) for c in known))
        out.append("".join(f"a{c}1{c}.{c}'{c} {c}\n{c}" for c in known))
    words = ENGLISH.split()
    out += [" ".join(rng.choices(words, k=50)) for _ in range(20)]
    if SHAKESPEARE.exists():
        out.append(SHAKESPEARE.read_text(encoding="utf-8")[:20_000])
    return out


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train([ENGLISH, "abc bca cab aab baa " * 5], 440, progress=False)


def gpt2_order(tokenizer: Tokenizer, specials: list[str]) -> Tokenizer:
    """The same merges over bytes numbered in GPT-2's order."""
    at = [bpe.BYTE_ORDERS["gpt2"].index(byte) for byte in range(256)]
    move = {id: at[id] if id < 256 else id for pair in tokenizer.merges for id in pair}
    return Tokenizer([(move[left], move[right]) for left, right in tokenizer.merges], specials, "gpt2")


@pytest.fixture(scope="module", params=["plain", "gpt2 order", "odd specials", "no merge", "edges", "GPT-2"])
def tokenizer(request: pytest.FixtureRequest, trained: Tokenizer) -> Tokenizer:
    if request.param == "GPT-2":
        if not (GPT2 / "encoder.json").exists():
            pytest.skip("GPT-2's encoder.json and vocab.bpe are not on this machine")
        return Tokenizer.from_gpt2(GPT2 / "encoder.json", GPT2 / "vocab.bpe")
    return {
        "plain": trained,
        "gpt2 order": gpt2_order(trained, ["<|endoftext|>"]),
        "odd specials": Tokenizer(trained.merges, ["</s>", "<| end é |>", "été", "Ġ\n"]),
        "no merge": Tokenizer([], []),
        # One token where a piece goes on with a character that is not ASCII, two where it is cut before it.
        "edges": Tokenizer([(left, right) for left in b"a1.' \n" for right in range(0x80, 0x100)], []),
    }[request.param]


def save(content: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


# --- Hugging Face


def test_huggingface_reads_our_export(tokenizer: Tokenizer, tmp_path: Path) -> None:
    peer = pytest.importorskip("tokenizers")
    path = save(formats.to_huggingface(tokenizer), tmp_path / "tokenizer.json")
    theirs = peer.Tokenizer.from_file(str(path))
    assert theirs.get_vocab_size() == tokenizer.vocab_size
    for text in texts():
        ids = tokenizer.encode(text)
        assert theirs.encode(text).ids == ids
        assert theirs.decode(ids) == text
    for text, id in tokenizer.specials.items():
        assert theirs.decode([id]) == text
    assert formats.from_huggingface(path).hash() == tokenizer.hash()
    # And what the peer writes after reading it comes back too.
    theirs.save(str(path))
    assert formats.from_huggingface(path).hash() == tokenizer.hash()


def test_huggingface_recognises_specials_when_asked(trained: Tokenizer, tmp_path: Path) -> None:
    peer = pytest.importorskip("tokenizers")
    path = save(formats.to_huggingface(trained, recognise_specials=True), tmp_path / "tokenizer.json")
    theirs = peer.Tokenizer.from_file(str(path))
    stop = trained.specials["</s>"]
    assert theirs.encode("one</s>two").ids == [*trained.encode("one"), stop, *trained.encode("two")]
    assert theirs.decode([*trained.encode("one"), stop]) == "one"
    theirs.encode_special_tokens = True
    for text in texts():
        assert theirs.encode(text).ids == trained.encode(text)
    assert formats.from_huggingface(path).hash() == trained.hash()


def test_import_of_a_vocabulary_trained_by_huggingface(tmp_path: Path) -> None:
    peer = pytest.importorskip("tokenizers")
    theirs = peer.Tokenizer(peer.models.BPE())
    theirs.pre_tokenizer = peer.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = peer.decoders.ByteLevel()
    theirs.post_processor = peer.processors.ByteLevel(trim_offsets=False)
    alphabet = peer.pre_tokenizers.ByteLevel.alphabet()
    trainer = peer.trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator([ENGLISH], trainer)
    theirs.add_special_tokens(["<|endoftext|>", "<| end é |>"])
    path = tmp_path / "tokenizer.json"
    theirs.save(str(path))
    ours = formats.from_huggingface(path)
    assert ours.byte_order == "gpt2" and len(ours.merges) > 100
    first = 256 + len(ours.merges)
    assert ours.specials == {"<|endoftext|>": first, "<| end é |>": first + 1}
    theirs.encode_special_tokens = True
    for text in texts():
        assert ours.encode(text) == theirs.encode(text).ids


def test_import_of_an_old_file(trained: Tokenizer, tmp_path: Path) -> None:
    """As GPT-2's own: no model type, merges as strings, empty affixes, the special token in both places."""
    content = formats.to_huggingface(trained, recognise_specials=True)
    model = content["model"]
    del model["type"], model["ignore_merges"], model["byte_fallback"]
    model |= {"continuing_subword_prefix": "", "end_of_word_suffix": "", "unk_token": "<|endoftext|>"}
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    model["vocab"] |= trained.specials
    assert formats.from_huggingface(save(content, tmp_path / "old.json")).hash() == trained.hash()


# --- tiktoken


def test_tiktoken_reads_our_export(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    load = pytest.importorskip("tiktoken.load")
    path = tmp_path / "ours.tiktoken"
    path.write_text("".join(formats.to_tiktoken(tokenizer)))
    theirs = tiktoken.Encoding(
        "ours",
        pat_str=formats.GPT2_PATTERN,
        mergeable_ranks=load.load_tiktoken_bpe(str(path)),
        special_tokens=tokenizer.specials,
    )
    assert theirs.n_vocab == tokenizer.vocab_size
    for text in texts():
        ids = tokenizer.encode(text)
        assert theirs.encode_ordinary(text) == ids
        assert theirs.decode(ids) == text
    for text, id in tokenizer.specials.items():
        assert theirs.decode([id]) == text
    # Bytes that are no text, as one piece: there the pattern has no say.
    order, merged = (bpe.BYTE_ORDERS[tokenizer.byte_order], tokenizer._merged)
    rng = random.Random(1)
    for alphabet in (range(256), b"abc", "中é👍 e".encode()):
        for length in [*range(1, 60), 200, 1000]:
            data = bytes(rng.choices(alphabet, k=length))
            ids = bpe.apply_merges([order.index(byte) for byte in data], merged, range(tokenizer.vocab_size))
            assert theirs._encode_single_piece(data) == ids
            assert theirs.decode_bytes(tokenizer.encode_bytes(data)) == data
    assert formats.from_tiktoken(path, tokenizer.specials).hash() == tokenizer.hash()


def test_tiktoken_lines(tmp_path: Path) -> None:
    lines = formats.to_tiktoken(Tokenizer([(97, 98)], ["</s>"]))
    assert len(lines) == 257 and lines[97] == "YQ== 97\n" and lines[256] == "YWI= 256\n"
    path = tmp_path / "ranks"
    path.write_text("\r\n".join(line.strip() for line in reversed(lines)))  # any order, any line end
    again = formats.from_tiktoken(path, ["</s>"])
    assert again.merges == [(97, 98)] and again.specials == {"</s>": 257}


# --- what a format cannot express


def user_error(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def test_exports_that_are_refused() -> None:
    # "abc" in two ways: an id each here, one entry there.
    twice = Tokenizer([(97, 98), (98, 99), (256, 99), (97, 257)], [])
    assert "the bytes b'abc' as ids 258 and 259" in user_error(lambda: formats.to_huggingface(twice))
    assert "token 259 b'abc', whose bytes encode to [258]" in user_error(lambda: formats.to_tiktoken(twice))
    # Here "abc" is a + bc, since bc goes first; tiktoken would join the two.
    unreachable = Tokenizer([(98, 99), (97, 98), (257, 99)], [])
    assert unreachable.encode("abc") == [97, 256]
    assert "token 258 b'abc', whose bytes encode to [97, 256]" in user_error(lambda: formats.to_tiktoken(unreachable))
    for special, wanted in [("ab", "spelt as token 256 is"), ("a", "spelt as token 97 is"), ("\ud83d", "surrogate")]:
        odd = Tokenizer([(97, 98)], [special])
        for recognise in (False, True):
            assert wanted in user_error(lambda odd=odd, flag=recognise: formats.to_huggingface(odd, flag))
        assert len(formats.to_tiktoken(odd)) == 257
    accent = Tokenizer([], ["été"])
    assert "characters that spell other bytes" in user_error(lambda: formats.to_huggingface(accent, True))
    assert "spelt as token 32 is" in user_error(lambda: formats.to_huggingface(Tokenizer([], ["Ġ"]), True))


def test_huggingface_keeps_an_unreachable_token(tmp_path: Path) -> None:
    peer = pytest.importorskip("tokenizers")
    unreachable = Tokenizer([(98, 99), (97, 98), (257, 99)], [])
    path = save(formats.to_huggingface(unreachable), tmp_path / "tokenizer.json")
    theirs = peer.Tokenizer.from_file(str(path))
    for text in ("abc", "ab", "bc", "abcabc abbc", "aabbcc"):
        assert theirs.encode(text).ids == unreachable.encode(text)


def put(content: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        content = content[key]
    content[last] = value


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
SPECIAL = {"id": 258, "content": "</s>", "special": True}


@pytest.mark.parametrize(
    ("dotted", "value", "wanted"),
    [
        ("normalizer", {"type": "NFC"}, "got normalizer {'type': 'NFC'}, wanted none"),
        ("truncation", {"max_length": 5}, "got truncation"),
        ("padding", {"pad_id": 0}, "got padding"),
        ("post_processor", {"type": "TemplateProcessing"}, "got post_processor"),
        ("pre_tokenizer", None, "got pre_tokenizer None"),
        ("pre_tokenizer", {"type": "Metaspace"}, "got pre_tokenizer"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [LEVEL] * 20}, "got pre_tokenizer"),
        ("pre_tokenizer", LEVEL | {"add_prefix_space": True}, "no prefix space"),
        ("pre_tokenizer", LEVEL | {"use_regex": False}, "with its own pattern"),
        ("decoder", None, "got decoder None, wanted ByteLevel"),
        ("model", [], "got model []"),
        ("model.type", "Unigram", "got model 'Unigram', wanted 'BPE'"),
        ("model.dropout", 0.1, "got model.dropout 0.1"),
        ("model.end_of_word_suffix", "</w>", "got model.end_of_word_suffix"),
        ("model.continuing_subword_prefix", "##", "got model.continuing_subword_prefix"),
        ("model.ignore_merges", True, "got model.ignore_merges True"),
        ("model.vocab", [], "model.vocab"),
        ("model.vocab", {"a": "b"}, "model.vocab"),
        ("model.vocab", {"a": 0}, "for the byte"),
        ("model.vocab.a", 98, "got id 98 for the byte 0x61"),
        ("model.vocab.ab", 300, "got id 300 for 'ab', wanted 256"),
        ("model.vocab.Ã", 300, "for the byte 0xc3"),
        ("model.vocab.ÃĠ", 257, "which is no text"),
        ("model.vocab.zzz", 300, "got the ids [257, 300] for special tokens, wanted 257 onwards"),
        ("model.vocab.zzz", 257, "got id 257 for both"),
        ("model.merges", None, "model.merges"),
        ("model.merges", [["a", "bc"]], "merge 0: got ['a', 'bc'], wanted two earlier tokens"),
        ("model.merges", [["a", 1]], "merge 0"),
        ("model.merges", ["a b c"], "merge 0"),
        ("model.merges", [["a", "b"], ["a", "b"]], "merge 1: got id 256 for 'ab', wanted 257"),
        ("added_tokens", {"a": 1}, "got no list as added_tokens"),
        ("added_tokens", [SPECIAL | {"special": False}], "'</s>' that is not special"),
        ("added_tokens", [{"id": 258}], "wanted an id and a content"),
        ("added_tokens", [SPECIAL], "'</s>' with two ids"),
        ("added_tokens", [SPECIAL | {"content": "x" * 3, "id": 259}], "special tokens, wanted 257 onwards"),
        ("added_tokens", [SPECIAL | {"content": "ab", "id": 256}], "special tokens, wanted 257 onwards"),
    ],
)
def test_huggingface_files_that_are_refused(dotted: str, value: object, wanted: str, tmp_path: Path) -> None:
    good = formats.to_huggingface(Tokenizer([(97, 98)], ["</s>"]))
    path = save(good, tmp_path / "tokenizer.json")
    assert formats.from_huggingface(path).encode("ab</s>") == [256, *b"</s>"]
    bad = copy.deepcopy(good)
    put(bad, dotted, value)
    message = user_error(lambda: formats.from_huggingface(save(bad, path)))
    assert wanted in message and str(path) in message


def ranks(tokens: list[bytes]) -> list[str]:
    return [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]


BYTES = [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([], "got 0 ranks"),
        (ranks(BYTES[:9]), "got 9 ranks of which 9 is none"),
        (["YQ=="], "line 1: got 'YQ==', wanted a token in base64 and its rank"),
        (["Y!== 1"], "line 1: got 'Y!== 1'"),
        (["YQ== one"], "line 1"),
        (["é 1"], "line 1"),
        (["YQ== -1"], "line 1: got b'a' with rank -1"),
        ([*ranks(BYTES), "YWI= 255"], "line 257: got b'ab' with rank 255"),
        ([*ranks(BYTES), "YQ== 256"], "line 257: got b'a' with rank 256"),
        ([*ranks(BYTES), "YWI= 257"], "of which 256 is none"),
        (ranks([*reversed(BYTES)]), "for the byte 0x00"),
        (ranks([*BYTES, b"abc"]), "line 257: got b'abc', which tokens of lower rank make in 3 parts, wanted 2"),
        (ranks([*BYTES, b"ab", b".\n"]), "line 258: got b'.\\n', which GPT-2's pattern cuts in two"),
    ],
)
def test_rank_files_that_are_refused(lines: list[str], wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    path.write_text("\n".join(lines), encoding="utf-8")
    message = user_error(lambda: formats.from_tiktoken(path))
    assert wanted in message and str(path) in message


def test_rank_files_and_specials(tmp_path: Path) -> None:
    path = tmp_path / "ranks.tiktoken"
    path.write_text("\n".join(ranks([*BYTES, b"'r", b"'re", b"\n\n"])))
    assert formats.from_tiktoken(path).encode("we're\n\n") == [119, 101, 257, 258]
    assert "wanted distinct texts" in user_error(lambda: formats.from_tiktoken(path, ["a", "a"]))
    assert "cannot read" in user_error(lambda: formats.from_tiktoken(tmp_path / "none"))
    assert "cannot read" in user_error(lambda: formats.from_huggingface(tmp_path / "none"))
