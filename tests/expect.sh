# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# For scenarios, to be sourced: counts of what held, in n_passed and n_failed. Wants $scratch.
n_passed=0 n_failed=0

# expect NAME EXIT-STATUS TEXT COMMAND...: TEXT is an extended regular expression, in its output.
# shellcheck disable=SC2154 # scratch is the caller's
expect() {
    local name=$1 wanted=$2 text=$3 rc
    shift 3
    "$@" >"$scratch/log" 2>&1 </dev/null
    rc=$?
    if [ $rc -eq "$wanted" ] && { [ -z "$text" ] || grep -qE -e "$text" "$scratch/log"; }; then
        echo "ok $name"
        n_passed=$((n_passed + 1))
    else
        echo "not ok $name: exit status $rc, wanted $wanted and \"$text\" in"
        sed 's/^/    /' "$scratch/log"
        n_failed=$((n_failed + 1))
    fi
}
