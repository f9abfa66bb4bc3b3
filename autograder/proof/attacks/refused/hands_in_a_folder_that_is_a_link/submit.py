"""The whole folder is a link to another student's. It must not be graded as this student's, and not be overlooked.

group: reads
control: yes
"""


def submit(folder, released):
    folder.rmdir()
    folder.symlink_to(f"../neighbour/{folder.name}")
