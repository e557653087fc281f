"""The loops: where training stands, what comes next, and which hooks are called."""
