# The monitor's BPF object. No kernel headers, no BTF at build time: dg_kernel.h is relocated when it is loaded.
# SPDX-License-Identifier: Apache-2.0
BPF_CLANG ?= $(firstword $(shell command -v clang-14 || command -v clang) clang-14)
BPF_STRIP ?= $(firstword $(shell command -v llvm-strip-14 || command -v llvm-strip) llvm-strip-14)
bpf_dir := $(dir $(abspath $(lastword $(MAKEFILE_LIST))))
# Tracepoint signatures name arguments that a program may not use.
BPF_FLAGS := -std=gnu11 -target bpf -mcpu=v3 -O2 -g -Wall -Wextra -Werror -Wno-unused-parameter \
	-D__TARGET_ARCH_x86 -I/usr/include/x86_64-linux-gnu

NATIVE_TARGETS += $(OUT)/dg_guard.bpf.o

# strip -g drops DWARF (it holds paths of the building machine) and keeps BTF. Renamed last: a guard that starts
# meanwhile never sees half an object.
$(OUT)/dg_guard.bpf.o: $(bpf_dir)dg_guard.bpf.c $(wildcard $(bpf_dir)*.h) $(bpf_dir)bpf.mk | $(OUT)
	$(BPF_CLANG) $(BPF_FLAGS) -c $< -o $@.new
	$(BPF_STRIP) -g $@.new
	mv $@.new $@
