"""Train a classifier of texts or images, from scratch or from a pretrained model.

    python recipes/classify.py                                  the built-in questions: is this the answer?
    python recipes/classify.py --base runs/pretrain --data train.parquet --test test.parquet
    python recipes/classify.py --base bert-base-uncased --data reviews.csv --steps 300 --lr 5e-5
    python recipes/classify.py --model vit --data mnist --steps 4000 --shift 2
    python recipes/classify.py --resume                         continue runs/classify

Texts come from .parquet, .jsonl or .csv files with the columns text and label (and text2 for pairs of texts), images
from a folder of idx files, a folder of PNGs per class, or a parquet file (data/labelled.py). The run ends with the
accuracy on the test set: --test, MNIST's own, or else a held-out tenth of the data. For texts, a logistic regression on
the bag of words is trained on the same data as a baseline; for images, mistakes.png shows some mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge import checkpoint
from tinyforge.config import ModelConfig
from tinyforge.data.labelled import Labelled, answers, has_test_images, hold_out, read_images, read_texts
from tinyforge.errors import UserError, run_command
from tinyforge.formats import load, open_model, resolve_checkpoint
from tinyforge.formats.foreign import spec_of_model
from tinyforge.formats.labels import Labels
from tinyforge.models.bag_of_words import BagOfWords
from tinyforge.parallel.launch import ProcessGroupInfo
from tinyforge.params import take_weights
from tinyforge.registry import ModelSpec, default_classifier, find_model
from tinyforge.report import count_of, timed
from tinyforge.rng import Stream
from tinyforge.terminal import one_line
from tinyforge.tokenizers import TextTokenizer, WordPiece, load_tokenizer
from tinyforge.train.batches import Shuffled, fingerprint, micro_batches
from tinyforge.train.corpus import CHARS
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.masked import framed, padded, padding_id, room_in
from tinyforge.train.metrics import save_scores
from tinyforge.train.objectives import Batch, Classes
from tinyforge.train.plan import check_fits, print_plan
from tinyforge.train.run import Run, Task, running
from tinyforge.train.settings import (
    ClassifySettings,
    config_of,
    described,
    on_base,
    open_backend,
    parse,
    print_schedule,
    sequence_length,
    start_ranks,
)

BUILT_IN_EXAMPLES, BUILT_IN_TESTS = 40_000, 2_000
EVAL_EXAMPLES = 2_000  # while training; at the end all are evaluated
EVAL_ROWS = 100
PICTURED = 40


def main(argv: Sequence[str] | None = None) -> int:
    settings, resume, plan_only, _ = parse(ClassifySettings, __doc__ or "", argv, actions=("resume", "plan"))
    start = start_of(settings, resume)
    if start and settings.model == default_classifier():
        settings = replace(settings, model=open_model(start).spec.name, config="")
    spec = find_model(settings.model)
    if spec.learns not in ("masked text", "images"):
        what = "predicts next tokens" if spec.learns == "text" else f"learns {spec.learns}"
        raise UserError(f"{start or '--model'}: {spec.name} {what}; classes are learned by bert and vit")
    if settings.shift and spec.learns != "images" and not resume:
        raise UserError(f"--shift moves images, and {spec.name} reads texts; leave it out")
    if plan_only:
        config = on_base(open_model(start).config, settings, resume) if start else config_of(settings)
        print_plan(spec, config, settings)
        return 0
    if (status := start_ranks(settings, __file__, argv)) is not None:
        return status
    with running(settings, resume) as ranks:
        classify(settings, spec, resume, ranks)
    return 0


def start_of(settings: ClassifySettings, resume: bool) -> Path | None:
    """The model to start from, or the run itself."""
    return Path(settings.out) if resume else resolve_checkpoint(settings.base) if settings.base else None


@dataclass(frozen=True)
class Data:
    """Training and test examples, and the function that makes a batch of some of their rows."""

    train: Labelled
    test: Labelled
    tokenizer: TextTokenizer
    collate: Any  # (part, rows, stream or None): the last draws what is random in training


def image_data(settings: ClassifySettings, names: Sequence[str]) -> Data:
    if len(settings.data) != 1:
        raise UserError("--data: expected one folder of images or one parquet file, e.g. --data mnist")
    path = Path(settings.data[0])
    train = read_images(path, names)
    if settings.test or has_test_images(path):
        test = read_images(Path(settings.test or path), train.names, "test")
    else:
        train, test = hold_out(train, settings.seed)
    if test.inputs.shape[1:] != train.inputs.shape[1:]:
        sizes = test.inputs.shape[1:], train.inputs.shape[1:]
        raise UserError(
            f"the images to test are {sizes[0]}, those to learn from {sizes[1]}; both must be of one size "
            "(channels, height, width)"
        )

    def collate(part: Labelled, rows: np.ndarray, stream: Stream | None) -> Batch:
        images = part.inputs[rows]
        if stream is not None and settings.shift:
            images = moved(images, settings.shift, stream)
        return Batch(images, part.labels[rows].reshape(-1, 1, 1))

    return Data(train, test, Labels(train.names), collate)


def text_data(
    settings: ClassifySettings, names: Sequence[str], tokenizer: TextTokenizer | None, length: int, vocab: int
) -> Data:
    """tokenizer: that of the base; None to load --tokenizer, or to train one of `vocab` ids."""
    room_in(length)
    if settings.tokenizer == CHARS:
        raise UserError("--tokenizer chars: expected a WordPiece tokenizer; leave it out to train one on the data")
    if not settings.data:
        print(f"data: built in (no --data given), {BUILT_IN_EXAMPLES:,} questions, each with a right or a wrong answer")
        train, test = answers("train", BUILT_IN_EXAMPLES, settings.seed), answers("val", BUILT_IN_TESTS, settings.seed)
    elif len(settings.data) == 1:
        train = read_texts(Path(settings.data[0]), names, settings.encoding)
        if settings.test:
            test = read_texts(Path(settings.test), train.names, settings.encoding)
        else:
            train, test = hold_out(train, settings.seed)
    else:
        raise UserError("--data: expected one file of labelled texts, e.g. --data train.parquet --test test.parquet")
    if tokenizer is None:
        every = (text for pair in train.inputs for text in pair)
        tokenizer = load_tokenizer(settings.tokenizer) if settings.tokenizer else WordPiece.train(every, vocab)
    pad = padding_id(tokenizer)
    encoded = {
        id(part): [framed(tokenizer, tokenizer.encode(a), tokenizer.encode(b), length) for a, b in part.inputs]
        for part in (train, test)
    }

    def collate(part: Labelled, rows: np.ndarray, stream: Stream | None) -> Batch:
        ids, segments, lengths = padded([encoded[id(part)][i] for i in rows], pad)
        return Batch(ids, part.labels[rows].reshape(-1, 1, 1), None, (segments, lengths))

    return Data(train, test, tokenizer, collate)


def moved(images: np.ndarray, most: int, stream: Stream) -> np.ndarray:
    """Each image shifted at random by up to `most` pixels each way, padded with 0."""
    batch, _, height, width = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (most, most), (most, most)))
    down, across = (stream.uniform((2, batch)) * (2 * most + 1)).astype(int)
    axes: Any = 2, 3  # NumPy 2.3's annotations allow one axis only
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axes)
    return windows[np.arange(batch), :, down, across]


def config_for(
    settings: ClassifySettings, spec: ModelSpec, base: ModelConfig | None, data: Data, resume: bool
) -> ModelConfig:
    """The config with the data's classes, and for images with their size. Raises UserError where they do not fit."""
    config = on_base(base, settings, resume) if base else config_of(settings)
    changes: dict[str, Any] = {}
    classes = getattr(config, "classes", 0)
    asked = any(item.startswith("classes=") for item in settings.set)
    if asked and not resume and len(data.train.names) != classes:  # more would have no names
        raise UserError(f"data: labels of {len(data.train.names)} classes, --set classes={classes}; leave that out")
    if not asked:
        changes["classes"] = len(data.train.names)
    if spec.learns != "images" and base is None:
        changes["vocab"] = data.tokenizer.vocab_size
    if spec.learns == "images":
        channels, height, width = data.train.inputs.shape[1:]
        given = getattr(config, "image", 0), getattr(config, "channels", 0)
        if height != width:
            raise UserError(f"data: images of {height} x {width} pixels, expected square ones; crop or pad them")
        if base is not None and given != (height, channels):
            raise UserError(
                f"data: images of {height} pixels and {channels} channels, the base takes {given[0]} and "
                f"{given[1]}; resize them"
            )
        changes |= {"image": height, "channels": channels}
    found = config.override({name: value for name, value in changes.items() if getattr(config, name) != value})
    for name, value in changes.items():
        if value != getattr(config, name):
            print(f"{name} {getattr(config, name)} -> {value}: as the data has it")
    return found


