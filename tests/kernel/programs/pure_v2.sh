#!/bin/sh
# pure_v2.sh DSEC_GUARD OUTDIR: runs under cgroup version 2 alone, for test_pure_v2.py. Results go to OUTDIR.
set -eu
test "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs
place=$(mktemp -d)
mkdir "$place/work" "$place/state" "$place/run"
export DSEC_GUARD_STATE="$place/state" DSEC_GUARD_RUN_DIR="$place/run"
cd "$place/work"
before=$(find /sys/fs/cgroup -type d | wc -l)
guarded() {
	name=$1
	shift
	"$dsec_guard" run --quiet --report "$out/$name.json" "$@" || true
}
dsec_guard=$1 out=$2
guarded clean -- sh -c 'echo kept > kept'
guarded memory --limit memory=64MiB -- python3 -c 'b = bytearray(200 << 20)'
guarded pids --limit pids=16 -- sh -c 'i=0; while [ $i -lt 40 ]; do sleep 1 & i=$((i+1)); done; wait'
guarded cgroup -- sh -c 'echo 1 > /sys/fs/cgroup/memory.max; echo 0 > /sys/fs/cgroup/cgroup.procs'
cp kept "$out/kept"
echo "$(($(find /sys/fs/cgroup -type d | wc -l) - before))" > "$out/left"
