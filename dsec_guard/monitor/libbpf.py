"""libbpf.so.1 through ctypes: just the calls that loading and running one object needs.

The library is looked for by its soname, not by its development name, so Debian's package `libbpf1` is enough.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections import deque
from collections.abc import Iterator
from typing import Any

from dsec_guard.errors import HostError, MonitorError

__all__ = ["BpfError", "BpfLink", "BpfMap", "BpfObject"]

_SONAME = "libbpf.so.1"
_ANY = 0
_LOG_LINES = 40


class BpfError(MonitorError):
    """A libbpf call failed: `code` is the positive errno, `log` the last lines the library printed."""

    def __init__(self, message: str, code: int, log: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.log = log


class _Library:
    """The loaded library; its messages are kept instead of printed (the last few explain a refused program)."""

    def __init__(self) -> None:
        try:
            self.c: Any = ctypes.CDLL(_SONAME, use_errno=True)
        except OSError as exc:
            raise HostError(
                f"{_SONAME} cannot be loaded: {exc}",
                feature="bpf",
                hint="install libbpf 1.x (Debian: apt install libbpf1)",
            ) from exc
        self.lines: deque[str] = deque(maxlen=_LOG_LINES)
        c, ptr, text, u32 = self.c, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32
        for name, result, args in (
            ("bpf_object__open_file", ptr, [text, ptr]),
            ("bpf_object__load", ctypes.c_int, [ptr]),
            ("bpf_object__close", None, [ptr]),
            ("bpf_object__next_program", ptr, [ptr, ptr]),
            ("bpf_object__find_program_by_name", ptr, [ptr, text]),
            ("bpf_object__find_map_by_name", ptr, [ptr, text]),
            ("bpf_program__name", text, [ptr]),
            ("bpf_program__section_name", text, [ptr]),
            ("bpf_program__set_autoload", ctypes.c_int, [ptr, ctypes.c_bool]),
            ("bpf_program__attach", ptr, [ptr]),
            ("bpf_program__attach_cgroup", ptr, [ptr, ctypes.c_int]),
            ("bpf_link__destroy", ctypes.c_int, [ptr]),
            ("bpf_map__fd", ctypes.c_int, [ptr]),
            ("bpf_map__set_max_entries", ctypes.c_int, [ptr, u32]),
            ("bpf_map__set_initial_value", ctypes.c_int, [ptr, ptr, ctypes.c_size_t]),
            ("bpf_map_update_elem", ctypes.c_int, [ctypes.c_int, text, text, ctypes.c_uint64]),
            ("bpf_map_lookup_elem", ctypes.c_int, [ctypes.c_int, text, ptr]),
            ("bpf_map_delete_elem", ctypes.c_int, [ctypes.c_int, text]),
            ("bpf_map_get_next_key", ctypes.c_int, [ctypes.c_int, ptr, ptr]),
        ):
            function = getattr(c, name)
            function.restype = result
            function.argtypes = args
        libc = ctypes.CDLL(None)
        libc.vsnprintf.argtypes = [ptr, ctypes.c_size_t, text, ptr]
        # x86-64 passes a va_list as the address of its one element: System V ABI, 3.5.7.
        callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, text, ptr)

        def keep(_level: int, pattern: bytes, args: int) -> int:
            buffer = ctypes.create_string_buffer(4096)
            libc.vsnprintf(buffer, len(buffer), pattern, args)
            self.lines.extend(buffer.value.decode("utf-8", "replace").rstrip("\n").split("\n"))
            return 0

        self._keep = callback(keep)  # the library holds the bare pointer
        c.libbpf_set_print.restype = ptr

    def listen(self) -> None:
        """Have messages kept: the setting is the whole process's, and others silence it."""
        self.lines.clear()
        self.c.libbpf_set_print(self._keep)

    def fail(self, what: str, code: int) -> BpfError:
        code = abs(code) or errno.EIO
        log = "\n".join(self.lines)
        self.lines.clear()
        return BpfError(f"{what}: {os.strerror(code)} ({errno.errorcode.get(code, code)})", code, log)


@functools.cache
def _lib() -> _Library:
    return _Library()


