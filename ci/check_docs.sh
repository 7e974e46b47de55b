#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Pages say what the code does: the table of variables, links, the README's program, and a comment
# on every public function.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
failed=0
fail() {
    echo "$@"
    failed=1
}

# docs/environment.md is printed by the program.
difference=$(diff docs/environment.md <(build/cofuse info --env-markdown)) ||
    fail "docs/environment.md is not what 'build/cofuse info --env-markdown' prints:
$difference"

# Relative links lead somewhere.
if git rev-parse --git-dir >/dev/null 2>&1; then
    mapfile -t pages < <(git ls-files --cached --others --exclude-standard '*.md')
else
    mapfile -t pages < <(find . -path ./build -prune -o -name '*.md' -print)
fi
for page in "${pages[@]}"; do
    while IFS= read -r link; do
        target=${link%%#*}
        [ -n "$target" ] || continue
        [ -e "$(dirname "$page")/$target" ] || fail "$page: no such file: $link"
    done < <(grep -oE '\]\([^)[:space:]]+\)' "$page" | sed -E 's/^\]\((.*)\)$/\1/' |
        grep -vE '^[a-z]+:')
    # Files named in code font from the root of the tree.
    # shellcheck disable=SC2016
    while IFS= read -r path; do
        [ -e "$path" ] || fail "$page: no such file: $path"
    done < <(grep -oE '`(src|include|tools|tests|docs|ci|samples|examples)/[A-Za-z0-9_./-]+`' \
        "$page" | tr -d '`' | sort -u)
done

# The README shows the first example as it is, its SPDX lines apart.
shown=$(awk '/^```c$/ { on = 1; next } /^```$/ { on = 0 } on' README.md)
[ "$shown" = "$(tail -n +3 examples/attention.c)" ] ||
    fail "README.md does not show examples/attention.c as it is"

# A comment ends on the line before each public function, or before the group it belongs to.
for header in include/cofuse/*.h; do
    while IFS= read -r place; do
        fail "$place: public function without a comment"
    done < <(awk '
        /^COF_API / {
            if (!documented) print FILENAME ":" FNR
            inside = !/;$/
            next
        }
        inside { inside = !/;$/; next }
        { documented = /\*\/$/ }
    ' "$header")
done
exit $failed
