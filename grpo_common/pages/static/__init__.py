"""Shared parts of pages. uPlot is version 1.6.32 of https://github.com/leeoniya/uPlot (MIT licence)."""
