"""A spreadsheet formula as a message and as a line's name; no table for spreadsheets holds it.

group: reaches
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    raise type("=cmd|' /C calc'!A0", (Exception,), {})('=HYPERLINK("http://example.org")')
