"""Tokenizers as GGUF's metadata, there and back; tests/formats/test_gguf_model.py asks llama.cpp itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tokenizers.test_huggingface import FALLBACK, LLAMA, METASPACE, STRIP, byte_level, llama_model, strings
from tests.tokenizers.test_sentencepiece import SPECIALS, tiny, train
from tinyforge.errors import UserError
from tinyforge.tokenizers import CharTokenizer, SentencePiece, TextTokenizer, Tokenizer, load_tokenizer
from tinyforge.tokenizers.gguf_vocabulary import PRE, from_gguf, lost_in_gguf, to_gguf
from tinyforge.tokenizers.huggingface import read_huggingface
from tinyforge.tokenizers.pieces import PATTERNS
from tinyforge.tokenizers.sentencepiece import BYTES, SPACE, Spaces, read_model

FILE = Path("model.gguf")


def as_read(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata as the reader of files gives it: lists of numbers are arrays, scores in float32."""

    def read(value: Any) -> Any:
        if not isinstance(value, list) or isinstance(value[0], str):
            return value
        return np.array(value, np.float32 if isinstance(value[0], float) else np.int32)

    return {key: read(value) for key, value in metadata.items()}


def again(tokenizer: TextTokenizer, ids: int | None = None) -> TextTokenizer:
    return from_gguf(as_read(to_gguf(tokenizer, ids or tokenizer.vocab_size)), FILE)


@pytest.mark.parametrize("kind", PATTERNS)
def test_byte_level_tokenizers_come_back(kind: str, tmp_path: Path) -> None:
    byte_level(kind).save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    metadata = to_gguf(ours, ours.vocab_size)
    assert PRE[metadata["tokenizer.ggml.pre"]] == (kind, kind in ("llama3", "tekken"))
    back = from_gguf(as_read(metadata), FILE)
    assert back.specials == ours.specials and back.bos == ours.bos
    nfc = kind == "qwen2"
    assert lost_in_gguf(ours) == ("text is not normalised to Unicode's form C" if nfc else "")
    if not nfc:
        assert back.hash() == ours.hash()
    for text in ["Zoë's 12 \u00e9 dogs", "x=1;\r\n\tb++", " WE'LL  "]:
        assert back.encode(text) == ours.encode(text)
    assert not isinstance(back, Tokenizer) or back.merging.nfc is False


def test_pieces_that_are_tokens_stay_whole_where_the_model_wants_it(tmp_path: Path) -> None:
    byte_level("llama3").save(str(tmp_path / "tokenizer.json"))
    whole = load_tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(whole, Tokenizer) and whole.byte_order is None and whole.merging.whole
    tokens = [whole.token_bytes(id) for id in range(whole.vocab_size)]
    merged = Tokenizer(whole.merges, whole.specials, pattern=PATTERNS["llama3"], tokens=tokens, bos=900)
    names = [to_gguf(tokenizer, 902)["tokenizer.ggml.pre"] for tokenizer in (merged, whole)]
    assert names == ["smaug-bpe", "llama-bpe"]
    assert again(whole).hash() == whole.hash() and again(merged).hash() == merged.hash()
    gpt2 = Tokenizer(merged.merges, merged.specials, tokens=tokens, ignore_merges=True)
    with pytest.raises(UserError, match="no tokenizer with 644 merges, the pattern gpt2 and whole pieces kept"):
        to_gguf(gpt2, 902)


@pytest.mark.parametrize("kind", ["llama3", "tekken", "qwen2"])
def test_a_text_begins_as_in_llama_cpp_where_the_file_does_not_say(kind: str, tmp_path: Path) -> None:
    byte_level(kind).save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    metadata = as_read(to_gguf(ours, ours.vocab_size)) | {"tokenizer.ggml.bos_token_id": 900}
    del metadata["tokenizer.ggml.add_bos_token"]
    assert from_gguf(metadata, FILE).bos == (None if kind == "qwen2" else 900)
    assert from_gguf(metadata | {"tokenizer.ggml.add_bos_token": False}, FILE).bos is None


def test_scores_come_back(tmp_path: Path) -> None:
    train(tmp_path / "tokenizer.model")
    ours = read_model(tmp_path / "tokenizer.model")
    back = again(ours, ours.vocab_size + 3)
    assert back.hash() == ours.hash() and back.bos == 1
    metadata = to_gguf(ours, ours.vocab_size + 1)
    types = metadata["tokenizer.ggml.token_type"]
    assert (types[:4], types[-1]) == ([2, 3, 3, 6], 5) and metadata["tokenizer.ggml.tokens"][3] == "<0x00>"
    assert metadata["tokenizer.ggml.unknown_token_id"] == 0 and metadata["tokenizer.ggml.add_space_prefix"] is True


