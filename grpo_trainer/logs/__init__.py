"""Where a run's figures and samples go: console, files, trackers."""
