"""Runs a directory of behaviour probes under the guard and compares what happened with what its manifest expects.

manifest.py   the directory's own files: what each probe is, and the facts of the task
policy.py     those facts as a policy for one probe
outside.py    what stands around a box: a network of our own, the sink, the stand-in, a process that watches the host
watch.py      what one `dsec-guard run` started and used, seen from outside while it runs
checks.py     the `after` checks
judge.py      expectation against observation
runner.py     one probe, and all of them
"""
