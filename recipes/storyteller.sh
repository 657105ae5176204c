#!/usr/bin/env bash
# The model that comes with the repository and tells stories, from text to a checkpoint to give away.
#
#   recipes/storyteller.sh data OUT tinystories.parquet children-books.zip simple-wikipedia.parquet [dolly.json]
#   recipes/storyteller.sh train OUT
#
# The first makes token shards and instructions in OUT, on a CPU, with DuckDB: five minutes. The second, on a GPU, which
# needs neither DuckDB nor the texts, pretrains, fine-tunes, and writes OUT/storyteller in bf16: four minutes on one H200.
# Stages of the first that are complete are skipped. Flags after OUT go to recipes/pretrain.py and recipes/sft.py, and
# $PRETRAIN_STEPS and $SFT_STEPS make the second shorter:
#
#   PRETRAIN_STEPS=20 SFT_STEPS=20 recipes/storyteller.sh train OUT --backend numpy --precision fp32
#
#
#   tinystories.parquet        TinyStories, or its published text files     (CDLA-Sharing-1.0)
#   children-books.zip         books of Project Gutenberg                    (public domain in the US)
#   simple-wikipedia.parquet   Simple English Wikipedia, columns title, text  (CC BY-SA 4.0)
#   dolly.json                 Alpaca records: questions to decline           (Dolly: CC BY-SA 3.0)
#
# The Python is $PYTHON, else .venv/bin/python if it is there, else python3. docs/results/storyteller.md has the measurements.
set -euo pipefail

die() { # one line: what is wrong, and what to do
    printf 'error: %s\n' "$1" >&2
    exit 2
}

run() {
    printf '$ %s\n' "$*"
    "$PYTHON" "$@"
}

[[ $# -ge 2 ]] || die "got $# arguments, wanted data or train, then a folder; head -20 recipes/storyteller.sh says more"
what=$1 out=$(realpath -m "$2")
shift 2
root=$(dirname "$(realpath "$0")")/..
PYTHON=${PYTHON:-$([[ -x $root/.venv/bin/python ]] && echo "$root/.venv/bin/python" || echo python3)}

case $what in
data)
    [[ $# -ge 3 ]] || die "data wants stories, books and Simple English after $out; got $# files"
    for file in "$@"; do [[ -e $file ]] || die "$file: no such file; check the path"; done
    files=()
    for file in "$@"; do files+=("$(realpath "$file")"); done
    set -- "${files[@]}"
    cd "$root"
    mkdir -p "$out"
    cat data/filters.sql data/plain.sql >"$out/filters.sql"
    [[ -e $out/sources/tinystories/source.json ]] || run -m data.tinystories --out "$out/sources/tinystories" "$1"
    # One of the books may be refused, as under copyright: that is said, and no fault.
    [[ -e $out/sources/books/source.json ]] || run -m data.gutenberg --out "$out/sources/books" "$2" || true
    [[ -e $out/sources/simple/source.json ]] ||
        run -m data.local --out "$out/sources/simple" --name simple --licence "CC BY-SA 4.0" "$3"
    run -m data.corpus "$out/sources/tinystories" "$out/sources/books" "$out/sources/simple" --out "$out/corpus" \
        --filters "$out/filters.sql" --val-share 0.02 tinystories=0.04
    run -m data.shards --corpus "$out/corpus" --out "$out/shards" --vocab-size 4096
    [[ -e $out/sources/retold/source.json ]] || run -m data.stories retell "$out/corpus" --out "$out/sources/retold"
    # Near-duplicates are what is wanted here.
    run -m data.corpus "$out/sources/retold" --out "$out/corpus-retold" --val-share 0 --similarity 1
    run -m data.shards --corpus "$out/corpus-retold" --out "$out/shards-retold" --tokenizer "$out/shards/tokenizer.json"
    [[ -e $out/instructions/source.json ]] ||
        run -m data.stories instruct "$out/corpus" --out "$out/instructions" ${4:+--others "$4"}
    ;;
train)
    [[ -e $out/shards/manifest.json ]] || die "$out has no shards; make them: recipes/storyteller.sh data $out ..."
    cd "$root"
    for stage in base sft; do
        [[ -z $(compgen -G "$out/$stage/step-*" || true) ]] || die "$out/$stage holds a run; remove it, or take another folder"
    done
    run recipes/pretrain.py --data "$out/shards" "$out/shards-retold" --out "$out/base" \
        --mix tinystories=0.25 retold=0.35 gutenberg=0.15 simple=0.25 \
        --set dim=256 heads=4 kv_heads=2 layers=8 hidden=688 context=1024 mtp_heads=2 dropout=0.2 \
        --document-mask restart --batch-size 32 --lr 2e-3 --lr-decay 0.6 --weight-decay 0.5 \
        --steps "${PRETRAIN_STEPS:-3909}" --precision bf16 --eval-every 500 --save-every 1000 "$@"
    run recipes/sft.py --base "$out/base" --data "$out/instructions/alpaca.json" --out "$out/sft" --document-mask restart \
        --batch-size 32 --lr 1e-3 --weight-decay 0.5 --steps "${SFT_STEPS:-1000}" --eval-every 250 --save-every 500 --card \
        --precision bf16 "$@"
    run -m tinyforge.hub convert "$out/sft" "$out/storyteller" --format tinyforge --dtype bf16
    ;;
*) die "$what: wanted data or train" ;;
esac
