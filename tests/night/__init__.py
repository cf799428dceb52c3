"""A night of jobs that something happens to: the log, the exit code, doctor and ls say what the pages promise."""
