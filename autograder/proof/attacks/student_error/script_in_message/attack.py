"""HTML with a script in an exception's text; the page shows it as text.

group: reaches
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    raise ValueError("</pre></div><script>document.title='run'</script><img src=x onerror=alert(1)>")
