"""Models on the Hugging Face hub by name: owner/name, owner/name@revision, owner/name/FILE.gguf.

    path = fetch("HuggingFaceTB/SmolLM2-135M-Instruct")     the folder in the hub's cache, downloaded where needed

The package huggingface_hub does the work: its cache (HF_HOME), token (HF_TOKEN, or `hf auth login`), endpoint
(HF_ENDPOINT), offline mode (HF_HUB_OFFLINE=1), resumed downloads and progress bars. Only safetensors, GGUF, JSON, text
and SentencePiece's tokenizer.model are downloaded, never a pickle or a program.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from tinyforge.errors import UserError
from tinyforge.requirements import needs
from tinyforge.terminal import one_line

_PASTED = r"(?:https://huggingface\.co/|hf://)?"  # an address from the hub's pages
NAME = re.compile(
    _PASTED + r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?P<file>/[^@]+\.gguf)?(?:@(?P<revision>[^@\s]+))?"
)
_FILES = (".bin", ".gguf", ".json", ".safetensors")  # of paths that are no names
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(/.+\.gguf)?")
_TEXTS = (".json", ".jinja", ".md", ".txt")
_VOCABULARY = "tokenizer.model"
_FOLDERS = ("additional_chat_templates/", "published/")  # the latter in our own checkpoints
_PICKLES = (".bin", ".ckpt", ".h5", ".msgpack", ".pkl", ".pt", ".pth")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MODEL = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def is_name(asked: str) -> bool:
    """Whether `asked` can be the name of a model on the hub: it is no path here, nor in a folder that is."""
    found = NAME.fullmatch(asked)
    if not found or Path(asked).exists() or Path(asked.partition("/")[0]).is_dir():
        return False
    return bool(found["file"]) or not found["repository"].endswith(_FILES)


def name_of(path: Path) -> str:
    """The name, with its commit, of a model in the hub's cache; "" for any other path."""
    found = _CACHED.search(path.absolute().as_posix())
    return f"{found[1]}/{found[2]}{found[4] or ''}@{found[3]}" if found else ""


def called(path: Path) -> str:
    """What a message calls a model: its name on the hub, or its path."""
    return name_of(path) or str(path)


def reference(path: Path, run: Path) -> str:
    """How a run names a model that it depends on: by its name on the hub with the commit, else relative to the run, as
    both may move."""
    return name_of(path) or os.path.relpath(path, run)


def referenced(named: str, run: Path) -> Path:
    """The path of the model that `reference` named; from the hub where it has to be downloaded again."""
    return fetch(named) if re.search("@[0-9a-f]{40}$", named) else Path(os.path.normpath(run / named))


def fetch(asked: str) -> Path:
    """The path of a model of the hub in its local cache: a folder, or a .gguf file. Downloads what the cache lacks.

    Raises UserError where the hub has no such model or revision, requires a token, or cannot be reached and the cache
    has no copy; where the model has no safetensors and no GGUF, or several .gguf files and none is named; and where the
    download ends early or cannot be stored. The weights are downloaded last, so what opens is complete.
    """
    hub, found = package(), NAME.fullmatch(asked)
    assert found is not None, asked
    repository, file, revision = found["repository"], (found["file"] or "")[1:], found["revision"]
    with explained(asked):
        try:
            described = hub.HfApi().model_info(repository, revision=revision)
        except hub.errors.HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise
            return _cached(hub, asked, repository, file, revision, error)
        except (hub.errors.HTTPError, OSError) as error:
            return _cached(hub, asked, repository, file, revision, error)
        texts, weights = select(asked, [sibling.rfilename for sibling in described.siblings or ()], file)

        def held(name: str) -> str | None:
            place = hub.try_to_load_from_cache(repository, name, revision=described.sha)
            return place if isinstance(place, str) else None

        for names in (texts, weights):
            if not all(map(held, names)):
                hub.snapshot_download(repository, revision=revision, allow_patterns=names)
        if (first := held(weights[0])) is None:
            raise UserError(f"{asked} changed while it was downloaded; run the command again")
    return Path(first) if first.endswith(".gguf") else Path(first).parent


