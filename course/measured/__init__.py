"""Time and memory on real devices: how they are measured, and what the measurements support."""
