"""The chat page without a server: a model of NanoEuler's or Llama's shape, run by the browser that shows it."""
