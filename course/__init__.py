"""The library that pages, exercises and solutions share; importing it gives this process 8 emulated devices."""

from course.cuda_plugin import hide_cuda_plugin

hide_cuda_plugin()  # before anything imports jax

from course.mesh import emulate_devices  # noqa: E402

emulate_devices()
