"""Print the pip option that selects CPU builds of torch, or nothing.

On a machine without an NVIDIA driver the CPU builds save gigabytes. Their index is used only when it answers,
so a machine behind a mirror falls back to whatever its own pip configuration offers.
"""

import shutil
import sys
from urllib.error import URLError
from urllib.request import urlopen

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def torch_index_option(timeout_s: float = 5.0) -> str:
    """Return `--extra-index-url …` for CPU builds, or an empty string where a GPU, or no such index, is there."""
    if sys.platform != "linux" or shutil.which("nvidia-smi"):
        return ""
    try:
        with urlopen(f"{CPU_INDEX}/torch/", timeout=timeout_s):
            return f"--extra-index-url {CPU_INDEX}"
    except (URLError, OSError):
        return ""


if __name__ == "__main__":
    print(torch_index_option())
