"""What pages, exercises and solutions share; importing it gives this process 8 emulated devices."""

from course.mesh import emulate_devices

emulate_devices()
