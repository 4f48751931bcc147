"""What is measured, and how. Nothing here runs in a test: figures depend on the machine and on what else it does."""
