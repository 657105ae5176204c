"""Downloads over HTTP, each complete, checked and recorded, or absent.

    downloader = Downloader()
    downloader.fetch(["https://a.example/84.txt", "https://b.example/84.txt"], Path("raw/84.txt"))
        ->  Fetched(url="https://a.example/84.txt", path=Path("raw/84.txt"), bytes=448821, sha256="...")

URLs are tried in turn. After a transient failure (a dropped connection, a wrong length, 429, 503) the request is
retried after a pause that doubles, or after the server's Retry-After. A partial download is kept in `84.txt.part`, and
the rest is requested with Range and If-Range, so a file that has changed is sent from its start and two versions are
never joined. The complete file is synced, then renamed; `84.txt.json` records URL, size and SHA-256, and a file
that still matches its record is not downloaded again. Requests to one host are a short pause apart, on at most two
connections.

HTTP semantics: RFC 9110 (13.1.5 If-Range, 14 Range requests, 10.2.3 Retry-After).
"""

from __future__ import annotations

import email.utils
import http.client
import random
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinyforge import __version__
from tinyforge.data.files import make_folder, write_json, writing
from tinyforge.errors import UserError
from tinyforge.files import read_json, replace, sha256_of, sync
from tinyforge.report import count_of

USER_AGENT = f"tinyforge/{__version__} (text for training language models; Python-urllib)"
CONNECTIONS = 2
CHUNK = 1 << 18
PROGRESS = 1 << 20  # bytes; an attempt that transfers as many does not count as a failure
PASSING = (408, 425, 429, 500, 502, 503, 504)  # transient: the same request may succeed later


@dataclass(frozen=True)
class Patience:
    """Timeouts and pauses in seconds, and how often to try."""

    timeout: float = 30.0  # for a connection, and for the next bytes
    attempts: int = 5  # per URL, in a row and without progress
    backoff: float = 1.0  # pause after the first failure; it doubles, times a random factor of 0.5 to 1
    longest: float = 300.0  # of one pause; a longer Retry-After is reported instead
    gap: float = 0.5  # between two requests to one host


@dataclass(frozen=True)
class Fetched:
    """A complete file: its path, where it came from, its size and hash."""

    url: str
    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Job:
    """A file to fetch: its URLs in the order to try them, and its size and SHA-256 if known."""

    urls: tuple[str, ...]
    path: Path
    bytes: int | None = None
    sha256: str | None = None


class FetchError(UserError):
    """No URL gave the file. Other files may still be available."""


class _Fault(Exception):
    """Why a URL failed. passing: a later attempt may succeed."""

    def __init__(
        self, reason: str, passing: bool = True, retry_after: float | None = None, silent: bool = False
    ) -> None:
        super().__init__(" ".join(reason.split()))
        self.passing = passing
        self.retry_after = retry_after
        self.silent = silent  # the host did not answer at all


@dataclass(frozen=True)
class _Version:
    """The version of the file that a part belongs to."""

    url: str
    validator: str | None  # a strong ETag, else Last-Modified; None: the part cannot be resumed
    length: int | None


