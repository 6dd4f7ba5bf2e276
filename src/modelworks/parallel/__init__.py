"""Running one model on many processes: the mesh, the collectives, and one file for each axis.

Names are loaded on first use, so that importing this room does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelworks.parallel.collectives import Group as Group
    from modelworks.parallel.mesh import Mesh as Mesh
    from modelworks.parallel.mesh import build_mesh as build_mesh
    from modelworks.parallel.mesh import single_process as single_process
    from modelworks.parallel.traffic import Traffic as Traffic

_HOME = {
    "Group": "collectives",
    "Mesh": "mesh",
    "Traffic": "traffic",
    "build_mesh": "mesh",
    "single_process": "mesh",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
