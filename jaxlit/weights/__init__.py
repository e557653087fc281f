"""Pretrained weights: files of other libraries read into a module, and a module written to one."""
