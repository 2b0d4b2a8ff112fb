"""One fork server for the tests of a worker. Whoever starts it decides for all later tests what a child need
not import again.
"""

import multiprocessing
from multiprocessing import forkserver

PRELOAD = [
    "composer_nb.diloco.outer_loop",
    "composer_nb.diloco.torchft_engine",
    "composer_nb.trainer",
    "torchft.manager",
    "transformers.trainer",
    "s3fs",
    "aiobotocore.session",
    "hypothesis",
    "pytest",
]


def context():
    """Where processes of a test come from."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOAD)
    return found


def start() -> None:
    """Start the server, for code that would start it with a list of its own."""
    context()
    forkserver.ensure_running()
