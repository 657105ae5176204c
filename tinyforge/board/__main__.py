"""A live view of training in the browser: curves of all runs, compared; samples, memory, the ledger.

    python -m tinyforge.board                       the runs under runs/, at http://127.0.0.1:8321
    python -m tinyforge.board runs/pretrain         one run
    python -m tinyforge.board runs --export report.html      one file to keep or send: no server, no network

It follows metrics.jsonl, samples.jsonl, run.json, scores.json and README.md of each run, and the folder's logs/*.log.
It writes nothing there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tinyforge.board.runs import METRICS, Board
from tinyforge.board.server import Server, exported
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import write_whole, writing
from tinyforge.hosts import add_allow_host_flag
from tinyforge.report import count_of
from tinyforge.terminal import one_line

PORT = 8321


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m tinyforge.board", description=__doc__)
    where = "a run, or a folder with runs in it (default: %(default)s)"
    parser.add_argument("folder", nargs="?", default="runs", metavar="DIR", help=where)
    parser.flag("--export", str, "write the page with all data into this file and exit", metavar="FILE")
    listen = "address to listen on (default: %(default)s, this machine only; 0.0.0.0 lets everyone on the network read "
    parser.add_argument("--host", default="127.0.0.1", help=f"{listen}the board)")
    parser.flag("--port", PORT, "port, 0 for any free one", 0, 65535)
    add_allow_host_flag(parser)
    args = parser.parse_args(argv)
    folder = Path(args.folder)
    if not folder.is_dir():
        raise UserError(
            f"no folder {folder}; train a model first, e.g. python recipes/pretrain.py, or name the folder of a run"
        )
    return export(folder, Path(args.export)) if args.export else serve(folder, args.host, args.port, args.allow_host)


def export(folder: Path, target: Path) -> int:
    board = Board(folder)
    page = exported(board)
    if not board.runs:
        raise UserError(f"no run in {folder}: no folder there has a {METRICS}; name the folder of a run")
    with writing(target):
        write_whole(target, page)
    runs, rows = count_of(len(board.runs), "run"), count_of(sum(run.count for run in board.runs.values()), "row")
    print(f"wrote {one_line(str(target))}: {runs}, {rows}, {len(page) / 1e6:.1f} MB")
    return 0


def serve(folder: Path, host: str, port: int, names: Sequence[str] = ()) -> int:
    try:
        server = Server(host, port, Board(folder), names)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {host}, port {port}: {cause}; choose another --port or --host") from error
    with server:
        print(f"board of {one_line(str(folder))} at {server.url}; Ctrl-C ends it", flush=True)
        server.serve_forever()
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
