#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Pages say what the code does: the table of variables, that of measurements, links, the README's
# program, and a comment on every public function. --update writes the two tables first.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
failed=0
fail() {
    echo "$@"
    failed=1
}

# The tables of docs/performance.md, from the stored results.
measurements() {
    local file
    for file in bench/results/*.json; do
        echo
        if [ ! -e "$file" ]; then
            echo "No run is stored yet."
            continue
        fi
        echo "From \`$file\`:"
        echo
        build/cofuse bench --from "$file" --markdown || echo "$file cannot be read"
    done
    echo
}
readonly TABLES_BEGIN='<!-- tables: begin -->' TABLES_END='<!-- tables: end -->'
performance_page() { # the page with its tables made anew
    awk -v begin="$TABLES_BEGIN" -v end="$TABLES_END" -v tables="$1" '
        $0 == end { on = 0 }
        !on { print }
        $0 == begin { on = 1; while ((getline line <tables) > 0) print line }
    ' docs/performance.md
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
measurements >"$scratch/tables"
performance_page "$scratch/tables" >"$scratch/performance.md"
if [ "${1:-}" = --update ]; then
    cp "$scratch/performance.md" docs/performance.md
    build/cofuse info --env-markdown >docs/environment.md
fi
for line in "$TABLES_BEGIN" "$TABLES_END"; do
    grep -qFx -e "$line" docs/performance.md || fail "docs/performance.md: wanted the line $line"
done
difference=$(diff docs/performance.md "$scratch/performance.md") ||
    fail "docs/performance.md is not in step with bench/results (ci/check_docs.sh --update):
$difference"

# docs/environment.md is printed by the program.
difference=$(diff docs/environment.md <(build/cofuse info --env-markdown)) ||
    fail "docs/environment.md is not what 'build/cofuse info --env-markdown' prints:
$difference"

# Relative links lead somewhere.
readonly FOLDERS='(src|include|tools|tests|docs|ci|bench|samples|examples)'
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
    while IFS= read -r path; do
        [ -e "$path" ] || fail "$page: no such file: $path"
    done < <(grep -oE "\`$FOLDERS/[A-Za-z0-9_./-]+\`" "$page" | tr -d '`' | sort -u)
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
