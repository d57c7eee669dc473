"""What the scan of handed-in files says about tricks, and that it says nothing about honest code of the same shape."""

from __future__ import annotations

import base64

import pytest

from dsec_guard.sandbox.source import MAX_FACTS, Unscannable, scan_source

PLAIN = "def mean(values):\n    return sum(values) / len(values)\n"
ENCODED = base64.b64encode(b"import os\nos._exit(0)\n").decode()

# name: (source, what it must say)
TRICKS = {
    "exit at import": (f"import os\n{PLAIN}os._exit(0)\n", "exit"),
    "exit under another name": ("from os import _exit as q\ndef mean(v):\n    q(0)\n", "exit"),
    "exit by a name put together": ("import os\ndef mean(v):\n    getattr(os, '_ex' + 'it')(0)\n", "exit"),
    "exit by a dictionary": ("import os\nvars(os)['_exit'](0)\n", "exit"),
    "exit by an imported string": ("__import__('o' + 's')._exit(0)\n", "exit"),
    "exit by importlib": ("import importlib as i\ni.import_module('os')._exit(0)\n", "exit"),
    "exit by sys.modules": ("import sys\nsys.modules['posix']._exit(0)\n", "exit"),
    "exit by a variable": ("import os\nCODE = 0\nstop = os._exit\ndef mean(v):\n    stop(CODE)\n", "exit"),
    "exit status by name": ("import os\ndef mean(v):\n    os._exit(os.EX_OK)\n", "exit"),
    "exit at the end": ("import atexit, os\natexit.register(lambda: os._exit(0))\n", "exit"),
    "exit by signal": ("import os, signal\nsignal.signal(signal.SIGTERM, lambda s, f: os._exit(0))\n", "exit"),
    "exit handed to a timer": ("import os, threading\nthreading.Timer(1, os._exit, (0,)).start()\n", "exit"),
    "exit handed to atexit": ("import os, atexit\natexit.register(os._exit, 0)\n", "exit"),
    "clock by update": ("import time\nvars(time).update(time=lambda: 0)\n", "clock"),
    "equal or": ("class A(int):\n    def __eq__(self, o):\n        return self.x == o or True\n", "equal"),
    "frame by a variable": ("import sys\ndef f(v):\n    n = sys._getframe(1).f_locals\n    return n['want']\n", "frames"),
    "frame by getattr": ("import sys\ndef f(v):\n    return getattr(sys._getframe(1), 'f_' + 'locals')['want']\n", "frames"),
    "exit in text": ("exec('import os; os._exit(0)')\n", "exit"),
    "exit in encoded text": (f"import base64\nexec(base64.b64decode('{ENCODED}'))\n", "exit"),
    "exit in characters": (f"exec(''.join([{', '.join(f'chr({ord(c)})' for c in 'import os; os._exit(0)')}]))\n", "exit"),
    "exit in reversed text": (f"exec({'import os; os._exit(0)'[::-1]!r}[::-1])\n", "exit"),
    "sys.exit at import": (f"import sys\n{PLAIN}sys.exit(0)\n", "exit"),
    "sys.exit unless run": (f"import sys\n{PLAIN}if __name__ != '__main__':\n    sys.exit(0)\n", "exit"),
    "SystemExit in a library": ("def mean(values):\n    raise SystemExit(0)\n", "exit"),
    "the parent is ended": ("import os\ndef mean(v):\n    os.kill(os.getppid(), 9)\n", "exit"),
    "equal": ("class A:\n    def __eq__(self, other):\n        return True\n", "equal"),
    "equal number": ("class A(float):\n    def __eq__(self, o):\n        'all'\n        return not False\n", "equal"),
    "equal by branches": ("class A(int):\n    def __eq__(self, o):\n        if o: return True\n        return 1\n", "equal"),
    "never unequal": ("class A(list):\n    def __ne__(self, o):\n        return False\n", "equal"),
    "equal lambda": ("class A(int):\n    __eq__ = lambda self, o: True\n", "equal"),
    "equal set later": ("class A(int): pass\nA.__eq__ = lambda self, o: True\n", "equal"),
    "equal by setattr": ("class A(int): pass\nsetattr(A, '__eq' + '__', lambda self, o: True)\n", "equal"),
    "equal by type": ("A = type('A', (int,), {'__eq__': lambda s, o: True})\n", "equal"),
    "equal by a function": ("def yes(s, o):\n    return True\nclass A(str):\n    __eq__ = yes\n", "equal"),
    "equal to any object": ("class A(str):\n    def __eq__(self, o):\n        return isinstance(o, object)\n", "equal"),
    "assertions replaced": ("import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n", "patch"),
    "runner replaced": ("from _pytest import runner\nrunner.call_runtest_hook = print\n", "patch"),
    "framework by setattr": ("import unittest as u\nsetattr(u.TestCase, 'fail', lambda *a: None)\n", "patch"),
    "module replaced": ("import sys\nsys.modules['pytest'] = object()\n", "patch"),
    "builtin replaced": ("import builtins\nbuiltins.isinstance = lambda *a: True\n", "patch"),
    "builtin by dictionary": ("__builtins__['all'] = lambda x: True\n", "patch"),
    "comparison replaced": ("import math\nmath.isclose = lambda *a, **k: True\n", "patch"),
    "closeness replaced": ("import numpy as np\nnp.testing.assert_allclose = lambda *a, **k: None\n", "patch"),
    "mock started": ("from unittest import mock\nmock.patch('unittest.TestCase.assertEqual').start()\n", "patch"),
    "outcome": ("def pytest_runtest_makereport(item, call):\n    r = yield\n    r.get_result().outcome = 'passed'\n", "report"),
    "session": ("def pytest_sessionfinish(session):\n    session.exitstatus = 0\n", "report"),
    "clock": ("import time\ntime.perf_counter = lambda: 0.0\n", "clock"),
    "clock by from": ("import time as t\nt.time, x = (lambda: 0.0), 1\n", "clock"),
    "clock by setattr": ("import time\nsetattr(time, 'mono' + 'tonic', lambda: 0)\n", "clock"),
    "clock in a function": ("def mean(v):\n    import time\n    time.sleep = print\n", "clock"),
    "device clock": ("import torch\ntorch.cuda.synchronize = lambda: None\n", "clock"),
    "tracer": ("import sys\nsys.settrace(lambda *a: None)\n", "trace"),
    "audit": ("import sys\ndef f():\n    sys.addaudithook(print)\n", "trace"),
    "memory": ("import ctypes\nctypes.memmove(id(1), id(2), 8)\n", "memory"),
    "decoded": ("import zlib\ndef f(x):\n    exec(zlib.decompress(x))\n", "opaque"),
    "frame by name": ("import sys\ndef mean(v):\n    return sys._getframe(1).f_locals['want']\n", "frames"),
    "frame by get": ("import inspect\ndef mean(v):\n    return inspect.stack()[1].frame.f_locals.get('want')\n", "frames"),
    "frames by a list": (("import sys\ndef mean(v):\n    f = sys._getframe(1)\n    for n in ('a', 'b'):\n"
                         "        if n in f.f_locals:\n            return f.f_locals[n]\n"), "frames"),
    "frames upwards": (("import sys\ndef mean(v):\n    f = sys._getframe()\n    while f:\n        print(f.f_locals)\n"
                       "        f = f.f_back\n"), "frames"),
    "frame of a traceback": (("def mean(v):\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n"
                             "        return e.__traceback__.tb_frame.f_back.f_locals['want']\n"), "frames"),
    "main module": ("import __main__\ndef mean(v):\n    return __main__.WANT\n", "frames"),
    "heap": (("import gc\ndef mean(v):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'want' in o:\n"
             "            return o['want']\n"), "heap"),
    "hidden read": ("def mean(v):\n    return open('/exam/key/' + 'a.txt').read()\n", "hidden_read"),
    "hidden write": ("def mean(v):\n    open('/exam/key/r', mode='w').write('1')\n", "hidden_write"),
}

