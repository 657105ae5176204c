"""The registered models side by side: sizes, shapes, memory, and measurements."""
