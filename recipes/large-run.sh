#!/usr/bin/env bash
# A model of 116 M parameters or more on all the text you have, in stages that fit into half an hour of one GPU.
#
#   recipes/large-run.sh data OUT eval=EVAL instructions=alpaca.zip preferences=pairs.json gutenberg=books.zip \
#       tinystories=tinystories.parquet wikipedia=a.parquet wikipedia=b.parquet simple=simple-wikipedia.parquet
#   recipes/large-run.sh pretrain OUT            then sft, dpo, grpo, evaluate: one after the other
#
# data runs on a CPU with DuckDB: sources, filters, duplicates, decontamination, token shards with a vocabulary of
# $VOCABULARY ids (8192). NAME=PATH may be repeated. gutenberg is read by data.gutenberg, tinystories by data.tinystories;
# eval, instructions and preferences are what their names say; any other name is a source of parquet, JSONL or text. All
# other stages run on a GPU machine that needs neither DuckDB nor the texts. The training instructions of sft are also read
# in pretraining, as the source questions, together with sums that are worked out. dpo learns from two kinds of pairs: the
# preferences, and pairs that reject a reply of the fine-tuned model which loops or does not end, and choose the record's.
# For grpo, sft also learns sums with small numbers. SENTENCES="gutenberg=30MB tinystories=8MB" adds a source of single
# sentences (data/sentences.py), for --mix ... sentences=19, unless there are several vocabularies.
#
# Complete stages are skipped. The same command resumes a stage that was stopped, by Ctrl-C or
# `timeout -s INT 9m recipes/large-run.sh pretrain OUT`. Flags after OUT go to every recipe of the stage. $PRETRAIN, $SFT,
# $DPO and $GRPO replace the flags below for the length and the learning rate of each stage, $OWN those for the pairs of
# the model's own replies:
#
#   PRETRAIN="--config small --steps 20" recipes/large-run.sh pretrain OUT --backend numpy --precision fp32
#
# To another machine, in files of $PART_MIB MiB (32):
#
#   recipes/large-run.sh pack OUT                OUT/parts, of shards, instructions, sums, preferences, evaluation sets
#   recipes/large-run.sh unpack OUT              there, after each part; unpacks when all have arrived
#
# To choose the vocabulary by measurement, on a tenth of the parquet files, with three vocabularies of the same corpus:
#
#   recipes/large-run.sh tenth OUT ...           on the CPU, the arguments of data; everything in OUT/tenth
#   recipes/large-run.sh vocabulary OUT/tenth    on the GPU: 2,500 steps each, and their bits per byte
#
# docs/results/base-run-2.md has a run on 546 MB: English and Simple English Wikipedia, books, children's books, TinyStories,
# textbooks, web pages and questions. On two busy cores the corpus took 70 s and the shards 42. 8,192 ids make 151.8 M
# tokens, 4.8 of them of the questions; the shards fill five parts of 32 MiB. On an H200 pretrain made 20,869 steps of
# 16 x 1,024 in 746 s, with 7.0 GB, by `--minutes 12.43` and with this mixture, as part of $PRETRAIN:
#
#   --mix wikipedia=41 gutenberg=18 simple=16 web=12 textbooks=3 tinystories=4 questions=6
#
# With `--config large --minutes 19` it made 17,075 steps, with 11.6 GB. docs/results/fast.md has flags of `--config fast` and
# $VOCABULARY for the same minutes and fewer bits per byte.
#
# sft made its 420 steps in 20 s, dpo its 64 in 10, and grpo 148 in 136 (`--minutes 2.2`). The other flags below are those of
# that run. A third of the sums to fine-tune on is worked out: docs/alignment.md says why.
#
# tenth and vocabulary have not been run on a GPU. On a tenth of the text, with GPT-2's pattern instead of single digits,
# bytes of Wikipedia per token: 3.37 of 4,096 ids, 3.84 of 8,192, 4.28 of 16,384. Each doubling costs base 15.7 M parameters
# (an embedding and four heads) for 9 to 12 % fewer tokens.
set -euo pipefail

what=${1-} out=$(realpath -m "${2:-.}") root=$(dirname "$(realpath "$0")")/..
# shellcheck source=recipes/stages.sh
source "$root/recipes/stages.sh"
stages="data, tenth, pack, unpack, vocabulary, pretrain, sft, dpo, grpo or evaluate"
[[ $# -ge 2 ]] || die "got $# of 2 arguments, expected $stages, then a folder; see $0 --help"
shift 2

licence_of() { # NAME
    case $1 in
    wikipedia | simple) echo "CC BY-SA 4.0" ;;
    textbooks) echo "CC BY-NC-SA 4.0" ;;
    web) echo "CC BY-SA; ODC-BY" ;;
    *) echo "not stated" ;;
    esac
}

