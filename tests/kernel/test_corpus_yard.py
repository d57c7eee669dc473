"""The corpus runner's surroundings, with real namespaces: the yard, the sink, the stand-in, the prober, the refusal."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsec_guard.corpus.manifest import load_corpus
from dsec_guard.corpus.outside import SINK_ADDRESS, SINK_PORTS, HostProber, Sink, Yard, stand_in
from dsec_guard.corpus.runner import CorpusSession
from dsec_guard.errors import HostError

OWN = Path(__file__).resolve().parents[1] / "corpus"
LAYOUT = OWN / "layout.py"
pytestmark = [pytest.mark.needs("root"), pytest.mark.needs("namespaces")]

TALK = f"""
import socket, sys
with socket.create_connection(({SINK_ADDRESS!r}, {SINK_PORTS["main"]}), timeout=3) as s:
    s.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
    sys.exit(0 if b"outside" in s.recv(200) else 1)
"""


def test_the_sink_answers_inside_the_yard_and_is_unknown_outside(tmp_path):
    with Yard() as yard:
        sink = Sink(LAYOUT, yard, tmp_path)
        try:
            assert sink.size() == 0
            inside = subprocess.run(yard.wrap([sys.executable, "-c", TALK]), timeout=20, check=False)
            assert inside.returncode == 0
            assert sink.size() > 0
            outside = subprocess.run([sys.executable, "-c", TALK], timeout=20, check=False, stderr=subprocess.DEVNULL)
            assert outside.returncode != 0
            assert sink.environment()["DSG_SINK"] == f"{SINK_ADDRESS}:{SINK_PORTS['main']}"
        finally:
            sink.stop()


def test_the_stand_ins_abstract_socket_belongs_to_the_yard(tmp_path):
    subprocess.run([sys.executable, str(LAYOUT), "build", str(tmp_path / "task")], check=True)
    ask = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0dsec-guard-selftest'); print(s.recv(100).decode())"
    with Yard() as yard, stand_in(LAYOUT, yard, tmp_path / "task"):
        told = subprocess.run(yard.wrap([sys.executable, "-c", ask]), capture_output=True, text=True, timeout=20, check=True)
        assert told.stdout.startswith("LOCKED-socket-")
        with socket.socket(socket.AF_UNIX) as s, pytest.raises(ConnectionRefusedError):
            s.connect("\0dsec-guard-selftest")


def test_nothing_of_the_yard_is_left():
    with Yard() as yard:
        pid = yard._keeper.process.pid
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_the_prober_measures_rounds(tmp_path):
    prober = HostProber(tmp_path)
    log = tmp_path / "prober.log"
    deadline = time.monotonic() + 20
    while log.read_text().count("seconds") < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    rounds, slowest = prober.stop()
    assert rounds >= 2
    assert 0 < slowest < 20


@pytest.mark.parametrize("bare", [
    ("sh", "-c", 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"', "sh"),   # runs the command on the host
    ("false",),
])
def test_no_probe_is_started_when_the_guard_does_not_bind(bare):
    with pytest.raises(HostError) as e, CorpusSession(load_corpus(OWN), cli=bare):
        pytest.fail("the session began")
    assert "no probe is started" in str(e.value) or "never started without it" in str(e.value)