HONEST = {
    "plain": PLAIN,
    "main": "import sys\ndef main():\n    sys.exit(0)\nif __name__ == '__main__':\n    main()\n",
    "guarded exit": f"import sys\n{PLAIN}if __name__ == '__main__':\n    sys.exit(0)\n",
    "main's status": f"import sys\n{PLAIN}sys.exit(main())\n",
    "failure": "import sys\ndef load(p):\n    sys.exit(1)\n",
    "script": "import sys\nprint('done')\nsys.exit(0)\n",
    "command": "import argparse, sys\ndef show(a):\n    print(a)\n    sys.exit(0)\n",
    "usage": "import sys\ndef usage():\n    print('x')\n    sys.exit(0)\n",
    "child": "import os\ndef spawn():\n    pid = os.fork()\n    if pid == 0:\n        os._exit(0)\n    os.waitpid(pid, 0)\n",
    "child at once": "import os\ndef spawn():\n    if os.fork() == 0:\n        os._exit(0)\n",
    "hard failure": "import os\ndef spawn():\n    os._exit(1)\n",
    "watchdog": "import os, threading\nthreading.Timer(9, os._exit, (1,)).start()\n",
    "name only": "def _exit(n):\n    return n\nx = _exit(0)\n",
    "another exit": "class Door:\n    def exit(self, n):\n        return n\nDoor().exit(0)\n",
    "comparison": "class A:\n    def __eq__(self, o):\n        return self.x == o.x\n"
                  "    def __ne__(self, o):\n        return not self == o\n",
    "one kind": "class A:\n    def __eq__(self, o):\n        if not isinstance(o, A):\n            return NotImplemented\n"
                "        return True\n",
    "never equal": "class A:\n    def __eq__(self, o):\n        return False\n    def __ne__(self, o):\n        return True\n",
    "own kind": "class Infinity:\n    def __eq__(self, o):\n        return isinstance(o, self.__class__)\n",
    "data class": "from dataclasses import dataclass\n@dataclass(eq=True)\nclass A:\n    x: int\n",
    "truth": "class A:\n    def __bool__(self):\n        return True\n",
    "measuring": "import time\ndef f():\n    t = time.perf_counter()\n    return time.perf_counter() - t\n",
    "own clock": "import time\nclass Clock:\n    def __init__(self):\n        self.time, self.sleep = time.time, print\n",
    "a parameter called time": "import time\ndef f(time):\n    time.time = 3\n",
    "translation": "import builtins, gettext\nbuiltins._ = gettext.gettext\n",
    "own module": "import sys\nsys.modules[__name__] = object()\nsys.modules['mine.x'] = object()\n",
    "fixture": "def test_a(monkeypatch):\n    monkeypatch.setattr('time.time', lambda: 0)\n",
    "patched for a while": "from unittest import mock\ndef f():\n    with mock.patch('time.time'):\n        pass\n",
    "caller's module": "import sys\ndef f():\n    return sys._getframe(1).f_globals.get('__name__', '__main__')\n",
    "caller's line": "import sys\ndef f():\n    fr = sys._getframe()\n"
                     "    while fr:\n        print(fr.f_code, fr.f_lineno)\n        fr = fr.f_back\n",
    "signature": "import inspect\ndef f(g):\n    return inspect.signature(g).parameters['x']\n",
    "traceback guard": "def f(tb):\n    return tb.tb_frame.f_locals.get('_guard', False)\n",
    "collector": "import gc\ndef f():\n    gc.collect()\n    return len(gc.get_objects())\n",
    "end of tracing": "import sys\ndef f():\n    sys.settrace(None)\n",
    "file of the main module": "import __main__\np = __main__.__file__\n",
    "constant text": "exec('x = 1')\nns = {}\nexec('def f(): return 1', ns)\n",
    "address as a key": "import ctypes\nd = {id(1): 2}\nctypes.memmove(b, c, 3)\n",
    "visible path": "def f():\n    return open('/exam/keyboard/a').read() + open('/work/a').read()\n",
    "loaded with json": "import json\nd = json.loads('{}')\n",
    "context": "import contextlib\n@contextlib.contextmanager\ndef f():\n    yield\n",
    "no Python": "def (:\n",
    "empty": "",
}


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_is_named(name: str) -> None:
    source, what = TRICKS[name]
    assert what in {fact.what for fact in scan_source(source.encode(), hidden=("/exam/key",))}


