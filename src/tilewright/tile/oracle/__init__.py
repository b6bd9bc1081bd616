"""Independent ways to run a program, for tests: slow, plain, and the definition of what is right."""
