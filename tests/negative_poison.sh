#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# A rank whose deadline passes without telling the others must be noticed by the test of it, which
# passes with no step left out.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
test=build/fault/tests/unit_attention_failure
COFUSE_FAULT=NONE $test || { echo "fails with no step left out"; exit 1; }
COFUSE_FAULT=POISON $test && { echo "passes without POISON"; exit 1; }
echo "ok POISON is noticed"
