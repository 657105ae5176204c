"""A slice comes over HTTP through DuckDB, within its budget, without the rest, and the same after every fault."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.data.conftest import contents
from tinyforge.data import fineweb_edu
from tinyforge.data.download import FetchError, Patience
from tinyforge.data.fineweb_edu import REPOSITORY, Filter, main, make_source
from tinyforge.data.hub import Published
from tinyforge.data.source import Source, read_source
from tinyforge.errors import UserError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("duckdb_extension_httpfs") is None,
    reason="DuckDB's httpfs extension as a package (pip install duckdb-extension-httpfs)",
)
ROOT = Path(__file__).parents[2]
QUICK = Patience(timeout=5.0, attempts=2, backoff=0.01, gap=0.0)
ROWS, GROUP = 12_288, 2048
FILES = [f"sample/10BT/{i:03d}_00000.parquet" for i in range(3)]


@cache
def parquet(seed: int, select: str = "*") -> bytes:
    """A file with FineWeb-Edu's columns: six row groups of texts that hardly compress, with known scores."""
    with tempfile.TemporaryDirectory() as folder:
        return write_parquet(Path(folder, "file.parquet"), seed, select)


def write_parquet(path: Path, seed: int, select: str) -> bytes:
    duckdb.execute(f"""
        COPY (SELECT {select} FROM (SELECT
            'Text ' || i || '.' || chr(10) || md5('{seed} ' || i) || sha256('{seed} ' || i) AS text,
            '<urn:{seed}-' || i || '>' AS id, 'CC-MAIN-2024-10' AS dump, 'https://host/{seed}/' || i AS url,
            's3://' || i AS file_path, CASE WHEN i % 5 = 0 THEN 'de' ELSE 'en' END AS language,
            (CASE WHEN i % 7 = 0 THEN 0.5 ELSE 0.9 END)::DOUBLE AS language_score, (i % 1000)::BIGINT AS token_count,
            (2.0 + i // {GROUP} / 2.0)::DOUBLE AS score, (2 + i // {GROUP} / 2)::BIGINT AS int_score
        FROM range({ROWS}) t(i) ORDER BY i))
        TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE {GROUP}, COMPRESSION snappy)""")
    return path.read_bytes()


def wanted(seed: int, min_score: float = 3.0) -> list[str]:
    """The ids that pass, by the same rules in plain Python."""
    return [
        f"<urn:{seed}-{i}>"
        for i in range(ROWS)
        if i % 5 and i % 7 and i % 1000 >= 64 and 2.0 + i // GROUP / 2 >= min_score
    ]


@pytest.fixture
def files(host: Any) -> dict[str, bytes]:
    published = {name: parquet(seed) for seed, name in enumerate(FILES)}
    host.publish(REPOSITORY, published)
    return published


def take(host: Any, out: Path, **how: Any) -> Source:
    return make_source(out, base_url=host.url, patience=QUICK, **how)


def ids(source: Source) -> list[str]:
    names = [str(path) for path in source.parquet]
    return [row[0] for row in duckdb.execute("SELECT id FROM read_parquet($1)", [names]).fetchall()]


