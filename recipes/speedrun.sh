#!/usr/bin/env bash
# From raw text to a chat, in one command.
#
#   recipes/speedrun.sh --config small                      a few books, on a CPU: a quarter of an hour
#   recipes/speedrun.sh                                     --config base: 116 M parameters, on a GPU
#   recipes/speedrun.sh --books books.zip --web pages/ --instructions alpaca.json       files that you have
#   recipes/speedrun.sh --shards shards                     begin with token shards; what makes them is --data-only
#
# The stages, each an ordinary command that is printed before it runs:
#
#   books, web, instructions     sources: Project Gutenberg, FineWeb-Edu, Alpaca, or your own files  (docs/sources.md)
#   corpus                       filters, duplicates, held-out text, decontamination                  (docs/data.md)
#   shards                       a tokenizer, and files of tokens                                     (docs/shards.md)
#   pretrain, sft                a base model, then fine-tuned on the instructions                    (docs/training.md)
#   evaluate-base, evaluate-sft  what both are worth on text and instructions they never saw
#   dpo, evaluate-dpo            where --preferences are given: the chosen replies made likelier      (docs/alignment.md)
#   grpo, evaluate-grpo          where --problems are given: what a checker finds right made likelier (docs/alignment.md)
#   tasks-base, tasks-tuned      where --task-data is given: benchmarks that people know              (docs/evaluation.md)
#   chat                         one question
#   report                       OUT/report.html: curves, samples, tables, cards, in one file         (docs/board.md)
#
# After a kill, Ctrl-C or a fault run the same command again: complete stages are skipped, and the one that was under
# way continues where it stopped. Everything is under --out, the log of each stage in its folder logs.
set -euo pipefail
set -f # flags are kept as strings and split at spaces; nothing in them is a pattern of file names

usage() {
    cat <<'END'
usage: recipes/speedrun.sh [flags]

  --config small|base       small: a few books on a CPU; base: 116 M parameters on a GPU (default: base)
  --out DIR                 everything goes here (default: runs/speedrun-CONFIG)

  --books PATH              files of Project Gutenberg as published: a .txt, a folder or a zip of them; may be repeated
                            (default: they are fetched; none: no books)
  --web PATH                parquet or JSONL with a column "text", plain text, folders, zips; may be repeated
                            (default: FineWeb-Edu for base, read over HTTP, and none for small)
  --web-licence TEXT        what the files of --web are under, for the catalogue and the shards
  --instructions PATH       Alpaca records: .json, .jsonl or a zip of one (default: they are fetched)
  --preferences PATH        preference pairs, JSON with instruction, input, chosen, rejected: goes on to recipes/dpo.py
  --problems PATH|TASK      Alpaca records whose output ends in the right number, or one-step or harder-sums, which are
                            built in: goes on to recipes/grpo.py
  --task-data PATH          a folder or a zip of evaluation sets: benchmarks of the base and of the last model
  --tasks NAMES             which benchmarks, with commas (default: blimp,arc_easy,piqa)
  --shards DIR              begin with these token shards: no books and no web are read, and no DuckDB is needed
  --data-only               end when the shards and the instructions are made

  --backend auto|numpy|cupy where to compute (default: auto, a GPU if there is one)
  --precision P             fp32, and on a GPU tf32 or bf16 (default: bf16 for base, fp32 for small)
  --vocab-size N            ids of the tokenizer (default: 4096 for base, 1024 for small)
  --corpus-flags "..."      more flags for data.corpus, after those of the config
  --pretrain-flags "..."    more flags for recipes/pretrain.py, after those of the config
  --sft-flags "..."         more flags for recipes/sft.py, after those of the config
  --dpo-flags "..."         more flags for recipes/dpo.py, after those of the config
  --grpo-flags "..."        more flags for recipes/grpo.py, after those of the config
  --tasks-flags "..."       more flags for recipes/evaluate.py --tasks
  -h, --help                this text

The Python is $PYTHON, else .venv/bin/python if it is there, else python3.
END
}

