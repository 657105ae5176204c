"""A local server that speaks the Hugging Face hub's API, as far as huggingface_hub uses it for models.

Reading: a model's description and tree, files that are in git itself (served in place) or in LFS (a redirect to another
path, which takes ranges), revisions, renamed, gated, private and missing repositories. Writing: a repository, a branch,
what is uploaded how, LFS objects, a commit. `broken` and `fails` make it break off or answer with an error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS = (".safetensors", ".gguf", ".bin", ".model", ".parquet", ".png")
TOKEN = "hf_secret"


@dataclass
class Repository:
    """commits: the files of each, by name. refs: the commit of each branch. gated: its files require TOKEN. private: so
    does all else. moved: its new name."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    moved: str = ""

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        names = json.dumps({name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())})
        sha = hashlib.sha1(f"{branch} {self.refs.get(branch)} {names}".encode()).hexdigest()
        self.commits[sha], self.refs[branch] = dict(files), sha
        return sha


class Hub:
    """The repositories, and what was asked. served: bytes sent of each LFS object. broken: bytes after which an answer
    with an LFS object breaks off, once for each number. fails: (pattern of a path, status) of requests to refuse."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.served: dict[str, int] = {}
        self.broken: list[int] = []
        self.fails: list[tuple[str, int]] = []

    def add(self, name: str, files: Mapping[str, bytes], **settings: bool) -> Repository:
        found = self.repositories[name] = Repository(**settings)
        found.commit(files)
        return found

    @contextmanager
    def running(self) -> Iterator[str]:
        """The server's address, while it runs."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": self}))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                self.body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.hub.requests.append((self.command, path))
        for pattern, status in self.hub.fails:
            if re.search(pattern, path):
                return self.refuse(status, "")
        for pattern, method in ROUTES:
            if found := re.fullmatch(pattern, path):
                return method(self, *found.groups())
        return self.refuse(404, "")

    do_HEAD = do_POST = do_PUT = do_GET

    def send(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.send({"error": code}, status, **({"X_Error_Code": code} if code else {}))

    @property
    def trusted(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def find(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and the commit; None where the answer was already sent."""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.trusted):
            return self.refuse(404 if self.trusted else 401, "RepoNotFound")
        if repository.moved:
            return self.send(b"", 307, Location=self.path.replace(name, repository.moved, 1))
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            return self.refuse(404, "RevisionNotFound")
        return repository, sha

    # --- reading

    def describe(self, name: str, revision: str | None) -> None:
        if found := self.find(name, revision or "main"):
            repository, sha = found
            siblings = [{"rfilename": file} for file in repository.commits[sha]]
            known = {"id": name, "sha": sha, "siblings": siblings, "private": repository.private, "tags": []}
            self.send(known | {"gated": "manual" if repository.gated else False, "downloads": 0, "likes": 0})

    def tree(self, name: str, revision: str) -> None:
        if found := self.find(name, revision):
            files = []
            for file, content in found[0].commits[found[1]].items():
                entry = {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                if file.endswith(LFS):
                    digest = hashlib.sha256(content).hexdigest()
                    entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
                files.append(entry)
            self.send(files)

    def resolve(self, name: str, revision: str, file: str) -> None:
        if not (found := self.find(name, revision)):
            return
        repository, sha = found
        if repository.gated and not self.trusted:
            return self.refuse(401 if self.headers.get("Authorization") is None else 403, "GatedRepo")
        content = repository.commits[sha].get(file)
        if content is None:
            return self.refuse(404, "EntryNotFound")
        if not file.endswith(LFS):
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self.send(content, ETag=etag, X_Repo_Commit=sha)
        digest = hashlib.sha256(content).hexdigest()
        self.hub.objects[digest] = content
        port = self.headers["Host"].rpartition(":")[2]  # another host, as the hub's files have
        linked = {"X_Linked_ETag": f'"{digest}"', "X_Linked_Size": str(len(content)), "X_Repo_Commit": sha}
        self.send(b"", 302, Location=f"http://localhost:{port}/cdn/{digest}", **linked)

    def content(self, digest: str) -> None:
        content, start = self.hub.objects[digest], 0
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(found[1])
        end = len(content)
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("Content-Length", str(end - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.broken:
            end = min(end, start + self.hub.broken.pop(0))
            self.close_connection = True
        self.wfile.write(content[start:end])
        self.hub.served[digest] = self.hub.served.get(digest, 0) + end - start

    # --- writing

    def create(self) -> None:
        if not self.trusted:
            return self.refuse(401, "")
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        made = {"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name}
        if name in self.hub.repositories:
            return self.send(made, 409)
        self.hub.add(name, {}, private=asked.get("private") or asked.get("visibility") == "private")
        self.send(made)

    def branch(self, name: str, branch: str) -> None:
        refs = self.hub.repositories[name].refs
        if branch in refs:
            return self.refuse(409, "")
        refs[branch] = refs["main"]
        self.send({})

    def preupload(self, name: str, revision: str) -> None:
        if self.find(name, revision):
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(LFS) else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(self.body)["files"]
            ]
            self.send({"files": modes})

    def batch(self, name: str) -> None:
        address = f"http://{self.headers['Host']}/lfs"
        objects = [
            o | {"actions": {"upload": {"href": f"{address}/{o['oid']}"}}} for o in json.loads(self.body)["objects"]
        ]
        self.send({"transfer": "basic", "objects": objects})

    def store(self, digest: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == digest
        self.hub.objects[digest] = self.body
        self.send({})

    def commit(self, name: str, revision: str) -> None:
        if not self.trusted:
            return self.refuse(403, "")
        if not (found := self.find(name, revision)):
            return
        files = dict(found[0].commits[found[1]])
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        sha = found[0].commit(files, revision)
        self.send({"commitUrl": f"http://127.0.0.1/{name}/commit/{sha}", "commitOid": sha, "hookOutput": ""})

    def validate(self) -> None:
        self.send({"errors": [], "warnings": []})

    def whoami(self) -> None:
        self.send({"type": "user", "name": "owner"}) if self.trusted else self.refuse(401, "")


MODEL = r"/api/(?:models|datasets)/([^/]+/[^/]+)"
ROUTES = (
    (rf"{MODEL}(?:/revision/(.+))?", Handler.describe),
    (rf"{MODEL}/tree/(.+?)/?", Handler.tree),
    (r"(?:/datasets)?/([^/]+/[^/]+)/resolve/(.+?)/(.+)", Handler.resolve),
    (r"/cdn/(\w+)", Handler.content),
    (r"/api/repos/create", Handler.create),
    (rf"{MODEL}/branch/(.+)", Handler.branch),
    (rf"{MODEL}/preupload/(.+)", Handler.preupload),
    (r"(?:/datasets)?/([^/]+/[^/]+)\.git/info/lfs/objects/batch", Handler.batch),
    (r"/lfs/(\w+)", Handler.store),
    (rf"{MODEL}/commit/(.+)", Handler.commit),
    (r"/api/validate-yaml", Handler.validate),
    (r"/api/whoami-v2", Handler.whoami),
)
