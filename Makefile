# make setup   everything a fresh Debian 12 needs (as root): apt packages, virtual environment, native build
# make demo    an honest and a cheating agent under the guard; results in build/demo/
# make test    setup, linters and the whole test suite
# make lint    ruff and mypy
# make clean   all that the above made, the virtual environment excepted

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMPS := build/stamps

# What building and running needs, and what tests compare with (bubblewrap).
APT_PACKAGES := bubblewrap ca-certificates clang-14 gcc git libbpf-dev libbpf1 libc6-dev libseccomp2 linux-libc-dev \
                llvm-14 make musl-tools procps python3 python3-venv

.PHONY: setup demo test lint clean native doctor packages
.DEFAULT_GOAL := setup

setup: packages $(STAMPS)/venv native doctor

packages:
	@missing=(); \
	for p in $(APT_PACKAGES); do \
	  state=$$(dpkg-query -W -f='$${db:Status-Status}' "$$p" 2>/dev/null || true); \
	  [ "$$state" = installed ] || missing+=("$$p"); \
	done; \
	if [ "$${#missing[@]}" -gt 0 ]; then \
	  if [ "$$(id -u)" != 0 ]; then \
	    echo "make setup: packages are missing and only root can install them: apt-get install $${missing[*]}" >&2; exit 1; \
	  fi; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get install -y --no-install-recommends "$${missing[@]}" \
	    || { apt-get update && apt-get install -y --no-install-recommends "$${missing[@]}"; }; \
	fi

# The newest interpreter of 3.11 or later; a stamp older than the build files makes pip look again.
$(STAMPS)/venv: pyproject.toml setup.py | packages
	@mkdir -p $(STAMPS)
	@if [ ! -x $(PYTHON) ]; then \
	  for p in /usr/bin/python3 python3.13 python3.12 python3.11 python3; do \
	    if "$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$p; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then \
	    echo "make setup: no Python 3.11 or later with venv here: apt-get install python3.11-venv" >&2; exit 1; \
	  fi; \
	  "$$found" -m venv $(VENV); \
	fi
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[guard,test,dev]'
	@touch $@

native: | packages
	@$(MAKE) --no-print-directory -C dsec_guard/native all

# Says which layer this host lacks and how to enable it; a missing one stops whoever needs it, not the set-up.
doctor: $(STAMPS)/venv native
	@$(VENV)/bin/dsec-guard doctor > build/doctor.txt 2>&1 \
	  || { cat build/doctor.txt; echo "make setup: this host lacks something that dsec-guard needs, see above" >&2; }

demo: setup
	$(PYTHON) demo/run.py --out build/demo

lint: $(STAMPS)/venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: setup lint
	$(PYTHON) -m pytest -o cache_dir=build/pytest_cache

clean:
	rm -rf build dist *.egg-info dsec_guard/_native .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dsec_guard tests demo -name __pycache__ -type d -prune -exec rm -rf {} +
