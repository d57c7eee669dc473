"""Where the data files that ship with the package are: in a source checkout, or inside an installed wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dsec_guard.errors import HostError

Kind = Literal["policies", "profiles", "detectors", "replays"]

_PACKAGE = Path(__file__).resolve().parent.parent


def data_dir(kind: Kind) -> Path:
    """The directory of one kind of shipped data.

    A checkout has it at the top level; a wheel under `dsec_guard/data/`. Raises: HostError when neither is there (a
    broken installation).
    """
    for candidate in (_PACKAGE / "data" / kind, _PACKAGE.parent / kind):
        if candidate.is_dir():
            return candidate
    raise HostError(f"the {kind}/ directory of dsec-guard is missing beside {_PACKAGE}", feature="installation",
                    hint="install dsec-guard again")
