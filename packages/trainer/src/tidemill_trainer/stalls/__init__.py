"""Reports about a run that does not make progress: which process is stuck, and where."""