@pytest.mark.parametrize(
    ("normalizer", "cut", "lost"), [(LLAMA, None, False), (None, METASPACE | {"prepend_scheme": "first"}, True)]
)
def test_merges_become_scores_that_encode_alike(normalizer: Any, cut: Any, lost: bool) -> None:
    content = {**llama_model(), "normalizer": normalizer, "pre_tokenizer": cut}
    content["decoder"] = {"type": "Sequence", "decoders": [*FALLBACK, STRIP]}
    ours = read_huggingface(content, FILE)
    assert isinstance(ours, SentencePiece) and ours.scores is None
    merges = ours.pairs()
    # The trainer wrote one way to make each token; SentencePiece's own files, and those of Llama, have all of them.
    with pytest.raises(UserError, match="joins by scores, and none give this tokenizer's merges"):
        to_gguf(ours, ours.vocab_size)
    scored = SentencePiece(
        ours.pieces, ours.specials, 1, [-float(i) for i in range(ours.vocab_size)], spaces=ours.spaces
    )
    assert merges is not None and (pairs := scored.pairs()) is not None and len(pairs) > len(merges)
    merged = SentencePiece(ours.pieces, ours.specials, 1, merges=pairs, spaces=ours.spaces)
    assert bool(lost_in_gguf(merged)) == lost
    back = again(merged)
    for text in strings(300):
        if not lost or not text.startswith((" ", SPACE)):
            assert back.encode(text) == merged.encode(text)


def test_what_llama_cpp_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="cannot hold a CharTokenizer"):
        to_gguf(CharTokenizer("abc"), 4)
    with pytest.raises(UserError, match="keeps all spaces, this tokenizer removes some"):
        to_gguf(tiny(["a"], spaces=Spaces(collapsed=True)), 260)
    every = ["<unk>", "<s>", "</s>", *BYTES, "a", "b", "ab", "ba", "aba"]
    # "aba" is made of ab and a before "ba" is made, and of a and ba after.
    odd = SentencePiece(every, SPECIALS, 1, merges=[(259, 260), (261, 259), (260, 259), (259, 262)])
    with pytest.raises(UserError, match="joins by scores"):
        to_gguf(odd, len(every))
    with pytest.raises(UserError, match="no tokenizer with 0 merges"):
        to_gguf(Tokenizer([], ["<|endoftext|>"]), 257)


GOOD = as_read(to_gguf(Tokenizer([(104, 105)], ["<|endoftext|>", "</s>"]), 259))
SCORED = as_read(to_gguf(tiny(["a", "b", "ab"]), 262))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "its tokenizer is of kind 'bert'; supported: 'gpt2', 'llama'"),
        ({"model": ["gpt2", "llama"]}, r"its tokenizer.ggml.model is \['gpt2', 'llama'\], expected str"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre is 'deepseek-llm'; supported: gpt-2, phi-2, mpt"),
        ({"pre": ["gpt-2"]}, r"tokenizer.ggml.pre is \['gpt-2'\], expected str"),
        ({"tokens": None}, "its tokenizer.ggml.tokens is not a list of texts"),
        ({"tokens": np.arange(259)}, "its tokenizer.ggml.tokens is not a list of texts"),
        ({"tokens": ["a"] * 259}, "model.gguf: "),
        ({"merges": None}, "its tokenizer.ggml.merges is not a list of texts"),
        ({"merges": ["h i x"]}, "merge 0: got 'h i x', expected two tokens"),
        ({"token_type": np.ones(7, np.int32)}, "its tokenizer.ggml.token_type is not an array of 259 numbers"),
        ({"token_type": "all"}, "its tokenizer.ggml.token_type is not an array of 259 numbers"),
        ({"token_type": np.array([0] + [1] * 258)}, "token 0 '.*' is of type 0"),
        ({"token_type": np.array([77] + [1] * 258)}, "token 0 '.*' is of type 77"),
        ({"add_bos_token": True, "bos_token_id": 3}, "its bos_token_id is 3, which is not a special token"),
        ({"bos_token_id": np.arange(2)}, r"its tokenizer.ggml.bos_token_id is array\(\[0, 1\]\), expected int"),
        ({"add_bos_token": np.arange(2)}, "its tokenizer.ggml.add_bos_token is array.*, expected bool"),
    ],
)
def test_faulty_metadata_is_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        from_gguf(GOOD | {f"tokenizer.ggml.{key}": value for key, value in change.items()}, FILE)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("model.gguf: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "its tokenizer.ggml.scores is not an array of 262 numbers"),
        ({"scores": np.full(262, np.nan, np.float32)}, "token 261 'ab': got the score nan"),
        ({"tokens": [*SPECIALS, *["a"] * 259]}, "token 4: got 'a', which is token 3 too"),
    ],
)
def test_faulty_scores_are_one_line(change: dict[str, Any], message: str) -> None:
    assert from_gguf(SCORED, FILE).encode("ab") == tiny(["a", "b", "ab"]).encode("ab")
    with pytest.raises(UserError, match=message) as caught:
        from_gguf(SCORED | {f"tokenizer.ggml.{key}": value for key, value in change.items()}, FILE)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("model.gguf: ")


def test_files_that_do_not_name_a_kind_or_a_pattern() -> None:
    for key, message in (("model", "of kind ''; supported"), ("pre", "pre is ''; supported: gpt-2")):
        with pytest.raises(UserError, match=message):
            from_gguf({name: value for name, value in GOOD.items() if name != f"tokenizer.ggml.{key}"}, FILE)
