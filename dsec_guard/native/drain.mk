# libdgdrain.so: the ring buffers' reader, loaded by monitor/loader.py.
# SPDX-License-Identifier: Apache-2.0
NATIVE_TARGETS += $(OUT)/libdgdrain.so

$(OUT)/libdgdrain.so: $(native_dir)dg_drain.c $(native_dir)drain.mk | $(OUT)
	$(CC) $(DG_WARN) $(DG_HARDEN) -D_FORTIFY_SOURCE=2 -fPIC -fvisibility=hidden -shared -o $@.new $< \
		-Wl,-z,relro,-z,now,-z,noexecstack
	mv $@.new $@