def test_the_filters_choose_and_the_order_stays(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    source = take(host, tmp_path / "out", bytes=10**9)
    assert ids(source) == [record for seed in range(3) for record in wanted(seed)]
    names = [str(path) for path in source.parquet]
    row = duckdb.execute("SELECT * FROM read_parquet($1) LIMIT 1", [names]).fetchone()
    first = int(wanted(0)[0][7:-1])
    assert row is not None and row[:4] == (f"<urn:0-{first}>", "", f"https://host/0/{first}", 0.9)
    assert row[4].startswith(f"Text {first}.\n")
    assert (source.name, source.licence) == ("fineweb_edu", fineweb_edu.LICENCE)


def test_provenance_has_the_published_sizes_and_hashes(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    take(host, tmp_path / "out", rows=30)
    manifest = json.loads((tmp_path / "out" / "source.json").read_text())
    assert manifest["files"] == [
        {
            "url": f"{host.url}/datasets/{REPOSITORY}/resolve/main/{name}",
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        for name, content in files.items()
    ]
    assert str(tmp_path) not in json.dumps(manifest)


@pytest.mark.parametrize("rows", [2, 100, 5000])
def test_a_budget_of_rows_is_shared_among_the_files(
    tmp_path: Path, host: Any, files: dict[str, bytes], rows: int
) -> None:
    source = take(host, tmp_path / "out", rows=rows)
    expected, left = [], rows
    for seed in range(3):
        share = wanted(seed)[: left // (3 - seed)]
        expected += share
        left -= len(share)
    assert ids(source) == expected and source.documents == rows


def test_a_budget_of_bytes_is_never_exceeded_and_nearly_used(
    tmp_path: Path, host: Any, files: dict[str, bytes]
) -> None:
    source = take(host, tmp_path / "out", bytes=100_000)
    assert 99_000 < source.bytes <= 100_000
    total = duckdb.sql(f"SELECT sum(strlen(text)) FROM '{tmp_path}/out/documents-*.parquet'").fetchone()
    assert total == (source.bytes,)


def test_what_one_file_cannot_give_is_left_to_the_next(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    some = len(wanted(0, min_score=4.5))
    source = take(host, tmp_path / "out", rows=2 * some + 1200, filter=Filter(min_score=4.5), files=FILES[:2])
    assert source.documents == 2 * some  # more than there is
    assert ids(take(host, tmp_path / "out", rows=10, files=[FILES[2]])) == wanted(2)[:10]


def sent(host: Any) -> int:
    return sum(request.sent for request in host.log)


def test_only_the_row_groups_of_the_budget_are_sent(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    """Of six row groups the filter on score leaves four, of which the budget needs one in each file."""
    take(host, tmp_path / "out", rows=300)
    whole = sum(map(len, files.values()))
    assert all(request.headers.get("Range") for request in host.gets("/cdn/"))
    assert sent(host) < 0.3 * whole, f"{sent(host):,} of {whole:,} bytes"


def test_a_filter_that_nothing_passes_sends_no_text(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    with pytest.raises(UserError, match="no document in 3 files passed.*widen the filters"):
        take(host, tmp_path / "out", filter=Filter(min_score=4.9))
    assert sent(host) < 0.05 * sum(map(len, files.values()))


def test_columns_that_are_not_used_are_not_sent(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    """The same slice of files that also have a column twice as long as the text: it costs no more."""
    take(host, tmp_path / "out", rows=300, files=FILES[:1])
    lean = sent(host)
    wide = parquet(0, select="*, sha256('wide' || id) || md5(id) || sha256(id) AS extra")
    assert len(wide) > 2 * len(files[FILES[0]])
    host.publish(REPOSITORY, {FILES[0]: wide})
    host.log.clear()
    take(host, tmp_path / "wide", rows=300, files=FILES[:1])
    assert sent(host) < lean + 50_000


@pytest.mark.slow
def test_the_same_request_gives_the_same_bytes_and_fetches_nothing(
    tmp_path: Path, host: Any, files: dict[str, bytes]
) -> None:
    take(host, tmp_path / "a", bytes=100_000)
    before = contents(tmp_path / "a")
    host.log.clear()
    take(host, tmp_path / "a", bytes=100_000)
    assert host.log == [] and contents(tmp_path / "a") == before
    take(host, tmp_path / "b", bytes=100_000)
    assert contents(tmp_path / "b") == before
    assert take(host, tmp_path / "a", bytes=50_000).bytes <= 50_000  # another budget: taken again


def test_a_spoilt_slice_is_taken_again(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    take(host, tmp_path / "a", bytes=100_000)
    before = contents(tmp_path / "a")
    slice_0 = tmp_path / "a" / "raw" / "slice-00000.parquet"
    slice_0.write_bytes(slice_0.read_bytes()[:-9])
    take(host, tmp_path / "a", bytes=100_000)
    assert contents(tmp_path / "a") == before


def test_a_slice_whose_record_is_no_record_is_taken_again(tmp_path: Path) -> None:
    """It is JSON and names the right slice, but a count in it is text, or what was refused is."""
    path, file = tmp_path / "slice-00000.parquet", Published(FILES[0], "https://host/0", 9, "5" * 64)
    path.write_bytes(b"rows")
    good = {
        "url": file.url,
        "bytes": 9,
        "sha256": file.sha256,
        "wanted": {"budget": 3},
        "documents": 1,
        "text_bytes": 3,
        "slice_sha256": hashlib.sha256(b"rows").hexdigest(),
        "refused": [["<urn:1>", "repeated"]],
    }
    for change in (
        {},
        {"bytes": "9"},
        {"documents": "1"},
        {"text_bytes": -3},
        {"text_bytes": 3.0},
        {"refused": 4},
        {"refused": [["<urn:1>", 4]]},
    ):
        path.with_suffix(".json").write_text(json.dumps(good | change), encoding="utf-8")
        assert (fineweb_edu._recorded(path, file, {"budget": 3}) is None) == bool(change), change


def test_a_repeated_id_is_left_out_and_counted(tmp_path: Path, host: Any) -> None:
    one = parquet(0)
    host.publish(REPOSITORY, {FILES[0]: one, FILES[1]: one + b"", FILES[2]: parquet(2)})
    source = take(host, tmp_path / "out", rows=300)
    assert ids(source) == [*wanted(0)[:100], *wanted(0)[100:200], *wanted(2)[:100]]
    assert [refusal.record for refusal in source.refused] == wanted(0)[:100]


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_file_without_the_columns_is_named_and_the_rest_goes_on(
    tmp_path: Path, host: Any, files: dict[str, bytes]
) -> None:
    files[FILES[0]] = parquet(0, select="* EXCLUDE (score)")
    files[FILES[1]] = b"these are only words, and no parquet at all"
    host.publish(REPOSITORY, files)
    source = take(host, tmp_path / "out", rows=30, files=FILES)
    assert ids(source) == wanted(2)[:30]
    reasons = {refusal.record: refusal.reason for refusal in source.refused}
    assert "expected 'score' of type DOUBLE" in reasons[FILES[0]]
    assert "not a readable parquet file" in reasons[FILES[1]]


def test_a_file_that_is_not_there_is_named(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    source = take(host, tmp_path / "out", rows=30, files=["none.parquet", FILES[1]])
    (missing,) = source.refused
    assert missing.record == "none.parquet" and "404" in missing.reason and "\n" not in missing.reason


@pytest.mark.parametrize("code", [429, 503])
def test_a_passing_status_is_tried_again(
    tmp_path: Path, host: Any, files: dict[str, bytes], faults: Any, code: int
) -> None:
    for path in list(host.files):
        if path.startswith("/cdn/"):
            host.faults[path] = [faults.status(code)] * 2
    assert ids(take(host, tmp_path / "out", rows=200, files=FILES[:2])) == [*wanted(0)[:100], *wanted(1)[:100]]


def cut_range(handler: Any, content: bytes) -> None:
    """The answer to a Range, of which half comes."""
    begin, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    part = content[begin : end + 1]
    place = {"Content-Range": f"bytes {begin}-{end}/{len(content)}", "Content-Length": str(len(part))}
    handler.start(206, place)
    handler.body(part[: len(part) // 2])
    handler.close_connection = True


def test_a_cut_connection_is_tried_again(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    for path in list(host.files):
        if path.startswith("/cdn/"):
            host.faults[path] = [cut_range] * 2
    assert ids(take(host, tmp_path / "out", rows=200, files=FILES[:2])) == [*wanted(0)[:100], *wanted(1)[:100]]


def test_a_host_that_goes_away_is_one_line_and_the_next_run_goes_on(
    tmp_path: Path, host: Any, files: dict[str, bytes], faults: Any
) -> None:
    second = next(path for path in host.files if path.endswith(hashlib.sha256(files[FILES[1]]).hexdigest()))
    host.faults[second] = [faults.status(503)] * 99
    with pytest.raises(FetchError, match="run again: it resumes with this file") as caught:
        take(host, tmp_path / "out", rows=300)
    assert "\n" not in str(caught.value) and FILES[1] in str(caught.value)
    with pytest.raises(UserError, match=r"no source\.json"):
        read_source(tmp_path / "out")
    host.faults.clear()
    host.log.clear()
    assert ids(take(host, tmp_path / "out", rows=300)) == [r for seed in range(3) for r in wanted(seed)[:100]]
    assert not host.gets(hashlib.sha256(files[FILES[0]]).hexdigest())


def test_a_server_that_ignores_ranges_gives_the_same(
    tmp_path: Path, host: Any, files: dict[str, bytes], faults: Any
) -> None:
    for path in list(host.files):
        if path.startswith("/cdn/"):
            host.faults[path] = [faults.other(b"", ranges=False)] * 99
    assert ids(take(host, tmp_path / "out", rows=200, files=FILES[:2])) == [*wanted(0)[:100], *wanted(1)[:100]]
    assert all(request.status == 200 for request in host.gets("/cdn/"))


def test_a_file_that_changes_while_it_is_read_is_not_mixed(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    """After the footer of the old version has gone out, the new one is there, with other row groups."""
    path = f"/datasets/{REPOSITORY}/resolve/main/{FILES[0]}"
    del host.redirects[path]
    new = parquet(9)
    host.files[path] = files[FILES[0]]

    def serve_and_change(handler: Any, content: bytes) -> None:
        handler.serve(content)
        host.files[path] = new

    host.faults[path] = [serve_and_change]
    assert ids(take(host, tmp_path / "out", rows=100, files=FILES[:1])) == wanted(9)[:100]


def test_a_listing_that_is_none(tmp_path: Path, host: Any) -> None:
    api = f"/api/datasets/{REPOSITORY}/tree/main/sample/10BT"
    for content, message in (
        (b"{", "not a list of files"),
        (b'[{"path": 1}]', "not a list"),
        (b"[]", "no parquet files"),
    ):
        host.files[api] = content
        with pytest.raises(UserError, match=message) as caught:
            take(host, tmp_path / str(len(content)), rows=3)
        assert "\n" not in str(caught.value)
    with pytest.raises(FetchError, match="HTTP 404"):
        take(host, tmp_path / "none", rows=3, folder="sample/none")


def test_an_extension_that_cannot_be_loaded(
    tmp_path: Path, host: Any, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.duckdb_extension").write_bytes(b"no extension")
    monkeypatch.setattr(fineweb_edu, "_packaged_extension", lambda _: tmp_path / "bad.duckdb_extension")
    with pytest.raises(
        UserError, match="httpfs extension cannot be loaded.*pip install duckdb-extension-httpfs=="
    ) as caught:
        take(host, tmp_path / "out", rows=3)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_no_source(
    tmp_path: Path, host: Any, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    take(host, tmp_path / "whole", rows=300)
    (tmp_path / "out" / "raw").mkdir(parents=True)
    for name in ("files.json", "files.json.json"):
        (tmp_path / "out" / "raw" / name).write_bytes((tmp_path / "whole" / "raw" / name).read_bytes())
    with monkeypatch.context() as patched, pytest.raises(UserError, match="the disk is full"):
        patched.setattr(os, "fsync", full)
        take(host, tmp_path / "out", rows=300)
    with pytest.raises(UserError, match=r"no source\.json"):
        read_source(tmp_path / "out")
    take(host, tmp_path / "out", rows=300)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bytes x", "--bytes is 'x', expected bytes"),
        ("--bytes 0", "--bytes is '0', expected bytes"),
        ("--rows 0", "--rows is 0, expected 1 or more"),
        ("--base-url ftp://x", "not a URL"),
    ],
)
def test_bad_flags(tmp_path: Path, flags: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        main(["--out", str(tmp_path), *flags.split()])
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path: Path, host: Any, files: dict[str, bytes]) -> None:
    host.check_kills("data.fineweb_edu", ["--bytes", "300KB"], tmp_path, pace=0.01, seed=7)


# --- real text -------------------------------------------------------------------------------------------------------

WEB = Path(__file__).parents[3] / "shared" / "data" / "web"


@pytest.mark.skipif(
    not WEB.exists(), reason="real pages in FineWeb-Edu's columns (shared/data/web next to the repository)"
)
def test_real_pages(tmp_path: Path, host: Any, capsys: pytest.CaptureFixture[str]) -> None:
    files = {f"sample/10BT/{path.name}": path.read_bytes() for path in sorted(WEB.glob("*.parquet"))}
    host.publish(REPOSITORY, files)
    assert main(["--out", str(tmp_path), "--bytes", "3MB", "--base-url", host.url]) == 0
    source = read_source(tmp_path, verify=True)
    assert 2_900_000 < source.bytes <= 3_000_000
    assert sent(host) < 0.5 * sum(map(len, files.values()))
    names = [str(path) for path in source.parquet]
    query = "SELECT min(language_score) >= 0.65, min(strlen(text)) > 0, count(DISTINCT id) FROM read_parquet($1)"
    assert duckdb.execute(query, [names]).fetchone() == (True, True, source.documents)
    assert f"{source.documents:,} documents" in capsys.readouterr().out
