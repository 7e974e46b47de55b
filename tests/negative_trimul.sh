#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# trimul with one protocol step left out (src/core/faults.h): its checks must fail.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
cofuse=${COFUSE:-build/fault/cofuse}
export COFUSE_TIMEOUT=3 COFUSE_INIT_TIMEOUT=20
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# shellcheck source=tests/expect.sh
source tests/expect.sh

check=("$cofuse" check 'trimul*delay=random*' --ranks 3)
control NONE 0 "${check[@]}"
for step in TRI_AB_WAIT TRI_TRI_WAIT TRI_DTRI_WAIT TRI_DAB_WAIT TRI_PARTS_WAIT TRI_SUMS_WAIT \
    TRI_HASH_WAIT; do
    control $step "1 3" "${check[@]}"
done
closing
