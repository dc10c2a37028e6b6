"""The folder of a rendezvous is there as long as its group, and no longer."""

import subprocess
import sys
from pathlib import Path

from rltrain.controller.cluster.rendezvous import rendezvous_file

AT_EXIT = """
from rltrain.controller.cluster.rendezvous import rendezvous_file
class Group: pass
group = Group()
print(rendezvous_file(group), end="")
"""


class Group:
    pass


def test_the_folder_goes_with_its_group() -> None:
    group, other = Group(), Group()
    file, kept = rendezvous_file(group), rendezvous_file(other)
    file.write_text("a store's")
    assert file.parent != kept.parent and kept.parent.is_dir()
    del group
    assert not file.parent.exists() and kept.parent.is_dir()


def test_the_folder_goes_when_the_process_exits() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout).name == "group" and not Path(done.stdout).parent.exists()