def classify(settings: ClassifySettings, spec: ModelSpec, resume: bool, ranks: ProcessGroupInfo) -> None:
    with timed("opening the backend"):
        backend, settings = open_backend(settings, ranks)
    print(described(backend, settings))
    start_from = start_of(settings, resume)
    base = load(start_from, backend) if start_from else None
    if base and (kind := spec_of_model(base.model).name) != spec.name:  # before the data are read, which takes seconds
        raise UserError(f"{start_from}: its model is a {kind}, expected a {spec.name}; give another --base or --model")
    names = base.meta.get("classes", ()) if base else ()
    shape = base.model.config if base else config_of(settings)
    length = sequence_length(shape, settings)
    if base is None:  # the data may change the sizes a little; a batch far too large is refused before they are read
        check_fits(spec, shape, backend, settings, ranks.size)
    with timed("reading the data"):
        if spec.learns == "images":
            data = image_data(settings, names)
        else:
            data = text_data(settings, names, base.tokenizer if base else None, length, shape.vocab)
    print(
        f"data: {len(data.train):,} examples to learn from and {len(data.test):,} to test, {len(data.train.names)} "
        f"classes: {one_line(', '.join(data.train.names)[:60])}"
    )
    config = config_for(settings, spec, base.model.config if base else None, data, resume)
    length = sequence_length(config, settings)
    plan = check_fits(spec, config, backend, settings, ranks.size)
    model = spec.build(config, backend, recompute=settings.recompute)
    model.initialise(settings.seed)
    if base:
        take_weights(model.buffer, base.model.buffer, backend)
    print(f"model: {spec.name}, {model.buffer.count:,} parameters, seed {settings.seed}")

    images = spec.learns == "images"
    rows = settings.batch_size
    shuffled = Shuffled(len(data.train), settings.seed, lambda chosen, stream: data.collate(data.train, chosen, stream))
    per_step = rows * settings.grad_accum
    print_schedule(settings, count_of(per_step, "example"), len(data.train) / per_step, "examples")

    def evaluate(parallel: DataParallel) -> dict[str, float]:
        logits = predicted(parallel, data, min(EVAL_EXAMPLES, len(data.test)))
        return scores_of(logits, data.test.labels[: len(logits)])

    def sample() -> str:
        batch = data.collate(data.test, np.arange(1), None)
        ids, _targets, *more = batch.inputs(backend)
        guess = int(backend.to_numpy(model.classify(ids, *more))[0, 0].argmax())
        shown = "" if images else " | ".join(filter(None, data.test.inputs[0])).replace("\n", " ")[:60]
        label = data.test.names[data.test.labels[0]]
        return f"  the first of them{f' ({shown})' if shown else ''} is {label!r}, taken for {data.test.names[guess]!r}"

    task = Task(
        model=model,
        tokenizer=data.tokenizer,
        objective=Classes(),
        batches=micro_batches(shuffled, rows, settings.grad_accum),
        evaluate=evaluate,
        sample=sample,
        meta={
            "kind": "classify",
            "model": spec.name,
            "config": config.to_dict(),
            "tokenizer_hash": data.tokenizer.hash(),
            "data_hash": fingerprint(data.train.labels),
            "examples_hash": data.train.fingerprint(),
            "classes": list(data.train.names),
            "machine": backend.describe(),
        },
        flop_per_token=model.flop_per_token(length) * (length if images else 1),
        unit="images" if images else "tokens",
        plan=plan,
    )
    last = Run(task, settings, backend, resume).train()
    logits = predicted(DataParallel(model, backend), data, len(data.test))
    found = scores_of(logits, data.test.labels)
    print(f"test: {found['test_accuracy']:.2%} of {len(data.test):,} right, loss {found['test_loss']:.4f}")
    save_scores(Path(settings.out), checkpoint.step_of(last), {"test accuracy": found["test_accuracy"]})
    if not images:
        compare(settings, data, found["test_accuracy"], checkpoint.step_of(last))
        return
    picture = Path(settings.out) / "mistakes.png"
    if draw_mistakes(data.test, logits, picture):
        print(f"wrote {picture}")


