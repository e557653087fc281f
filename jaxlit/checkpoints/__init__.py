"""Checkpoints on disk: complete or not there, which is newest, and how a module reads weights of one."""
