"""Questions with verifiable answers, and the rewards of replies to them, for recipes/grpo.py.

python -m data.rewards --out sums                                  # easy sums for recipes/sft.py --data
questions = open_questions("harder-sums", files=(), encoding="utf-8")
questions.rewards(questions.training[0], "13 14 15, so 15")        # {"correct": 1.0, "format": 1.0}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.data.alpaca import Record, evenly, hold_out, origins_of, read_records, write_instructions
from tinyforge.data.files import locked
from tinyforge.data.world import Instruction, harder_sums, sum_rewards
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.report import count_of
from tinyforge.rng import Stream
from tinyforge.train.batches import fingerprint

TASKS = ("harder-sums", "one-step")
# As a person reads it: a comma (or a no-break space) belongs to a number between groups of three digits, a hyphen after
# a digit, a letter or a bracket is no sign, and a decimal may begin with its point.
NUMBER = re.compile(
    r"(?<![\w.,])(?:(?<!\))[-\u2212\u2013\uff0d])?[$\u20ac\u00a3]?(?=\.?\d)"
    r"(?:\d{1,3}(?:[,\u00a0\u2009\u202f]\d{3})+(?!\d)|\d*)(?:\.\d+)?(?:[eE][-+\u2212]?\d{1,3}(?!\w))?"
    r"|\d+(?:\.\d+)?"
)
_PLAIN = str.maketrans("\u2212\u2013\uff0d", "---", ",$\u20ac\u00a3\u00a0\u2009\u202f")
ONE_STEP, LARGEST = 4_000, 100  # training problems, and the largest number in them
EASY, EASY_LARGEST = 8_000, 50  # solved problems for fine-tuning: any up to this number, and single steps above
BRIEF = 2 / 3  # share of these that give the answer without the steps
HELD_OUT = 200  # questions for exact match, at most


@dataclass(frozen=True)
class Asked(Instruction):
    """A question in a conversation. history, system: as in a Record."""

    history: tuple[tuple[str, str], ...] = ()
    system: str = ""


def asked(record: Record) -> Instruction:
    """A record as a question."""
    said = "record", record.instruction, record.input, record.output
    before = record.history, record.system
    return Asked(*said, *before) if any(before) else Instruction(*said)  # of which earlier versions have hashes


@dataclass(frozen=True)
class Questions:
    """rewards(question, reply): "correct" and "format", each from 0 to 1."""

    name: str
    licence: str
    training: Sequence[Instruction]
    held_out: Sequence[Instruction]
    rewards: Callable[[Instruction, str], dict[str, float]]

    def fingerprint(self) -> str:
        """SHA-256 of the training questions: a resumed run must ask the same."""
        text = "\0".join(str(asdict(question)) for question in self.training)
        return fingerprint(np.frombuffer(text.encode(), np.uint8))

    def summary(self) -> dict[str, Any]:
        return {
            "source": self.name,
            "licence": self.licence,
            "questions": len(self.training),
            "held-out_questions": len(self.held_out),
        }


def open_questions(task: str, files: Sequence[str], encoding: str) -> Questions:
    """The questions of a built-in task, or of Alpaca records whose output ends with a number, the right answer. Raises
    UserError."""
    if files:
        return _of_records(files, encoding)
    if task == "harder-sums":
        return Questions(
            "harder sums of the built-in world", "MIT", harder_sums("train"), harder_sums("val"), sum_rewards
        )
    return Questions(
        "one-step sums in words", "MIT", one_step_sums("train", ONE_STEP), one_step_sums("val", HELD_OUT), last_number
    )


def number_in(text: str) -> Decimal | None:
    """The last number in a text, exactly, which is how GSM8K's answers are extracted; None if there is none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].translate(_PLAIN)) if found else None


def last_number(question: Instruction, reply: str) -> dict[str, float]:
    """correct: the reply's last number is the right answer. format: the reply is one short sentence that ends with a
    number, with or without a full stop."""
    number = None if reply.endswith("...") else number_in(reply)
    form = re.fullmatch(r"[^\n]{0,120}?\d\.?", reply.strip()) is not None
    return {"correct": float(number is not None and number == number_in(question.output)), "format": float(form)}


def _of_records(files: Sequence[str], encoding: str) -> Questions:
    records = [read_records([file], encoding) for file in files]
    kept = [[asked(r) for r in part if number_in(r.output) is not None] for part in records]
    count, usable = (sum(map(len, parts)) for parts in (records, kept))
    training, by_file = hold_out(kept)
    if not training:
        raise UserError(
            f"{files[0]}: {usable} of {count} records have a number in their output, expected at least 2 in a file; a "
            "reply is checked by its last number"
        )
    held_out = [question for part in by_file for question in part]
    print(f"{', '.join(files)}: {count - usable} records without a number in their output left out")
    # Evenly spaced, so that every file is represented.
    return Questions(*origins_of(files, ("", "")), training, evenly(held_out, HELD_OUT), last_number)


