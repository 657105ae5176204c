"""Published vocabularies: ids, decoding, streaming and time of loading, compared with the packages they belong to."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.world.artefacts import artefact
from tests.world.texts import texts
from tinyforge.errors import UserError
from tinyforge.formats.tokenizers import find_tokenizer
from tinyforge.infer.stream import TextStream
from tinyforge.tokenizers import TextTokenizer, load_tokenizer

COUNT = 3000
TURNS, SLOWER = 11, 2  # the time of loading, as a multiple of the package's: 1.3 to 1.7, by how slow a page fault is
JSON = ["llama3.1", "llama2", "qwen3", "gemma3", "deepseek-v3", "gpt-oss", "gpt-4o"]
MISTRAL = ["tokenizer.model.v1", "*_240323.model.v3", "*_241114.model.v7", "tekken_240911.json"]


def check(
    ours: TextTokenizer, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], some: list[str]
) -> None:
    """0 differences on COUNT texts. some: texts of special and user-defined tokens, which the texts spell."""
    found = list(texts(COUNT, some))
    assert len(found) == COUNT
    many = ours.encode_many(found, workers=1)
    wrong = []
    for text, at_once in zip(found, many, strict=True):
        expected, stream = encode(text), TextStream(ours)
        whole, streamed = decode(expected), "".join(map(stream.push, expected)) + stream.finish()
        if ours.encode(text) != expected or at_once.tolist() != expected:
            wrong.append(("ids", text))
        # A stream continues a text, so it keeps the space that SentencePiece puts before a text.
        elif ours.decode(expected) != whole or streamed not in (whole, " " + whole):
            wrong.append(("text", text))
    assert not wrong, f"{len(wrong)} of {COUNT}, first {wrong[0]!r}"


def check_load(ours: Callable[[], Any], theirs: Callable[[], Any]) -> None:
    """Processor time, since neither side starts threads and the machine may be busy: the medians of turns."""
    found: dict[Callable[[], Any], list[float]] = {ours: [], theirs: []}
    for turn in range(TURNS):
        for read in (ours, theirs)[:: 1 if turn % 2 else -1]:
            begin = time.process_time()
            read()
            found[read].append(time.process_time() - begin)
    took, limit = median(found[ours]), SLOWER * median(found[theirs])
    assert took < limit, f"{took:.4f} s, at most {limit:.4f}"


@pytest.mark.parametrize("name", JSON)
def test_ids_and_texts_are_the_reference_package_s(name: str) -> None:
    reference_package: Any = pytest.importorskip("tokenizers")
    file = artefact(name) / "tokenizer.json"
    ours, reference = load_tokenizer(file), reference_package.Tokenizer.from_file(str(file))
    reference.encode_special_tokens = True  # ours never reads a special token from text
    some = [token.content for token in reference.get_added_tokens_decoder().values()]
    check(
        ours,
        lambda text: reference.encode(text, add_special_tokens=False).ids,
        lambda ids: reference.decode(ids, skip_special_tokens=False),
        some,
    )
    check_load(lambda: load_tokenizer(file), lambda: reference_package.Tokenizer.from_file(str(file)))


@pytest.mark.parametrize("given", ["tokenizer.json without the last tokens", "vocab.json and merges.txt"])
def test_qwen3_s_files_in_parts(given: str, tmp_path: Path) -> None:
    """Tokens that only tokenizer_config.json lists, and the files of transformers' own Qwen2Tokenizer."""
    transformers: Any = pytest.importorskip("transformers")
    source = artefact("qwen3")
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    shutil.copy(source / "tokenizer_config.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    if given.startswith("vocab"):
        (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
        (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    else:
        del content["added_tokens"][-9:]
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    ours, theirs = find_tokenizer(tmp_path, 151_936), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.specials | ours.user_defined == theirs.get_added_vocab() and "<think>" in ours.user_defined
    for text in texts(300, list(ours.user_defined)):
        expected = theirs.encode(text, add_special_tokens=False, split_special_tokens=False)
        if not any(special in text for special in ours.specials):
            assert ours.encode(text) == expected
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["added_tokens_decoder"]["151700"] = {"content": "<far>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="add the tokens \\['<far>'\\] to a tokenizer of .* by ids that do not follow"):
        find_tokenizer(tmp_path, 151_936)


def mistral(pattern: str) -> tuple[Path, Any]:
    """A file of Mistral's, and what reads it in their package."""
    (file,) = artefact("mistral").glob(pattern)
    if file.suffix == ".json":
        return file, pytest.importorskip("mistral_common.tokens.tokenizers.tekken").Tekkenizer.from_file
    pytest.importorskip("sentencepiece")
    return file, pytest.importorskip("mistral_common.tokens.tokenizers.sentencepiece").SentencePieceTokenizer


@pytest.mark.parametrize("pattern", MISTRAL)
def test_mistral_s_ids_and_texts_are_their_package_s(pattern: str) -> None:
    file, read = mistral(pattern)
    ours, reference = load_tokenizer(file), read(file)
    decode = reference.decode if file.suffix == ".json" else reference._model.decode
    check(ours, lambda text: reference.encode(text, bos=False, eos=False), decode, [*ours.specials, *ours.user_defined])
    check_load(lambda: load_tokenizer(file), lambda: read(file))
