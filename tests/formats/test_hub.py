"""Models by their names on the hub, from a local server that speaks its API: read, resumed, refused, published."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.hub_server import TOKEN, Hub
from tests.formats.test_huggingface import shard
from tinyforge import cli
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.formats import convert, hub, load_pretrained, open_model, resolve_checkpoint, save_pretrained
from tinyforge.models.llama import Config, Llama
from tinyforge.recipes import sft
from tinyforge.tokenizers import Tokenizer
from tinyforge.zoo import push

library: Any = pytest.importorskip("huggingface_hub")
pytest.importorskip("huggingface_hub.constants")
FP32 = get_backend("numpy", "fp32", workers=1)
TOKENIZER = Tokenizer([(104, 105)], ["<|endoftext|>", "</s>"])
TINY = Config(dim=16, heads=2, kv_heads=1, layers=2, context=64, vocab=TOKENIZER.vocab_size, hidden=24, tied=False)
NAME = "owner/tiny"
CHUNK = 1024


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model's files, as Hugging Face's directories have them, and a pickle and a program among them."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model = Llama(TINY, FP32)
    model.initialise(seed=1)
    save_pretrained(model, TOKENIZER, folder)
    unwanted = {"pytorch_model.bin": b"\x80\x04.", "modeling.py": b"raise SystemExit", "onnx/model.onnx": b"onnx"}
    return {file.name: file.read_bytes() for file in folder.iterdir()} | unwanted


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and this process's settings of huggingface_hub, which reads its environment when it is imported."""
    found = Hub()
    monkeypatch.chdir(tmp_path)
    with found.running() as address:
        for name, value in settings(address, tmp_path).items():
            monkeypatch.setenv(name, value)
        constants = library.constants
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace("https://huggingface.co", address)
        )
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)  # what it writes at once, and so what it resumes
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
        yield found


def settings(address: str, folder: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}


def cached(folder: Path) -> list[str]:
    """The names of the files in the cache's snapshots."""
    return sorted(path.name for path in (folder / "home").glob("hub/models--*/snapshots/*/**/*"))


