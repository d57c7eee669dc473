# dg-launcher and dg-init: static, so that a fork copies few pages and exec maps no loader.
# SPDX-License-Identifier: Apache-2.0
# musl starts in a tenth of the time of a static glibc program; -idirafter only serves <linux/...> and <asm/...>.
DG_STATIC_CC ?= $(if $(shell command -v musl-gcc),musl-gcc -idirafter /usr/include -idirafter /usr/include/x86_64-linux-gnu,$(CC))
DG_STATIC_LD := -static -Wl,-z,relro,-z,now,-z,noexecstack
dg_headers := $(native_dir)dg_plan.h $(native_dir)dg_kernel.h $(native_dir)dg_common.h $(native_dir)dg_setup.h
dg_launcher_src := $(addprefix $(native_dir),dg_launch.c dg_setup.c dg_root.c dg_landlock.c dg_userns.c dg_check.c dg_common.c)
dg_init_src := $(addprefix $(native_dir),dg_init.c dg_check.c dg_common.c)

NATIVE_TARGETS += $(OUT)/dg-launcher $(OUT)/dg-init

$(OUT)/dg-launcher: $(dg_launcher_src) $(dg_headers) $(native_dir)launcher.mk | $(OUT)
	$(DG_STATIC_CC) $(DG_WARN) $(DG_HARDEN) -o $@ $(dg_launcher_src) $(DG_STATIC_LD)

$(OUT)/dg-init: $(dg_init_src) $(dg_headers) $(native_dir)launcher.mk | $(OUT)
	$(DG_STATIC_CC) $(DG_WARN) $(DG_HARDEN) -o $@ $(dg_init_src) $(DG_STATIC_LD)
