#!/usr/bin/env bash
# Storyteller, the model that comes with the repository: from text to a checkpoint to publish.
#
#   examples/storyteller/run.sh data OUT tinystories.parquet children-books.zip simple-wikipedia.parquet [dolly.json]
#   examples/storyteller/run.sh train OUT
#   examples/storyteller/run.sh chats OUT
#
# data writes token shards and instructions to OUT, on a CPU, with DuckDB: five minutes. train, on a GPU machine that
# needs neither DuckDB nor the texts, trains a chain of models, each on the text and then on the instructions, and each with
# those before it as teachers: the first, of 9 M parameters, alone; the second, of 17 M, with the first; three more with the
# second; and the last with the three, fine-tuned twice. The mean of its weights before and after fine-tuning, calibrated,
# tells 16,000 stories, and DPO prefers the best of each eight to the worst. A mean of these models, calibrated, is
# OUT/storyteller, in int8. Complete stages are skipped, and the same command resumes a run that was stopped. Flags after OUT
# go to all runs; $TEACHER (pretraining of the teachers), $PRETRAIN (of the last) and $SFT are further flags, in place of
# their numbers of steps, and $OWN (of the stories) and $DPO in place of those below, e.g.
#
#   PRETRAIN="--minutes 11 --cuda-graph" examples/storyteller/run.sh train OUT
#   TEACHER="--steps 20" PRETRAIN="--steps 20" SFT="--steps 20" OWN="--records 20 --backend numpy" DPO="--steps 2" \
#       examples/storyteller/run.sh train OUT --backend numpy --precision fp32
#
# chats fine-tunes $BASE (OUT/storyteller, else the shipped model) on chats of several lines: $RECORDS (3000) in each of
# fourteen files, eleven of TinyStories and three of the stories that $BASE tells. Eight of ten rows are the text that it was
# trained on, where it learns from itself ($CHATS: --steps 3450). OUT/talker is the result, calibrated, in int8; OUT/lines.json
# and OUT/evaluate.json are its measurements, with the flags $SECOND (--rounds 3) and $EVALUATE (--prompts 100). It stops after
# $LIMIT seconds (1500), and the same command goes on from there.
#
# To another machine, in files of $PART_MIB MiB (32):
#
#   examples/storyteller/run.sh pack OUT           OUT/parts, of shards and instructions
#   examples/storyteller/run.sh unpack OUT         there, once OUT/parts has been copied
#
#   tinystories.parquet        TinyStories, or its published text files     (CDLA-Sharing-1.0)
#   children-books.zip         books of Project Gutenberg                    (public domain in the US)
#   simple-wikipedia.parquet   Simple English Wikipedia, columns title, text  (CC BY-SA 4.0)
#   dolly.json                 Alpaca records: questions to decline           (Dolly: CC BY-SA 3.0)
#
# The Python is $PYTHON, else .venv/bin/python if it is there, else python3. docs/results/storyteller.md has the measurements.
set -euo pipefail

