#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# `cofuse bench`: every case of --tiny runs in every way; what it writes it reads back, and finds no
# slower than itself; a baseline twice as fast is refused; a rank that dies is exit status 3.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/cofuse}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh

json=$scratch/first.json
expect "tiny" 0 'backward' "$cofuse" bench --tiny --ranks 1,2 --json "$json"
expect "tiny with buffers in turn" 0 'cold  no' "$cofuse" bench --tiny --ranks 3 \
    --engine thread --cache cold --threads 1 --warmup 0 --repeat 2
expect "tiny in the other ways" 0 'warm  yes' "$cofuse" bench --tiny --ranks 1,3 \
    --engine thread --staged both --pin both --threads 1 --warmup 0 --repeat 2
expect "each variant is listed once" 0 'ranks=3' \
    bash -c "'$cofuse' bench --tiny --ranks 1,3 --staged both --list | tee '$scratch/list'
             [ -z \"\$(sort '$scratch/list' | uniq -d)\" ]"

# Each variant of the list has a result for each of its calls: attention two, runtime two, but
# large transfers one, the others one.
"$cofuse" bench --tiny --ranks 1,2 --list >"$scratch/list"
one_call='direction=forward|^(grad_return|allreduce_rmsnorm) |^runtime .*bytes=[0-9]{5}'
n_wanted=$((2 * $(wc -l <"$scratch/list") - $(grep -cE "$one_call" "$scratch/list")))
n_results=$(grep -c '"key":' "$json")
expect "$n_wanted results" 0 '' test "$n_results" -eq "$n_wanted"

expect "equal to itself" 0 "^$n_results compared, 0 slower\$" \
    "$cofuse" bench --from "$json" --baseline "$json"
expect "Markdown" 0 '^\| attention .*\| forward \| 1 x ' \
    "$cofuse" bench --from "$json" --markdown

# halve FILE: all times; a band is given, for a single start on a busy machine tells no spread.
awk '/"(median|p90|p99|min)_s":/ { match($0, /[0-9.e+-]+,?$/)
         printf "%s%.9g,\n", substr($0, 1, RSTART - 1), substr($0, RSTART) / 2; next } { print }' \
    "$json" >"$scratch/half.json"
expect "slower than a baseline twice as fast" 1 "^$n_results compared, $n_results slower\$" \
    "$cofuse" bench --from "$json" --baseline "$scratch/half.json" --band 50
expect "twice as fast as the baseline" 0 ' 0 slower$' \
    "$cofuse" bench --from "$scratch/half.json" --baseline "$json" --band 50

sed -e '0,/ranks=1 /s//ranks=77 /' -e 's/"cpu": "[^"]*"/"cpu": "another"/' "$json" \
    >"$scratch/other.json"
expect "a new case" 0 '^new, not in the baseline: ' \
    "$cofuse" bench --from "$json" --baseline "$scratch/other.json"
expect "a missing case" 0 '^missing, in the baseline only: .*ranks=77 ' \
    "$cofuse" bench --from "$json" --baseline "$scratch/other.json"
expect "another machine" 0 '^another machine: cpu ' \
    "$cofuse" bench --from "$json" --baseline "$scratch/other.json"
sed 's/"key": "/"key": "x/' "$json" >"$scratch/none.json"
expect "nothing in common" 2 'none of the results' \
    "$cofuse" bench --from "$json" --baseline "$scratch/none.json"

# Documents and options that are wrong: exit status 2, and what was wanted.
sed 's/"schema": 1/"schema": 99/' "$json" >"$scratch/schema.json"
expect "another schema" 2 '"schema" = 99: wanted 1' "$cofuse" bench --from "$scratch/schema.json"
sed 's/"median_s": [^,]*/"median_s": "fast"/' "$json" >"$scratch/type.json"
expect "a text for a number" 2 '"median_s" is missing or wrong' \
    "$cofuse" bench --from "$scratch/type.json"
head -c 500 "$json" >"$scratch/cut.json"
expect "half a document" 2 'cut.json:[0-9]+: ' "$cofuse" bench --from "$scratch/cut.json"
for option in --ranks=0 --pin=maybe --cache=hot --staged=1 --processes=0 --processes=101 \
    --repeat=0 --warmup=-1 --seconds=-1 --threads=257 --engine=gpu --band=-1 --device=tpu; do
    expect "$option" 2 "option ${option%%=*} = \"${option#*=}\": wanted " \
        "$cofuse" bench "$option"
