# Shared by large-run.sh and examples/storyteller/run.sh, which source it with $what, $out and $root set.
# shellcheck shell=bash

die() { # one line: the error and its remedy
    printf 'error: %s\n' "$1" >&2
    exit 2
}

case $what in -h | --help)
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" # the comment that the script begins with
    exit
    ;;
esac

run() {
    printf '$ %s\n' "$*"
    "$PYTHON" "$@"
}

trained() { # NAME RECIPE FLAGS...: a run in $out/NAME; skipped if it is complete, resumed if it was stopped
    local name=$1 more=()
    shift
    if [[ -e $out/$name/complete ]]; then
        echo "$out/$name: complete, skipped"
        return
    fi
    [[ -z $(compgen -G "$out/$name/step-*" || true) ]] || more=(--resume)
    run "$@" --out "$out/$name" ${more[@]+"${more[@]}"}
    # --plan and --help train nothing.
    [[ " $* " == *" --plan "* || " $* " == *" --help "* || " $* " == *" -h "* ]] || touch "$out/$name/complete"
}

# To copy to a machine that limits the size of files.

pack() { # NAMES...: those that exist in $out, as $out/parts/part-00, part-01, ... of $PART_MIB MiB
    local names=() name
    for name in "$@"; do [[ ! -e $out/$name ]] || names+=("$name"); done
    ((${#names[@]})) || die "$out has none of: $*; make them with: $0 data $out ..."
    rm -rf "$out/parts"
    mkdir "$out/parts"
    (cd "$out" && "$PYTHON" -m tarfile -c parts/all.tar.xz "${names[@]}")
    split -d -b "${PART_MIB:-32}M" "$out/parts/all.tar.xz" "$out/parts/part-"
    rm "$out/parts/all.tar.xz"
    (cd "$out/parts" && sha256sum part-* >SHA256)
    ls -l "$out/parts"
}

unpack() { # once all parts of pack have arrived; may be called after each of them
    [[ -e $out/parts/SHA256 ]] || die "$out/parts has no SHA256; copy it there with the parts that pack has made"
    local missing
    missing=$(cd "$out/parts" && sed 's/.* //' SHA256 | while read -r part; do [[ -e $part ]] || echo "$part"; done)
    if [[ -n $missing ]]; then
        echo "not here yet: ${missing//$'\n'/ }"
        return
    fi
    (cd "$out/parts" && sha256sum --quiet -c SHA256) || die "$out/parts: a part is damaged, see above; copy it again"
    cat "$out/parts/part-"* >"$out/all.tar.xz"
    "$PYTHON" -m tarfile -e "$out/all.tar.xz" "$out"
    rm "$out/all.tar.xz"
    echo "unpacked into $out"
}

root=$(realpath "$root")
PYTHON=${PYTHON:-$([[ -x $root/.venv/bin/python ]] && echo "$root/.venv/bin/python" || echo python3)}
