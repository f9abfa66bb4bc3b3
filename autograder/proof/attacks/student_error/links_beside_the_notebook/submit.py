"""Beside an untouched notebook lie links to the secret, to the gradebook and to a neighbour, and a linked timestamp.

group: reads
functions: shard_params
control: yes
"""

import shutil


def submit(folder, released):
    shutil.copyfile(released, folder / released.name)
    (folder / "timestamp.txt").symlink_to("../../../.meshcraft/secret")
    (folder / "secret.txt").symlink_to("../../../.meshcraft/secret")
    (folder / "theirs.ipynb").symlink_to(f"../../neighbour/{folder.name}/{released.name}")
    (folder / "everything").symlink_to("../../..")