die() { # one line: the error and its remedy
    printf 'error: %s\n' "$1" >&2
    exit "${2:-2}"
}

quoted() { # the words, quoted for a shell
    local word line=''
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./=:,+-]+$ ]] || word="'${word//\'/\'\\\'\'}'"
        line+=" $word"
    done
    printf '%s' "${line# }"
}

joined() { # CONFIG MORE: flags of a config and MORE, which override them; --steps and --minutes exclude each other
    local flags=$1
    [[ ! " $2" =~ [[:space:]]--(steps|minutes)[=[:space:]] ]] ||
        flags=$(sed -E 's/--(steps|minutes) [^ ]+ //' <<<"$flags")
    printf '%s %s' "$flags" "$2"
}

QUESTION="Name three things to see in the sky at night."

# --- the flags -------------------------------------------------------------------------------------------------------

called="${PYTHON:+PYTHON=$(quoted "$PYTHON") }" # the beginning of the command line
again=$called$(quoted "$0" "$@") all=()
config=base out='' books=() web=() licence='not stated' instructions='' shards='' data_only=no
vocab='' at_most='' backend=auto precision='' corpus_more='' pretrain_more='' sft_more='' preferences='' dpo_more=''
problems='' grpo_more='' task_data='' tasks=blimp,arc_easy,piqa tasks_more=''
while (($#)); do
    case $1 in
    -h | --help)
        usage
        exit
        ;;
    --data-only)
        data_only=yes
        shift
        continue
        ;;
    --config) config=${2-} ;;
    --out) out=${2-} ;;
    --books) books+=("${2-}") ;;
    --web) web+=("${2-}") ;;
    --web-licence) licence=${2-} ;;
    --instructions) instructions=${2-} ;;
    --shards) shards=${2-} ;;
    --backend) backend=${2-} ;;
    --precision) precision=${2-} ;;
    --vocab-size) vocab=${2-} ;;
    --corpus-flags) corpus_more=${2-} ;;
    --pretrain-flags) pretrain_more=${2-} ;;
    --sft-flags) sft_more=${2-} ;;
    --preferences) preferences=${2-} ;;
    --problems) problems=${2-} ;;
    --task-data) task_data=${2-} ;;
    --tasks) tasks=${2-} ;;
    --dpo-flags) dpo_more=${2-} ;;
    --grpo-flags) grpo_more=${2-} ;;
    --tasks-flags) tasks_more=${2-} ;;
    *) die "$1: no such flag; recipes/speedrun.sh --help lists them" ;;
    esac
    (($# > 1)) || die "$1: needs a value; see recipes/speedrun.sh --help"
    all+=("$1" "$2")
    shift 2
done

[[ -n $vocab ]] || at_most=--at-most # a small text may have fewer

# --- the settings of each config -------------------------------------------------------------------------------------

case $config in
base)
    # Tuned on 78 MB of text, 23.4 M tokens that are read 7.7 times: docs/results/base-run.md. The text that is fetched
    # by default is several times as much, and was not measured.
    pretrain="--config base --batch-size 32 --lr 6e-4 --weight-decay 1.5 --steps 11000"
    pretrain+=" --eval-every 1100 --save-every 2200"
    sft="--batch-size 32 --lr 2e-4 --steps 240 --max-reply 160 --eval-every 60 --save-every 120"
    dpo="--lr 5e-6"                    # these two have not been measured
    grpo="--lr 2e-6 --max-tokens 64"
    : "${precision:=bf16}"
    : "${vocab:=4096}"
    fetch_books="" # the hundred classics of data/gutenberg.csv
    fetch_web="--bytes 200MB"
    corpus=""
    ;;
small)
    pretrain="--config small --set context=256 --batch-size 8 --minutes 7 --eval-every 500 --save-every 250"
    sft="--batch-size 8 --minutes 3 --max-reply 120 --eval-every 250 --save-every 100"
    dpo="" grpo=""
    : "${precision:=fp32}"
    : "${vocab:=1024}"
    fetch_books="--numbers 11 84 1342 1661" # Alice, Frankenstein, Pride and Prejudice, Sherlock Holmes
    ((${#web[@]})) || web=(none)
    # Too few books to hold a whole one out: each part of 16 KiB is assigned to train or val separately.
    corpus="--max-bytes 16384 --split-by part --val-share 0.05"
    ;;
*) die "--config $config: expected small or base" ;;
esac
pretrain=$(joined "$pretrain --precision $precision --card" "$pretrain_more")
sft=$(joined "$sft --precision $precision --card" "$sft_more")
dpo=$(joined "$dpo --precision $precision --card" "$dpo_more")
grpo=$(joined "$grpo --precision $precision --card" "$grpo_more")
corpus+=" $corpus_more"
: "${out:=runs/speedrun-$config}"

if [[ -n $shards ]]; then
    ((${#books[@]} == 0)) || die "--books: --shards names finished shards; drop one of the two"
    [[ ${web[*]-none} == none ]] || die "--web: --shards names finished shards; drop one of the two"
    [[ $data_only == no ]] || die "--data-only: --shards names finished shards; drop one of the two"
    [[ -e $shards/manifest.json ]] || die "--shards $shards: no manifest.json in it; name a folder of data.shards"
fi
[[ ${books[*]-} != none || ${web[*]-} != none ]] || die "--books none and --web none leave no text; name some"
case $problems in
'' | one-step | harder-sums) asked=(--task "$problems") ;;
*)
    [[ -e $problems ]] || die "--problems $problems: expected one-step, harder-sums, or a file that exists"
    asked=(--data "$problems")
    ;;
esac
for path in ${books[@]+"${books[@]}"} ${web[@]+"${web[@]}"} ${instructions:+"$instructions"} \
    ${preferences:+"$preferences"} ${task_data:+"$task_data"}; do
    [[ $path == none || -e $path ]] || die "$path: no such file or folder; check the path, relative to $PWD"
done

# --- requirements ----------------------------------------------------------------------------------------------------

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # so that the script runs from any folder
export PYTHONUNBUFFERED=1                            # so that logs are up to date
if [[ -n ${PYTHON-} ]]; then
    python=$PYTHON
elif [[ -x .venv/bin/python ]]; then
    python=.venv/bin/python
else
    python=python3
fi
command -v "$python" >/dev/null || die "$python: no such Python; name one: PYTHON=python3.12"
mkdir -p "$out/logs" "$out/.stages" 2>/dev/null || die "--out $out: cannot be created; name another folder"
exec 9>"$out/.lock" # also held by every command that is started here, even if it outlives this script
modules="numpy tqdm safetensors matplotlib"
[[ -n $shards ]] || modules+=" duckdb"
[[ $data_only == no ]] || backend=none
"$python" - "$python" "$root" "$out" "$backend" "$precision" "$modules" "$tasks" "$task_data" "$tasks_more" \
    <<'END' || exit 2
import importlib.util, sys

python, root, out, backend, precision, modules, tasks, task_data, tasks_more = sys.argv[1:]
if sys.version_info < (3, 11):
    sys.exit("error: %s is older than 3.11; name another Python: PYTHON=python3.12" % python)
missing = [name for name in modules.split() if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: {python} lacks {', '.join(missing)}; {python} -m pip install -e {root}")
try:
    import fcntl
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except ImportError:  # Windows; the stages lock their folders themselves
    pass
except OSError:
    sys.exit(f"error: another run is at work in {out}; wait for it or stop it, or name another --out")
if backend != "none":  # fail now rather than after hours
    from pathlib import Path

    from data.evaluation import TASKS, check_tasks, find_sets, read_set
    from tinyforge.backends import get_backend
    from tinyforge.errors import run_command

    def check():
        get_backend(backend, precision)
        names, files = check_tasks([tasks]), find_sets([Path(task_data)] if task_data else [])
        for name in filter(TASKS.__contains__, names if task_data else ()):
            read_set(name, files, "--any-version" in tasks_more)

    run_command(check)
END

# --- the stages ------------------------------------------------------------------------------------------------------

complete=() stopped=0 # complete: find's arguments to keep the marks of the stages so far
trap 'stopped=130' INT # the running command gets Ctrl-C too, saves and exits
trap 'stopped=143' TERM

stage() { # NAME RESULT COMMAND...: run it unless it is complete; RESULT is the file that it makes, "" if none
    local name=$1 result=$2 made="$out/.stages/$1" log="$out/logs/$1.log" began=$SECONDS command seconds status
    shift 2
    command=$(quoted "${@:2}") # without the Python, which may differ
    if [[ -f $made && -e $result ]]; then
        [[ $(<"$made") == "$command" ]] ||
            die "$name is complete, by '$(<"$made")', and not '$command'; give the same flags, or another --out"
        printf '\n=== %s: complete, skipped; %s\n' "$name" "$result"
        complete+=(! -name "$name")
        return
    fi
    # Later stages depend on this one: they are neither complete nor begun.
    find "$out/.stages" -type f ! -name "$name.begun" ${complete[@]+"${complete[@]}"} -exec rm {} +
    case $name in
    books | web) rm -f "$result" ;; # tells status 1, files were left out, from a crash
    tasks-*) [[ -f $made.begun ]] || rm -f "$result" ;; # figures of another model
    pretrain | sft | dpo | grpo)
        set -- "$@" --backend "$backend"
        if [[ -z $(find "$result" -maxdepth 1 -name 'step-*' 2>/dev/null) ]]; then
            : # nothing was saved
        elif [[ -f $made.begun ]]; then
            set -- "$@" --resume
        else # an earlier stage was repeated, so these steps are stale
            printf '\n%s is stale and made again; the old one is removed\n' "$result"
            rm -r "$result"
        fi
        ;;
    esac
    printf '%s\n' "$command" >"$made.begun"
    set +e
    printf '\n=== %s\n%s\n' "$name" "$(quoted "$@")" | tee -a "$log"
    # tee ignores signals, so that it logs what a stopped command still prints.
    "$@" 2>&1 | (
        trap '' INT TERM HUP
        exec tee -a "$log"
    )
    status=${PIPESTATUS[0]}
    set -e
    if [[ $status == 1 && ($name == books || $name == web) && -e $result ]]; then
        echo "some files were left out, see above; continuing without them (to try again: rm $(quoted "$made"))"
        status=0
    fi
    seconds=$((SECONDS - began))
    ((status != 130 && status != 143)) || stopped=$status
    if ((status == 0)); then
        printf '=== %s: complete after %d min %d s\n' "$name" $((seconds / 60)) $((seconds % 60)) | tee -a "$log"
        mv "$made.begun" "$made"
        complete+=(! -name "$name")
    elif ((stopped == 0)); then
        die "stage $name failed with status $status, log: $log; fix the error, then continue with: $again" "$status"
    fi
    ((stopped == 0)) || die "stopped in stage $name; continue with: $again" "$stopped"
}

sources=()
# shellcheck disable=SC2086 # the flags of a config are words
if [[ -z $shards && ${books[*]-} != none ]]; then
    folder=$out/sources/books
    sources+=("$folder")
    if ((${#books[@]})); then
        stage books "$folder/source.json" "$python" -m data.gutenberg --out "$folder" "${books[@]}"
    else
        stage books "$folder/source.json" "$python" -m data.gutenberg --out "$folder" $fetch_books
    fi
fi
# shellcheck disable=SC2086
if [[ -z $shards && ${web[*]-} != none ]]; then
    folder=$out/sources/web
    sources+=("$folder")
    if ((${#web[@]})); then
        stage web "$folder/source.json" "$python" -m data.local --out "$folder" \
            --name web --licence "$licence" "${web[@]}"
    else
        stage web "$folder/source.json" "$python" -m data.fineweb_edu --out "$folder" $fetch_web
    fi
fi
folder=$out/sources/instructions
records=$folder/alpaca.json
stage instructions "$folder/source.json" "$python" -m data.alpaca --out "$folder" ${instructions:+"$instructions"}
if [[ -z $shards ]]; then
    shards=$out/shards
    # shellcheck disable=SC2086
    stage corpus "$out/corpus/corpus.json" "$python" -m data.corpus "${sources[@]}" --out "$out/corpus" $corpus
    stage shards "$shards/manifest.json" "$python" -m data.shards \
        --corpus "$out/corpus" --out "$shards" --vocab-size "$vocab" $at_most
fi
if [[ $data_only == yes ]]; then
    more=(${pretrain_more:+--pretrain-flags "$pretrain_more"} ${sft_more:+--sft-flags "$sft_more"}
        ${preferences:+--preferences "$preferences"} ${dpo_more:+--dpo-flags "$dpo_more"}
        ${problems:+--problems "$problems"} ${grpo_more:+--grpo-flags "$grpo_more"}
        ${task_data:+--task-data "$task_data" --tasks "$tasks"} ${tasks_more:+--tasks-flags "$tasks_more"})
    printf '\nThe data are ready: %s and %s. To train on them here:\n' "$shards" "$records"
    echo "  $called$(quoted "$0" ${all[@]+"${all[@]}"})"
    echo "or on another machine, after copying them there:"
    echo "  $(quoted recipes/speedrun.sh --config "$config" --shards "$shards" --instructions "$records" \
        ${more[@]+"${more[@]}"})"
    exit
fi

# shellcheck disable=SC2086
stage pretrain "$out/pretrain" "$python" "$root/recipes/pretrain.py" --data "$shards" --out "$out/pretrain" $pretrain
# shellcheck disable=SC2086
stage sft "$out/sft" "$python" "$root/recipes/sft.py" \
    --base "$out/pretrain" --data "$records" --out "$out/sft" $sft
where=(--backend "$backend" --precision "$precision")
stage evaluate-base "$out/evaluate-base.json" "$python" "$root/recipes/evaluate.py" \
    --checkpoint "$out/pretrain" --data "$shards" --json "$out/evaluate-base.json" "${where[@]}" --card
evaluate_tuned() { # NAME: the run of that name, as sft before it
    stage "evaluate-$1" "$out/evaluate-$1.json" "$python" "$root/recipes/evaluate.py" \
        --checkpoint "$out/$1" --data "$shards" --instructions "$records" --json "$out/evaluate-$1.json" \
        "${where[@]}" --card
}
evaluate_tuned sft
tuned=$out/sft
if [[ -n $preferences ]]; then
    # shellcheck disable=SC2086
    stage dpo "$out/dpo" "$python" "$root/recipes/dpo.py" --base "$tuned" --data "$preferences" --out "$out/dpo" \
        --cache "$out/reference" $dpo
    evaluate_tuned dpo
    tuned=$out/dpo
fi
if [[ -n $problems ]]; then
    # shellcheck disable=SC2086
    stage grpo "$out/grpo" "$python" "$root/recipes/grpo.py" --base "$tuned" "${asked[@]}" --out "$out/grpo" \
        $grpo
    evaluate_tuned grpo
    tuned=$out/grpo
fi
if [[ -n $task_data ]]; then
    for name in base tuned; do
        [[ $name == base ]] && model=$out/pretrain || model=$tuned
        # shellcheck disable=SC2086
        stage "tasks-$name" "$out/tasks-$name.json" "$python" "$root/recipes/evaluate.py" --checkpoint "$model" \
            --tasks "$tasks" --task-data "$task_data" --json "$out/tasks-$name.json" --resume "${where[@]}" $tasks_more
    done
fi
stage chat "" "$python" -m tinyforge.chat --checkpoint "$tuned" --prompt "$QUESTION" "${where[@]}"
stage report "" "$python" -m tinyforge.board "$out" --export "$out/report.html"

printf '\nThis took %d min %d s. Report: %s; figures: %s. To ask more:\n' $((SECONDS / 60)) \
    $((SECONDS % 60)) "$out/report.html" "$out/*.json"
echo "  $(quoted "$python") -m tinyforge.chat --checkpoint $(quoted "$tuned") --backend $backend"
