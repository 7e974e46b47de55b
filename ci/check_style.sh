#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Style rules that a pattern can see. One line per finding; exit 1 when there is any but notes.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
export LC_ALL=C.UTF-8

readonly MAX_COLUMNS=100 NOTE_LINES=500 MAX_LINES=1000 MAX_FUNCTION=120
n_findings=0

if git rev-parse --git-dir >/dev/null 2>&1; then
    mapfile -t listed < <(git ls-files --cached --others --exclude-standard)
else
    mapfile -t listed < <(find . -path ./build -prune -o -type f -print | sed 's,^\./,,')
fi
text=() source=() code=() scripts=()
for file in "${listed[@]}"; do
    [ -f "$file" ] || continue
    case $file in
    LICENSE | *.safetensors | *.npy | *.png | bench/*results/*.json) continue ;;
    esac
    text+=("$file")
    case $file in
    *.c | *.cc | *.h | *.cu | *.cuh | *.inc) code+=("$file") source+=("$file") ;;
    *.sh | .ci/run) scripts+=("$file") source+=("$file") ;;
    *.py | *.cmake | *.map | *.in | CMakeLists.txt | Makefile) source+=("$file") ;;
    esac
done

# found WHAT: reports every line of its input.
found() {
    local line
    while IFS= read -r line; do
        echo "$line: $1"
        n_findings=$((n_findings + 1))
    done
}

# places PATTERN FILES...: "file:line" of every line that matches.
places() {
    local pattern=$1
    shift
    grep -HnE -e "$pattern" -- "$@" | cut -d: -f1,2
}

mapfile -t tab_free < <(printf '%s\n' "${text[@]}" | grep -vE '(^|/)Makefile$')
found "tab" < <(places $'\t' "${tab_free[@]}")
found "blank at the end of the line" < <(places '[ '$'\t'']+$' "${text[@]}")
found "carriage return" < <(places $'\r' "${text[@]}")
found "no newline at the end" < <(
    for file in "${text[@]}"; do
        [ -z "$(tail -c 1 "$file")" ] || echo "$file"
    done)

# Tables, bare links and output shown in a page cannot be broken.
found "over $MAX_COLUMNS columns" < <(
    grep -HnE "^.{$((MAX_COLUMNS + 1)),}$" -- "${text[@]}" |
        grep -vE '^[^:]*\.md:[0-9]+:(\||.*https?://|attention |ranks  |    [1-9] )' |
        cut -d: -f1,2)

found "two SPDX lines wanted at the head" < <(
    for file in "${source[@]}"; do
        # A generated or checked-in list may have a first line of its own (#!).
        head -n 3 "$file" | grep -q 'SPDX-FileCopyrightText: The Cofuse authors' &&
            head -n 3 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || echo "$file"
    done)

found "#if 0" < <(places '^[[:space:]]*#[[:space:]]*if[[:space:]]+0' "${code[@]}")
found "reserved name (double underscore)" < <(places '\b[cC][oO][fF][iIkK]?__' "${code[@]}")
found "TODO without an issue number, as in TODO(#12)" < <(
    grep -HnE '\b(TODO|FIXME|XXX)\b' -- "${source[@]}" | grep -v '^ci/check_style\.sh:' |
        grep -vE '(TODO|FIXME)\(#[0-9]+\)' | cut -d: -f1,2)
# What a kernel does to memory that others see has its order in its name: src/device.
mapfile -t kernels < <(printf '%s\n' "${code[@]}" | grep -E '\.cuh?$')
if [ ${#kernels[@]} -gt 0 ]; then
    found "inline PTX, volatile, system-wide fences and atomics are for src/device" < <(
        places '\b(asm|volatile|__threadfence_system|atomic[A-Za-z]+_system|__nanosleep)\b' \
            "${kernels[@]}")
    found "kernels are cofk_*" < <(
        grep -HnE '__global__' -- "${kernels[@]}" | grep -vE 'cofk_|__launch_bounds__' |
            cut -d: -f1,2)
fi
found "path of one machine" < <(places '(^|[^A-Za-z0-9_.$}/])/(wor[k]|roo[t]|hom[e])/' "${text[@]}")

for file in "${code[@]}" "${scripts[@]}"; do
    n=$(wc -l <"$file")
    if [ "$n" -gt $MAX_LINES ]; then
        found "$n lines, at most $MAX_LINES" <<<"$file"
    elif [ "$n" -gt $NOTE_LINES ]; then
        echo "$file: note: $n lines, aim at 300"
    fi
done

# Functions open and close with a brace in column 0.
mapfile -t c_files < <(printf '%s\n' "${code[@]}" | grep -vE '\.inc$')
found "function over $MAX_FUNCTION lines" < <(
    awk -v max=$MAX_FUNCTION '
        FNR == 1 { start = 0 }
        /^\{$/ { start = FNR }
        /^\}/ { if (start && FNR - start > max) print FILENAME ":" start; start = 0 }
    ' "${c_files[@]}")

# A log line or a backtrace names a file by its base name. A public header and the internal one
# beside it may share theirs; examples are programs of their own.
found "base name used twice" < <(
    printf '%s\n' "${code[@]}" "${scripts[@]}" | grep -vE '^(examples|include)/' |
        awk -F/ '{ if ($NF in seen) print $0 " and " seen[$NF]; seen[$NF] = $0 }')

if command -v shellcheck >/dev/null; then
    found "shellcheck" < <(shellcheck -f gcc -s bash -- "${scripts[@]}" 2>&1 | cut -d: -f1,2,4-)
fi

[ $n_findings -eq 0 ] || {
    echo "$n_findings findings"
    exit 1
}
