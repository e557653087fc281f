"""Traced programs: what depends on what, how results depend on rows, and what a program costs."""
