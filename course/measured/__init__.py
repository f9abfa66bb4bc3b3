"""Time and memory on real devices: how they are taken, and what may be concluded from them."""