done
expect "--markdown alone" 2 'wanted --from' "$cofuse" bench --markdown
for words in attention --list '--ranks 2' '--tiny' '--device cuda' "--json $scratch/x"; do
    # shellcheck disable=SC2086
    expect "--from with $words" 2 'option --from = .* wanted no PATTERN, --list or option of' \
        "$cofuse" bench --from "$json" $words
done
expect "--band alone" 2 'option --band: wanted --baseline FILE' "$cofuse" bench --tiny --band 3
expect "--list with --json" 2 'option --list: wanted no --json' "$cofuse" bench --tiny --list \
    --json "$scratch/x"
expect "--list with --baseline" 2 'option --list: wanted no --baseline' "$cofuse" bench --tiny \
    --list --baseline "$json"
# A message names the word that is wrong, wherever words without a dash stand.
expect "an unknown option" 2 'unknown option --bogus$' "$cofuse" bench causal --bogus
expect "an unknown letter" 2 'unknown option -x$' "$cofuse" bench causal --list -xh causal
expect "a missing value" 2 'option --ranks: a value is missing$' "$cofuse" bench causal --ranks
expect "a surplus value" 2 'option --list takes no value$' "$cofuse" bench causal --list=3 causal
expect "COFUSE_ENGINE=thread" 0 'engine=thread' \
    env COFUSE_ENGINE=thread "$cofuse" bench --tiny --list
sample=samples/minilm_qkv.safetensors
for words in 'bench --tiny --list' 'check runtime --list' "run attention -i $sample"; do
    # shellcheck disable=SC2086
    expect "COFUSE_ENGINE=cuda without --device cuda: $words" 2 \
        'variable COFUSE_ENGINE = "cuda": wanted --device cuda with it$' \
        env COFUSE_ENGINE=cuda "$cofuse" $words
done
expect "--engine comes before COFUSE_ENGINE=cuda" 0 'engine=shm' env COFUSE_ENGINE=cuda "$cofuse" \
    bench --tiny --list --engine shm
expect "COFUSE_ENGINE=cuda with --device cuda" 0 'engine=cuda' env COFUSE_ENGINE=cuda "$cofuse" \
    bench --list --device cuda
expect "COFUSE_ENGINE=cuda beside results" 0 "compared" env COFUSE_ENGINE=cuda "$cofuse" bench \
    --from "$json" --baseline "$json"
expect "COFUSE_ENGINE=thread with --device cuda" 2 \
    'variable COFUSE_ENGINE = "thread": wanted shm with --device cuda' env COFUSE_ENGINE=thread \
    "$cofuse" run attention -i $sample --device cuda
to_full() { "$@" >/dev/full; }
for words in --help --version help 'bench --help' 'bench --list'; do
    # shellcheck disable=SC2086
    expect "output that cannot be written: $words" 3 'standard output: No space left' \
        to_full "$cofuse" $words
done
expect "no such variant" 2 'no variant matches "nothing"' "$cofuse" bench nothing
expect "--json into nowhere" 2 'nowhere/x' "$cofuse" bench --tiny --json "$scratch/nowhere/x"
mkfifo "$scratch/fifo"
expect "--json into a pipe" 2 'fifo: it exists and is not a regular file' \
    "$cofuse" bench --tiny --json "$scratch/fifo"
echo 'old' >"$scratch/behind"
ln -s "$scratch/behind" "$scratch/link"
expect "--json through a link" 0 '' "$cofuse" bench transfer=pull --tiny --ranks 1 \
    --json "$scratch/link"
expect "the link stays" 0 '' test -L "$scratch/link"
expect "its file is new" 0 '' grep -q '"schema"' "$scratch/behind"
rm "$scratch/behind"
expect "--json through a link to no file" 0 '' "$cofuse" bench transfer=pull --tiny --ranks 1 \
    --json "$scratch/link"
expect "this link stays" 0 '' test -L "$scratch/link"
expect "its file is there" 0 '' grep -q '"schema"' "$scratch/behind"
printf 'grad_return S=7 Hkv=1 Dk=8 # \xc3\xa9\n' >"$scratch/shapes"
expect "text that is no UTF-8 in the command" 0 '' "$cofuse" bench --shapes "$scratch/shapes" \
    --ranks 1 --processes 1 --repeat 1 --json "$scratch/bytes.json" 'S=7*' $'no\xffsuch' $'\xc3\xa9'
