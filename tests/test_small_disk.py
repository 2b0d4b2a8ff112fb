"""A disk of a few MiB is seen by those that are started on it, fills up, and is gone afterwards."""

import subprocess
import sys

import pytest

from composer_nb.drills.small_disk import SmallDisk

WRITES = "import sys; open(sys.argv[1], 'ab', buffering=0).write(bytes(1 << 13))"


@pytest.mark.skipif(bool(SmallDisk.reason()), reason="no right to mount a small file system")
def test_it_fills_up_and_is_gone_afterwards():
    def write(disk: SmallDisk) -> str:
        process = disk.run(
            [sys.executable, "-c", WRITES, str(disk.folder / "a")], stderr=subprocess.PIPE, text=True
        )
        return process.communicate(timeout=30)[1]

    with SmallDisk(2) as disk:
        assert write(disk) == "" and (disk.seen / "a").stat().st_size == 1 << 13
        assert not (disk.folder / "a").exists()  # out here the folder is another one
        assert 1 << 20 < disk.fill() < 2 << 20
        assert "No space left" in write(disk) and (disk.seen / "a").stat().st_size == 1 << 13
        disk.empty()
        assert write(disk) == "" and (disk.seen / "a").stat().st_size == 1 << 14
    assert not disk.folder.exists() and not disk.seen.exists()


def test_without_the_program_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert "unshare" in SmallDisk.reason()
    with pytest.raises(OSError, match="no small disk"), SmallDisk(1):
        pass
