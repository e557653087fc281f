"""The training state on the devices, and the compiled programs that change it."""