class BpfMap:
    """One map of a loaded object; keys and values are bytes of the sizes in bpf/dg_events.h."""

    def __init__(self, fd: int, value_size: int, key_size: int) -> None:
        self.fd = fd
        self.key_size = key_size
        self.value_size = value_size
        self._buffer = ctypes.create_string_buffer(value_size)

    def update(self, key: bytes, value: bytes) -> None:
        """Insert or replace. Raises BpfError, E2BIG when the map is full."""
        self._check(key, value)
        if code := _lib().c.bpf_map_update_elem(self.fd, key, value, _ANY):
            raise _lib().fail("map update", code)

    def lookup(self, key: bytes) -> bytes | None:
        self._check(key)
        code = _lib().c.bpf_map_lookup_elem(self.fd, key, self._buffer)
        if code == -errno.ENOENT:
            return None
        if code:
            raise _lib().fail("map lookup", code)
        return self._buffer.raw

    def delete(self, key: bytes) -> bool:
        """Whether there was such a key."""
        self._check(key)
        code: int = _lib().c.bpf_map_delete_elem(self.fd, key)
        if code and code != -errno.ENOENT:
            raise _lib().fail("map delete", code)
        return code == 0

    def scan(self) -> Iterator[bytes]:
        """All keys at about this moment; do not delete while iterating."""
        current = ctypes.create_string_buffer(self.key_size)
        following = ctypes.create_string_buffer(self.key_size)
        code = _lib().c.bpf_map_get_next_key(self.fd, None, following)
        while code == 0:
            yield following.raw
            ctypes.memmove(current, following, self.key_size)
            code = _lib().c.bpf_map_get_next_key(self.fd, current, following)
        if code != -errno.ENOENT:
            raise _lib().fail("map iteration", code)

    def _check(self, key: bytes, value: bytes | None = None) -> None:
        # The kernel would read beyond a short buffer.
        if len(key) != self.key_size or (value is not None and len(value) != self.value_size):
            raise ValueError(f"key or value of the wrong size: {len(key)}, {None if value is None else len(value)}")


class BpfLink:
    """An attachment; ends with `close` or with the process."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def close(self) -> None:
        if self._handle:
            _lib().c.bpf_link__destroy(self._handle)
            self._handle = 0


class BpfObject:
    """An object file: opened, adjusted, loaded, attached. Close ends its links too, when they were made by `attach`."""

    def __init__(self, path: str) -> None:
        lib = _lib()
        lib.listen()
        ctypes.set_errno(0)
        self._handle = lib.c.bpf_object__open_file(os.fsencode(path), None)
        if not self._handle:
            raise lib.fail(f"open {path}", ctypes.get_errno())
        self._links: list[BpfLink] = []

    def programs(self) -> dict[str, str]:
        """Program name -> section name, in the file's order."""
        lib, found, handle = _lib(), {}, None
        while handle := lib.c.bpf_object__next_program(self._handle, handle):
            found[lib.c.bpf_program__name(handle).decode()] = lib.c.bpf_program__section_name(handle).decode()
        return found

    def skip_program(self, name: str) -> None:
        """Leave a program out of `load`."""
        if code := _lib().c.bpf_program__set_autoload(self._program(name), False):
            raise _lib().fail(f"skip {name}", code)

    def set_max_entries(self, map_name: str, entries: int) -> None:
        if code := _lib().c.bpf_map__set_max_entries(self._map(map_name), entries):
            raise _lib().fail(f"size of map {map_name}", code)

    def set_initial_value(self, map_name: str, value: bytes) -> None:
        """Contents of a data section's map; the size must match."""
        if code := _lib().c.bpf_map__set_initial_value(self._map(map_name), value, len(value)):
            raise _lib().fail(f"value of map {map_name}", code)

    def load(self) -> None:
        """Relocate, verify, create. Raises BpfError whose log says which program was refused and why."""
        if code := _lib().c.bpf_object__load(self._handle):
            raise _lib().fail("load", code)

    def map(self, name: str, *, key_size: int, value_size: int) -> BpfMap:
        return BpfMap(_lib().c.bpf_map__fd(self._map(name)), value_size, key_size)

    def attach(self, program: str, cgroup_fd: int = -1) -> BpfLink:
        """Attach to what the section names; a cgroup program to the directory behind `cgroup_fd`."""
        lib = _lib()
        lib.lines.clear()
        ctypes.set_errno(0)
        handle = self._program(program)
        attach, where = (
            (lib.c.bpf_program__attach, ()) if cgroup_fd < 0 else (lib.c.bpf_program__attach_cgroup, (cgroup_fd,))
        )
        link = attach(handle, *where)
        if not link:
            raise lib.fail(f"attach {program}", ctypes.get_errno())
        self._links.append(BpfLink(link))
        return self._links[-1]

    def detach(self, link: BpfLink) -> None:
        """End one attachment made by `attach`."""
        self._links.remove(link)
        link.close()

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._links.clear()
        if self._handle:
            _lib().c.bpf_object__close(self._handle)
            self._handle = 0

    def _program(self, name: str) -> int:
        handle = _lib().c.bpf_object__find_program_by_name(self._handle, name.encode())
        if not handle:
            raise _lib().fail(f"no program {name}", errno.ENOENT)
        return int(handle)

    def _map(self, name: str) -> int:
        handle = _lib().c.bpf_object__find_map_by_name(self._handle, name.encode())
        if not handle:
            raise _lib().fail(f"no map {name}", errno.ENOENT)
        return int(handle)
