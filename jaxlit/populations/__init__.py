"""Many trainings of one module in one program: members that differ in seeds and numbers."""