def compare(settings: ClassifySettings, data: Data, accuracy: float, step: int) -> None:
    """Two baselines on the same texts: logistic regressions on the bag of words."""
    scores = {}
    for tf_idf, name in ((False, "bag of words"), (True, "bag of words, tf-idf")):
        with timed(f"fitting a logistic regression on the {name}"):
            baseline = BagOfWords(data.train.inputs, data.train.labels, len(data.train.names), tf_idf=tf_idf)
            guesses = baseline.predict(data.test.inputs).argmax(axis=-1)
        scores[f"test accuracy, {name}"] = found = float((guesses == data.test.labels).mean())
        print(f"  {name}: {found:.2%}; the model: {accuracy:.2%}")
    save_scores(Path(settings.out), step, scores)


def predicted(parallel: DataParallel, data: Data, count: int) -> np.ndarray:
    """Logits of the first `count` test examples, (count, classes)."""
    parts = np.split(np.arange(count), range(EVAL_ROWS, count, EVAL_ROWS))
    return np.concatenate([parallel.logits(data.collate(data.test, rows, None)) for rows in parts])


def scores_of(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    nll = np.log(np.exp(shifted).sum(axis=-1)) - shifted[np.arange(len(labels)), labels]
    return {"test_accuracy": float((logits.argmax(axis=-1) == labels).mean()), "test_loss": float(nll.mean())}


def draw_mistakes(test: Labelled, logits: np.ndarray, target: Path) -> bool:
    """Plot the most confident mistakes, each with its label and its prediction. False if there is none."""
    guesses = logits.argmax(axis=-1)
    wrong = np.flatnonzero(guesses != test.labels)
    if not len(wrong):
        return False
    from matplotlib.figure import Figure

    margin = logits[wrong, guesses[wrong]] - logits[wrong, test.labels[wrong]]
    shown = wrong[np.argsort(-margin)][:PICTURED]
    across, down = 10, -(-len(shown) // 10)
    figure = Figure(figsize=(across, 1.3 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for place, axis in enumerate(axes.flat):
        axis.axis("off")
        if place < len(shown):
            i = shown[place]
            pixels = test.inputs[i].transpose(1, 2, 0)
            axis.imshow(pixels[..., 0] if pixels.shape[-1] == 1 else pixels, cmap="gray_r", vmin=0, vmax=255)
            title = f"{test.names[test.labels[i]]}, not {test.names[guesses[i]]}"
            axis.set_title(title.replace("$", r"\$"), fontsize=7)  # between two, matplotlib reads a formula
    figure.suptitle(f"mistakes: {len(wrong)} of {len(test)}; the {len(shown)} that the model was surest of", fontsize=9)
    figure.savefig(target, dpi=110)
    return True


if __name__ == "__main__":
    run_command(main)
