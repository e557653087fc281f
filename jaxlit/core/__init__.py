"""What a step is: the module and its state taken apart, what it logs, and the pure functions that are compiled."""
