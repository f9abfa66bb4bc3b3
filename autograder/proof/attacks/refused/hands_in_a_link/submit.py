"""The notebook is a symbolic link to another student's. It is refused without being followed.

group: reads
control: yes
"""

import json


def submit(folder, released):
    (folder / released.name).symlink_to(f"../../neighbour/{folder.name}/{released.name}")
