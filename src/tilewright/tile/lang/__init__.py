"""What a kernel's author writes: tiles, views, loops, fragments, and the tracer that records them."""
