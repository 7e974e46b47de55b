# SPDX-FileCopyrightText: The Cofuse authors
# SPDX-License-Identifier: Apache-2.0
#
# Thin: CMake builds (CMakePresets.json), scripts test. `make help` lists the targets.

.PHONY: all setup setup-test demo test test-gpu check bench bench-gpu asan ubsan tsan install clean
.PHONY: help models-full published
.NOTPARALLEL:
PREFIX ?= /usr/local

all: setup
	@ci/build.sh release

setup:
	@ci/setup.sh

setup-test:
	@ci/setup.sh test

demo: all
	@ci/demo.sh

test: setup-test all
	@tests/run_tests.sh

test-gpu: all
	@tests/run_gpu.sh --json build/test-gpu.json

check: all
	@build/cofuse check --ranks 1,2,3,4

bench: all
	@build/cofuse bench --json build/bench.json

bench-gpu: all
	@bench/bench_gpu.sh --json build/bench-gpu.json

published: all
	@python/build_site.sh
	@bench/published.sh

models-full: setup-test
	@ci/check_models.sh --full

asan ubsan tsan: setup-test
	@tests/run_tests.sh $@

install: all
	@cmake --install build --prefix $(PREFIX)
	@[ -n "$(DESTDIR)" ] || [ "$$(id -u)" -ne 0 ] || PATH=$$PATH:/usr/sbin:/sbin ldconfig

clean:
	@rm -rf build

help:
	@echo "make          build/libcofuse.so and build/cofuse, after installing what is missing"
	@echo "make demo     operators over several ranks on sample tensors, beside the reference"
	@echo "make test     every test"
	@echo "make test-gpu what needs CUDA devices, on one and on all; build/test-gpu.json"
	@echo "make check    every kernel against its reference"
	@echo "make bench    times the same calls; build/bench.json"
	@echo "make bench-gpu the same on CUDA devices; build/bench-gpu.json"
	@echo "make published  the published tables on CUDA devices, and rivals; build/published"
	@echo "make asan     unit tests and a short check under AddressSanitizer; also: ubsan, tsan"
	@echo "make models-full  the protocol models, with the sizes that take long too"
	@echo "make install  into PREFIX ($(PREFIX))"
	@echo "make clean    removes build/"