class Downloader:
    """Fetches files. Remembers when each host was last asked, and which hosts do not answer."""

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        # Only HTTP: urllib's default opener would also read file: and ftp: URLs, which a redirect may name.
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler,
            urllib.request.HTTPHandler,
            urllib.request.HTTPSHandler,
            urllib.request.HTTPRedirectHandler,
            urllib.request.HTTPErrorProcessor,
            urllib.request.HTTPDefaultErrorHandler,
            urllib.request.UnknownHandler,
        ):
            self._opener.add_handler(handler())
        self._lock = threading.Lock()
        self._next_request: dict[str, float] = {}  # host: the time from which it may be asked again
        self._silent: set[str] = set()
        self._stop = threading.Event()

    def fetch(
        self, urls: str | Sequence[str], path: Path, size: int | None = None, sha256: str | None = None
    ) -> Fetched:
        """Fetch one file to `path` from the first of `urls` that has it, or return it if it is already complete.

        size, sha256: of the file, if known; a download that differs is discarded and retried.

        Raises FetchError if no URL has the file, and UserError for anything but an http(s) URL, for a full disk and for
        a folder that is not writable. A partial download stays next to `path`; the next call continues it.
        """
        job = Job((urls,) if isinstance(urls, str) else tuple(urls), path, size, sha256)
        return self._fetch(job, None)

    def fetch_all(self, jobs: Sequence[Job]) -> list[Fetched | FetchError]:
        """Fetch several files on CONNECTIONS connections; for each job, in order, the file or the error."""
        from tqdm import tqdm

        bar = tqdm(total=len(jobs), desc="fetching", unit="file", disable=None)
        with ThreadPoolExecutor(CONNECTIONS) as pool, bar:
            futures = [pool.submit(self._fetch, job, True) for job in jobs]
            try:
                for future in as_completed(futures):
                    if not isinstance(future.exception(), FetchError):
                        future.result()
                    bar.update()
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        faults = [future.exception() for future in futures]
        return [
            fault if isinstance(fault, FetchError) else future.result()
            for future, fault in zip(futures, faults, strict=True)
        ]

    def _fetch(self, job: Job, no_bar: bool | None) -> Fetched:
        """no_bar: as tqdm's `disable`; None shows a bar on a terminal."""
        for url in job.urls:
            check_url(url)
        make_folder(job.path.parent)
        if (whole := _whole(job)) is not None:
            _Part(job.path).discard()  # of a run that was killed just after renaming
            return whole
        faults: list[tuple[str, _Fault]] = []
        for url in job.urls:
            try:
                return self._fetch_from(url, job, no_bar)
            except _Fault as fault:
                faults.append((url, fault))
        # Report a host that is down rather than one that lacks the file.
        url, worst = next((pair for pair in faults if pair[1].passing), faults[-1])
        others = f" (and {count_of(len(faults) - 1, 'more URL')})" if len(faults) > 1 else ""
        raise FetchError(f"{job.path.name}: could not be downloaded from {url}{others}: {worst}; {_advice(worst)}")

    def _fetch_from(self, url: str, job: Job, no_bar: bool | None) -> Fetched:
        host = urllib.parse.urlsplit(url).netloc
        if host in self._silent:
            raise _Fault("the host did not answer earlier")
        failures, best = 0, 0
        while True:
            part = _Part(job.path)
            try:
                return self._attempt(url, host, job, part, no_bar)
            except _Fault as fault:
                if (size := part.size()) >= best + PROGRESS:
                    best, failures = size, 0
                failures += 1
                asked = fault.retry_after or 0.0
                if not fault.passing or failures >= self.patience.attempts or asked > self.patience.longest:
                    if fault.silent:
                        self._silent.add(host)
                    raise
                pause = min(self.patience.backoff * 2 ** (failures - 1), self.patience.longest)
                self._sleep(max(asked, pause * random.uniform(0.5, 1.0)))

    def _attempt(self, url: str, host: str, job: Job, part: _Part, no_bar: bool | None) -> Fetched:
        """One request for the missing bytes, which are appended to the part. Raises _Fault."""
        from tqdm import tqdm

        version, have = part.resumable(url)
        if version is None or version.length is None or have != version.length:
            headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
            if version is not None and have:
                headers |= {"Range": f"bytes={have}-", "If-Range": str(version.validator)}
            request = urllib.request.Request(url, headers=headers)  # noqa: S310 - `check_url` has seen the scheme
            with self._open(request, host, part) as response:
                version, have = _agree(response, url, version, have, job, part)
                with tqdm(
                    total=version.length, initial=have, desc=job.path.name, unit="B", unit_scale=True, disable=no_bar
                ) as bar:
                    have = self._receive(response, part, have, version.length, bar)
        if version.length is not None and have != version.length:
            raise _Fault(f"the connection was dropped after {have:,} of {version.length:,} bytes")
        if job.bytes is not None and have != job.bytes:
            part.discard()
            raise _Fault(f"got {have:,} bytes, expected {job.bytes:,}")
        digest = sha256_of(part.path)
        if job.sha256 is not None and digest != job.sha256:
            part.discard()
            raise _Fault(f"got SHA-256 {digest[:16]}..., expected {job.sha256[:16]}...")
        return part.finish(Fetched(url, job.path, have, digest))

    @contextmanager
    def _open(self, request: urllib.request.Request, host: str, part: _Part) -> Iterator[Any]:
        self._wait_for(host)
        try:
            response = self._opener.open(request, timeout=self.patience.timeout)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 416:  # the part is longer than the file is now
                    part.discard()
                passing = error.code in (416, *PASSING)
                raise _Fault(f"HTTP {error.code} {error.reason}", passing, _retry_after(error.headers)) from None
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", error) or type(error).__name__
            raise _Fault(f"no answer ({reason})", silent=True) from None
        with response:
            yield response

    def _receive(self, response: Any, part: _Part, have: int, length: int | None, bar: Any) -> int:
        """Append the body to the part as it arrives; returns the new length, also if the connection is closed early."""
        with writing(part.path), open(part.path, "ab") as file:
            while have != length and not self._stop.is_set():
                try:
                    chunk = response.read1(CHUNK)[: None if length is None else length - have]
                except (OSError, http.client.HTTPException) as error:
                    reason = str(error) or type(error).__name__
                    raise _Fault(f"the connection was dropped after {have:,} bytes ({reason})") from None
                if not chunk:
                    break
                file.write(chunk)
                file.flush()  # so that a kill loses no bytes
                have += len(chunk)
                bar.update(len(chunk))
        if self._stop.is_set():
            raise _Fault("stopped", passing=False)
        return have

    def _wait_for(self, host: str) -> None:
        with self._lock:
            now = time.monotonic()
            start = max(now, self._next_request.get(host, now))
            self._next_request[host] = start + self.patience.gap
        self._sleep(start - now)

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(max(seconds, 0.0)):
            raise _Fault("stopped", passing=False)


