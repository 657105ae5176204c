"""The report of a corpus: what was kept and dropped, and why, as tables in Markdown and as a plot.

python -m data.corpus report corpus
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinyforge.data.files import writing, written_whole
from tinyforge.data.parquet import reading
from tinyforge.errors import Parser, UserError
from tinyforge.terminal import printable

CATALOGUE = "corpus.duckdb"
_PASSAGES = 20  # that the report shows
Ask = Callable[..., list[Any]]
Outcome = tuple[str, str, int, int, int | None]
"""(source, outcome, documents, bytes, tokens or None). The outcome is "kept, train", "kept, val" or the reason why
documents were dropped."""
_OUTCOMES = "coalesce(dropped, 'kept, ' || split)"


@contextmanager
def catalogue(corpus: Path) -> Iterator[Ask]:
    """The catalogue of a corpus, opened for queries: SQL and its values to rows. UserError without a catalogue, or for
    one that cannot be read."""
    import duckdb

    path = corpus / CATALOGUE
    if not path.is_file():
        raise UserError(f"{path}: no such file; name a folder made by python -m data.corpus")
    with reading(path, "make the corpus again", "catalogue"), duckdb.connect(str(path), read_only=True) as connection:
        yield lambda sql, *values: connection.execute(sql, values).fetchall()


def read_outcomes(ask: Ask) -> list[Outcome]:
    """In the order of the sources, kept documents first."""
    return ask(
        f"SELECT source, {_OUTCOMES} AS outcome, count(*), sum(bytes)::BIGINT, sum(tokens)::BIGINT FROM documents "
        "GROUP BY source, outcome "
        "ORDER BY min(min(number)) OVER (PARTITION BY source), outcome NOT LIKE 'kept%', outcome"
    )


def render(ask: Ask, rows: Sequence[Outcome]) -> str:
    """The report as Markdown."""
    sources = list(dict.fromkeys(source for source, *_ in rows))
    counted = any(tokens is not None for *_, tokens in rows)
    lines = ["# The contents of the corpus", ""]
    licences = ask("SELECT name, licence, documents, bytes, refused FROM sources")
    lines += _table(
        ("source", "licence", "texts", "bytes", "refused earlier"),
        [(name, licence, f"{n:,}", f"{size:,}", f"{refused:,}") for name, licence, n, size, refused in licences],
    )
    for source in (*sources, None):
        if source is None and len(sources) == 1:
            break
        chosen: dict[str, list[int]] = {}
        for name, outcome, documents, size, tokens in rows:
            if source in (None, name):
                total = chosen.setdefault(outcome, [0, 0, 0])
                for index, value in enumerate((documents, size, tokens or 0)):
                    total[index] += value
        everything = [sum(column) for column in zip((0, 0, 0), *chosen.values(), strict=True)]
        ordered = sorted(chosen.items(), key=lambda item: (not item[0].startswith("kept"), item[0]))
        lines += ["", f"## {source or 'All sources'}", ""]
        lines += _table(
            ("outcome", "documents", "bytes", "% of bytes") + (("tokens",) if counted else ()),
            [
                (
                    outcome,
                    f"{documents:,}",
                    f"{size:,}",
                    f"{100 * size / max(everything[1], 1):.2f}",
                    *((f"{tokens:,}",) if counted else ()),
                )
                for outcome, (documents, size, tokens) in [*ordered, ("all", everything)]
            ],
        )
    for name, explanation in ask("SELECT name, explanation FROM filters WHERE kind = 'filter'"):
        if any(outcome == name for _, outcome, *_ in rows):
            lines += ["", f"`{name}`: {explanation}"]
    lines += [*_boilerplate(ask), *_passages(ask)]
    without = [s for s in sources if not any(row[0] == s and row[1] == "kept, val" for row in rows)]
    if without:
        advice = _advice(ask, without[0])
        lines += ["", f"No document for val in {', '.join(without)}{advice}."]
    return "\n".join(lines) + "\n"


def _boilerplate(ask: Ask) -> list[str]:
    """What was cut out of documents, with the sentences and lines that most documents had."""
    rows = ask("SELECT count(cut_bytes), coalesce(sum(cut_bytes), 0)::BIGINT FROM documents")
    count, size = rows[0] if rows else (0, 0)
    masked = ask("SELECT kind, count FROM masked WHERE count > 0 ORDER BY kind")
    if not count and not masked:
        return []
    shown = ask(f"SELECT * FROM boilerplate ORDER BY documents DESC, source, example LIMIT {_PASSAGES}")
    rows = [
        (source, f"{documents:,}", text if len(text) <= 240 else f"{text[:240]}...")
        for source, documents, text in shown
    ]
    head = ("source", "documents", "text that they share")
    private = f" Masked: {', '.join(f'{number:,} [{kind}]' for kind, number in masked)}." if masked else ""
    lines = ["", "## What was cut out", "", f"{size:,} bytes, of {count:,} documents.{private}"]
    return [*lines, *(["", *_table(head, rows)] if rows else [])]


def _passages(ask: Ask) -> list[str]:
    """The documents that were dropped for text of val or of an evaluation set, each with the passage."""
    where = "FROM documents WHERE passage IS NOT NULL"
    count = sum(row[0] for row in ask(f"SELECT count(*) {where}"))
    if not count:
        return []
    shown = ask(f"SELECT source, id, dropped, passage {where} ORDER BY number LIMIT {_PASSAGES}")
    rest = f"; {count - len(shown):,} more are in the catalogue" if count > len(shown) else ""
    rows = [(source, id_, why, text if len(text) <= 240 else f"{text[:240]}...") for source, id_, why, text in shown]
    head = ("source", "document", "dropped as", "longest passage that it shares")
    return ["", f"## Text that is held out{rest}", "", *_table(head, rows)]


def _advice(ask: Ask, source: str) -> str:
    """How the source gets something in val, computed from its documents that were kept."""
    which = f"FROM documents WHERE dropped IS NULL AND source = '{source}'"
    [(count, size)] = ask(f"SELECT count(*), coalesce(sum(bytes), 0)::BIGINT {which}")
    if not count:
        return ": none of its documents was kept"
    if count == 1:
        return f": it has a single document, of {size:,} bytes; give more text"
    # The split compares 52 bits of the hash, as a fraction.
    [(split_by,)] = ask("SELECT value FROM settings WHERE name = 'split_by'")
    texts = ask(f"SELECT count(DISTINCT text_hash) {which}")[0][0]
    by_part = json.loads(split_by) == "part" or texts == 1
    [(least,)] = ask(f"SELECT min({'hash' if by_part else 'text_hash'}) {which}")
    share = (int(least[:13], 16) / (1 << 52) * 1e4 // 1 + 1) / 1e4
    return f": build again with `--val-share {source}={share:g}{' --split-by part' if by_part else ''}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]


def plot(rows: Sequence[Outcome], target: Path) -> None:
    """A bar per source: the share of its bytes that was kept, and why the rest was dropped."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    sources = list(dict.fromkeys(source for source, *_ in rows))
    outcomes = sorted({outcome for _, outcome, *_ in rows}, key=lambda name: (not name.startswith("kept"), name))
    totals = {source: max(sum(size for s, _, _, size, _ in rows if s == source), 1) for source in sources}
    dropped = {s: sum(row[3] for row in rows if row[0] == s and not row[1].startswith("kept")) for s in sources}
    size = 10, 1.8 + 0.45 * len(sources) + 0.1 * len(outcomes)
    figure = Figure(figsize=size, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    colours = colormaps["tab20"]
    for axes, chosen in ((left, outcomes), (right, [name for name in outcomes if not name.startswith("kept")])):
        begin = dict.fromkeys(sources, 0.0)
        for outcome in chosen:
            sizes = {s: 100 * n / totals[s] for s, o, _, n, _ in rows if o == outcome}
            widths = [sizes.get(source, 0.0) for source in sources]
            colour = colours(outcomes.index(outcome) % 20)
            axes.barh(sources, widths, left=[begin[s] for s in sources], color=colour, label=outcome)
            begin = {s: begin[s] + width for s, width in zip(sources, widths, strict=True)}
        axes.invert_yaxis()
        axes.set_xlabel("% of the source's bytes")
    left.set_title("all documents")
    left.set_yticks(range(len(sources)), [f"{s}\n{totals[s] / 1e6:,.0f} MB" for s in sources])
    right.set_title("what was dropped" if any(dropped.values()) else "nothing was dropped")
    right.set_yticks([])
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(target, dpi=120, format="png", metadata={"Software": None})


def write_report(corpus: Path) -> str:
    """Write report.md and report.png into the corpus; returns the text."""
    with catalogue(corpus) as ask:
        rows = read_outcomes(ask)
        text = render(ask, rows)
    with writing(corpus):
        with written_whole(corpus / "report.png") as partial:
            plot(rows, partial)
        with written_whole(corpus / "report.md") as partial:
            partial.write_text(text, encoding="utf-8", newline="\n")
    return text


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="python -m data.corpus report", description="Print a corpus's report.")
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help="a folder made by python -m data.corpus")
    print(printable(write_report(parser.parse_args(arguments).corpus)))
    return 0