what=${1-} out=$(realpath -m "${2:-.}") root=$(dirname "$(realpath "$0")")/../..
# shellcheck source=recipes/stages.sh
source "$root/recipes/stages.sh"
[[ $# -ge 2 ]] || die "got $# of 2 arguments, expected data, pack, unpack, train or chats, then a folder; see $0 --help"
shift 2

chats() { # SEED SOURCE: of a corpus, or of records with stories
    local others=()
    [[ ! -e $out/others.json ]] || others=(--others "$out/others.json")
    [[ -e $out/chats-$1/source.json ]] || run examples/storyteller/chats.py "$2" --out "$out/chats-$1" --seed "$1" \
        --records "${RECORDS:-3000}" ${others[@]+"${others[@]}"}
}
calibrated() { # NAME MODEL SHARDS FLAGS...: sampled in the chat as the shipped one
    [[ -e $out/$1/model.safetensors ]] ||
        run recipes/calibrate.py "$out/$2" "$out/$1" --data "$out/$3" --source tinystories "${@:4}"
    cp models/nanoeuler/storyteller/generation_config.json "$out/$1"
}

case $what in
data)
    [[ $# -ge 3 ]] || die "data expects stories, books and Simple English after $out; got $# files"
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
    [[ -e $out/sources/retold/source.json ]] || run examples/storyteller/stories.py retell "$out/corpus" --out "$out/sources/retold"
    # Near-duplicates are intended here.
    run -m data.corpus "$out/sources/retold" --out "$out/corpus-retold" --val-share 0 --similarity 1
    run -m data.shards --corpus "$out/corpus-retold" --out "$out/shards-retold" --tokenizer "$out/shards/tokenizer.json"
    [[ -e $out/instructions/source.json ]] ||
        run examples/storyteller/stories.py instruct "$out/corpus" --out "$out/instructions" ${4:+--others "$4"}
    [[ -z ${4-} ]] || cp "$4" "$out/others.json"
    for seed in {0..10}; do chats "$seed" "$out/corpus"; done
    ;;
pack) pack shards shards-retold instructions others.json chats-{0..10} corpus{,-retold}/{corpus.json,train,val} ;;
unpack) unpack ;;
train)
    [[ -e $out/shards/manifest.json ]] || die "$out has no shards; make them: examples/storyteller/run.sh data $out ..."
    cd "$root"
    pretrained() { # NAME FLAGS...
        trained "$1" recipes/pretrain.py --data "$out/shards" "$out/shards-retold" \
            --mix tinystories=0.3 retold=0.35 gutenberg=0.12 simple=0.23 --set context=1024 layers=8 mtp_heads=2 dropout=0.2 \
            --document-mask restart --batch-size 16 --decay-fraction 0.6 --weight-decay 0.5 --precision bf16 \
            --eval-every 1000 --save-every 2000 "${@:2}"
    }
    # shellcheck disable=SC2086 # flags are words
    tuned() { # NAME BASE FLAGS...
        trained "$1" recipes/sft.py --base "$out/$2" --data "$out/instructions/alpaca.json" --document-mask restart \
            --batch-size 32 --weight-decay 0.5 --eval-every 250 --save-every 500 --card --precision bf16 \
            ${SFT:---steps 700} "${@:3}"
    }
    w9="dim=256 heads=4 kv_heads=2 hidden=688"
    w17="dim=384 heads=6 kv_heads=2 hidden=1024"
    w30="dim=512 heads=8 kv_heads=2 hidden=1376"
    # shellcheck disable=SC2086 # flags are words
    {
        pretrained first --set $w9 --lr 1.4e-3 ${TEACHER:---steps 11000} "$@"
        tuned first-sft first --lr 1e-3 "$@"
        pretrained second --set $w17 --lr 1.2e-3 --teacher "$out/first-sft" ${TEACHER:---steps 10000} "$@"
        tuned second-sft second --lr 8e-4 "$@"

        by_second=(--teacher "$out/second-sft")
        pretrained one --set $w17 --lr 1.2e-3 --seed 1 "${by_second[@]}" ${TEACHER:---steps 13700} "$@"
        pretrained two --set $w30 dropout=0.25 --lr 1e-3 --seed 2 "${by_second[@]}" ${TEACHER:---steps 11200} "$@"
        pretrained three --set $w17 --lr 1.2e-3 --seed 3 --weight-decay 1.5 "${by_second[@]}" ${TEACHER:---steps 13700} "$@"
        tuned one-sft one --lr 8e-4 --seed 1 "$@"
        tuned two-sft two --lr 8e-4 --seed 2 "$@"
        tuned three-sft three --lr 8e-4 --seed 3 "$@"

        pretrained base --set $w17 dropout=0.15 --lr 1.2e-3 --seed 5 --teacher "$out"/{one,two,three} --teacher-share 0.9 \
            ${PRETRAIN:---steps 24000} "$@"
        by_three=(--teacher "$out"/{one,two,three}-sft)
        tuned sft base --lr 8e-4 --seed 5 "${by_three[@]}" --teacher-share 0.9 "$@"
        SFT=${SFT:---steps 350} tuned gentle base --lr 4e-4 --seed 4 "${by_three[@]}" --teacher-share 0.7 "$@"
    }
    [[ -e $out/mean/model.safetensors ]] ||
        run -m tinyforge.formats average "$out/base" "$out/sft" "$out/mean" --weights 0.3 0.7
    calibrated teller mean shards
    # shellcheck disable=SC2086 # flags are words
    [[ -e $out/told.json ]] || run examples/storyteller/own_pairs.py --base "$out/teller" --data "$out/instructions/alpaca.json" \
        --stories 8 --max-tokens 400 --out "$out/told.json" ${OWN:---records 2000 --precision bf16}
    blend=("$out/gentle" "$out/teller") weights=(0.3 0.3)
    for seed in 5 6 7 8; do
        [[ -e $out/told.json ]] || break # none where no story is better than another, as in a run of a few steps
        # shellcheck disable=SC2086
        trained "told-$seed" recipes/dpo.py --base "$out/teller" --data "$out/told.json" --cache "$out/reference" --seed $seed \
            --batch-size 32 --precision bf16 --eval-every 30 --save-every 30 --card ${DPO:---steps 60 --lr 4e-5} "$@"
        blend+=("$out/told-$seed") weights+=(0.1)
    done
    [[ -e $out/blend/model.safetensors ]] ||
        run -m tinyforge.formats average "${blend[@]}" "$out/blend" --weights "${weights[@]}"
    calibrated storyteller blend shards --dtype int8
    ;;