# --- names


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("owner/model", True),
        ("owner/model@v1.0", True),
        ("https://huggingface.co/owner/model", True),
        ("hf://owner/model@v1.0", True),
        ("https://example.com/owner/model", False),
        ("owner/model@refs/pr/3", True),
        ("owner/model/folder/file.Q4_K_M.gguf@main", True),
        ("owner/model.gguf", False),
        ("runs/sft", False),  # runs/ is a folder here
        ("runs/sft/step-00000001", False),
        ("./owner/model", False),
        ("/owner/model", False),
        ("../owner/model", False),
        ("model", False),
        ("owner/model/config.json", False),
    ],
)
def test_what_is_a_name(asked: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert hub.is_name(asked) is named


def test_a_path_that_exists_comes_before_a_name(server: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    server.add(NAME, files)
    (tmp_path / NAME).mkdir(parents=True)
    assert resolve_checkpoint(NAME) == Path(NAME)
    assert server.requests == []


# --- reading


def test_a_name_is_fetched_without_pickles_and_programs(server: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    sha = server.add(NAME, files).refs["main"]
    model, tokenizer = load_pretrained(NAME, FP32)
    expected = Llama(TINY, FP32)
    expected.initialise(seed=1)
    for ours, theirs in zip(model.buffer.params, expected.buffer.params, strict=True):
        np.testing.assert_array_equal(ours.value, theirs.value)
    assert tokenizer.hash() == TOKENIZER.hash()
    assert cached(tmp_path) == sorted(set(files) - {"pytorch_model.bin", "modeling.py", "onnx/model.onnx"})
    path = resolve_checkpoint(NAME)
    assert hub.name_of(path) == f"{NAME}@{sha}"
    weights = [path for method, path in server.requests if method == "GET" and path.startswith("/cdn/")]
    assert len(weights) == 1  # the second time it came from the cache


def test_a_revision_and_a_renamed_repository(server: Hub, files: dict[str, bytes]) -> None:
    repository = server.add(NAME, {"config.json": b"{}"})
    sha = repository.commit(files, "v2")
    server.add("former/name", {}).moved = NAME
    for asked in (f"{NAME}@v2", f"{NAME}@{sha}", "former/name@v2"):
        assert resolve_checkpoint(asked).name == sha
    with pytest.raises(UserError, match=f"^{NAME}@v3: http.* has no such revision of it; see http.*/{NAME}$"):
        resolve_checkpoint(f"{NAME}@v3")


def test_shards(server: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    folder = tmp_path / "sharded"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_bytes(files[name])
    shard(folder)
    server.add(NAME, {file.name: file.read_bytes() for file in folder.iterdir()} | {"consolidated.safetensors": b"0"})
    assert open_model(resolve_checkpoint(NAME)).fingerprint() == open_model(folder).fingerprint()
    assert "consolidated.safetensors" not in cached(tmp_path)


def test_gguf_files(server: Hub, tmp_path: Path, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    server.add(NAME, files)
    for name, dtype in (("a.gguf", "f16"), ("b.gguf", "q8_0")):
        convert.main([NAME, name, "--type", dtype])
    packed = {name: Path(name).read_bytes() for name in ("a.gguf", "b.gguf")}
    server.add("owner/one", {"README.md": b"# one", "only.gguf": packed["a.gguf"]})
    server.add("owner/two", {"x/a.gguf": packed["a.gguf"], "b.gguf": packed["b.gguf"]})
    path = resolve_checkpoint("owner/one")
    assert open_model(path).fingerprint() == open_model(Path("a.gguf")).fingerprint()
    assert hub.name_of(path).startswith("owner/one/only.gguf@")
    with pytest.raises(UserError, match=r"^owner/two has 2 \.gguf files; name one of x/a.gguf, b.gguf: owner/two/FILE"):
        resolve_checkpoint("owner/two")
    assert resolve_checkpoint("owner/two/x/a.gguf").read_bytes() == packed["a.gguf"]
    assert cached(tmp_path).count("b.gguf") == 0
    with pytest.raises(UserError, match=r"^owner/two/c.gguf: there is no such file; its .gguf files: x/a.gguf, b.gguf"):
        resolve_checkpoint("owner/two/c.gguf")


def test_offline_and_out_of_reach(
    server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.add(NAME, files)
    path = resolve_checkpoint(NAME)
    seen = len(server.requests)
    monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", True)
    assert resolve_checkpoint(NAME) == path and len(server.requests) == seen
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=r"^other/model is no path here, the hub's cache has no copy of it, and HF_HUB"):
        resolve_checkpoint("other/model")
    monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(library.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve_checkpoint(NAME) == path
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"note: http://127.0.0.1:9 cannot be reached \(.+\); using the copy of {NAME} in the hub's", line)
    with pytest.raises(UserError, match=r"the hub's cache has no copy of it, and http://127.0.0.1:9 cannot be reached"):
        resolve_checkpoint("other/model")


def test_a_broken_download_resumes(
    server: Hub, tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.add(NAME, files)
    size = len(files["model.safetensors"])
    server.broken = [size // 3]
    assert resolve_checkpoint(NAME)
    assert sum(server.served.values()) < size + CHUNK  # it went on where it had stopped


def test_a_network_that_stops_for_good_leaves_nothing_that_opens(
    server: Hub, tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    sha, size = server.add(NAME, files).refs["main"], len(files["model.safetensors"])
    server.broken = [size // 3, *[0] * 99]
    with pytest.raises(UserError, match=rf"^{NAME}: http\S+ broke off \(.+\); run the command again, which keeps"):
        resolve_checkpoint(NAME)
    assert "model.safetensors" not in cached(tmp_path)
    monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="the hub's cache has no copy of it"):
        resolve_checkpoint(NAME)
    monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", False)
    server.broken = []
    assert open_model(resolve_checkpoint(NAME)).config == TINY
    assert [path for method, path in server.requests if method == "GET"].count(
        f"/{NAME}/resolve/{sha}/config.json"
    ) == 1  # it was kept


@pytest.mark.parametrize(
    "words",
    [
        f"chat --checkpoint {NAME} --prompt hi",
        f"serve --checkpoint {NAME} --port 0",
        f"serve --checkpoint small --adapter {NAME} --port 0",
        f"inspect --checkpoint {NAME} hi",
        f"evaluate --checkpoint {NAME}",
        f"evaluate --checkpoint {NAME} --tasks text --data data.txt",
        f"convert {NAME} out",
        f"convert small out --base {NAME}",
        f"average {NAME} small out",
        f"calibrate {NAME} out --data data.txt",
        f"models show {NAME}",
        f"hub push {NAME} other/name",
        f"train --base {NAME}",
        f"train --teacher {NAME}",
        f"sft --base {NAME}",
        f"sft --base small --teacher {NAME}",
        f"dpo --base {NAME}",
        f"grpo --base {NAME}",
        f"classify --base {NAME} --data data.csv",
    ],
)
def test_every_command_takes_a_name(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def fetch(asked: str) -> Path:
        raise Asked(asked)

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("It is noon in the town. " * 400)
    Path("data.csv").write_text("text,label\n" + "It is good.,1\nIt is bad.,0\n" * 40)
    with pytest.raises(Asked, match=NAME):
        cli.main(words.split())


# --- refusing


def test_each_refusal_is_one_line(server: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("owner/pickled", {"config.json": b"{}", "pytorch_model.bin": b"\x80", "x.py": b""})
    server.add("owner/empty", {"README.md": b""})
    server.add("owner/gated", files, gated=True)
    server.add("owner/private", files, private=True)
    server.add("owner/down", files)
    refusals = {
        "owner/pickled": r"^owner/pickled has only pickles \(pytorch_model.bin\), which can run code .* supported: ",
        "owner/empty": "^owner/empty has no weights; supported: safetensors and GGUF",
        "owner/gated": r"^owner/gated needs a token: accept its terms at http\S+/owner/gated, then set HF_TOKEN",
        "owner/private": r"^owner/private is no path here, and no model on http\S+ that you may read; check the name",
        "owner/none": r"^owner/none is no path here, and no model on http\S+ that you may read; check the name, or set",
        "own--er/x": "^own--er/x is no path here, and not a name on the hub",
    }
    for asked, message in refusals.items():
        with pytest.raises(UserError, match=message) as caught:
            resolve_checkpoint(asked)
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(UserError, match="^owner/gated needs a token"):
        resolve_checkpoint("owner/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolve_checkpoint("owner/gated") and resolve_checkpoint("owner/private")
    server.fails = [("/resolve/", 403)]
    with pytest.raises(UserError, match=r"^owner/down: http\S+ answered with status 403 \(.+\); set HF_TOKEN"):
        resolve_checkpoint("owner/down")


COMMAND = """
import sys
from tinyforge.cli import run
sys.argv = ["tinyforge", *sys.argv[1:]]
run()
"""


def tinyforge(*words: str, home: Path, address: str, **limits: int) -> subprocess.CompletedProcess[str]:
    """A command as a user runs it, with the environment alone to say where the hub is. file: bytes that it may write
    into one file."""

    def limit() -> None:
        if "file" in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file"],) * 2)

    given = {**os.environ, **settings(address, home), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMMAND, *words]
    return subprocess.run(command, capture_output=True, text=True, env=given, cwd=home, preexec_fn=limit, timeout=120)


@pytest.mark.slow
def test_a_command_with_a_name(tmp_path: Path, files: dict[str, bytes]) -> None:
    server = Hub()
    server.add(NAME, files)
    with server.running() as address:
        said = tinyforge("chat", "--checkpoint", NAME, "--prompt", "hi", home=tmp_path, address=address)
        assert said.returncode == 0, said.stderr
        assert all(line.startswith("note: ") for line in said.stderr.splitlines()), said.stderr
        again = tinyforge("chat", "--checkpoint", f"{NAME}@main", "--prompt", "hi", home=tmp_path, address=address)
        assert again.stdout == said.stdout
        missing = tinyforge("chat", "--checkpoint", "no/such", "--prompt", "hi", home=tmp_path, address=address)
    assert missing.returncode == 2 and missing.stderr.startswith("error: no/such is no path here, and no model on http")
    assert missing.stderr.count("\n") == 1 and missing.stdout == ""


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, files: dict[str, bytes]) -> None:
    server = Hub()
    server.add(NAME, files)
    with server.running() as address:
        size = len(files["model.safetensors"]) // 2
        found = tinyforge("chat", "--checkpoint", NAME, "--prompt", "hi", home=tmp_path, address=address, file=size)
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.startswith(f"error: {NAME}: cannot store it in the hub's cache: File too large; free space")
    assert found.stderr.count("\n") == 1
    assert "model.safetensors" not in cached(tmp_path)


# --- what depends on a model of the hub


def test_an_adapter_finds_its_base_on_the_hub_again(server: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    sha = server.add(NAME, files).refs["main"]
    records = [{"instruction": f"Say {n}.", "input": "", "output": "hi"} for n in range(40)]
    Path("data.json").write_text(json.dumps(records))
    flags = ["--data", "data.json", "--lora", "2", "--steps", "2", "--batch-size", "2", "--seq-len", "64"]
    sft.main(["--base", NAME, *flags, "--out", "run"])
    tuned = open_model(Path("run"))
    (path,) = Path("run").glob("step-*")
    meta = json.loads((path / "meta.json").read_text())
    assert meta["lora"]["base"] == f"{NAME}@{sha}" and meta["base"]["source"] == f"{NAME}@{sha}"
    convert.main(["run", "peft", "--adapter"])
    config = json.loads(Path("peft/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (NAME, sha)
    server.repositories[NAME].commit({"config.json": b"{}"})  # main has another model by now
    (tmp_path / "home").rename(tmp_path / "gone")
    assert open_model(Path("run")).fingerprint() == tuned.fingerprint()
    assert open_model(Path("peft")).fingerprint() == tuned.fingerprint()


# --- publishing


@pytest.mark.slow
def test_a_run_is_pushed_and_opened_by_its_name(
    server: Hub, tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    server.add("first/base", files)
    records = [{"instruction": f"Say {n}.", "input": "", "output": "hi"} for n in range(40)]
    Path("data.json").write_text(json.dumps(records))
    flags = ["--data", "data.json", "--steps", "2", "--batch-size", "2", "--seq-len", "64"]
    sft.main(["--base", "first/base", *flags, "--out", "run"])
    with pytest.raises(UserError, match=f"^{NAME}: writing to the hub needs a token; set HF_TOKEN"):
        push.main(["push", "run", NAME])
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    push.main(["push", "run", NAME, "--private"])
    pushed = server.repositories[NAME]
    assert pushed.private
    got = pushed.commits[pushed.refs["main"]]
    assert set(got) == {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} | (
        {"chat_template.jinja", "generation_config.json"} & set(got)
    )
    card = got["README.md"].decode()
    assert "base_model: first/base\n" in card and "library_name: transformers\n" in card
    assert f"python -m tinyforge.chat --checkpoint {NAME}\n" in card and "recipes/sft.py" in card and "DIR" not in card
    assert open_model(resolve_checkpoint(NAME)).fingerprint() == open_model(Path("run")).fingerprint()
    assert f"pushed run to http://127.0.0.1/{NAME}/commit/" in capsys.readouterr().out


def test_a_directory_is_pushed_as_it_is(
    server: Hub, tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, content in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_bytes(content)
    push.main(["push", "mine", NAME])
    push.main(["push", "mine", NAME, "--revision", "v2"])
    pushed = server.repositories[NAME]
    kept = {name: content for name, content in files.items() if not name.endswith((".bin", ".py", ".onnx"))}
    assert pushed.commits[pushed.refs["main"]] == pushed.commits[pushed.refs["v2"]] == kept
    (tmp_path / "mine" / "README.md").unlink()
    push.main(["push", "mine", "owner/bare"])
    bare = server.repositories["owner/bare"]
    assert b"python -m tinyforge.chat --checkpoint owner/bare" in bare.commits[bare.refs["main"]]["README.md"]


def test_what_cannot_be_pushed(
    server: Hub, tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(NAME, files)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    resolve_checkpoint(NAME)
    with pytest.raises(UserError, match=f"^{NAME} exists and is public; leave out --private"):
        push.main(["push", NAME, NAME, "--private"])
    for name in ("tiny", "owner/tiny@main", "owner/x/a.gguf"):
        with pytest.raises(UserError, match=f"^{name} is not a name on the hub; expected owner/name"):
            push.main(["push", "mine", name])
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(UserError, match=r"^owner/new.* HF_TOKEN, or run hf auth login"):
        push.main(["push", NAME, "owner/new"])
    assert set(server.repositories) == {NAME}
