# dg-holder: outlives the guard, cleans up after it, answers fanotify and seccomp events.
HOLDER_DIR := $(dir $(lastword $(MAKEFILE_LIST)))
HOLDER_BIN := $(OUT)/dg-holder
HOLDER_SOURCES := $(addprefix $(HOLDER_DIR),dg_holder.c dg_holder_box.c dg_holder_task.c dg_cleanup.c dg_fanotify.c \
	dg_notify.c)
HOLDER_HEADERS := $(addprefix $(HOLDER_DIR),dg_holder.h dg_holder_state.h)
HOLDER_CFLAGS := -std=gnu11 -O2 -g0 -Wall -Wextra -Werror -Wshadow -Wformat=2 -fstack-protector-strong \
	-D_FORTIFY_SOURCE=2 -D_GNU_SOURCE -fPIE -fno-plt -fstack-clash-protection -fcf-protection
HOLDER_LDFLAGS := -pie -Wl,-z,relro,-z,now,-z,noexecstack -pthread

NATIVE_TARGETS += $(HOLDER_BIN)

# Renamed last: a guard that starts meanwhile never runs a half-written file.
$(HOLDER_BIN): $(HOLDER_SOURCES) $(HOLDER_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(HOLDER_CFLAGS) -o $@.new $(HOLDER_SOURCES) $(HOLDER_LDFLAGS)
	mv $@.new $@
