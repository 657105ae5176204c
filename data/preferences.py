"""Preference pairs for recipes/dpo.py: a prompt, a preferred reply and a rejected one.

pairs = read_pairs(["pairs.json"])               objects with prompt, chosen and rejected, or as data.conversations says
pairs = world_pairs("train", 6000, seed=0)       of the built-in world: the right answer and a near miss
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyforge.data.alpaca import Record, before, encode_example, fault, hold_out, read_as
from tinyforge.data.conversations import Fault, is_chat, named, preference
from tinyforge.data.world import instructions, wrong_answer
from tinyforge.errors import UserError
from tinyforge.report import count_of
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.chat_templates import TEMPLATES, AnyTemplate
from tinyforge.train.preferences import Encoded

FIELDS = ("instruction", "input", "chosen", "rejected")
MISSING = "it has no '{name}'; a preference pair has a prompt, chosen and rejected; add it"


@dataclass(frozen=True)
class Pair:
    """Two replies to one instruction; `input` may be empty. cut: the rejected reply was truncated, so its end gets no
    loss either. history, system: as in a Record."""

    instruction: str
    input: str
    chosen: str
    rejected: str
    cut: bool = False
    history: tuple[tuple[str, str], ...] = ()
    system: str = ""


def read_pairs(paths: Sequence[str | Path], encoding: str = "utf-8") -> list[Pair]:
    """The pairs of JSON, JSON-lines or parquet files, in the order given. Other fields than `cut` and those that
    `before` reads are ignored.

    Raises UserError, naming the file, the record (counted from 0) and its line, for malformed JSON and for a record
    that lacks a field or has one that is not a string.
    """
    return [pair for path in paths for pair in read_as(Path(path), encoding, _pair, "preference pairs")]


def _pair(value: object) -> Pair:
    cut = isinstance(value, dict) and value.get("cut") is True
    if is_chat(value) or isinstance(value, dict) and isinstance(value.get("rejected"), list):
        assert isinstance(value, dict)
        chat, chosen, rejected = preference(value)
        made = Pair(chat.turns[-1][0], "", chosen, rejected, cut, chat.answered, chat.system)
        texts = [part for turn in made.history for part in turn] + [made.instruction, made.system]
        value = {"instruction": "\n".join(texts), "input": "", "chosen": chosen, "rejected": rejected}
    else:
        made = None
    if wrong := fault(value, FIELDS, MISSING):
        raise Fault(wrong)
    assert isinstance(value, dict)
    value = named(value)
    return made or Pair(**{name: value[name] for name in FIELDS}, cut=cut, **before(value))


def read_split(paths: Sequence[str | Path], encoding: str = "utf-8") -> tuple[list[Pair], list[Sequence[Pair]]]:
    """Training pairs, and the last fifth of each file, by file, to evaluate on: an accuracy needs many. Raises
    UserError, as read_pairs does, and if no file has two pairs."""
    training, by_file = hold_out([read_pairs([path], encoding) for path in paths], 5)
    if not training:
        pairs = count_of(sum(map(len, by_file)), "preference pair")
        raise UserError(f"data: {pairs}, expected at least 2 in a file; give more")
    return training, by_file


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: TextTokenizer,
    seq_len: int,
    what: str,
    may_be_none: bool = False,
    template: AnyTemplate = TEMPLATES["alpaca"],
) -> list[Encoded]:
    """Pairs as ids, in a chat template. Prints how many are left out: pairs whose replies are equal, which express no
    preference; empty replies; and replies that exceed seq_len, since a truncated reply is a different one. Raises
    UserError if no pair is left, unless `may_be_none`."""
    found: list[Encoded] = []
    equal = empty = long = 0
    for pair in pairs:
        if pair.chosen.strip() == pair.rejected.strip():
            equal += 1
        elif not (pair.chosen.strip() and pair.rejected.strip()):
            empty += 1
        else:
            sides = [
                encode_example(
                    tokenizer, Record(pair.instruction, pair.input, reply, pair.history, pair.system), 10**9, template
                )
                for reply in (pair.chosen, pair.rejected)
            ]
            (chosen, prompt), (rejected, _) = (side for side in sides if side is not None)
            if max(len(chosen), len(rejected)) > seq_len + 1:
                long += 1
            else:
                found.append((chosen, rejected[:-1] if pair.cut else rejected, prompt))
    print(
        f"{what}: {count_of(len(found), 'pair')} of up to {seq_len} tokens; left out {equal:,} whose chosen reply "
        f"equals the rejected one, {empty:,} with an empty reply and {long:,} that are longer"
    )
    if not found and not may_be_none:
        raise UserError(
            f"{what}: no pair can be learned from: {equal} prefer a reply to itself, {empty} "
            f"have an empty reply, {long} take more than {seq_len} tokens; give others, or a model with more context"
        )
    return found


def world_pairs(split: str, count: int, seed: int) -> list[Pair]:
    """Pairs about the built-in world; the rejected answer is that of a hasty reader (`wrong_answer`)."""
    return [
        Pair(e.instruction, e.input, e.output, wrong_answer(e, split, seed, number))
        for number, e in enumerate(instructions(split, count, seed))
    ]