# --- sums for a model that has read the world ------------------------------------------------------------------------

NAMES = tuple("Anna Ben Clara David Emma Frank Grace Henry Ivy Jack Kate Leo Mary Nick Olivia Paul".split())
THINGS = tuple("apples books coins eggs flowers marbles pencils shells stamps stickers".split())
STORIES = (
    ("{p} has {a} {x}. {q} gives {p} {b} more. How many {x} does {p} have now?", 1),
    ("{p} has {c} {x} and gives {b} of them to {q}. How many {x} does {p} have left?", -1),
    ("{p} has {a} {x} and {q} has {b} {x}. How many {x} do they have together?", 1),
    ("There were {c} {x} in a box. {p} took {b} of them. How many {x} are still in the box?", -1),
    ("What is {a} plus {b}?", 1),
    ("What is {c} minus {b}?", -1),
)


def parts_of(number: int) -> list[int]:
    """Tens and ones, where there are any: 57 is 50 and 7."""
    return [part for part in (number // 10 * 10, number % 10) if part]


def worked(start: int, change: int) -> str:
    """The steps of a sum, tens first: "38 + 50 = 88, 88 + 7 = 95"; a single step below ten."""
    said, sign = [], 1 if change > 0 else -1
    for part in parts_of(abs(change)):
        said.append(f"{start} {'+' if sign > 0 else '-'} {part} = {start + sign * part}")
        start += sign * part
    return ", ".join(said)


def one_step_sums(split: str, count: int, easy: bool = False) -> list[Instruction]:
    """Problems of one addition or subtraction with no number above LARGEST, the kind of GSM8K's single steps. A quarter
    of all pairs of numbers belong to "val" only. easy: problems with no number above EASY_LARGEST, and those that are
    solved in one step. So every number and every step occurs, but not two steps with large numbers."""
    found: list[Instruction] = []
    for u in Stream(0, f"one-step/{split}").uniform((32 * count, 6)).tolist():  # more than enough
        if len(found) == count:
            break
        a, b = 1 + int(u[0] * (LARGEST - 1)), 1 + int(u[1] * (LARGEST - 1))
        if easy and a + b > EASY_LARGEST and len(parts_of(b)) > 1:
            continue
        if a + b > LARGEST or ((min(a, b) * 31 + max(a, b) * 17) % 4 == 0) != (split == "val"):
            continue
        story, sign = STORIES[int(u[2] * len(STORIES))]
        p, q = NAMES[int(u[3] * len(NAMES))], NAMES[int(u[4] * len(NAMES))]
        if p == q:
            continue
        text = story.format(p=p, q=q, x=THINGS[int(u[5] * len(THINGS))], a=a, b=b, c=a + b)
        found.append(Instruction("one_step", text, "", worked(a, b) if sign > 0 else worked(a + b, -b)))
    return found


def solved_sums(count: int, brief: float = BRIEF) -> list[Record]:
    """Easy sums to fine-tune on. A share of them, `brief`, give the answer alone, the others the steps as well,
    independently of the sum. The model then knows both ways, and GRPO can reinforce the one that is right more
    often."""
    sums = one_step_sums("train", count, easy=True)
    at_once = (Stream(0, "one-step/brief").uniform((count,)) < brief).tolist()
    return [
        Record(e.instruction, e.input, e.output.rpartition(" ")[2] if short else e.output)
        for e, short in zip(sums, at_once, strict=False)
    ]


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    p = Parser(
        prog="python -m data.rewards",
        description="Easy one-step sums with their solutions, for recipes/sft.py --data; recipes/grpo.py --task "
        "one-step continues from there. No pair of numbers that it holds out occurs.",
    )
    p.flag("--out", Path, "folder for alpaca.json and source.json", required=True, metavar="DIR")
    p.flag("--count", EASY, "problems", 1)
    brief = f"share of problems whose answer is given without the steps (default: {BRIEF:.2f})"
    p.flag("--brief", float, brief, 0, 1, default=BRIEF, metavar="SHARE")
    args = p.parse_args(arguments)
    records = solved_sums(args.count, args.brief)
    with locked(args.out):
        print(f"{count_of(len(records), 'sum')} in {write_instructions(args.out, records, 'one-step sums', 'MIT')}")
    return 0


if __name__ == "__main__":
    run_command(main)