@pytest.mark.parametrize("name", HONEST)
def test_honest_code_has_no_facts(name: str) -> None:
    assert scan_source(HONEST[name].encode(), hidden=("/exam/key",)) == ()


def test_a_fact_has_the_line_also_from_text_that_is_executed() -> None:
    assert [fact.line for fact in scan_source(b"import os\n\n\nexec('\\n\\nos._exit(0)')\n")] == [4]


@pytest.mark.parametrize("source", [
    b"\xef\xbb\xbfimport os\r\nos._exit(0)\r\n", "# coding: latin-1\nimport os  # \xe9\nos._exit(0)\n".encode("latin-1"),
], ids=["bom", "latin-1"])
def test_encodings_that_python_reads_are_read(source: bytes) -> None:
    assert [fact.what for fact in scan_source(source)] == ["exit"]


@pytest.mark.parametrize("source", [
    b"a\0b", b"\xff\xfe\x00", b"# coding: rot13\nx", b"# coding: nothing\nx", b"(" * 5000, b"'" * 9999, b"x = '\\ud800'\n",
    b"\n".join(b" " * i + b"if 1:" for i in range(200)), b"import time\nsetattr(time, '\\ud800', 1)\n",
], ids=range(9))
def test_broken_files_are_no_trouble(source: bytes) -> None:
    assert scan_source(source) == ()


@pytest.mark.parametrize("source", [
    b"-" * 100_000 + b"1", b"not " * 50_000 + b"1", b"x" + b"()" * 50_000, b"x" + b".a" * 50_000, b"lambda:" * 50_000 + b"1",
    b"a;" * 300_000, b"x = f'" + b"{a}" * 50_000 + b"'",
], ids=["minus", "not", "calls", "names", "lambdas", "statements", "f-string"])
def test_what_python_might_run_but_nobody_can_look_at_is_said(source: bytes) -> None:
    with pytest.raises(Unscannable):
        scan_source(source)


def test_text_that_doubles_or_runs_itself_again_and_again_is_given_up() -> None:
    doubling = "s = 'a = 1;' * 1\ns = 'abcdefgh'\n" + "s = s + s\n" * 40 + "exec(s)\n"
    assert scan_source(doubling.encode()) == ()
    again = "s = '" + "a = 1;" * 8_000 + "'\n" + "exec(s)\n" * 20_000
    assert "opaque" in {fact.what for fact in scan_source(again.encode())}


def test_facts_of_one_file_are_bounded() -> None:
    assert len(scan_source(b"import os\n" + b"os._exit(0)\n" * 5_000)) == MAX_FACTS
