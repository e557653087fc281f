"""Traced programs: what depends on what, how values of replicas relate to the batch's, and what a program costs."""