needs() { # FOLDER: a run that the stage starts from
    [[ -e $out/$1/complete ]] || die "$out/$1 is not complete; first: recipes/large-run.sh $1 $out"
}

logged() { # NAME COMMAND...: with a log for the report
    mkdir -p "$out/logs"
    run "${@:2}" 2>&1 | tee "$out/logs/$1.log"
}

case $what in
data | tenth)
    declare -A given=()
    for word in "$@"; do
        [[ $word == ?*=?* ]] || die "$word: expected NAME=PATH, as wikipedia=wikipedia.parquet"
        [[ -e ${word#*=} ]] || die "${word#*=}: no such file or folder; check the path"
        given[${word%%=*}]+="$(realpath "${word#*=}")"$'\n'
    done
    [[ -n ${given[eval]-} ]] || die "$what expects eval=PATH, the evaluation sets that are kept out of the text"
    cd "$root"
    ;;&
tenth)
    mkdir -p "$out/tenth/text"
    words=("eval=${given[eval]%$'\n'}")
    unset "given[eval]"
    number=0
    for name in "${!given[@]}"; do
        while read -r path; do
            [[ $path == *.parquet ]] || continue
            number=$((number + 1))
            tenth=$out/tenth/text/$name-$number.parquet
            # By a hash of the text, so that it is always the same tenth.
            [[ -e $tenth ]] || run -c "import duckdb, sys; duckdb.execute(\"COPY (SELECT * FROM read_parquet('\" +
sys.argv[1] + \"') WHERE hash(text) % 10 = 0) TO '\" + sys.argv[2] + \"' (FORMAT parquet)\")" "$path" "$tenth"
            words+=("$name=$tenth")
        done <<<"${given[$name]%$'\n'}"
    done
    VOCABULARY="4096 8192 16384" exec "$root/recipes/large-run.sh" data "$out/tenth" "${words[@]}"
    ;;
data)
    mkdir -p "$out/eval" "$out/instructions"
    sources=() evaluation=()
    for name in $(printf '%s\n' "${!given[@]}" | sort); do
        mapfile -t paths <<<"${given[$name]%$'\n'}"
        folder=$out/sources/$name
        case $name in
        eval) evaluation=("${paths[@]}") && cp -r "${paths[@]}" "$out/eval/" ;;
        preferences) cp "${paths[0]}" "$out/preferences.json" ;;
        instructions)
            for path in "${paths[@]}"; do
                to=$out/instructions/$(basename "${path%.*}")
                [[ -e $to/source.json ]] || run -m data.alpaca --out "$to" "$path"
            done
            ;;
        *)
            sources+=("$folder")
            case $name in
            gutenberg) reader=(data.gutenberg) ;;
            tinystories) reader=(data.tinystories) ;;
            *) reader=(data.local --name "$name" --licence "$(licence_of "$name")") ;;
            esac
            # Some texts may be refused, such as a book under copyright. That is reported, and not an error.
            [[ -e $folder/source.json ]] || run -m "${reader[@]}" --out "$folder" "${paths[@]}" || [[ -e $folder/source.json ]]
            ;;
        esac
    done
    ((${#sources[@]})) || die "data expects text, as wikipedia=wikipedia.parquet"
    if [[ -n ${given[instructions]-} ]]; then
        # A start for grpo: solved sums with small numbers, all worked out for pretraining, some for fine-tuning.
        [[ -e $out/worked/source.json ]] || run -m data.rewards --out "$out/worked" --count 60000 --brief 0
        [[ -e $out/sums/source.json ]] || run -m data.rewards --out "$out/sums" --count 16000 --brief "${BRIEF:-0.67}"
        # The training records of sft, without those it holds out, and sums, as questions with answers.
        sources+=("$out/sources/questions")
        [[ -e $out/sources/questions/source.json ]] || run -m data.alpaca --out "$out/sources/questions" \
            --as-text "$out"/instructions/*/alpaca.json "$out/worked/alpaca.json"
    fi
    run -m data.corpus "${sources[@]}" --out "$out/corpus" --decontaminate "${evaluation[@]}"
    for ids in ${VOCABULARY:-8192}; do
        [[ $ids == "${VOCABULARY:-8192}" ]] && shards=$out/shards || shards=$out/shards-$ids
        run -m data.shards --corpus "$out/corpus" --out "$shards" --vocab-size "$ids" --at-most --single-digits
    done
    if [[ -n ${SENTENCES-} && ${VOCABULARY-} != *" "* ]]; then
        sentences=$out/sentences made="$SENTENCES $(sha256sum <"$out/corpus/corpus.json")"
        [[ ! -e $sentences || $(cat "$sentences/made" 2>/dev/null) == "$made" ]] || rm -r "$sentences"
        mkdir -p "$sentences"
        printf '%s' "$made" >"$sentences/made"
        # shellcheck disable=SC2086 # SOURCE=BYTES ...
        [[ -e $sentences/source/source.json ]] || run -m data.sentences "$out/corpus" $SENTENCES --out "$sentences/source"
        run -m data.corpus "$sentences/source" --filters data/sentences.sql --val-share 0 --out "$sentences/corpus"
        run -m data.shards --corpus "$sentences/corpus" --tokenizer "$out/shards/tokenizer.json" --out "$sentences/shards"
    fi
    ;;
pack) pack shards shards-4096 shards-8192 shards-16384 sentences/shards instructions sums preferences.json eval ;;
unpack) unpack ;;
vocabulary)
    arms=()
    for shards in "$out"/shards-*; do arms+=(--arm "${shards##*-} ids: --data $shards"); done
    [[ -e ${shards}/manifest.json ]] || die "$out has no shards-4096, ...; make them: recipes/large-run.sh tenth OUT ..."
    cd "$root"
    # shellcheck disable=SC2086 # flags are words
    logged vocabulary recipes/ablation.py "${arms[@]}" --seeds 1 --out "$out/ablation" -- --config base --batch-size 32 \
        --precision bf16 ${PRETRAIN:---steps 2500 --lr 6e-4 --weight-decay 0.2} "$@"
    ;;
pretrain)
    [[ -e $out/shards/manifest.json ]] || die "$out has no shards; make them: recipes/large-run.sh data $out ..."
    cd "$root"
    data=("$out/shards")
    [[ ! -e $out/sentences/shards/manifest.json ]] || data+=("$out/sentences/shards")
    # shellcheck disable=SC2086
    trained pretrain recipes/pretrain.py --data "${data[@]}" --config base --batch-size 32 --precision bf16 --card \
        --eval-every 1000 --save-every 5000 ${PRETRAIN:---set context=1024 mtp_weights=[1,0.3,0.15,0.07] --batch-size 16
        --document-mask keep --optimizer muon --steps 19500 --lr 8e-4 --weight-decay 0.15 --decay-fraction 0.6} "$@"
    ;;
sft)
    needs pretrain
    cd "$root"
    # shellcheck disable=SC2086
    trained sft recipes/sft.py --base "$out/pretrain" --data "$out"/instructions/*/alpaca.json "$out/sums/alpaca.json" \
        --batch-size 16 --precision bf16 --card --document-mask keep --eval-every 140 --save-every 280 \
        ${SFT:---steps 420 --lr 2e-4 --max-reply 120} "$@"
    ;;
dpo)
    needs sft
    cd "$root"
    # shellcheck disable=SC2086
    [[ -e $out/own.json ]] || run examples/storyteller/own_pairs.py --base "$out/sft" --data "$out"/instructions/*/alpaca.json \
        --out "$out/own.json" ${OWN:---records 1500 --precision bf16}
    own=()
    [[ ! -e $out/own.json ]] || own=("$out/own.json") # no file if all replies were well-formed
    # shellcheck disable=SC2086
    trained dpo recipes/dpo.py --base "$out/sft" --data "$out/preferences.json" ${own[@]+"${own[@]}"} \
        --cache "$out/reference" --batch-size 32 --precision bf16 --card --eval-every 10 --save-every 20 \
        ${DPO:---steps 64 --lr 8e-6} "$@"
    ;;
grpo)
    needs sft
    cd "$root"
    # shellcheck disable=SC2086
    trained grpo recipes/grpo.py --base "$out/sft" --task one-step --batch-size 32 --precision bf16 --card \
        --eval-every 20 --save-every 40 ${GRPO:---steps 100 --lr 1e-5 --max-tokens 32} "$@"
    ;;
evaluate)
    needs pretrain
    cd "$root"
    tasks=${TASKS:-blimp,arc_easy,arc_challenge,piqa,winogrande,openbookqa}
    for name in pretrain sft dpo grpo; do
        [[ -e $out/$name/complete ]] || continue
        replies=()
        [[ $name == pretrain ]] || replies=(--instructions "$out"/instructions/*/alpaca.json)
        [[ -e $out/evaluate-$name.json ]] || logged "evaluate-$name" recipes/evaluate.py --checkpoint "$out/$name" \
            --data "$out/shards" ${replies[@]+"${replies[@]}"} --json "$out/evaluate-$name.json" --card "$@"
        # In fp32, as in other harnesses: bf16 logits round away the difference between texts of nearly equal likelihood.
        # shellcheck disable=SC2086 # $EVALUATE is flags: --limit 100, --any-version
        logged "tasks-$name" recipes/evaluate.py --checkpoint "$out/$name" --tasks "$tasks" --task-data "$out/eval" \
            --json "$out/tasks-$name.json" --resume --precision fp32 ${EVALUATE-} "$@"
    done
    run -m tinyforge.board "$out" --export "$out/report.html"
    ;;
*) die "$what: expected $stages" ;;
esac
