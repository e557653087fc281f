"""The loops: how far training is, what comes next, and which hooks are called."""
