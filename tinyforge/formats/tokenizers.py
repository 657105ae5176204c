"""The tokenizer of a foreign model, and its chat template: finding and writing them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinyforge.checkpoint import write_files
from tinyforge.errors import UserError, errors_in
from tinyforge.files import GET_AGAIN, MORE_DIGITS, parse_json, read_json, read_text, shown, write_whole, writing
from tinyforge.formats import generation, gguf_file, gguf_model
from tinyforge.formats.labels import Labels
from tinyforge.tokenizers import Tokenizer, load_tokenizer
from tinyforge.tokenizers.chat_templates import TEMPLATES, AnyTemplate, ChatTemplate
from tinyforge.tokenizers.gguf_vocabulary import PREFIX, from_gguf, lost_in_gguf, to_gguf
from tinyforge.tokenizers.huggingface import BYTE_LEVEL, cut_by, read_huggingface, to_huggingface
from tinyforge.tokenizers.ids import Ids
from tinyforge.tokenizers.load import NAMES
from tinyforge.tokenizers.pieces import PATTERNS, to_utf8
from tinyforge.tokenizers.sentencepiece import SentencePiece, write_llama2c
from tinyforge.tokenizers.template_formats import jinja, modelfile
from tinyforge.tokenizers.vocabulary import ENDS, TextTokenizer, id_of, texts_by_id

CONFIG, TEMPLATE, MAP = "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"
ADDED = "added_tokens.json"
ODD_FLAGS = ("single_word", "lstrip", "rstrip")  # of an added token that is not found in a text as it is
MORE_TEMPLATES = "additional_chat_templates"
TEMPLATE_KEY = "tokenizer.chat_template"  # of GGUF
FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", ADDED, "vocab.txt", "tekken.json"),
    *(CONFIG, MAP, TEMPLATE, "chat_template.json", generation.FILE),
)
"""The files of a Hugging Face directory that say how texts and conversations are encoded, and how replies end."""
GGUF_IDS = {
    "unk_token": "unknown_token",
    "sep_token": "seperator_token",
    "pad_token": "padding_token",
}  # GGUF's spelling
GGUF_ENDS = ("eos", "eot", "eom")  # all end a text in llama.cpp
TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def find_tokenizer(model: Path, vocab: int, asked: Path | None = None) -> TextTokenizer:
    """The tokenizer of a foreign model with `vocab` ids: the one asked for, or the model's own.

    A directory holds it under its usual name, and a .gguf file inside; for a .bin file it lies next to it, as
    `tok<vocab>.bin` or tokenizer.bin, or in another format under these names. A directory without one has `Ids`, with a
    line on stderr. Raises UserError where a file has none, and where it has more ids than the model.
    """
    if asked is not None:
        found = load_tokenizer(asked)
    elif model.is_dir():
        found = _in_directory(model, vocab)
    elif gguf_model.is_file(model):
        found = from_gguf(gguf_file.read(model).metadata, model, vocab)
    else:
        names = [f"{stem}{suffix}" for stem in (f"tok{vocab}", "tokenizer") for suffix in (".bin", ".model", ".json")]
        beside = next((file for name in names if (file := model.parent / name).is_file()), None)
        if beside is None:
            raise UserError(
                f"{model} has no tokenizer next to it; looked for {', '.join(names)}; give --tokenizer FILE"
            )
        found = load_tokenizer(beside)
    if found.vocab_size > vocab:
        raise UserError(
            f"{model}: its tokenizer has {found.vocab_size} ids, the model {vocab}; give its own with --tokenizer FILE"
        )
    return found


def _in_directory(path: Path, vocab: int) -> TextTokenizer:
    if (file := path / "tokenizer.json").is_file():
        content = read_json(file, "the tokenizer")
        return load_tokenizer(file) if "model" not in content else read_huggingface(_completed(content, path), file)
    if (path / "vocab.json").is_file():
        if str(_json_of(path / CONFIG).get("tokenizer_class")).startswith("Qwen2Tokenizer"):
            return read_huggingface(_completed(_of_qwen2(path), path), path / "vocab.json")
        # GPT-2's repository as it was first published.
        found: TextTokenizer = Tokenizer.from_gpt2(path / "vocab.json", path / "merges.txt")
    elif any((path / name).is_file() for name in NAMES):
        found = load_tokenizer(path)
    else:
        print(
            f"note: {path} has no tokenizer: the model takes ids; put its tokenizer.json there, or convert the model "
            "with --tokenizer FILE",
            file=sys.stderr,
        )
        return Ids(vocab)
    return _with_added(path, found)


def _of_qwen2(path: Path) -> dict[str, Any]:
    """vocab.json and merges.txt as the tokenizer.json that transformers' Qwen2Tokenizer makes of them."""
    lines = read_text(path / "merges.txt", "the merges").splitlines()
    return {
        "added_tokens": [],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": cut_by(PATTERNS["qwen2"]),
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": read_json(path / "vocab.json", "the tokens"),
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }


