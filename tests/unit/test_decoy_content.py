"""Decoys of formats that a program loads as a whole can be loaded."""

from __future__ import annotations

import marshal
import pickle
import random
import zlib

import pytest

from dsec_guard.sandbox.decoys import plausible

TOKEN = b"lantern-quartz-17"


def load_bytecode(data: bytes) -> bytes:
    scope: dict[str, bytes] = {}
    exec(marshal.loads(data[16:]), scope)  # noqa: S102 - made by us a line above
    return scope["DATA"]


def load_gzip(data: bytes) -> bytes:
    return zlib.decompressobj(31).decompress(data)


LOADERS = {b"x.pyc": load_bytecode, b"x.pkl": lambda data: pickle.loads(data)["data"], b"x.gz": load_gzip}  # noqa: S301


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("size", [400, 5000])
def test_a_loadable_decoy_loads_and_holds_its_token(name: bytes, size: int) -> None:
    data = plausible(name, size, random.Random(1), TOKEN)
    assert len(data) == size
    assert TOKEN in LOADERS[name](data)


@pytest.mark.parametrize("name", LOADERS)
def test_a_decoy_too_small_for_its_format_still_has_its_size(name: bytes) -> None:
    assert len(plausible(name, 20, random.Random(1), TOKEN)) == 20


def test_two_boxes_never_share_a_loadable_decoy() -> None:
    one, two = (plausible(b"x.gz", 900, random.Random(seed), TOKEN) for seed in (1, 2))
    assert load_gzip(one) != load_gzip(two)
