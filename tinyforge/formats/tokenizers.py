"""The tokenizer of a foreign model, and its chat template: finding and writing them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError
from tinyforge.files import read_json, read_text, write_whole, writing
from tinyforge.formats import gguf, gguf_file
from tinyforge.tokenizers import Tokenizer, load_tokenizer
from tinyforge.tokenizers.chat_templates import Template, recognise
from tinyforge.tokenizers.gguf import PREFIX, from_gguf, lost_in_gguf, to_gguf
from tinyforge.tokenizers.huggingface import to_huggingface
from tinyforge.tokenizers.labels import Labels
from tinyforge.tokenizers.sentencepiece import SentencePiece, write_llama2c
from tinyforge.tokenizers.template_formats import jinja, modelfile
from tinyforge.tokenizers.vocabulary import ENDS, TextTokenizer

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
TEMPLATE_KEY = "tokenizer.chat_template"  # of GGUF


def find_tokenizer(model: Path, vocab: int, asked: Path | None = None) -> TextTokenizer:
    """The tokenizer of a foreign model with `vocab` ids: the one asked for, or the model's own.

    A directory holds it under its usual name, and a .gguf file inside; for a .bin file it lies beside it, as
    tok<vocab>.bin or tokenizer.bin, or in another format under these names. Raises UserError where there is none, and
    where it has more ids than the model.
    """
    if asked is not None:
        found = load_tokenizer(asked)
    elif model.is_dir():
        found = _in_directory(model)
    elif gguf.is_file(model):
        found = from_gguf(gguf_file.read(model).metadata, model)
    else:
        names = [f"{stem}{suffix}" for stem in (f"tok{vocab}", "tokenizer") for suffix in (".bin", ".model", ".json")]
        beside = next((file for name in names if (file := model.parent / name).is_file()), None)
        if beside is None:
            raise UserError(f"{model} has no tokenizer beside it; looked for {', '.join(names)}; give --tokenizer FILE")
        found = load_tokenizer(beside)
    if found.vocab_size > vocab:
        raise UserError(
            f"{model}: its tokenizer has {found.vocab_size} ids, the model {vocab}; give its own with --tokenizer FILE"
        )
    return found


def _in_directory(path: Path) -> TextTokenizer:
    # GPT-2's repository as it was first published.
    if not (path / "tokenizer.json").is_file() and (path / "vocab.json").is_file():
        return Tokenizer.from_gpt2(path / "vocab.json", path / "merges.txt")
    return load_tokenizer(path)


def template_in(path: Path, tokenizer: TextTokenizer) -> str:
    """The name of a foreign model's chat template; "plain" if it has none, or an unknown one."""
    if gguf.is_file(path):
        text = gguf_file.read(path).metadata.get(TEMPLATE_KEY)
    elif (path / TEMPLATE).is_file():
        text = read_text(path / TEMPLATE, "the chat template")
    elif (path / CONFIG).is_file():
        text = read_json(path / CONFIG, "the tokenizer's config").get("chat_template")
    else:
        text = None
    found = recognise(text, tokenizer.specials) if isinstance(text, str) else None
    return found.name if found else "plain"


def special_ids(tokenizer: TextTokenizer) -> dict[str, Any]:
    """bos_token_id and eos_token_id of config.json. transformers' defaults, 1 and 2, are ordinary bytes here."""
    ends = [tokenizer.specials[text] for text in ENDS if text in tokenizer.specials]
    return {"bos_token_id": tokenizer.bos, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def write_for_huggingface(directory: Path, tokenizer: TextTokenizer, template: Template, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template, if any; nothing for `Labels`."""
    if isinstance(tokenizer, Labels):
        return
    texts = {id: text for text, id in tokenizer.specials.items()}
    end = next((text for text in (*template.ends, *ENDS) if text in tokenizer.specials), None)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "bos_token": None if tokenizer.bos is None else texts[tokenizer.bos],
        "eos_token": end,
    }
    for name, content in (("tokenizer.json", to_huggingface(tokenizer, recognise_specials=True)), (CONFIG, config)):
        write_whole(directory / name, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    if template.ends:
        write_whole(directory / TEMPLATE, jinja(template))


def class_names(config: Mapping[str, Any], count: int) -> list[str]:
    """The names of a classifier's `count` classes in config.json; their numbers if its names do not fit."""
    given = config.get("id2label")
    numbers = list(map(str, range(count)))
    if isinstance(given, dict) and set(given) == set(numbers) and all(isinstance(n, str) for n in given.values()):
        return [given[number] for number in numbers]
    return numbers


def class_labels(names: Sequence[str]) -> dict[str, Any]:
    """id2label and label2id of config.json."""
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def place_for_llama2c(model: Path, tokenizer: TextTokenizer) -> Path:
    """The path of a .bin file's tokenizer, where `find_tokenizer` finds it. UserError if another tokenizer is there.

    llama2.c reads only SentencePiece tokenizers; others are kept in our own format.
    """
    suffix = ".bin" if isinstance(tokenizer, SentencePiece) else ".json"
    path = model.parent / f"tok{tokenizer.vocab_size}{suffix}"
    if path.exists() and load_tokenizer(path).hash() != tokenizer.hash():
        raise UserError(f"{path} exists already and is another tokenizer; choose another directory")
    return path


def write_for_llama2c(path: Path, tokenizer: TextTokenizer) -> None:
    if isinstance(tokenizer, SentencePiece):
        write_llama2c(tokenizer, path)
    else:
        print(f"note: run.c reads only SentencePiece tokenizers; this one is kept in {path}", file=sys.stderr)
        tokenizer.save(path)


def for_gguf(tokenizer: TextTokenizer, ids: int, template: Template) -> dict[str, Any]:
    """The metadata of a .gguf file for a model with `ids` ids: tokenizer, special tokens, chat template."""
    found = to_gguf(tokenizer, ids)
    if lost := lost_in_gguf(tokenizer):
        print(f"note: in llama.cpp {lost}", file=sys.stderr)
    ends = [text for text in (*template.ends, *ENDS) if text in tokenizer.specials]
    if ends:
        found[f"{PREFIX}eos_token_id"] = tokenizer.specials[ends[0]]
    if tokenizer.bos is None and ENDS[0] in tokenizer.specials:
        # Not added to texts, but better than llama.cpp's default, id 11, for programs that want one.
        found[f"{PREFIX}bos_token_id"] = tokenizer.specials[ENDS[0]]
    if template.ends:
        found[TEMPLATE_KEY] = jinja(template)
    return found


def write_modelfile(model: Path, tokenizer: TextTokenizer, template: Template, parameters: Mapping[str, float]) -> None:
    """Write Ollama's Modelfile beside a .gguf file, as Modelfile or, if that exists, as NAME.Modelfile. parameters: by
    Ollama's names.

    Raises UserError where it cannot be written.
    """
    stops = [text for text in template.ends if text in tokenizer.specials]
    text, path = modelfile(template, model.name, stops, parameters), model.with_name("Modelfile")
    if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):  # ours, of a killed process
        path = model.with_suffix(".Modelfile")
    with writing(path):
        write_whole(path, text)
    print(f"note: for Ollama: ollama create {model.stem} -f {path}", file=sys.stderr)
