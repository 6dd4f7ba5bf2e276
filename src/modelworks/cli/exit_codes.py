"""What the exit code of a command says."""

DONE = 0
FAILED = 1
USER_ERROR = 2  # something that the user can fix
PREEMPTED = 75  # stopped by a signal, its state saved: to be resumed
INTERRUPTED = 130
