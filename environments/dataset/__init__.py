"""Rows of a data set and reward functions: the environment behind ``--data`` and ``--reward``."""
