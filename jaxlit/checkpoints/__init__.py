"""Checkpoints on disk: whole or nothing, which is newest, and a module's weights out of one."""