class _Part:
    """A partial download, and the version that it belongs to: NAME.part and NAME.part.json."""

    def __init__(self, path: Path) -> None:
        self.whole = path
        self.path = path.with_name(path.name + ".part")
        self._state = path.with_name(path.name + ".part.json")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def resumable(self, url: str) -> tuple[_Version | None, int]:
        """The version and the length of the part, if the download from `url` can be resumed."""
        try:
            version = _Version(**read_json(self._state, "the state"))
        except (UserError, TypeError):
            return None, 0
        usable = isinstance(version.validator, str) and version.validator and isinstance(version.length, int | None)
        return (version, self.size()) if version.url == url and usable else (None, 0)

    def begin(self, version: _Version) -> None:
        """Start over. The old bytes are removed first, so that they are never mistaken for the new version."""
        with writing(self.path):
            self.path.write_bytes(b"")
        write_json(self._state, asdict(version))

    def discard(self) -> None:
        with writing(self.path):
            self._state.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)

    def finish(self, fetched: Fetched) -> Fetched:
        """Write the record, then rename: a file without its record is never considered complete."""
        with writing(self.whole):
            sync(self.path)
            write_json(_record(self.whole), {"url": fetched.url, "bytes": fetched.bytes, "sha256": fetched.sha256})
            replace(self.path, self.whole)
            self._state.unlink(missing_ok=True)
            sync(self.whole.parent)
        return fetched


def check_url(url: str) -> str:
    """`url`, if it can be fetched; else UserError."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and not re.search(r"[\s\x00-\x1f]", url)
        _ = parts.port  # raises ValueError if it is not a number
    except ValueError:
        good = False
    if not good:
        raise UserError(f"{url!r}: not a URL that can be fetched, expected one like https://host/path")
    return url


def _record(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _whole(job: Job) -> Fetched | None:
    """The file if it matches its record and the job."""
    try:
        found = Fetched(path=job.path, **read_json(_record(job.path), "the record"))
        same = job.path.stat().st_size == found.bytes and sha256_of(job.path) == found.sha256
    except (OSError, UserError, TypeError):
        return None
    expected = job.bytes in (None, found.bytes) and job.sha256 in (None, found.sha256)
    known = found.url in job.urls or job.sha256 is not None  # another mirror may have another file under that name
    return found if same and expected and known else None


def _agree(response: Any, url: str, version: _Version | None, have: int, job: Job, part: _Part) -> tuple[_Version, int]:
    """The version in the response and the offset at which it starts; prepares the part for appending."""
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise _Fault(f"has the content encoding {encoding}, which was not requested", passing=False)
    length = response.length
    if length is None and not response.chunked and job.bytes is None and job.sha256 is None:
        raise _Fault("has no length, so a truncated file could not be detected", passing=False)
    etag, modified = response.headers.get("ETag"), response.headers.get("Last-Modified")
    validator = etag if etag and not etag.startswith("W/") else modified
    if response.status == 206:
        span = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", response.headers.get("Content-Range", ""))
        total = version.length if version else None
        fits = span and version and int(span[1]) == have and (total is None or span[3] in ("*", str(total)))
        if not fits or (version and validator and validator != version.validator):
            part.discard()
            raise _Fault("the file has changed since the first part, or the server sent a range that was not requested")
        assert version is not None
        return version, have
    if job.bytes is not None and length is not None and length != job.bytes:
        raise _Fault(f"is {length:,} bytes long, expected {job.bytes:,}")
    fresh = _Version(url, validator, length)
    part.begin(fresh)
    return fresh, 0


def _retry_after(headers: Any) -> float | None:
    """Seconds from the Retry-After header, which holds seconds or a date."""
    value = (headers.get("Retry-After") or "").strip()
    if re.fullmatch("[0-9]+", value):
        return float(value)
    try:
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _advice(fault: _Fault) -> str:
    if fault.retry_after:
        return f"run again in {fault.retry_after:.0f} s, the download resumes"
    if fault.silent:
        return "check the network, or name a mirror with --base-url; run again, the download resumes"
    if fault.passing:
        return "run again later, the download resumes, or name a mirror with --base-url"
    return "check the URL, or name another mirror with --base-url"