def select(asked: str, names: Sequence[str], file: str = "") -> tuple[list[str], list[str]]:
    """Of a repository's file names, the texts and the weights to download; file: the .gguf file that was named."""
    top = [name for name in names if "/" not in name]
    texts = [name for name in top if name.endswith(_TEXTS) or name == _VOCABULARY]
    texts += [name for name in names if name.startswith(_FOLDERS) and name.endswith((*_TEXTS, _VOCABULARY))]
    packed = [name for name in names if name.endswith(".gguf")]
    if file:
        if file not in packed:
            raise UserError(f"{asked}: there is no such file; its .gguf files: {', '.join(packed) or 'none'}")
        return texts, [file]
    tensors = [name for name in top if name.endswith(".safetensors")]
    weights = [name for name in tensors if _MODEL.fullmatch(name)] or tensors
    if weights:
        return texts, weights
    if len(packed) > 1:
        raise UserError(f"{asked} has {len(packed)} .gguf files; name one of {', '.join(packed)}: {asked}/FILE.gguf")
    if packed:
        return texts, packed
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    what = f"only pickles ({pickles[0]}), which can run code when they are read" if pickles else "no weights"
    raise UserError(f"{asked} has {what}; supported: safetensors and GGUF; look for a converted copy of it")


def package() -> ModuleType:
    """The package huggingface_hub. Raises UserError where it is not installed."""
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError as error:
        raise UserError(needs("a model of the Hugging Face hub", "huggingface_hub", "hub")) from error
    logging.set_verbosity_error()  # without a warning for each retry
    if not sys.stderr.isatty():
        disable_progress_bars()
    return huggingface_hub


@contextmanager
def explained(asked: str) -> Iterator[None]:
    """Raise every fault of the hub as a UserError about the repository `asked`."""
    hub = package()
    faults = (hub.errors.HTTPError, OSError, RuntimeError, ValueError, LookupError, TypeError)
    try:
        with warnings.catch_warnings():  # one of a full disk comes before its error
            warnings.simplefilter("ignore")
            yield
    except faults as error:
        cause = error.__cause__ if isinstance(error, hub.errors.LocalEntryNotFoundError) else None
        raise UserError(f"{asked}{_explanation(hub, asked, cause or error)}") from error


def _explanation(hub: ModuleType, asked: str, error: BaseException) -> str:
    """What is wrong with `asked`, and what to do."""
    errors, endpoint, login = hub.errors, hub.constants.ENDPOINT, "set HF_TOKEN, or run hf auth login"
    found = NAME.fullmatch(asked)
    page = f"{endpoint}/{found['repository'] if found else asked}"
    if isinstance(error, errors.GatedRepoError):
        return f" needs a token: accept its terms at {page}, then {login}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f" is no path here, and no model on {endpoint} that you may read; check the name, or {login} if it is "
            "private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f": {endpoint} has no such revision of it; see {page}"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        fix = login if status in (401, 403) else "try again later"
        return f": {endpoint} answered with status {status} ({_reason(error)}); {fix}"
    if isinstance(error, errors.HFValidationError):
        return f" is no path here, and not a name on the hub ({_reason(error)}); check it"
    if getattr(error, "errno", None) in FULL or getattr(error, "filename", None):
        fix = f"free space there, or set HF_HOME to another disk (now {hub.constants.HF_HOME})"
        return f": cannot store it in the hub's cache: {_reason(error)}; {fix}"
    return f": {endpoint} broke off ({_reason(error)}); run the command again, which keeps the complete files"


def _reason(error: BaseException) -> str:
    return one_line(str(getattr(error, "strerror", None) or error).strip().partition("\n")[0]) or type(error).__name__


def _cached(
    hub: ModuleType, asked: str, repository: str, file: str, revision: str | None, error: BaseException
) -> Path:
    """The model in the cache, when the hub cannot be reached. UserError where the cache has no complete copy."""
    offline = hub.constants.HF_HUB_OFFLINE
    why = "HF_HUB_OFFLINE is set" if offline else f"{hub.constants.ENDPOINT} cannot be reached ({_reason(error)})"
    fix = "unset it, or copy the model here" if offline else "connect, or copy the model here"
    missing = UserError(f"{asked} is no path here, the hub's cache has no copy of it, and {why}; {fix}")
    try:
        folder = Path(hub.snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=[]))
    except hub.errors.LocalEntryNotFoundError:
        raise missing from error
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        _, weights = select(asked, names, file)
    except UserError:
        raise missing from error
    if not offline:
        print(f"note: {why}; using the copy of {asked} in the hub's cache", file=sys.stderr)
    return folder / weights[0] if weights[0].endswith(".gguf") else folder
