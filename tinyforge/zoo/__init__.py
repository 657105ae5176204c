"""The registered models side by side: sizes, shapes, memory, and measurements; and models on their way to the hub."""
