"""HTML with a script in a docstring, a comment and a string of the source; the page lists the source as text.

group: reaches
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    """</pre></div><script>document.title='run'</script><img src=x onerror=alert(1)>"""
    # </span></pre><script>document.title='run'</script>
    raise NotImplementedError("--></style><script>document.title='run'</script>")