chats)
    [[ -e $out/chats-0/source.json ]] || die "$out has no chats; make them: examples/storyteller/run.sh data $out ..."
    if [[ -z ${LIMITED-} ]]; then
        LIMITED=1 exec timeout "${LIMIT:-1500}" "$(realpath "$0")" chats "$out" "$@"
    fi
    cd "$root"
    base=$out/storyteller backend=auto
    [[ -z ${BASE-} && -e $base ]] || base=${BASE:-storyteller}
    [[ " $* " != *" --backend numpy "* ]] || backend=numpy
    tokenizer=$base/tokenizer.json # the shipped model has another than that of $out/shards
    [[ -e $tokenizer ]] || tokenizer=models/nanoeuler/$base/tokenizer.json
    for name in "" -retold; do
        run -m data.shards --corpus "$out/corpus$name" --out "$out/replay$name" --tokenizer "$tokenizer"
    done
    # shellcheck disable=SC2086 # flags are words
    {
        [[ -e $out/own.json ]] || run examples/storyteller/own_pairs.py --base "$base" --data "$out"/chats-{0..10}/alpaca.json \
            --stories 1 --max-tokens 400 --out "$out/own.json" ${OWN:---records 4000 --precision bf16}
        [[ ! -e $out/own.json ]] || for seed in 11 12 13; do chats $seed "$out/own.json"; done
        trained second-lines recipes/sft.py --base "$base" --data "$out"/chats-*/alpaca.json --replay "$out"/replay{,-retold} \
            --mix tinystories=0.35 retold=0.4 gutenberg=0.1 simple=0.15 --replay-share 0.8 --teacher "$base" --teacher-share 1 \
            --document-mask restart --batch-size 32 --lr 4e-4 --weight-decay 0.1 --decay-fraction 0.6 --seed 4 \
            --eval-every 1000 --save-every 1000 --card --precision bf16 ${CHATS:---steps 3450} "$@"
        calibrated talker second-lines replay --dtype int8 --backend $backend
        [[ -e $out/lines.json ]] || run examples/storyteller/lines.py "$out/talker" --backend $backend \
            ${SECOND:---rounds 3} --json "$out/lines.json"
        [[ -e $out/evaluate.json ]] || run examples/storyteller/evaluate.py "$out/corpus" "$out/corpus-retold" \
            "$out"/instructions/alpaca.json "$out"/chats-*/alpaca.json --checkpoint "$out/talker" --backend $backend \
            ${EVALUATE:---prompts 100} --json "$out/evaluate.json"
    }
    ;;
*) die "$what: expected data, pack, unpack, train or chats" ;;
esac