expect "bad bytes are ?" 0 '' grep -qF $'S=7* no?such \xc3\xa9"' "$scratch/bytes.json"
expect "COFUSE_PIN=no" 0 'pin=no .*staged=no' env COFUSE_PIN=no "$cofuse" bench --tiny --list
expect "--pin beats it" 0 'pin=auto .*staged=no' env COFUSE_PIN=no "$cofuse" bench --tiny \
    --pin yes --list
expect "COFUSE_FORCE_STAGED=1" 0 'ranks=2 .*pin=auto .*staged=yes' \
    env COFUSE_FORCE_STAGED=1 "$cofuse" bench --tiny --list
shape() { # TEXT WANTED
    printf '\n%s # comment\n' "$1" >"$scratch/shapes"
    expect "shape $1" 2 "line 2: .*$2" "$cofuse" bench --shapes "$scratch/shapes"
}
shape 'nobody S=3' 'wanted an operator'
shape $'attention S=3 H=1 Dqk=8 name=\xff' 'wanted ASCII, found a byte 0xff'
shape 'attention S=3' 'H is missing'
shape 'attention S=3 H=3 Hkv=2 Dqk=8' 'a divisor of H = 3'
shape 'attention S=3 H=3 Dqk=8 speed=9' 'speed=9'
shape 'attention S=-3 H=3 Dqk=8' 'S = "-3": wanted'
shape 'attention S=3 H=3 Dqk=8 mask=some' 'wanted one of none\|causal'
shape 'attention S=3 H=3 Dqk=8 schedule=fast' 'wanted one of default\|ring\|gather'
shape 'grad_return S=3 Dk=8' 'Hkv is missing'
shape 'allreduce_rmsnorm T=3' 'H is missing: wanted T and H'
shape 'allreduce_rmsnorm T=3 H=8 variant=sum' 'wanted one of residual_norm\|norm\|only'
shape 'allreduce_rmsnorm T=3 H=8 eps=x' 'eps = "x": wanted a number'
shape 'allreduce_rmsnorm T=3 H=8 S=4' 'word "S=4": wanted one of T, H'
shape 'grad_return S=3 Hkv=1 Dk=8 H=1' 'word "H=1": wanted one of'
shape 'grad_return S=3 Hkv=1 Dk=8 writers=table' 'wanted one of all\|causal'
shape 'runtime count=3' 'form is missing'
shape 'runtime form=put' 'bytes = 0: wanted with form=put'
shape 'runtime form=put bytes=8 by=stream' 'by: no such way of this form'
shape 'runtime form=round by=kernel how=graph' 'wanted eager of rounds within one kernel'
shape 'attention S=3 H=1 Dqk=8 wire=f16' 'wire = "f16": wanted'
shape 'grad_return S=3 Hkv=1 Dk=8 dtype=f32 partial=bf16' 'partial = "bf16": wanted'

