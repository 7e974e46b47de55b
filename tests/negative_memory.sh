#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Memory that one rank is refused, by a fault hook: an error on all ranks, and nothing is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
build/fault/tests/unit_attention_failure
