"""What is known of integers at compile time."""
