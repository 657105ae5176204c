"""The figures of an evaluation as tables, and by the names that a model card uses. docs/evaluation.md explains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinyforge.report import NOISE, count_of

SHARES = {
    "ended": "end by themselves",
    "not_empty": "are not empty",
    "no_line_repeated": "repeat no line three times",
    "all_three": "do all three",
    "four_words_repeated": "have four words three times",
}


def _heading(found: Mapping[str, Any], what: str) -> str:
    weights = f", weights in {found['weights']}" if found["weights"] else ""
    return (
        f"{found['checkpoint']}: {what}, {found['parameters']:,} parameters; {found['backend']}, "
        f"{found['precision']}{weights}"
    )


def table_of(found: Mapping[str, Any]) -> str:
    """All figures but those of benchmarks."""
    text, sources = found["text"], found["text"]["sources"]
    heads = len(next(iter(sources.values()))["bits_per_byte"])
    n_grams = "kneser_ney" in text
    width = max(len("over all"), *map(len, sources))
    lines = [
        _heading(found, f"{found['kind']}, step {found['step']:,}"),
        "",
        "bits per byte of held-out text; head k predicts the token k + 1 places ahead",
        " " * (2 + width) + "".join(f"   head {k}" for k in range(heads)) + "   5-gram" * n_grams + "   bytes",
    ]
    for name, figures in sources.items():
        row = [f"{bits:>9.3f}" for bits in figures["bits_per_byte"]]
        row += [f"{figures['kneser_ney']:>9.3f}"] if n_grams else []
        lines.append(f"  {name:<{width}}{''.join(row)}   {figures['bytes']:,}")
    if len(sources) > 1 or n_grams:
        row = [f"{text['bits_per_byte']:>9.3f}", " " * 9 * (heads - 1)]
        row += [f"{text['kneser_ney']:>9.3f}"] if n_grams else []
        lines.append(f"  {'over all':<{width}}{''.join(row)}")
    if n_grams:
        ratio = text["bits_per_byte"] / text["kneser_ney"]
        lines.append(
            f"  the model is {'below' if ratio < 1 else 'NOT below'} a 5-gram Kneser-Ney model of the same "
            f"training text: {ratio:.3f} of its bits per byte"
        )
    if found["weights"]:
        lines += _weights(found)
    lines += ["", "the last word of a sentence among ten (chance: 10 %)"]
    for name, figures in sources.items():
        cloze = figures["cloze"]
        shown = "skipped: too few different last words of sentences"
        if cloze:
            shown = (
                f"{cloze['right']:>8.1%} +- {cloze['standard_error']:.1%} of {cloze['sentences']} sentences; "
                f"always the commonest of the ten: {cloze['by_frequency']:.1%}"
            )
        lines.append(f"  {name:<{width}}{shown}")
    return "\n".join([*lines, "", *_replies(found["replies"]), "", *_speculation(found["speculation"]), ""])


def _replies(found: Mapping[str, Any]) -> list[str]:
    if "skipped" in found:
        return [f"replies: skipped; {found['skipped']}"]
    sampled = f"sampled, {count_of(found['seeds'], 'seed')}" if "sampled" in found else ""
    lines = [
        f"replies to {count_of(found['prompts'], 'held-out instruction')}, up to {found['max_tokens']} tokens"
        + (f"; {found['left_out']} skipped, too long for the context" if found["left_out"] else ""),
        f"  {'':<30}{'greedy':<17}{sampled}",
    ]
    for key, what in SHARES.items():
        greedy = f"{found['greedy'][key]:>6.1%} +- {found['standard_error'][key]:.1%}"
        sampled = f"{found['sampled'][key]:>6.1%}" if "sampled" in found else ""
        spread = f" +- {found['spread'][key]:.1%}" if found.get("spread") else ""
        lines.append(f"  {what:<30}{greedy:<17}{sampled}{spread}")
    sampled = f"{found['sampled']['tokens']:>6.1f}" if "sampled" in found else ""
    return [*lines, f"  {'tokens':<30}{found['greedy']['tokens']:>6.1f}{'':<11}{sampled}"]


def _speculation(found: Mapping[str, Any]) -> list[str]:
    if "skipped" in found:
        return [f"speculation: skipped; {found['skipped']}"]
    heads = ", ".join(f"head {k} {share:.1%}" for k, share in enumerate(found["acceptance"], 1))
    return [
        f"speculation, greedy, on {found['texts']} {found['on']}: {found['tokens_per_pass']:.2f} tokens a pass",
        f"  accepted of what was looked at: {heads}",
    ]


def _weights(found: Mapping[str, Any]) -> list[str]:
    """Head 0's bits per byte with weights of one byte, and without."""
    text, width = found["text"], max(map(len, (*found["text"]["sources"], "over all")))
    plain, own = found["weight_bytes_plain"], found["weight_bytes"]
    kinds = found["weights"], found["precision"]
    lines = [
        "",
        f"head 0 with weights in {kinds[0]}, {own / 1e6:,.1f} MB, and in {kinds[1]}, {plain / 1e6:,.1f} MB",
        " " * (2 + width) + f"{kinds[0]:>9}{kinds[1]:>9}{'more':>19}",
    ]
    rows = [
        (name, figures["bits_per_byte"][0], figures["bits_per_byte_plain"][0])
        for name, figures in text["sources"].items()
    ]
    rows += [("over all", text["bits_per_byte"], text["bits_per_byte_plain"])] * (len(rows) > 1)
    for name, bits, before in rows:
        lines.append(f"  {name:<{width}}{bits:>9.4f}{before:>9.4f}{bits - before:>+10.4f}{bits / before - 1:>+9.2%}")
    return lines


