# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# For scenarios and negative controls, to be sourced: counts of what held, a line for each, and the
# ranks that a test has running. Wants $scratch, a folder; the last command's output is in its log.
n_passed=0 n_failed=0

# verdict NAME PROBLEM [LOG]: it holds when PROBLEM is empty; the log is shown when it does not.
# shellcheck disable=SC2154 # scratch is the caller's
verdict() {
    if [ -z "$2" ]; then
        echo "ok $1"
        n_passed=$((n_passed + 1))
    else
        echo "not ok $1: $2"
        tail -n 200 "${3:-$scratch/log}" | sed 's/^/    /'
        n_failed=$((n_failed + 1))
    fi
}

# expect NAME "EXIT-STATUS ..." TEXT COMMAND...: one of these; TEXT is an extended regular
# expression, in its output.
expect() {
    local name=$1 wanted=$2 text=$3 rc problem=
    shift 3
    "$@" >"$scratch/log" 2>&1 </dev/null
    rc=$?
    [[ " $wanted " == *" $rc "* ]] || problem="exit status $rc, wanted $wanted"
    [ -z "$text" ] || grep -qE -e "$text" "$scratch/log" || problem+="; no \"$text\""
    verdict "$name" "${problem#; }"
}

# control FAULT "EXIT-STATUS ..." COMMAND...: with the protocol steps of FAULT left out
# (src/core/faults.h), the command ends so; NONE leaves out none.
control() {
    local fault=$1 wanted=$2 rc problem=
    shift 2
    COFUSE_FAULT=$fault timeout 200 "$@" >"$scratch/log" 2>&1 </dev/null
    rc=$?
    [[ " $wanted " == *" $rc "* ]] || problem=", wanted $wanted"
    verdict "$fault ends with exit status $rc" "${problem#, }"
}

# The end of a script: its counts, and whether all held.
closing() {
    echo "$n_passed passed, $n_failed failed"
    [ $n_failed -eq 0 ] && [ $n_passed -gt 0 ]
}

# ranks_alive [RANK]: the processes that are ranks of jobs of this test, which carry a mark in their
# environment.
export COFUSE_TEST_MARK=$$-$RANDOM
ranks_alive() {
    local file
    grep -lzx "COFUSE_TEST_MARK=$COFUSE_TEST_MARK" /proc/[0-9]*/environ 2>/dev/null |
        while read -r file; do
            grep -qzxE "COFUSE_RANK=${1:-.*}" "$file" 2>/dev/null || continue
            file=${file%/environ}
            grep -q '^State:.*Z' "$file/status" 2>/dev/null || echo "${file#/proc/}"
        done
}
