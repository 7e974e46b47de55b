#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# ci/check_models.sh [--full] [PATTERN]: searches the protocol models of models/ with spin, to the
# end.
#
# The head of each model lists its runs: "check: holds MACROS" must be searched completely without
# an error, "check: refuted MACROS" is a broken variant in which an assertion must fail or a rank
# must wait for ever; "check: full ..." is one of more ranks or calls, left to --full. PATTERN, an
# extended regular expression, picks runs by "model macros". One line per run, in the order in which
# they end; closes with "N passed, N failed".
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
export LC_ALL=C.UTF-8

full=
if [ "${1:-}" = --full ]; then
    full=1
    shift
fi
readonly models=$PWD/models pattern=${1:-} full
readonly MAX_DEPTH=1000000 MAX_MIB=1400 MAX_SECONDS=600 TCC_SECONDS=0.5
# Entries of the table of states, as a power of 2: a small one stays in the cache.
hash_bits=21
[ -z "$full" ] || hash_bits=24
readonly hash_bits
cut_short='max search depth too small|out of memory|reached -DMEMLIM|not completed|aborting'
readonly cut_short

command -v spin >/dev/null || {
    echo "spin is not installed"
    exit 77
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM

# result ok|"not ok" TEXT: the line of a run; what went wrong leaves a mark to be counted.
result() {
    echo "$1 $2"
    if [ "$1" = ok ]; then touch passed; else touch failed; fi
}

# A misspelt macro would quietly check something else.
unknown_macro() { # unknown_macro MODEL MACROS...
    local text macro
    text=$(grep -v '^ \* check: ' "$1")
    for macro in "${@:2}"; do
        grep -qw -- "${macro%%=*}" <<<"$text" || echo "$macro"
    done
}

# search: compiles pan.c and runs it. Most have so few states that gcc takes longer than the search;
# long ones want optimised code, and those of --full more so.
search() {
    local pan=(./pan "-m$MAX_DEPTH" "-w$hash_bits") options=(-w -DSAFETY "-DMEMLIM=$MAX_MIB") rc
    if command -v tcc >/dev/null && tcc "${options[@]}" -o pan pan.c >log 2>&1; then
        timeout $TCC_SECONDS "${pan[@]}" >log 2>&1 && return
    fi
    "${CC:-gcc}" "-O${full:-g}" "${options[@]}" -o pan pan.c >log 2>&1 || return
    timeout $MAX_SECONDS "${pan[@]}" >log 2>&1 && return
    rc=$?
    echo "search ended with $rc: $(tail -n 1 log)" >log
    return 1
}

# run DIRECTORY MODEL holds|refuted MACROS...
run() {
    local model=$models/$2.pml expected=$3 name="$3 $2 ${*:4}" macros=("${@:4}")
    local begin=${EPOCHREALTIME/./} unknown how states took
    mkdir "$1" && cd "$1" || return
    unknown=$(unknown_macro "$model" "${macros[@]}")
    [ -z "$unknown" ] || { result "not ok" "$name: the model has no $unknown"; return; }
    if ! spin -a "${macros[@]/#/-D}" "$model" >log 2>&1 || ! search; then
        result "not ok" "$name: $(grep -m 1 -iE 'error|search ended' log)"
        return
    fi
    took=$(((${EPOCHREALTIME/./} - begin) / 100000))
    took=$((took / 10)).$((took % 10))
    how=$(grep -oE -m 1 'assertion violated( - invalid array index)?|invalid end state' \
        <(grep '^pan:1: ' log))
    states=$(sed -nE 's/^ *([0-9.e+]+) states, stored.*/\1/p' log)
    case $expected:$how in
    holds:)
        if grep -qE "$cut_short" log || ! grep -q 'errors: 0$' log; then
            result "not ok" "$name: $(grep -m 1 -E "$cut_short" log)"
        else
            result ok "$name ($states states, $took s)"
        fi
        ;;
    "refuted:assertion violated" | "refuted:invalid end state")
        result ok "$name: $how ($states states, $took s)"
        ;;
    holds:*) result "not ok" "$name: $how" ;;
    *) result "not ok" "$name: not refuted${how:+ but $how} ($states states, $took s)" ;;
    esac
}

n=0 n_running=0
n_jobs=$(nproc)
for model in "$models"/*.pml; do
    name=$(basename "$model" .pml)
    n_holds=0 n_refuted=0
    while read -r expected macros; do
        if [ "$expected" = full ]; then
            [ -n "$full" ] || continue
            read -r expected macros <<<"$macros"
        fi
        case $expected in
        holds) n_holds=$((n_holds + 1)) ;;
        refuted) n_refuted=$((n_refuted + 1)) ;;
        esac
        [[ "$name $macros" =~ $pattern ]] || continue
        if [ "$n_running" -ge "$n_jobs" ]; then
            wait -n
            n_running=$((n_running - 1))
        fi
        read -ra words <<<"$macros"
        n=$((n + 1)) n_running=$((n_running + 1))
        (run "$scratch/$n" "$name" "$expected" "${words[@]}") &
    done < <(sed -nE 's,^ \* check: ([^*]*[^* /])[ */]*$,\1,p' "$model")
    if [ $n_holds -lt 1 ] || [ $n_refuted -lt 2 ]; then
        echo "not ok $name: $n_holds runs that hold and $n_refuted broken variants, not 1 and 2"
        mkdir "$scratch/$name" && touch "$scratch/$name/failed"
    fi
done
wait
marks() { find "$scratch" -mindepth 2 -maxdepth 2 -name "$1" | wc -l; }
n_passed=$(marks passed) n_failed=$(marks failed)
# A run that left no mark ended in a way of its own.
n_failed=$((n_failed + n - n_passed - $(find "$scratch"/[0-9]* -name failed 2>/dev/null | wc -l)))
echo "$n_passed passed, $n_failed failed"
[ "$n_failed" -eq 0 ] && [ "$n_passed" -gt 0 ]
