"""Every command that writes: how it is begun, how it goes on after a kill, and what it must leave.

A new command that writes gets a line in COMMANDS.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fuzz.seeds import BOOK, RECORDS, documents, make_seeds
from tinyforge import chat, checkpoint
from tinyforge.data import alpaca, corpus, fineweb_edu, gutenberg, local, shards, tinystories
from tinyforge.formats import convert, load
from tinyforge.recipes import ablation, classify, evaluate, pretrain, sft
from tinyforge.tokenizers import command
from tinyforge.web import __main__ as web

Main = Callable[[list[str]], Any]
STEPS = 24
SHAPE = "dim=16 heads=2 kv_heads=1 layers=1 hidden=24 context=96 mtp_heads=2"
TOKENIZER = "--tokenizer inputs/tokenizers/ours.json --set vocab=300"
CORPUS = "inputs/source inputs/second --out out --val-share 0.3"
PLAN = "--save-every 3 --eval-every 8 --batch-size 4 --backend numpy"
# What no two runs have in common.
CLOCKS = re.compile("seconds|[a-z]+_per_second|elapsed|joules|peak_memory_mib|gpu_memory_mib")


@dataclass(frozen=True)
class Command:
    """words: of the command; it runs where `inputs` and `out` lie, writing the latter. go_on: what it is given where a
    run's checkpoint is found in out. before: copied to out at the start, since the command adds to it. once: it refuses
    an out that is there, which is then whole."""

    name: str
    main: Main
    words: str
    go_on: str = ""
    before: str = ""
    once: bool = False

    def begin(self, folder: Path) -> None:
        if self.before and not (folder / "out").exists():
            shutil.copytree(folder / "inputs" / self.before, folder / "out")

    def arguments(self, folder: Path) -> list[str] | None:
        """What the command is given now; None: it has done its work."""
        if self.once and (folder / "out").exists():
            return None
        if self.go_on and checkpoint.steps(folder / "out"):
            return self.go_on.split()
        return [word.replace("~", " ") for word in self.words.split()]


def _save_conversation(arguments: list[str]) -> None:
    """/load and /save of the chat."""
    loaded = load(Path("inputs/sft"), chat.get_backend("numpy", "fp32", workers=1))
    repl = chat.Repl(loaded, chat.Sampling(max_tokens=2))
    repl.obey("/load inputs/inputs/talk.json")
    Path("out").mkdir(exist_ok=True)
    repl.obey(f"/save {arguments[0]}")


def _into_folder(main: Main) -> Main:
    """For commands that write a file into a folder that must be there."""

    def run(arguments: list[str]) -> Any:
        Path("out").mkdir(exist_ok=True)
        return main(arguments)

    return run


def commands(url: str) -> list[Command]:
    """All of them. url: of the server that has the `stories`."""
    gguf = Command("convert to GGUF", _into_folder(_convert_to_file), "inputs/sft out/model.gguf")
    slice = Command("slice", fineweb_edu.main, f"--base-url {url} --rows 500 --out out")
    has_httpfs = importlib.util.find_spec("duckdb_extension_httpfs")
    return [
        Command(
            "pretrain, text",
            pretrain.main,
            f"--data inputs/inputs/text.txt {TOKENIZER} {SHAPE} --steps {STEPS} {PLAN} --workers 2 --out out --card",
            "--resume --out out --card",
        ),
        Command(
            "pretrain, shards",
            pretrain.main,
            f"--data inputs/shards --set {SHAPE} --steps {STEPS} {PLAN} --workers 1 --keep 0 --out out",
            "--resume --out out",
        ),
        Command(
            "sft",
            sft.main,
            f"--data inputs/inputs/alpaca.json --base inputs/run --steps {STEPS} {PLAN} --workers 1 --out out",
            "--resume --out out",
        ),
        Command(
            "sft, adapters",
            sft.main,
            f"--data inputs/inputs/alpaca.json --base inputs/run --lora 2 --steps {STEPS} {PLAN} --workers 1 --out out",
            "--resume --out out",
        ),
        Command(
            "pretrain, experts",
            pretrain.main,
            f"--model moe --data inputs/inputs/text.txt {TOKENIZER} {SHAPE} "
            f"experts=4 --steps {STEPS} {PLAN} --workers 1 --out out",
            "--resume --out out",
        ),
        Command(
            "pretrain, words",
            pretrain.main,
            "--model bert --data inputs/inputs/text.txt --tokenizer "
            f"inputs/tokenizers/words.json --set dim=16 heads=2 layers=1 hidden=24 context=96 vocab=200 --steps "
            f"{STEPS} {PLAN} --workers 1 --out out",
            "--resume --out out",
        ),
        Command(
            "classify, texts",
            classify.main,
            "--model bert --data inputs/labelled/texts.jsonl --tokenizer "
            f"inputs/tokenizers/words.json --set dim=16 heads=2 layers=1 hidden=24 context=64 --steps {STEPS} "
            f"{PLAN} --workers 1 --out out",
            "--resume --out out",
        ),
        Command(
            "classify, images",
            classify.main,
            "--model vit --data inputs/labelled/mnist --set dim=16 heads=2 "
            f"layers=1 hidden=24 image=8 patch=4 --steps {STEPS} {PLAN} --workers 1 --out out",
            "--resume --out out",
        ),
        Command(
            "ablation",
            ablation.main,
            "--arm a:~--lr~1e-3 --arm b:~--lr~2e-3 --seeds 1 --out out -- --data "
            f"inputs/inputs/text.txt {TOKENIZER} {SHAPE} --steps 6 {PLAN} --workers 1",
        ),
        Command(
            "evaluate",
            evaluate.main,
            "--checkpoint out --data inputs/inputs/text.txt --instructions "
            "inputs/inputs/alpaca.jsonl --sentences 4 --prompts 1 --seeds 0 --max-tokens 4 --backend numpy --json "
            "out/figures.json",
            before="run",
        ),
        Command(
            "tokenizer, train",
            _into_folder(command.main),
            "train inputs/inputs/text.txt --vocab-size 290 --out out/tokenizer.json --workers 2",
        ),
        Command(
            "tokenizer, encode",
            _into_folder(command.main),
            "encode inputs/inputs/book.txt --tokenizer inputs/tokenizers/ours.json --out out/ids.npy --workers 2",
        ),
        Command("local", local.main, "inputs/many --out out"),
        Command("alpaca", alpaca.main, "inputs/inputs/alpaca.json --out out"),
        Command("tinystories", tinystories.main, "inputs/inputs/stories.txt --out out"),
        Command("gutenberg", gutenberg.main, "inputs/inputs/books.zip --out out"),
        Command("download", tinystories.main, f"--base-url {url} --files a.txt b.txt --out out"),
        *([slice] if has_httpfs else []),
        Command("corpus", corpus.main, f"{CORPUS} --workers 1"),
        Command("corpus, two workers", corpus.main, f"{CORPUS} --workers 2"),
        Command("corpus, report", corpus.main, "report out", before="corpus"),
        Command(
            "shards", shards.main, "--corpus inputs/corpus --out out --vocab-size 280 --shard-tokens 300 --workers 2"
        ),
        Command("convert to Hugging Face", convert.main, "inputs/sft out", once=True),
        Command("convert to an adapter", convert.main, "inputs/lora out --adapter", once=True),
        Command("merge an adapter", convert.main, "inputs/peft out --base inputs/merged --format tinyforge", once=True),
        Command("web", web.main, "out --checkpoint inputs/sft", once=True),
        Command("convert to ours", convert.main, "inputs/llama out --format tinyforge", once=True),
        Command("convert to llama2.c", _into_folder(_convert_to_file), "inputs/llama2c/model.bin out/model.bin"),
        *([gguf] if importlib.util.find_spec("gguf") else []),  # an extra
        Command("conversation", _save_conversation, "out/talk.json"),
    ]


def _convert_to_file(arguments: list[str]) -> Any:
    """A model that is there is refused; it and what lies next to it must then be whole."""
    return None if Path(arguments[1]).exists() else convert.main(arguments)


def make_inputs(folder: Path) -> None:
    """What the commands read."""
    make_seeds(folder)
    (folder / "many" / "deep").mkdir(parents=True)
    for number, text in enumerate(documents("train", 12)):
        (folder / "many" / ("deep" if number % 2 else "") / f"{number}.txt").write_text(text, encoding="utf-8")
    book = BOOK.format(number=84, text="\n\n".join(documents("train", 400)))
    (folder / "inputs" / "book.txt").write_text(book, encoding="utf-8")
    # Enough for the context of the models here.
    many = [record | {"input": ""} for record in RECORDS] * 4
    (folder / "inputs" / "alpaca.json").write_text(json.dumps(many), encoding="utf-8")


def stories() -> dict[str, bytes]:
    """What the server has: two files of stories, as the real host's."""
    return {
        f"{name}.txt": "".join(f"{text}\n<|endoftext|>\n" for text in documents("train", 300, seed)).encode()
        for seed, name in enumerate("ab")
    }