# Lines that do not fit: as long as a line may be, one more, and cut at a blank, or at a byte 0.
long_line() { # BYTES: a case of so many bytes
    local line='grad_return S=3 Hkv=1 Dk=8'
    while [ $((${#line} + 6)) -le "$1" ]; do
        line+=' Hkv=1'
    done
    printf '%s%s\n' "$line" "$(head -c $(($1 - ${#line})) /dev/zero | tr '\0' 8)"
}
long_line 398 >"$scratch/shapes"
expect "a line of 398 bytes" 0 'Hkv=1' "$cofuse" bench --shapes "$scratch/shapes" --list
long_line 399 >"$scratch/shapes"
expect "a line of 399 bytes" 2 'line 1: wanted at most 398 bytes' \
    "$cofuse" bench --shapes "$scratch/shapes" --list
echo "$(long_line 398) Hkv=2" >"$scratch/shapes"
expect "a line with a blank where it would be cut" 2 'line 1: wanted at most 398 bytes' \
    "$cofuse" bench --shapes "$scratch/shapes" --list
printf '# \0\ngrad_return S=3 Hkv=1 Dk=8\ngrad_return S=5\0 Hkv=1 Dk=8\n' >"$scratch/shapes"
expect "a byte 0" 2 'line 3: wanted ASCII, found a byte 0x00' \
    "$cofuse" bench --shapes "$scratch/shapes" --list

# A describe line is a case, and the plan of this case has the same describe line.
plan_of() { # FILE ARGUMENTS...: the last plan line with all of these
    local file=$1 lines word
    shift
    lines=$(sed -n 's/^ *"plan": "\(.*\)",*$/\1/p' "$file")
    for word; do lines=$(grep -F -e "$word" <<<"$lines"); done
    tail -n 1 <<<"$lines"
}
for words in attention 'attention schedule=gather save_kv=1' 'attention schedule=ring save_kv=1' \
    'grad_return by=section' 'grad_return transfer=pull' 'allreduce_rmsnorm arena=own'; do
    # shellcheck disable=SC2086
    plan=$(plan_of "$json" "P=2 " $words)
    echo "$plan" >"$scratch/shapes"
    expect "the describe line of a plan: $words" 0 "$(cut -d' ' -f1-4 <<<"$plan")" \
        "$cofuse" bench --shapes "$scratch/shapes" --ranks 2 --processes 1 --repeat 1 \
        --json "$scratch/again.json"
    expect "it comes back" 0 '' test "$(plan_of "$scratch/again.json")" = "$plan"
done
words='algorithm=auto one_shot_rows=all units=lines max_ctas=0 P=2 engine=cuda device=cuda'
echo "allreduce_rmsnorm dtype=bf16 H=8 max_tokens=2 $words" >"$scratch/shapes"
expect "a describe line from devices" 0 'allreduce_rmsnorm dtype=bf16 H=8' \
    "$cofuse" bench --shapes "$scratch/shapes" --ranks 2 --list
echo 'attention S=8 H=1 Dqk=600' >"$scratch/shapes"
expect "what the plan refuses" 2 'head_dim_qk = 600: wanted' \
    "$cofuse" bench --shapes "$scratch/shapes" --ranks 2

echo 'runtime form=put bytes=64 how=graph' >"$scratch/shapes"
expect "what only devices do" 4 'wanted by=call how=eager busy=0 on the CPU' \
    "$cofuse" bench --shapes "$scratch/shapes" --ranks 2
expect "operators without a form on devices" 2 'wanted an operator with a bench on CUDA devices' \
    "$cofuse" bench --shapes <(echo 'trimul N=8 D=8') --device cuda --list
expect "cases of devices" 0 '^runtime form=round by=stream how=graph ranks=2 engine=cuda ' \
    "$cofuse" bench --device cuda --ranks 2 --list

# 256 x 10000 times do not fit the address space that the program and its libraries leave: a failure
# that is told, in the document too.
little=$(($(size "$cofuse" | awk 'NR == 2 { print int($4 / 1024) }') + 16000))
expect "no shared memory" 3 '^FAIL grad_return .* no [0-9]+ bytes of shared memory' \
    bash -c "ulimit -v $little; exec \"\$@\"" - "$cofuse" bench transfer=pull --tiny --ranks 256 \
    --repeat 10000 --json "$scratch/failed.json"
expect "it is in the document" 0 '' grep -qE '"error": "no [0-9]+ bytes' "$scratch/failed.json"

# A rank is killed while others wait for it; what was measured before is kept.
killed() {
    local pid=
    "$cofuse" bench --shapes "$scratch/shapes" --ranks 1,3 --processes 1 --warmup 0 \
        --repeat 10000 --seconds "$1" --json "$scratch/killed.json" &
    local parent=$!
    for _ in $(seq 600); do
        pid=$(ranks_alive 1 | head -n 1)
        [ -z "$pid" ] || break
        sleep 0.05
    done
    sleep 0.3
    [ -z "$pid" ] || kill -KILL "$pid"
    wait "$parent"
}
echo 'attention S=1024 H=4 Dqk=64' >"$scratch/shapes"
expect "a rank that is killed" 3 'rank 1 was killed by signal 9' killed 1
expect "the results beside it" 0 '"failures": \[$' \
    grep -E '"(key|error|failures)":' "$scratch/killed.json"
expect "the results beside it can be read" 0 'backward' \
    "$cofuse" bench --from "$scratch/killed.json"

closing
