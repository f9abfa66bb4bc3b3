"""Terminal escapes in an exception's text: colours, a cleared screen, a title, a link, a typed answer; each is
replaced.

group: reaches
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    title, link = "\x1b]0;run\x07", "\x1b]8;;http://example.org\x1b\\here"
    raise ValueError(f"\x1b[2J\x1b[1;32mpass\x1b[0m {title} {link} \x9b31m \x1b[6n\r\b\x7f")
