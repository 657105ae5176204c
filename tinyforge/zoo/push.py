"""Publish a model, or a corpus or its shards, on the Hugging Face hub.

    tinyforge hub push runs/sft owner/name                  a run, as a Hugging Face directory with its card
    tinyforge hub push my-model owner/name --private        a directory that `convert` wrote, as it is
    tinyforge hub push model.gguf owner/name --revision q8  a file, on a branch
    tinyforge hub push corpus owner/name                    a corpus or token shards, as a data set

A run's newest checkpoint is converted first, and its card is made from the run's metadata. Of a directory only
safetensors, GGUF, JSON and text are uploaded. The token is huggingface_hub's: set HF_TOKEN, or run hf auth login.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import read_json, write_whole
from tinyforge.formats import hub, open_model, resolve_checkpoint
from tinyforge.formats.foreign import is_foreign
from tinyforge.formats.pretrained import save_opened, short_card
from tinyforge.train.card import card

# What is uploaded of a corpus and of shards, by the name of their manifest.
DATA = {
    "corpus.json": ("train/*.parquet", "val/*.parquet", "*.md", "corpus.json", "filters.sql", "report.png"),
    "manifest.json": ("*.bin", "*.md", "manifest.json", "tokenizer.json"),  # of shards
}
PATTERNS = ["*.safetensors", "*.gguf", "*.json", "*.jinja", "*.md", "*.txt", "tokenizer.model"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tinyforge hub", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="push")
    push_ = commands.add_parser("push", help="publish a model", description=__doc__)
    push_.add_argument(
        "source", metavar="DIR", help="a run, a checkpoint, a Hugging Face directory, a .gguf file, a corpus, shards"
    )
    push_.add_argument("name", metavar="owner/name", help="the repository, made where it does not exist")
    push_.flag("--private", False, "make a repository that only its owner sees")
    push_.flag("--revision", str, "branch to push to, made where it does not exist", metavar="BRANCH")
    args = parser.parse_args(argv)
    found = hub.NAME.fullmatch(args.name)
    if not found or found["file"] or found["revision"]:
        raise UserError(f"{args.name} is not a name on the hub; expected owner/name, with --revision for a branch")
    with tempfile.TemporaryDirectory() as scratch:
        kind = next((name for name in DATA if (Path(args.source) / name).is_file()), None)
        if kind:
            folder, patterns = prepared_data(Path(args.source), kind, Path(scratch)), [*DATA[kind]]
        else:
            folder, patterns = prepared(resolve_checkpoint(args.source), args.name, Path(scratch)), PATTERNS
        address = push(folder, args.name, args.private, args.revision, patterns, "dataset" if kind else "model")
        print(f"pushed {args.source} to {address}")
    return 0


def prepared_data(source: Path, manifest: str, scratch: Path) -> Path:
    """A folder to upload: the files that a corpus or shards list, and a card. UserError if one is missing."""
    folder = scratch / "data"
    names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    listed = [entry["file"] for entry in _files_of(read_json(source / manifest, "the manifest"))]
    if missing := [name for name in listed if name not in names]:
        raise UserError(f"{source}: {missing[0]} is missing, but {manifest} lists it; make it again")
    others = [name for pattern in DATA[manifest] for name in names if fnmatchcase(name, pattern) and "*" not in pattern]
    for name in (*listed, *others):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to((source / name).absolute())
    report = source / "report.md"
    text = report.read_text(encoding="utf-8") if report.is_file() else f"# {source.absolute().name}\n"
    if manifest == "corpus.json":
        splits = (
            (split, path) for split, path in (("train", "train"), ("validation", "val")) if (folder / path).is_dir()
        )
        files = "".join(f"  - split: {split}\n    path: {path}/*.parquet\n" for split, path in splits)
        text = f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n\n{text}"
    write_whole(folder / checkpoint.CARD, text)
    return folder


def _files_of(found: Any) -> Iterator[dict[str, Any]]:
    """The entries with a file, of a manifest."""
    if isinstance(found, dict) and isinstance(found.get("file"), str):
        yield found
    elif isinstance(found, dict | list):
        for value in found.values() if isinstance(found, dict) else found:
            yield from _files_of(value)


def prepared(source: Path, name: str, scratch: Path) -> Path:
    """The folder to upload: `source` itself, or in `scratch` what it lacks. UserError for a damaged model."""
    if is_foreign(source) and source.is_dir() and (source / checkpoint.CARD).is_file():
        return source
    opened, folder = open_model(source), scratch / "model"
    if is_foreign(source):
        model = opened.spec.build(opened.config, MetaBackend("fp32"))
        folder.mkdir()
        for file in source.iterdir() if source.is_dir() else [source]:
            if file.is_file():
                (folder / file.name).symlink_to(file.absolute())
        write_whole(folder / checkpoint.CARD, short_card(model, "hf", "f32").replace(" DIR", f" {name}"))
        return folder
    loaded = opened.build(get_backend("numpy", "fp32", workers=1))
    save_opened(loaded, loaded.model, folder, _card(source, name, loaded.meta), "hf")
    return folder


def _card(source: Path, name: str, meta: dict[str, object]) -> str:
    """The card of a run's checkpoint as it will be found on the hub: in transformers' format, under its name."""
    text = card(checkpoint.load(source))
    text = re.sub(r"\bDIR\b", name, text).replace("library_name: tinyforge", "library_name: transformers")
    base = meta.get("base")
    origin = str(base.get("source", "")) if isinstance(base, dict) else ""
    return text.replace("\ntags:", f"\nbase_model: {origin.partition('@')[0]}\ntags:", 1) if origin else text


def push(
    folder: Path,
    name: str,
    private: bool = False,
    revision: str | None = None,
    patterns: Sequence[str] = PATTERNS,
    kind: str = "model",
) -> str:
    """Upload a folder's files of these patterns in one commit to a repository of this kind, "model" or "dataset"; the
    address of the result.

    Raises UserError without a token, without the right to write, where `private` and the repository is public, and
    where the hub cannot be reached.
    """
    library = hub.package()
    if library.get_token() is None:
        raise UserError(f"{name}: writing to the hub needs a token; set HF_TOKEN, or run hf auth login")
    api = library.HfApi()
    with hub.explained(name):
        api.create_repo(name, private=private, exist_ok=True, repo_type=kind)
        if private and not api.repo_info(name, repo_type=kind).private:
            raise UserError(f"{name} exists and is public; leave out --private, or choose another name")
        if revision:
            api.create_branch(name, branch=revision, exist_ok=True, repo_type=kind)
        done = api.upload_folder(
            repo_id=name,
            folder_path=folder,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(patterns),
            commit_message=f"Upload a {kind} with tinyforge",
        )
    return str(done.commit_url)


if __name__ == "__main__":
    run_command(main)