def _completed(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The content of a tokenizer.json with the tokens that only tokenizer_config.json lists, as transformers adds them:
    by the ids that its vocabulary has for them, else the next ones. UserError where the listed ids are others."""
    added, model = content.get("added_tokens") or [], content["model"]
    known = {entry.get("content") for entry in added if isinstance(entry, dict)} if isinstance(added, list) else set()
    left = [entry for entry in _added_tokens(path) if entry["content"] not in known]
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not left or not isinstance(vocab, dict):
        return content
    every = {*vocab, *known}
    fits = {text: vocab.get(text) for text in (entry["content"] for entry in left)}
    fits |= {text: len(every) + number for number, text in enumerate(t for t in fits if t not in vocab)}
    if odd := [entry["content"] for entry in left if fits[entry["content"]] != entry["id"]]:
        raise UserError(
            f"{path}: its files add the tokens {shown(odd)} to a tokenizer of {len(every)} ids by ids that do not "
            "follow; give --tokenizer FILE, a tokenizer.json that has them"
        )
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    flagged = [{key: entry.get(key, value) for key, value in usual.items()} for entry in left]
    full = [
        {"id": entry["id"], "content": entry["content"], **flags, "special": entry["special"]}
        for entry, flags in zip(left, flagged, strict=True)
    ]
    return {**content, "added_tokens": [*added, *full]}


def _with_added(path: Path, found: TextTokenizer) -> TextTokenizer:
    """The tokenizer with the tokens that were added to it in other files: added_tokens.json, and added_tokens_decoder
    of tokenizer_config.json. UserError, naming them, where they do not follow its own."""
    left = [entry for entry in _added_tokens(path) if not _is_token(found, entry["content"], entry["id"])]
    if not left:
        return found
    texts = [entry["content"] for entry in left]
    fits = [entry["id"] for entry in left] == list(range(found.vocab_size, found.vocab_size + len(left)))
    odd = [entry["content"] for entry in left if not entry["special"] and any(map(entry.get, ODD_FLAGS))]
    if not (isinstance(found, SentencePiece) and found.scores and fits) or odd:
        raise UserError(
            f"{path}: its files add the tokens {shown(odd or texts)} to a tokenizer of {found.vocab_size} ids in a way "
            "that is not read; give --tokenizer FILE, a tokenizer.json that has them"
        )
    specials = {entry["content"]: entry["id"] for entry in left if entry["special"]}
    others = {entry["content"]: entry["id"] for entry in left if not entry["special"]}
    with errors_in(path):
        return SentencePiece(
            [*found.pieces, *texts],
            found.specials | specials,
            found.bos,
            [*found.scores, *[0.0] * len(left)],
            None,
            found.spaces,
            found.user_defined | others,
            found.prefix_once,
        )


def _is_token(tokenizer: TextTokenizer, text: str, id: int) -> bool:
    return id < tokenizer.vocab_size and tokenizer.token_bytes(id) == to_utf8(text)


def _added_tokens(path: Path) -> list[dict[str, Any]]:
    """The tokens that added_tokens.json and tokenizer_config.json list, by id, each as in a tokenizer.json."""
    config = _json_of(path / MAP) | _json_of(path / CONFIG)
    more = config.get("additional_special_tokens")
    named = {str(text_of(token)) for token in [*map(config.get, TOKENS), *(more if isinstance(more, list) else [])]}
    listed, plain = config.get("added_tokens_decoder"), _json_of(path / ADDED)
    found = {id: {"content": text, "special": text in named} for text, id in plain.items() if type(id) is int}
    for id, entry in (listed if isinstance(listed, dict) else {}).items():
        if not (id.isdecimal() and len(id) < 10 and isinstance(text := text_of(entry), str)):
            raise UserError(f"{path / CONFIG}: got the added token {shown(entry)} with id {shown(id)}; {GET_AGAIN}")
        found[int(id)] = {**entry, "content": text, "special": entry.get("special") is True}
    return [{**found[id], "id": id} for id in sorted(found)]


def _json_of(file: Path) -> dict[str, Any]:
    return read_json(file, "the tokenizer's config", digits=MORE_DIGITS) if file.is_file() else {}


def template_in(path: Path, tokenizer: TextTokenizer) -> AnyTemplate:
    """A foreign model's chat template; "plain" if it has none. One that we have written is the built-in one again."""
    found = _of_gguf(path, tokenizer) if gguf_model.is_file(path) else _of_directory(path)
    if odd := [id for id in found.ends if not 0 <= id < len(tokenizer.byte_lengths)]:
        print(f"note: {path}: eos_token_id {shown(odd)}: the model has no such id; it ends no reply", file=sys.stderr)
        found = replace(found, ends=tuple(id for id in found.ends if id not in odd))
    if not found.sources:
        return TEMPLATES["plain"]
    written = set(found.sources.values())
    return next((t for t in TEMPLATES.values() if written <= {jinja(t), jinja(t, bos=True)}), found)


def _of_directory(path: Path) -> ChatTemplate:
    def content(name: str) -> dict[str, Any]:
        return _json_of(path / name)

    config = {**content(MAP), **content(CONFIG)}
    name = CONFIG if config.get("chat_template") is not None else "chat_template.json"
    sources = _named_templates(content(name).get("chat_template"), path / name)
    for file in sorted((path / MORE_TEMPLATES).glob("*.jinja")):
        sources[file.stem] = read_text(file, "the chat template")
    if (path / TEMPLATE).is_file():
        sources["default"] = read_text(path / TEMPLATE, "the chat template")
    more = config.get("extra_special_tokens")
    tokens = {name: text_of(config.get(name)) for name in TOKENS} | (more if isinstance(more, dict) else {})
    ends = generation.read_generation(path).content.get("eos_token_id", content("config.json").get("eos_token_id"))
    return ChatTemplate(
        sources,
        {name: text for name, text in tokens.items() if isinstance(text, str)},
        tuple(id for id in (ends if isinstance(ends, list) else [ends]) if type(id) is int),
    )


def _named_templates(given: object, path: Path) -> dict[str, str]:
    """chat_template of a JSON file: a text, an object of texts by name, or a list of names and texts."""
    if given is None:
        return {}
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        given = {str(one.get("name")): one.get("template") for one in given}
    found: dict[str, Any] = given if isinstance(given, dict) else {"default": given}
    for name, text in found.items():
        if not isinstance(text, str):
            where = "chat_template" if found is not given else f"the chat template {name!r:.40}"
            raise UserError(f"{path}: {where} is {shown(text)}, expected a text; get or correct the file")
    return found


def text_of(token: object) -> object:
    """The text of a special token in tokenizer_config.json, where it may have its flags."""
    return token.get("content") if isinstance(token, dict) else token


def _of_gguf(path: Path, tokenizer: TextTokenizer) -> ChatTemplate:
    stored = gguf_file.read(path).metadata
    start = f"{TEMPLATE_KEY}."
    sources = {key.removeprefix(start): text for key, text in stored.items() if key.startswith(start)}
    sources |= {"default": stored[TEMPLATE_KEY]} if TEMPLATE_KEY in stored else {}
    texts = texts_by_id(tokenizer)
    ids = {name: stored.get(f"{PREFIX}{GGUF_IDS.get(name, name)}_id") for name in TOKENS}
    ends = [stored.get(f"{PREFIX}{name}_token_id") for name in GGUF_ENDS]
    return ChatTemplate(
        _named_templates(sources, path),
        {name: texts[id] for name, id in ids.items() if id in texts},
        tuple(id for id in ends if type(id) is int),
    )


def ends_of(tokenizer: TextTokenizer, template: AnyTemplate, tuned: bool) -> list[int]:
    """The ids that end a text, for the files of others, the main one first: of a tuned model what it was trained to end
    with."""
    if isinstance(template, ChatTemplate):
        own = id_of(tokenizer, template.tokens.get("eos_token"))
        ends = [template.end_id(tokenizer) if tuned else None, own, *template.ends]
    else:
        ends = [id_of(tokenizer, text) for text in (*template.ends, *ENDS)]
    return list(dict.fromkeys(id for id in ends if id is not None))


def special_ids(
    tokenizer: TextTokenizer, template: AnyTemplate, ends: Sequence[int], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """bos_token_id, eos_token_id and, where there is one, pad_token_id of config.json. transformers' defaults, 1 and 2,
    are ordinary bytes here. given: those of the config.json that the model comes from, which are kept."""
    tokens = template.tokens if isinstance(template, ChatTemplate) else {}
    bos, pad = (id_of(tokenizer, tokens.get(f"{name}_token")) for name in ("bos", "pad"))
    return {
        "bos_token_id": bos if tokenizer.bos is None else tokenizer.bos,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        **({} if pad is None else {"pad_token_id": pad}),
        **(given or {}),
    }


def given_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """The three of `special_ids` as a config.json has them."""
    return {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}


def write_for_huggingface(
    directory: Path, tokenizer: TextTokenizer, template: AnyTemplate, context: int, ends: Sequence[int]
) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template, if any; nothing for `Labels`."""
    if isinstance(tokenizer, Labels | Ids):
        return
    texts = texts_by_id(tokenizer)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "bos_token": None if tokenizer.bos is None else texts[tokenizer.bos],
    }
    config |= template.tokens if isinstance(template, ChatTemplate) else {}
    config["eos_token"] = texts.get(ends[0]) if ends else None
    files = {"tokenizer.json": _json(to_huggingface(tokenizer, recognise_specials=True)), CONFIG: _json(config)}
    write_files(directory, files | _template_files(sources_of(template, bos=tokenizer.bos is not None)))


def sources_of(template: AnyTemplate, bos: bool) -> dict[str, str]:
    """The Jinja programs of a template, by name. bos: built-in ones begin with the token that begins every text."""
    if isinstance(template, ChatTemplate):
        return dict(template.sources)
    return {"default": jinja(template, bos)} if template.ends else {}


def _template_files(sources: Mapping[str, str]) -> dict[str, bytes]:
    return {
        TEMPLATE if name == "default" else f"{MORE_TEMPLATES}/{Path(name).name}.jinja": source.encode()
        for name, source in sources.items()
    }


def _json(content: object) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()


def published_files(path: Path | None) -> dict[str, bytes]:
    """FILES of a directory, and its named chat templates, by name; {} for None."""
    found = [path / name for name in FILES] + sorted((path / MORE_TEMPLATES).glob("*.jinja")) if path else []
    return {file.relative_to(path or "").as_posix(): file.read_bytes() for file in found if file.is_file()}


def write_published(
    directory: Path,
    published: Path,
    tokenizer: TextTokenizer,
    template: AnyTemplate,
    ends: Sequence[int],
    sampling: Mapping[str, Any],
    tuned: bool,
) -> None:
    """Write the files as they were published, to the byte where nothing has changed. sampling: the content of the
    model's generation_config.json. After tuning, the end of text in all files is what the model was trained to end
    with, and the chat template is the one that it was trained in."""
    files = published_files(published)
    content, known = dict(sampling), sampling.get("eos_token_id")
    if tuned and ends and ends[0] not in (known if isinstance(known, list) else [known]):
        content["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    if content != generation.read_generation(published).content:
        files[generation.FILE] = _json(content)
    if tuned and ends:
        if sources_of(template, bos=False) != sources_of(template_in(published, tokenizer), bos=False):
            _replace_template(files, sources_of(template, bos=tokenizer.bos is not None))
        end = texts_by_id(tokenizer).get(ends[0])
        for name in {CONFIG, MAP} & files.keys():
            config = parse_json(files[name], published / name, "the tokenizer's config", digits=MORE_DIGITS)
            if end is not None and text_of(config.get("eos_token")) != end:
                files[name] = _json({**config, "eos_token": end})
    write_files(directory, files)


def _replace_template(files: dict[str, bytes], sources: Mapping[str, str]) -> None:
    for name in [name for name in files if name.startswith((MORE_TEMPLATES, "chat_template."))]:
        del files[name]
    config = parse_json(files.get(CONFIG, b"{}"), CONFIG, "the tokenizer's config", digits=MORE_DIGITS)
    if config.pop("chat_template", None):
        files[CONFIG] = _json(config)
    files |= _template_files(sources)


def class_names(config: Mapping[str, Any], count: int) -> list[str]:
    """The names of a classifier's `count` classes in config.json; their numbers if its names do not fit."""
    given = config.get("id2label")
    numbers = list(map(str, range(count)))
    if isinstance(given, dict) and set(given) == set(numbers) and all(isinstance(n, str) for n in given.values()):
        return [given[number] for number in numbers]
    return numbers


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


def for_gguf(tokenizer: TextTokenizer, ids: int, template: AnyTemplate, ends: Sequence[int]) -> dict[str, Any]:
    """The metadata of a .gguf file for a model with `ids` ids: tokenizer, special tokens, chat template."""
    found = to_gguf(tokenizer, ids)
    if lost := lost_in_gguf(tokenizer):
        print(f"note: in llama.cpp {lost}", file=sys.stderr)
    if tokenizer.bos is None and ENDS[0] in tokenizer.specials:
        # Not added to texts, but better than llama.cpp's default, id 11, for programs that expect one.
        found[f"{PREFIX}bos_token_id"] = tokenizer.specials[ENDS[0]]
    for name, text in template.tokens.items() if isinstance(template, ChatTemplate) else ():
        if name in TOKENS and (id := id_of(tokenizer, text)) is not None:
            found[f"{PREFIX}{GGUF_IDS.get(name, name)}_id"] = id
    found |= {f"{PREFIX}{name}_token_id": id for name, id in zip(GGUF_ENDS, ends, strict=False)}
    if more := ends[len(GGUF_ENDS) :]:
        print(f"note: left out: ends of text: {', '.join(map(str, more))}; GGUF has {len(GGUF_ENDS)}", file=sys.stderr)
    for name, source in sources_of(template, bos=False).items():
        found[TEMPLATE_KEY if name == "default" else f"{TEMPLATE_KEY}.{name}"] = source
    return found


def write_modelfile(
    model: Path, tokenizer: TextTokenizer, template: AnyTemplate, ends: Sequence[int], parameters: Mapping[str, float]
) -> None:
    """Write Ollama's Modelfile next to a .gguf file, as Modelfile or, if that exists, as NAME.Modelfile. parameters: by
    Ollama's names. A published model's template stays in the .gguf file, where Ollama looks for it.

    Raises UserError where it cannot be written.
    """
    if isinstance(template, ChatTemplate):
        stops = [text for id, text in sorted(texts_by_id(tokenizer).items()) if id in ends]
    else:
        stops = [text for text in template.ends if id_of(tokenizer, text) is not None]
    own = None if isinstance(template, ChatTemplate) else template
    text, path = modelfile(own, model.name, stops, parameters), model.with_name("Modelfile")
    if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):  # ours, of a killed process
        path = model.with_suffix(".Modelfile")
    with writing(path):
        write_whole(path, text)
    print(f"note: for Ollama: {shlex.join(['ollama', 'create', model.stem, '-f', str(path)])}", file=sys.stderr)
