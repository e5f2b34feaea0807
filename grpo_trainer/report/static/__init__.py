"""Files that go into the page as they are. uPlot is version 1.6.32 of https://github.com/leeoniya/uPlot."""
