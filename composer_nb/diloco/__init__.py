"""Training on replicas that rarely exchange parameters; names that users import from here are found when asked for."""

from importlib import import_module
from typing import Any

_PLACES = {
    "LocalProcessExecutor": "composer_nb.launch.local",
    "MockManager": "composer_nb.diloco.manager",
    "ObjectStoreAllReduce": "composer_nb.diloco.manager",
    "ObjectStoreManager": "composer_nb.diloco.manager",
    "ServerlessExecutor": "composer_nb.launch.job",
    "export_weights": "composer_nb.diloco.export",
    "look": "composer_nb.diloco.overview",
    "make_diloco_outer_loop": "composer_nb.diloco.outer_loop",
    "open_bucket": "composer_nb.diloco.store",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
