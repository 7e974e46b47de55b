#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Pages say what the code does: the table of variables, those of measurements, links, the README's
# program, and a comment on every public function. --update writes the tables first.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
failed=0
fail() {
    echo "$@"
    failed=1
}

# The tables of a page, from the stored results of `cofuse bench`: docs/performance.md has those of
# the CPU, docs/cuda.md those of devices, but for those that a page shows by itself (below). Other
# documents lie beside them.
results_of() { # cpu|cuda
    local file is_cuda
    for file in bench/results/*.json; do
        grep -q '"settings": {' "$file" 2>/dev/null || continue
        ! grep -qE "^<!-- [a-z]+: $file -->$" docs/*.md || continue
        is_cuda=$(grep -c '"device": "cuda"' "$file")
        [[ $1:$is_cuda =~ ^(cpu:0|cuda:[1-9].*)$ ]] && echo "$file"
    done
}
# Documents of tests/run_gpu.sh, which has a row on each line.
checks() {
    local file row=''
    row+='^ *\{"name": "([^"]*)", .*"ranks": ([0-9]+), "devices": ([0-9]+), "passed": ([0-9]+), '
    row+='"failed": ([0-9]+), "skipped": ([0-9]+), "exit": [0-9]+, "seconds": ([0-9.]+)\},?$'
    for file in bench/results/*.json; do
        grep -q '"rows": \[' "$file" 2>/dev/null || continue
        printf '\n%s\n' "From \`$file\` ($(sed -nE 's/^ *"command": "(.*)",$/\1/p' "$file")):"
        printf '\n%s\n' "$(sed -nE 's/^ *"date": "([0-9-]*).*/\1/p' "$file"), $(
            sed -nE 's/.*"n_gpus": ([0-9]+), "driver": "([^"]*)".*/devices: \1, driver \2/p' \
                "$file")."
        printf '\n| cases | ranks | devices | passed | failed | skipped | seconds |\n%s\n' \
            '|---|---|---|---|---|---|---|'
        sed -nE "s/$row/| \\1 | \\2 | \\3 | \\4 | \\5 | \\6 | \\7 |/p" "$file"
    done
}
measurements() { # cpu|cuda
    local file files
    [ "$1" = cpu ] || checks
    mapfile -t files < <(results_of "$1")
    [ ${#files[@]} -gt 0 ] || printf '\nNo run is stored yet.\n'
    for file in "${files[@]}"; do
        printf '\n%s\n\n' "From \`$file\`:"
        build/cofuse bench --from "$file" --markdown || echo "$file cannot be read"
    done
    echo
}
readonly TABLES_BEGIN='<!-- tables: begin -->' TABLES_END='<!-- tables: end -->'
with_tables() { # PAGE TABLES: the page with its tables made anew
    awk -v begin="$TABLES_BEGIN" -v end="$TABLES_END" -v tables="$2" '
        $0 == end { on = 0 }
        !on { print }
        $0 == begin { on = 1; while ((getline line <tables) > 0) print line }
    ' "$1"
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
check_page() { # PAGE cpu|cuda UPDATE
    local made=$scratch/$2.md line difference
    measurements "$2" >"$scratch/tables"
    with_tables "$1" "$scratch/tables" >"$made"
    [ "$3" != --update ] || cp "$made" "$1"
    for line in "$TABLES_BEGIN" "$TABLES_END"; do
        grep -qFx -e "$line" "$1" || fail "$1: wanted the line $line"
    done
    difference=$(diff "$1" "$made") ||
        fail "$1 is not in step with bench/results (ci/check_docs.sh --update):
$difference"
}
check_page docs/performance.md cpu "${1:-}"
check_page docs/cuda.md cuda "${1:-}"
[ "${1:-}" != --update ] || build/cofuse info --env-markdown >docs/environment.md

# Tables that a program in Python makes of one document lie between "<!-- peers: FILE -->" and
# "<!-- peers: end -->": those beside rivals; also "errors" and "crossover", of bench/NAME.py.
with_shown() { # PAGE: the page with these tables made anew
    local line file='' kind='' program begin end
    begin='^<!-- (peers|errors|crossover): (bench/(peers/)?results/[A-Za-z0-9_.-]+\.json) -->$'
    end='^<!-- (peers|errors|crossover): end -->$'
    while IFS= read -r line; do
        [[ ! $line =~ $end || ${BASH_REMATCH[1]} != "$kind" ]] || file=''
        [ -n "$file" ] || printf '%s\n' "$line"
        if [[ $line =~ $begin ]]; then
            kind=${BASH_REMATCH[1]} file=${BASH_REMATCH[2]} program=bench/$kind.py
            [ "$kind" != peers ] || program=bench/peers/show.py
            printf '\n%s\n\n' "$(python3 -B "$program" "$file")"
        fi
    done <"$1"
    [ -z "$file" ] || echo "no end of the table of $file"
}
mapfile -t pages < <(grep -lE '^<!-- (peers|errors|crossover): ' docs/*.md)
if [ ${#pages[@]} -gt 0 ] && ! command -v python3 >/dev/null; then
    echo "tables that programs in Python make: not checked, there is no python3"
    pages=()
fi
for page in "${pages[@]}"; do
    with_shown "$page" >"$scratch/shown.md"
    [ "${1:-}" != --update ] || cp "$scratch/shown.md" "$page"
    difference=$(diff "$page" "$scratch/shown.md") ||
        fail "$page is not in step with the documents it shows (ci/check_docs.sh --update):
$difference"
done

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
