"""The client whose calls wait; threads may share one."""
