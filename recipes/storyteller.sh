#!/usr/bin/env bash
# Storyteller, the model that comes with the repository: from text to a checkpoint to publish.
#
#   recipes/storyteller.sh data OUT tinystories.parquet children-books.zip simple-wikipedia.parquet [dolly.json]
#   recipes/storyteller.sh train OUT
#
# data writes token shards and instructions to OUT, on a CPU, with DuckDB: five minutes. train, on a GPU machine that
# needs neither DuckDB nor the texts, trains two models, each on the text and then on the instructions: a teacher of 9 M
# parameters, and the storyteller of 17 M, whose pretraining learns from the teacher too. It writes OUT/storyteller in int8.
# Complete stages are skipped, and the same command resumes a run that was stopped. Flags after OUT go to all four runs;
# $TEACHER and $PRETRAIN are further flags for the two of pretraining, $SFT for both of fine-tuning, e.g. their lengths:
#
#   TEACHER="--minutes 1.6 --capture" PRETRAIN="--minutes 4 --capture" recipes/storyteller.sh train OUT
#   TEACHER="--steps 20" PRETRAIN="--steps 20" SFT="--steps 20" \
#       recipes/storyteller.sh train OUT --backend numpy --precision fp32
#
# To another machine, in files of $PART_MIB MiB (32):
#
#   recipes/storyteller.sh pack OUT           OUT/parts, of shards and instructions
#   recipes/storyteller.sh unpack OUT         there, once OUT/parts has been copied
#
#   tinystories.parquet        TinyStories, or its published text files     (CDLA-Sharing-1.0)
#   children-books.zip         books of Project Gutenberg                    (public domain in the US)
#   simple-wikipedia.parquet   Simple English Wikipedia, columns title, text  (CC BY-SA 4.0)
#   dolly.json                 Alpaca records: questions to decline           (Dolly: CC BY-SA 3.0)
#
# The Python is $PYTHON, else .venv/bin/python if it is there, else python3. docs/results/storyteller.md has the measurements.
set -euo pipefail

what=${1-} out=$(realpath -m "${2:-.}") root=$(dirname "$(realpath "$0")")/..
# shellcheck source=recipes/stages.sh
source "$root/recipes/stages.sh"
[[ $# -ge 2 ]] || die "got $# arguments, wanted data, pack, unpack or train, then a folder; head -30 $0 says more"
shift 2

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
    # Some books may be refused, such as one under copyright. That is reported, and not an error.
    [[ -e $out/sources/books/source.json ]] || run -m data.gutenberg --out "$out/sources/books" "$2" ||
        [[ -e $out/sources/books/source.json ]]
    [[ -e $out/sources/simple/source.json ]] ||
        run -m data.local --out "$out/sources/simple" --name simple --licence "CC BY-SA 4.0" "$3"
    run -m data.corpus "$out/sources/tinystories" "$out/sources/books" "$out/sources/simple" --out "$out/corpus" \
        --filters "$out/filters.sql" --val-share 0.02 tinystories=0.04
    run -m data.shards --corpus "$out/corpus" --out "$out/shards" --vocab-size 4096 --at-most
    [[ -e $out/sources/retold/source.json ]] || run -m data.stories retell "$out/corpus" --out "$out/sources/retold"
    # Near-duplicates are intended here.
    run -m data.corpus "$out/sources/retold" --out "$out/corpus-retold" --val-share 0 --similarity 1
    run -m data.shards --corpus "$out/corpus-retold" --out "$out/shards-retold" --tokenizer "$out/shards/tokenizer.json"
    [[ -e $out/instructions/source.json ]] ||
        run -m data.stories instruct "$out/corpus" --out "$out/instructions" ${4:+--others "$4"}
    ;;
pack) pack shards shards-retold instructions ;;
unpack) unpack ;;
train)
    [[ -e $out/shards/manifest.json ]] || die "$out has no shards; make them: recipes/storyteller.sh data $out ..."
    cd "$root"
    pretrained() { # NAME FLAGS...
        trained "$1" recipes/pretrain.py --data "$out/shards" "$out/shards-retold" \
            --mix tinystories=0.3 retold=0.35 gutenberg=0.12 simple=0.23 --set context=1024 layers=8 mtp_heads=2 dropout=0.2 \
            --document-mask restart --batch-size 16 --lr-decay 0.6 --weight-decay 0.5 --precision bf16 \
            --eval-every 1000 --save-every 2000 "${@:2}"
    }
    tuned() { # NAME BASE FLAGS...
        trained "$1" recipes/sft.py --base "$out/$2" --data "$out/instructions/alpaca.json" --document-mask restart \
            --batch-size 32 --weight-decay 0.5 --eval-every 250 --save-every 500 --card --precision bf16 "${@:3}"
    }
    # shellcheck disable=SC2086 # flags are words
    {
        pretrained teacher-base --set dim=256 heads=4 kv_heads=2 hidden=688 --lr 1.4e-3 ${TEACHER:---steps 11000} "$@"
        tuned teacher teacher-base --lr 1e-3 ${SFT:---steps 700} "$@"
        pretrained base --set dim=384 heads=6 kv_heads=2 hidden=1024 --lr 1.2e-3 --teacher "$out/teacher" \
            ${PRETRAIN:---steps 10000} "$@"
        tuned sft base --lr 8e-4 ${SFT:---steps 700} "$@"
    }
    [[ -e $out/storyteller/model.safetensors ]] ||
        run -m tinyforge.hub convert "$out/sft" "$out/storyteller" --format tinyforge --dtype int8
    cp models/nanoeuler/storyteller/generation_config.json "$out/storyteller" # how the chat draws from it
    ;;
*) die "$what: wanted data, pack, unpack or train" ;;
esac