def rows_of_the_web() -> dict[str, bytes]:
    """Two parquet files as FineWeb-Edu's, whose rows pass its filters."""
    return {f"{fineweb_edu.FOLDER}/{seed:03d}.parquet": _web_rows(seed) for seed in range(2)}


def _web_rows(seed: int) -> bytes:
    import duckdb

    with TemporaryDirectory() as folder, duckdb.connect(config={"threads": 1}) as connection:
        path = Path(folder, "rows.parquet")
        columns = (
            f"'Text ' || i || md5('{seed} ' || i) AS text, '{seed} ' || i AS id, 'https://host/' || i AS url, "
            "'en' AS language, 0.9::DOUBLE AS language_score, 100::BIGINT AS token_count, 4.0::DOUBLE AS score"
        )
        connection.execute(f"COPY (SELECT {columns} FROM range(1000) t(i)) TO '{path}' (FORMAT parquet)")
        return path.read_bytes()


# --- what must be the same -------------------------------------------------------------------------------------------


def contents(out: Path) -> dict[str, bytes]:
    """All files under `out` by name, without what the clock has written, and a catalogue as its rows."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if path.is_dir():
            found[f"{name}/"] = b""
        elif path.name == "corpus.duckdb":
            found[name] = _rows(path)
        elif path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            found[name] = json.dumps(list(map(_timeless, rows))).encode()
        elif path.name in ("meta.json", "run.json", "hashes.json", "figures.json"):
            found[name] = json.dumps(_timeless(json.loads(path.read_bytes()))).encode()
        elif path.name in ("loss.png", "log.txt") or (path.name == "README.md" and (out / "loss.png").exists()):
            found[name] = b"the time is in it"
        else:
            found[name] = path.read_bytes()
    return found


def _timeless(content: Any) -> Any:
    """Without the clocks, the hash of a file that has one, and the flags that --resume does not repeat."""
    if isinstance(content, dict):
        return {
            key: _timeless(value) for key, value in content.items() if key != "meta.json" and not CLOCKS.fullmatch(key)
        }
    return content


def _rows(catalogue: Path) -> bytes:
    import duckdb

    with duckdb.connect(str(catalogue), read_only=True) as connection:
        names = connection.execute("SELECT table_name FROM duckdb_tables() ORDER BY ALL").fetchall()
        rows = {name: connection.execute(f"SELECT * FROM {name} ORDER BY ALL").fetchall() for (name,) in names}
    return repr(rows).encode()
