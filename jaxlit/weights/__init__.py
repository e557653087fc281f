"""Pretrained weights: load files of other libraries into a module, and save the weights of a module."""