def scores_of(found: Mapping[str, Any]) -> dict[str, float]:
    """The figures by the names that the model card uses; a name with NOISE is the figure's standard error or spread."""
    text, replies, speculation = found["text"], found["replies"], found["speculation"]
    scores: dict[str, float] = {"held-out text, bits per byte": text["bits_per_byte"]} if text["own"] else {}
    for name, figures in text["sources"].items():
        for k, bits in enumerate(figures["bits_per_byte"]):
            scores[f"held-out text of {name}{f', head {k}' if k else ''}, bits per byte"] = bits
        if "kneser_ney" in figures:
            scores[f"held-out text of {name}, a 5-gram model, bits per byte"] = figures["kneser_ney"]
        if figures["cloze"]:
            scores[f"last word of a sentence among ten, {name}"] = figures["cloze"]["right"]
            scores[f"last word of a sentence among ten, {name}{NOISE}"] = figures["cloze"]["standard_error"]
    for how, errors in (("greedy", "standard_error"), ("sampled", "spread")):
        for key, value in replies.get(how, {}).items():
            name = "tokens a reply" if key == "tokens" else f"replies that {SHARES[key]}"
            scores[f"{name}, {how}"] = value
            if key in replies[errors]:
                scores[f"{name}, {how}{NOISE}"] = replies[errors][key]
    for k, share in enumerate(speculation.get("acceptance", ()), 1):
        scores[f"guesses of head {k} accepted, greedy"] = share
    if "tokens_per_pass" in speculation:
        scores["tokens a pass, greedy"] = speculation["tokens_per_pass"]
    return scores


SHOWN = {
    "acc": "acc",
    "acc_norm": "acc_norm",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "word_perplexity": "word perplexity",
    "exact_match_strict": "exact, strict",
    "exact_match_flexible": "exact, last",
}


def table_of_tasks(found: Mapping[str, Any], published: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Every task's scores compared with chance level and the published scores: by model, task and metric."""
    lines = [
        _heading(found, found["model"]),
        "",
        f"{'task':<14}{'metric':<17}{'score':>10}{'+-':>10}{'chance':>9}"
        + "".join(f"{model:>13}" for model in published)
        + "   items",
    ]
    notes = []
    for name, task in found["tasks"].items():
        for metric, value in task["figures"].items():
            if metric not in SHOWN:
                continue
            form = ".1%" if metric.startswith(("acc", "exact")) else ".3f" if "bits" in metric else ".4g"
            error, chance = task["errors"].get(metric), task["chance"] if form == ".1%" else None
            numbers = [(value, 10), (error, 10), (chance, 9)]
            numbers += [(scores.get(name, {}).get(metric), 13) for scores in published.values()]
            cells = [" " * width if number is None else f"{number:>{width}{form}}" for number, width in numbers]
            lines.append(f"{name:<14}{SHOWN[metric]:<17}{''.join(cells)}   {task['items']:,}")
        notes += [f"{name}: {note}" for note in (task["variant"], task["note"]) if note]
        notes += [
            f"{name}: {task['cut']:,} of {task['items']:,} did not fit the context; their beginnings were cut off"
        ] * bool(task["cut"])
    if found["limit"]:
        notes.append(f"only the first {found['limit']:,} of each set's items: not comparable with scores of whole sets")
    return "\n".join([*lines, *([""] * bool(notes)), *notes, ""])
