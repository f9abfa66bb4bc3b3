"""The notebook is a symbolic link to the course's secret.

group: reads
control: no: nbgrader cannot read the secret as a notebook, and neither can we
"""


def submit(folder, released):
    (folder / released.name).symlink_to("../../../.meshcraft/secret")
